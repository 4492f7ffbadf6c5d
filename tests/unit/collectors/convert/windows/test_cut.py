"""A recording that is longer than its window is cut to the window's steps."""

import polars as pl
import pytest

from dpro.collectors.convert.windows import WINDOW_TABLES, cut
from dpro.ingest.kineto import read_trace
from dpro.schema import COLLECTIVES, COUNTERS, DEPENDENCIES, GPU_WORK_KINDS, SPANS, SYNCS, conform

BEGIN, END = 100, 300


def tables(spans=(), **others):
    """Tables of a window; a span is (id, kind, start, duration, correlation)."""
    names = ["span_id", "kind", "start_ns", "duration_ns", "correlation"]
    rows = [dict(zip(names, span, strict=False)) for span in spans]
    given = {SPANS.name: pl.DataFrame(rows)} | {name: pl.DataFrame(rows) for name, rows in others.items()}
    return {table.name: conform(table, given.get(table.name, table.empty())) for table in WINDOW_TABLES}


def kept(*spans):
    return cut(tables(spans), BEGIN, END)[SPANS.name]["span_id"].to_list()


def test_work_of_the_gpu_belongs_to_the_call_that_launched_it_whenever_it_ran():
    assert kept(
        (0, "runtime", 90, 5, 1), (1, "kernel", 120, 50, 1),  # queued before
        (2, "runtime", 110, 5, 2), (3, "kernel", 170, 200, 2),  # it runs beyond the end
        (4, "runtime", 290, 5, 3), (5, "memcpy", 400, 50, 3),
        (6, "runtime", 310, 5, 4), (7, "kernel", 450, 50, 4),
    ) == [2, 3, 4, 5]  # fmt: skip


def test_work_that_nothing_is_known_to_have_launched_belongs_where_it_ran():
    assert kept(
        (0, "kernel", 110, 10, 8),  # before what is the window's: still of the steps before
        (1, "runtime", 110, 5, 2), (2, "kernel", 170, 100, 2),
        (3, "kernel", 200, 10, -1), (4, "gpu_annotation", 180, 50, -1), (5, "kernel", 280, 10, 9),
    ) == [1, 2, 4, 3]  # fmt: skip


def test_without_any_launch_the_host_says_what_ran_meanwhile():
    assert kept((0, "kernel", 90, 5, -1), (1, "kernel", 150, 5, -1), (2, "kernel", 320, 5, -1)) == [1]


def test_host_work_is_as_if_recording_had_begun_and_ended_with_the_steps():
    spans = cut(
        tables(
            [
                (0, "cpu_op", 50, 40), (1, "annotation", 80, 100), (2, "python", 10, 1000),
                (3, "cpu_op", 100, 20), (4, "annotation", 250, 500), (5, "cpu_op", 300, 5),
            ]
        ),
        BEGIN, END,
    )[SPANS.name]  # fmt: skip
    assert spans.select("span_id", "start_ns", "duration_ns").rows() == [
        (2, 100, 200), (3, 100, 20), (4, 250, 50),
    ]  # fmt: skip


def test_what_points_to_spans_goes_with_them():
    spans = [(0, "runtime", 90, 5, 1), (1, "kernel", 120, 50, 1), (2, "runtime", 110, 5, 2),
             (3, "kernel", 170, 20, 2), (4, "cpu_op", 105, 50, -1)]  # fmt: skip
    frames = tables(
        spans,
        collectives=[
            {"collective_id": 0, "span_id": 1, "launch_span_id": 0, "start_ns": 120},
            {"collective_id": 1, "span_id": 3, "launch_span_id": 2, "start_ns": 170},
            {"collective_id": 2, "span_id": -1, "launch_span_id": -1, "start_ns": 90},
            {"collective_id": 3, "span_id": -1, "launch_span_id": -1, "start_ns": 150},
        ],
        syncs=[{"span_id": 0, "start_ns": 90}, {"span_id": 2, "start_ns": 110}],
        dependencies=[
            {"source_span_id": 0, "target_span_id": 2},
            {"source_span_id": 4, "target_span_id": 2},
        ],
        counters=[
            {"counter": "memory", "time_ns": time, "value": float(time)} for time in (80, 90, 200, 300)
        ],
    )
    found = cut(frames, BEGIN, END)
    assert found[COLLECTIVES.name]["collective_id"].to_list() == [3, 1]
    assert found[SYNCS.name]["span_id"].to_list() == [2]
    assert found[DEPENDENCIES.name]["source_span_id"].to_list() == [4]
    assert found[COUNTERS.name].select("time_ns", "value").rows() == [(100, 90.0), (200, 200.0)]
    for table in WINDOW_TABLES:
        assert conform(table, found[table.name]).equals(found[table.name])


@pytest.mark.parametrize(
    ("name", "per_step"),
    [
        ("multirank/torchrec_v100_2r_kjt/rank0.pt.trace.json.gz", 75),
        ("multirank/torchrec_v100_4r_a2a_ar/rank1.pt.trace.json.gz", 208),
        ("single_hta/nccl_parser_config__nccl_data.json.gz", 1258),
    ],
)
def test_real_trace_cut_to_one_of_its_steps_has_the_work_of_that_step(traces, name, per_step):
    trace = read_trace(traces / name, rank=0)
    frames = {
        table.name: conform(table, trace.frames.get(table.name, table.empty())) for table in WINDOW_TABLES
    }
    marked = trace.frames["steps"].sort("start_ns").select("start_ns", "duration_ns").rows()
    parts = [cut(frames, start, start + duration)[SPANS.name] for start, duration in marked]
    work = [part.filter(pl.col("kind").is_in(GPU_WORK_KINDS))["span_id"] for part in parts]
    assert len(work[1]) == per_step
    assert pl.concat(work).is_unique().all()
    assert all(part["span_id"].is_unique().all() for part in parts)
