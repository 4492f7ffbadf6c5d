"""Where steps begin and end."""

from __future__ import annotations

import polars as pl

from dpro.ingest.derived import find_steps


def _spans(*rows: tuple[str, str, int, int, int]) -> pl.DataFrame:
    frame = pl.DataFrame(
        rows, schema=["kind", "name", "start_ns", "duration_ns", "sequence_number"], orient="row"
    )
    return frame.with_columns(forward_thread=pl.lit(0, dtype=pl.Int64))


def _bounds(spans: pl.DataFrame) -> list[tuple[int, int, int]]:
    return list(find_steps(spans).select("step", "start_ns", "duration_ns").iter_rows())


def _optimizer(name: str, start: int) -> tuple[str, str, int, int, int]:
    return ("annotation", f"Optimizer.step#{name}.step", start, 5, -1)


def _forward(start: int) -> tuple[str, str, int, int, int]:
    return ("cpu_op", "aten::linear", start, 5, 1)


def test_the_profilers_own_marks_are_the_steps():
    spans = _spans(
        ("annotation", "ProfilerStep#12", 50, 40, -1), ("annotation", "ProfilerStep#11", 0, 50, -1)
    )
    assert _bounds(spans) == [(11, 0, 50), (12, 50, 40)]


def test_a_mark_that_no_work_belongs_to_is_no_step():
    mark, late = ("annotation", "ProfilerStep#0", 10, 5, -1), ("kernel", "gemm", 20, 100, -1)
    assert find_steps(_spans(mark, late)).is_empty()
    assert _bounds(_spans(mark, late, ("runtime", "cudaLaunchKernel", 12, 1, -1))) == [(0, 10, 5)]
    assert _bounds(_spans(mark, late, ("kernel", "gemm", 12, 100, -1))) == [(0, 10, 5)]
    assert _bounds(_spans(mark)) == [(0, 10, 5)]


def test_without_marks_a_step_ends_with_its_optimizer_and_the_tail_is_left_out():
    spans = _spans(_forward(3), _optimizer("Adam", 20), _forward(30), _optimizer("Adam", 40), _forward(50))
    assert _bounds(spans) == [(0, 3, 22), (1, 25, 20)]


def test_two_optimizers_in_a_row_end_one_step():
    spans = _spans(
        _forward(0), _optimizer("Muon", 10), _optimizer("Adam", 20), _forward(30), _optimizer("Muon", 40),
        _forward(50), _optimizer("Muon", 60), _optimizer("Adam", 70),
    )  # fmt: skip
    assert _bounds(spans) == [(0, 0, 25), (1, 25, 20), (2, 45, 30)]


def test_of_two_networks_trained_in_turn_the_rarer_ends_the_step():
    turns = [("D", 10), ("D", 30), ("G", 50), ("D", 70), ("D", 90), ("G", 110)]
    rows = [row for name, start in turns for row in (_forward(start - 10), _optimizer(name, start))]
    spans = _spans(*rows)
    assert _bounds(spans) == [(0, 0, 55), (1, 55, 60)]


def test_without_marks_and_optimizers_there_are_no_steps():
    assert find_steps(_spans(_forward(0))).is_empty()
