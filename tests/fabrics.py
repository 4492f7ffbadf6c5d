"""Jobs in a fabric, for the tests of its edits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.members import members_text
from dpro.replay.graph import Graph
from dpro.topology.file import FILE, write
from dpro.topology.kept import PathEntry
from tests.builders import TinyRun

SIZE = FabricSize(4, gpus=1, nics=1, ports=4, gbit=8, gpu_gbps=10)  # two leaves, two cables of 1 GB/s up
MB = 1_000_000


def on_cable(cables: tuple[int, int]) -> list[PathEntry]:
    """Paths of `crossing_pairs`: which cable both connections of each pair take.

    Args:
        cables: by pair, 0 or 1.
    """
    return [
        PathEntry(f"node{begin}:nic0", f"node{end}:nic0", [f"{up} > spine0 #{at}", f"spine0 > {down} #{at}"])
        for pair, at in enumerate(cables)
        for begin, end, up, down in ((pair, pair + 2, "leaf0", "leaf1"), (pair + 2, pair, "leaf1", "leaf0"))
    ]


def crossing_pairs(folder: Path, lasts_us: float = 1000, steps: int = 3) -> Graph:
    """Ranks 0 and 2, and 1 and 3, reduce 1 MB across the spine at the same time: 1 ms if they do not meet."""
    return reducing(folder, ([0, 2], [1, 3]), (0, 1, 2, 3), lasts_us, steps)


def crossing_ring(folder: Path, lasts_us: float = 1500, hosts: Sequence[int] = (0, 2, 1, 3)) -> Graph:
    """All four reduce 1 MB; each neighbour is behind the other leaf: 1.5 ms if the ring meets itself nowhere.

    Args:
        folder: of the run.
        lasts_us: of each reduction.
        hosts: by rank, the number of its host.
    """
    return reducing(folder, ([0, 1, 2, 3],), hosts, lasts_us, 3)


def reducing(
    folder: Path, groups: Sequence[list[int]], hosts: Sequence[int], lasts_us: float, steps: int
) -> Graph:
    """Groups reduce 1 MB each at the same time, once in each step of 10 ms.

    Args:
        folder: of the run.
        groups: of ranks.
        hosts: by rank, the number of its host.
        lasts_us: of each reduction.
        steps: how many.
    """
    run = TinyRun()
    for step in range(steps):
        at = 10_000.0 * step
        for group, ranks in enumerate(groups):
            facts = {
                "group": f"group{group}",
                "group_ranks": members_text(ranks),
                "bytes_in": MB,
                "bytes_out": MB,
            }
            for rank in ranks:
                called = (at + 100, at + 110)
                run.gloo(called, (at + 110, at + 110 + lasts_us), rank, sequence=step, **facts)
        for rank in range(len(hosts)):
            run.op("train", at, at + 100, rank)
            run.op("wait", at + 110 + lasts_us, at + 9000, rank)
            run.step(step, at, at + 9000, rank)
    for rank, host in enumerate(hosts):
        run.worker(rank, f"node{host}", local_rank=0)
    folder.mkdir(parents=True, exist_ok=True)
    write(fat_tree(SIZE), folder / FILE)
    return run.build(folder).graph
