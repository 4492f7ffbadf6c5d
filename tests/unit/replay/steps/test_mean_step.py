"""The mean step adds up to its parts, whatever of it is not known."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.replay.steps.breakdown import STEP_SCHEMA
from dpro.replay.steps.mean_step import PARTS, mean_steps, shown_parts

# step, rank, duration, compute, exposed (= wait + transfer), wait, transfer, overlapped, host bound, idle
ROWS = [
    (0, 0, 100, 40, 30, 20, 10, 5, 20, 10),
    (0, 1, 100, 60, 10, 0, 10, 5, 20, 10),
    (1, 0, 200, 40, 60, None, None, 0, 50, 50),
]


@pytest.fixture
def split() -> pl.DataFrame:
    return pl.DataFrame(ROWS, schema=STEP_SCHEMA, orient="row")


@pytest.mark.parametrize("by", [None, "rank", "step"])
def test_parts_add_up_to_the_mean_step(split, by):
    means = mean_steps(split, by)
    parts = means.select(pl.sum_horizontal(*PARTS)).to_series().to_list()
    assert parts == pytest.approx(means["duration_ns"].to_list())


def test_communication_of_steps_that_are_not_split_is_a_part_of_its_own(split):
    (row,) = mean_steps(split, "rank").filter(rank=0).to_dicts()
    assert (row["steps"], row["duration_ns"], row["compute_ns"], row["overlapped_comm_ns"]) == (
        2,
        150,
        40,
        2.5,
    )
    assert (row["exposed_wait_ns"], row["exposed_transfer_ns"], row["unsplit_comm_ns"]) == (10, 5, 30)


def test_that_part_is_not_shown_where_all_is_split(split):
    assert "unsplit_comm_ns" in shown_parts(mean_steps(split))
    assert "unsplit_comm_ns" not in shown_parts(mean_steps(split.filter(step=0)))


def test_no_steps_have_no_mean(split):
    assert mean_steps(split.clear()).is_empty()
    assert mean_steps(split.clear(), "rank").is_empty()
