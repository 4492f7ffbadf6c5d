"""Along which axis others wait for a late rank: four ranks, two replicas of two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.detect.stragglers.replayed import felt_along
from dpro.members import members_text
from dpro.replay.graph import Graph
from tests.builders import TinyRun

TENSOR, DATA = ([0, 1], [2, 3]), ([0, 2], [1, 3])


def job(folder: Path, tensor_us: float, data_us: float, axes: bool = True) -> Graph:
    """Rank 3 comes that much later than its peers to both of its groups, in each of three steps.

    Args:
        folder: of the run.
        tensor_us: to the group of ranks 2 and 3.
        data_us: to that of ranks 1 and 3.
        axes: whether the run says where ranks stand.
    """
    run = TinyRun()
    for step in range(3):
        at = 10_000.0 * step
        for kind, (groups, begins, late) in enumerate(((TENSOR, 100, tensor_us), (DATA, 2000, data_us))):
            for number, ranks in enumerate(groups):
                facts = {
                    "group": f"g{kind}{number}",
                    "group_ranks": members_text(ranks),
                    "bytes_in": 8,
                    "bytes_out": 8,
                }
                for rank in ranks:
                    since = at + begins + (late if rank == 3 else 0)
                    ends = at + begins + late + 500
                    run.gloo((since, since + 10), (since + 10, ends), rank, sequence=step, **facts)
                    run.op("wait", since + 10, ends, rank)
        for rank in range(4):
            run.op("train", at, at + 90, rank)
            run.step(step, at, at + 9000, rank)
    for rank in range(4):
        run.worker(rank, "n1", **({"dp": rank // 2, "tp": rank % 2} if axes else {}))
    return run.build(folder).graph


def test_the_axis_whose_ranks_wait_longest_is_named_with_the_place_of_the_rank(tmp_path) -> None:
    axis, (felt,) = felt_along(job(tmp_path, 300, 50), [3])
    assert axis == felt.values["axis"] == "tp"
    assert felt.values["wait_ns"] == pytest.approx(300_000)
    waits = "wait for it per step: along tp 300 us, along dp 50 us"
    assert felt.text == f"ranks that share a group with rank 3 (dp 1, tp 1) {waits}"


def test_an_axis_along_which_others_hardly_wait_is_not_mentioned(tmp_path) -> None:
    """20 us are less than a tenth of 300."""
    axis, (felt,) = felt_along(job(tmp_path, 20, 300), [3])
    assert axis == "dp"
    assert felt.text.endswith("per step: along dp 300 us")


@pytest.mark.parametrize(("axes", "late"), [(False, [3]), (True, [0])])
def test_no_axis_is_named_where_none_is_known_or_no_rank_waits(tmp_path, axes, late) -> None:
    assert felt_along(job(tmp_path, 300, 50, axes), late) == ("", ())
