"""Jobs in a fabric, for the tests of its edits."""

from __future__ import annotations

from pathlib import Path

from dpro.replay.graph import Graph
from dpro.topology.fabrics import FabricSize, fat_tree
from dpro.topology.file import FILE, write
from tests.builders import TinyRun

SIZE = FabricSize(4, gpus=1, nics=1, ports=4, gbit=8, gpu_gbps=10)  # two leaves, two cables of 1 GB/s up
MB = 1_000_000


def crossing_pairs(folder: Path, lasts_us: float = 1000, steps: int = 3) -> Graph:
    """Ranks 0 and 2, and 1 and 3, reduce 1 MB across the spine at the same time: 1 ms if they do not meet."""
    run = TinyRun()
    for step in range(steps):
        at = 10_000.0 * step
        for pair, ranks in enumerate(([0, 2], [1, 3])):
            facts = {"group": f"pair{pair}", "group_ranks": ranks, "bytes_in": MB, "bytes_out": MB}
            for rank in ranks:
                called = (at + 100, at + 110)
                run.gloo(called, (at + 110, at + 110 + lasts_us), rank, sequence=step, **facts)
        for rank in range(4):
            run.op("train", at, at + 100, rank)
            run.op("wait", at + 110 + lasts_us, at + 9000, rank)
            run.step(step, at, at + 9000, rank)
    for rank in range(4):
        run.worker(rank, f"node{rank}", local_rank=0)
    folder.mkdir(parents=True, exist_ok=True)
    write(fat_tree(SIZE), folder / FILE)
    return run.build(folder).graph
