"""Clocks of pretended ranks stand still while a collective is answered."""

import polars as pl

from dpro.replay.alignment.align import answers_of, one_after_the_other, without_answers


def collectives(*rows: tuple[int, int, int]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["rank", "start_ns", "duration_ns"], orient="row")


def test_time_of_answers_is_not_counted():
    # Answers of rank 0: from 100 to 110, and from 200 to 230. Rank 1 has one from 50 to 60.
    answers = answers_of(collectives((0, 100, 10), (0, 200, 30), (1, 50, 10)))
    spans = collectives((0, 90, 5), (0, 95, 20), (0, 105, 2), (0, 150, 100), (0, 300, -1), (1, 100, 10))
    moved = without_answers(spans, answers)
    assert moved["start_ns"].to_list() == [90, 95, 100, 140, 260, 90]
    assert moved["duration_ns"].to_list() == [5, 10, 0, 70, -1, 10]


def test_answers_that_overlap_are_counted_once():
    answers = answers_of(collectives((0, 100, 20), (0, 110, 20)))
    assert without_answers(collectives((0, 90, 60)), answers)["duration_ns"].to_list() == [30]


def test_when_a_result_was_asked_for_moves_as_well():
    answers = answers_of(collectives((0, 100, 10), (0, 120, 10)))
    rows = collectives((0, 100, 10), (0, 120, 10)).with_columns(asked_ns=pl.Series([140, -1]))
    assert without_answers(rows, answers)["asked_ns"].to_list() == [120, -1]


def test_all_ranks_begin_the_first_step_of_a_window_at_once():
    steps = pl.DataFrame(
        [(0, 0, 1000), (0, 0, 2000), (3, 0, 70_000), (3, -1, 5)],
        schema=["rank", "window", "start_ns"],
        orient="row",
    )
    alignment = one_after_the_other([(0, 0), (3, 0)], steps)
    rows = pl.DataFrame([(0, 0, 1500), (3, 0, 70_100)], schema=["rank", "window", "start_ns"], orient="row")
    assert alignment.aligned(rows)["start_ns"].to_list() == [1500, 1100]
