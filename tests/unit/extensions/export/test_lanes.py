"""Names of lanes: the same in exports and reports as in the dashboard's timeline."""

from __future__ import annotations

import polars as pl

from dpro.dashboards.loaded import Loaded
from dpro.timelines.lanes import lane_names
from dpro.timelines.slices import slices
from tests.builders import TinyRun, gpu_job


def test_streams_are_named_in_exports_as_in_the_timeline(tmp_path):
    loaded = Loaded(gpu_job().write(tmp_path))
    shown = {(rank, lane.label) for rank, lanes in loaded.measured.all().items() for lane in lanes.lanes}
    rows = slices(loaded.timeline).filter(pl.col("group").str.ends_with("measured"))
    assert set(rows.select("rank", "lane").unique().iter_rows()) == shown
    assert {lane for _, lane in shown} >= {"stream 20 (NCCL)", "stream 7 (compute)"}


def test_a_stream_is_named_by_what_takes_most_of_its_time_waits_included(tmp_path):
    run = TinyRun()
    for rank in range(2):
        run.call(0, 10, 1, rank)
        run.kernel("gemm", 20, 120, 1, rank)
        run.call(10, 20, 2, rank)
        run.nccl(120 + 300 * rank, 430, 2, rank)  # of rank 0 it waits 300 us
        for row in run.rows["spans"]:
            row |= {"stream": 7} if row.get("stream") == 20 else {}
        run.call(20, 25, 3, rank)
        run.kernel("Memcpy HtoD", 30, 40, 3, rank, kind="memcpy", stream=15)
        run.call(25, 30, 4, rank)
        run.kernel("gemm", 30, 40, 4, rank, stream=94_000)  # an address
        run.step(0, 0, 500, rank)
    loaded = Loaded(run.write(tmp_path))
    graph = loaded.timeline.graph
    named = {(rank, name) for (rank, _), name in zip(graph.lanes, lane_names(graph), strict=True)}
    assert named >= {
        (0, "stream 7 (NCCL)"),
        (1, "stream 7 (compute)"),
        (0, "stream 15 (copy)"),
        (0, "compute 1"),
    }
    shown = {(rank, lane.label) for rank, lanes in loaded.measured.all().items() for lane in lanes.lanes}
    assert named == shown
