"""Connections of a job that meet on a cable are slow, and nothing is broken: a made-up job on two leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.network.traffic import traffic_of
from dpro.detect.network.transfers import find_slow_network
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.members import members_text
from dpro.topology.file import FILE, write
from dpro.topology.kept import PATHS as PATHS
from dpro.topology.kept import PathEntry, write_paths
from tests.builders import TinyRun

PAIRS = 4  # rank i and rank i + 4, which is below the other leaf
SIZE = FabricSize(2 * PAIRS, gpus=1, nics=1, ports=8, gbit=8)  # a cable of 1 GB/s up for each host
MB = 1_000_000


def job(folder: Path, lasts_us: Sequence[float], cables: Sequence[int] | None) -> list[tuple[str, str, str]]:
    """What is found where each pair reduces 1 MB at the same time, each over a cable: 1 ms alone."""
    run = TinyRun()
    for step in range(8):
        at = 10_000.0 * step
        for pair, lasts in enumerate(lasts_us):
            ranks = [pair, pair + PAIRS]
            facts = {
                "group": f"group{pair}",
                "group_ranks": members_text(ranks),
                "bytes_in": MB,
                "bytes_out": MB,
            }
            for rank in ranks:
                moved = (at + 110, at + 110 + lasts)
                run.gloo((at + 100, at + 110), moved, rank, sequence=step, **facts)
                run.op("train", at, at + 100, rank)
                run.op("rest", at + 110 + lasts, at + lasts + 3000, rank)
                run.step(step, at, at + 9000, rank)
    for rank in range(2 * PAIRS):
        run.worker(rank, f"node{rank}", local_rank=0)
    folder.mkdir(exist_ok=True)
    write(fat_tree(SIZE), folder / FILE)
    if cables is not None:
        write_paths(
            [entry for pair, cable in enumerate(cables) for entry in paths(pair, cable)], folder / PATHS
        )
    found = find_slow_network(traffic_of(Baseline(run.build(folder).graph)))
    return [(each.class_, each.component_kind, each.component_id) for each in found]


def paths(pair: int, cable: int) -> list[PathEntry]:
    """Those of a pair, there and back."""
    ends = ((pair, pair + PAIRS, "leaf0", "leaf1"), (pair + PAIRS, pair, "leaf1", "leaf0"))
    return [
        PathEntry(
            f"node{begin}:nic0", f"node{end}:nic0", [f"{up} > spine0 #{cable}", f"spine0 > {down} #{cable}"]
        )
        for begin, end, up, down in ends
    ]


def test_pairs_that_are_slow_since_their_paths_meet_are_no_slow_link(tmp_path):
    assert job(tmp_path, (2000, 2000, 1000, 1000), cables=(0, 0, 2, 3)) == []


def test_the_same_times_on_paths_that_do_not_meet_are_slow(tmp_path):
    ((_, _, who),) = job(tmp_path, (2000, 1000, 1000, 1000), cables=(0, 1, 2, 3))
    assert who.startswith("rank 0, rank 4")


def test_pair_that_is_slower_than_meeting_explains_is_found(tmp_path):
    # It leaves three quarters of the cable to the pair that it meets.
    ((_, _, who),) = job(tmp_path, (4000, 1333, 1000, 1000), cables=(0, 0, 2, 3))
    assert who.startswith("rank 0, rank 4")


@pytest.mark.parametrize("cables", [None, (0, 0, 2)])
def test_where_a_path_is_not_known_nothing_is_explained_by_it(tmp_path, cables):
    assert job(tmp_path, (2000, 2000, 1000, 1000), cables) != []
