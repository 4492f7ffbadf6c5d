"""Steps guessed from what repeats."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.ingest.derived import guess_steps, repetitions

STEP = ["zero_grad", "embed", "linear", "relu", "linear", "loss", "adam"]


def _spans(names: list[str], *, kind: str = "cpu_op", every: int = 10, slow: int = -1) -> pl.DataFrame:
    """One span after the other; each has a child of its own name within it."""
    rows, now = [], 0
    for number, name in enumerate(names):
        rows += [(name, now, every - 2), (f"child of {name}", now + 1, 2)]
        now += every * (50 if number == slow else 1)
    frame = pl.DataFrame(
        rows, schema={"name": pl.String, "start_ns": pl.Int64, "duration_ns": pl.Int64}, orient="row"
    )
    same = {"pid": 1, "tid": 2, "stream": 7, "sequence_number": -1, "forward_thread": 0}
    return frame.with_columns(kind=pl.lit(kind), **{key: pl.lit(value) for key, value in same.items()})


@pytest.mark.parametrize("kind", ["cpu_op", "kernel"])
def test_three_equal_rounds_are_three_steps(kind):
    assert repetitions(_spans(STEP * 3, kind=kind)) == [(0, 70), (70, 140), (140, 208)]


def test_a_round_that_the_window_cuts_is_left_out():
    assert repetitions(_spans(STEP * 3 + STEP[:4])) == [(0, 70), (70, 140), (140, 210)]


def test_two_rounds_are_not_enough():
    assert repetitions(_spans(STEP * 2)) == []


def test_equal_layers_within_one_step_are_no_steps():
    layer = ["norm", "linear", "attention", "linear", "relu", "linear"]
    assert repetitions(_spans(["embed", "position", "mask", *layer * 12, "head", "loss", "adam"])) == []


def test_work_that_does_not_repeat_has_no_steps():
    assert repetitions(_spans([f"op {number}" for number in range(40)])) == []
    assert repetitions(_spans([])) == []


def test_rounds_of_very_different_lengths_are_not_clear():
    assert repetitions(_spans(STEP * 3, slow=9)) == []


def test_a_guess_says_that_it_is_one_and_marks_come_first():
    spans = _spans(STEP * 3)
    assert guess_steps(spans)["source"].to_list() == ["repetition"] * 3
    mark = spans.head(1).with_columns(kind=pl.lit("annotation"), name=pl.lit("ProfilerStep#5"))
    assert guess_steps(pl.concat([spans, mark]))["source"].to_list() == ["ProfilerStep"]
