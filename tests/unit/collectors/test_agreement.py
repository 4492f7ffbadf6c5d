import polars as pl
import pytest

from dpro.collectors.agreement import disagreement
from dpro.schema import STEPS, conform
from dpro.store import write_part


def write(run, rank, durations):
    frame = pl.DataFrame({"step": range(len(durations)), "duration_ns": durations})
    write_part(run, STEPS, f"rank{rank:05d}", conform(STEPS, frame.with_columns(rank=rank, start_ns=0)))


@pytest.mark.parametrize(
    ("first", "second", "warns"),
    [
        ([10] * 50, [10] * 50, False),
        ([10] * 50, [50] * 10, True),  # every fifth update only
        ([10] * 50, [10] * 9, False),  # ended early
        ([10, 30] * 25, [20] * 50, False),  # alternating, and as long on the mean
        ([10] * 3, [50] * 3, False),  # too few to tell
    ],
)
def test_ranks_disagree_where_steps_of_one_are_longer(tmp_path, first, second, warns):
    write(tmp_path, 0, first)
    write(tmp_path, 1, second)
    assert bool(disagreement(tmp_path)) == warns


def test_one_rank_agrees_with_itself(tmp_path):
    assert disagreement(tmp_path) == []
    write(tmp_path, 0, [10] * 50)
    assert disagreement(tmp_path) == []
