"""Totals of an area, computed by hand."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.dashboards.loaded import Loaded
from dpro.dashboards.timeline.area import by_lane, by_name, by_range, spans_within
from dpro.dashboards.timeline.lanes import KINDS, SpanNames, make_lanes
from dpro.schema import SPANS, conform
from tests.builders import TinyRun


@pytest.fixture
def laid():
    """A stream with a gap, a collective that waits 50 of 200 ns, and an operator in another."""
    rows = [
        ("gemm", "kernel", 0, 100, 7, None), ("gemm", "kernel", 150, 200, 7, None),
        ("ncclAllReduce", "kernel", 50, 250, 20, 100), ("outer", "cpu_op", 0, 200, -1, None),
        ("inner", "cpu_op", 20, 60, -1, None),
    ]  # fmt: skip
    columns = ["name", "kind", "start_ns", "end", "stream", "until_ns"]
    frame = pl.DataFrame(rows, columns, orient="row").with_row_index("span_id")
    frame = frame.with_columns(duration_ns=pl.col("end") - pl.col("start_ns"), rank=3, tid=1, device=0)
    names = SpanNames()
    spans = conform(SPANS, frame.drop("end", "until_ns"))
    until = frame.select(pl.col("span_id").cast(pl.Int64), "until_ns")
    return make_lanes(spans.join(until, on="span_id"), names, 1000, 0), names


def test_names_are_totalled_within_the_area_with_wait_and_transfer_apart(laid):
    lanes, names = laid
    spans = spans_within(lanes, range(lanes.all.first.size - 1), 50, 175)
    assert by_name(spans, names.texts).rows() == [
        ("outer", "operator", 1, 125, 125.0, 125),
        ("gemm", "kernel", 2, 75, 37.5, 50),
        ("ncclAllReduce", "transfer of a collective", 1, 75, 75.0, 75),
        ("ncclAllReduce", "wait in a collective", 1, 50, 50.0, 50),
        ("inner", "operator", 1, 10, 10.0, 10),
    ]


def test_a_lane_is_busy_while_a_span_runs_that_does_not_wait_for_peers(laid):
    lanes, _ = laid
    spans = spans_within(lanes, range(lanes.all.first.size - 1), 50, 175)
    assert by_lane(spans, lanes).rows() == [
        (3, "stream 20 (NCCL)", 2, 75), (3, "stream 7 (compute)", 2, 75), (3, "main thread", 2, 125)
    ]  # fmt: skip


def test_a_range_has_for_itself_the_time_in_which_neither_an_inner_range_nor_anything_else_runs(tmp_path):
    run = TinyRun()
    run.mark("step", 0, 100)
    run.mark("load", 10, 60)
    run.mark("load", 20, 50)
    run.op("aten::mm", 40, 55)
    run.op("aten::mm", 80, 120)
    measured = Loaded(run.write(tmp_path)).measured
    (lanes,) = measured.all().values()
    spans = spans_within(lanes, range(lanes.all.first.size - 1), 5_000, 90_000)
    assert by_range(spans, lanes, measured.names.texts).rows() == [
        (0, "main thread", "load", 35_000),  # 10 to 40 and 55 to 60
        (0, "main thread", "step", 25_000),  # 5 to 10 and 60 to 80
    ]
    works = spans.filter(pl.col("kind") != KINDS.index("host"))
    assert by_range(works, lanes, measured.names.texts).is_empty()


def test_only_the_rows_of_the_area_count_and_nothing_where_nothing_ran(laid):
    lanes, names = laid
    gemms = next(lane for lane in lanes.lanes if lane.label == "stream 7 (compute)")
    assert by_name(spans_within(lanes, range(*gemms.rows), 0, 1000), names.texts).rows() == [
        ("gemm", "kernel", 2, 150, 75.0, 100)
    ]
    nothing = spans_within(lanes, range(*gemms.rows), 100, 150)
    assert by_name(nothing, names.texts).is_empty()
    assert by_lane(nothing, lanes).is_empty()
