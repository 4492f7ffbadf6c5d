import itertools

import polars as pl
import pytest

from dpro.collectors.finish import disagreement
from dpro.schema import STEPS, conform
from dpro.store import write_part


def write(run, rank, durations, begin=0):
    starts = list(itertools.accumulate(durations, initial=begin))[:-1]
    frame = pl.DataFrame({"step": range(len(durations)), "start_ns": starts, "duration_ns": durations})
    write_part(run, STEPS, f"rank{rank:05d}", conform(STEPS, frame.with_columns(rank=rank)))


@pytest.mark.parametrize(
    ("first", "second", "begin", "warns"),
    [
        ([10] * 50, [10] * 50, 0, False),
        ([10] * 50, [50] * 10, 0, True),  # every fifth update only
        ([10] * 50, [10] * 9, 0, False),  # ended early
        ([10] * 50, [10] * 49, 10, False),  # began later
        ([900, *[10] * 20], [10] * 20, 900, False),  # was long in its first step
        ([10, 30] * 25, [20] * 50, 0, False),  # alternates
        ([10] * 3, [30], 0, False),  # too few to compare
        ([10] * 5, [10] * 5, 1000, False),  # one after the other: no time to compare
    ],
)
def test_ranks_disagree_where_one_ends_many_more_steps_in_the_same_time(
    tmp_path, first, second, begin, warns
):
    write(tmp_path, 0, first)
    write(tmp_path, 1, second, begin)
    assert bool(disagreement(tmp_path)) == warns


def test_one_rank_agrees_with_itself(tmp_path):
    assert disagreement(tmp_path) == []
    write(tmp_path, 0, [10] * 50)
    assert disagreement(tmp_path) == []
