"""Recorded operations: the same as those of an imported trace of the same job."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from dpro.replay.construction.graph_builder import build_graph, build_operation_view
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.pipeline.operations import Role
from dpro.replay.pipeline.recorded import operations_of, pipeline_bubbles
from dpro.replay.timeline import replay
from dpro.schema import COLLECTIVES, OPERATIONS, STEPS
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.table import complete
from tests.builders import gpu_job
from tests.pipelines import MS, Job, written
from tests.recorded_pipelines import recorded


@pytest.mark.parametrize(("num_stages", "num_batches"), [(2, 2), (4, 8), (3, 1)])
def test_bubbles_are_those_of_the_imported_trace_and_of_the_formula(tmp_path, num_stages, num_batches):
    rows = Job(num_stages=num_stages, num_batches=num_batches, num_steps=3, message=0.0, gather=0.0).run()
    found = pipeline_bubbles(recorded(rows, tmp_path / "recorded"))
    assert found.equals(pipeline_bubbles(written(rows, tmp_path / "imported")))
    expected = (num_stages - 1) / (num_batches + num_stages - 1)
    assert found["bubble_share"].to_list() == pytest.approx([expected] * num_stages, abs=1e-6)


def test_replay_of_operations_takes_as_long_as_the_steps_took(tmp_path):
    run = recorded(Job(num_stages=4, num_batches=6, num_steps=4, noise=0.1).run(), tmp_path)
    built = build_operation_view(run)
    trust = assess(built, replay(built.graph), run.manifest)
    steps = run.table(STEPS).unique("step").sort("step")
    assert trust.steps["measured_ns"].to_list() == steps["duration_ns"].to_list()
    assert trust.error_pct < 0.5
    assert trust.answerable


def test_places_of_ranks_and_the_order_of_the_model_come_from_the_recording(tmp_path):
    run = recorded(Job(num_stages=2, num_dp=2, num_steps=3).run(), tmp_path)
    operations = operations_of(run)
    assert operations is not None
    assert {rank: tuple(place) for rank, place in operations.places.items()} == {
        0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1),
    }  # fmt: skip
    assert (operations.num_stages, operations.num_chunks) == (2, 1)


def test_steps_that_are_not_whole_or_were_slowed_down_by_a_window_are_left_out(tmp_path):
    run = recorded(Job(num_stages=2, num_steps=8).run(), tmp_path / "whole")
    rows, steps = run.table(OPERATIONS), run.table(STEPS)
    lost = rows.filter(~((pl.col("step") == 4) & (pl.col("rank") == 1) & (pl.col("micro_batch") == 0)))
    window = pl.when(pl.col("step") == 6).then(0).otherwise("window").alias("window")
    write_part(run.path, OPERATIONS, "rank00000", lost)
    write_part(run.path, STEPS, "rank00000", steps.with_columns(window.cast(pl.Int32)))
    operations = operations_of(open_run(run.path))
    assert operations is not None
    # Step 7 comes right after the window.
    assert operations.rows["step"].unique().sort().to_list() == [3, 5, 8, 9, 10]
    length = operations.steps.select(pl.col("finish") - pl.col("begin")).to_series()
    assert length.n_unique() == 1  # what lay between them is gone


def test_last_step_of_a_job_is_left_out_since_ranks_leave_beside_it(tmp_path):
    run = recorded(Job(num_stages=2, num_steps=5).run(), tmp_path)
    write_manifest(run.path, dataclasses.replace(run.manifest, exit_status=0))
    operations = operations_of(open_run(run.path))
    assert operations is not None
    assert operations.rows["step"].unique().sort().to_list() == [3, 4, 5, 6]


def test_reduction_that_a_backward_calls_is_no_work_of_it(tmp_path):
    run = recorded(Job(num_stages=2, num_dp=2, num_steps=3).run(), tmp_path)
    last = (
        run.table(OPERATIONS).filter(pl.col("kind") == "backward").sort("start_ns").group_by("rank", "step")
    )
    calls = last.last().select(
        "rank",
        op=pl.lit("all_reduce"),
        group=pl.format("dp {}", "stage"),
        group_ranks=pl.when(pl.col("stage") == 0).then(pl.lit("0,1")).otherwise(pl.lit("2,3")),
        window=pl.lit(-1),
        enqueued_ns=pl.col("start_ns") + 15 * MS,  # of the 20 that it lasts
        start_ns=pl.lit(-1),
        duration_ns=pl.lit(-1),
    )
    write_part(run.path, COLLECTIVES, "rank00000", complete(COLLECTIVES, calls))
    operations = operations_of(open_run(run.path))
    assert operations is not None
    lasts = operations.rows.with_columns(ms=(pl.col("end") - pl.col("start")) / MS)
    reduced = lasts.filter(pl.col("role") == Role.REDUCE)
    assert reduced.height == 4 * 3
    assert reduced["ms"].to_list() == pytest.approx([5.0] * 12)
    backward = lasts.filter(pl.col("name") == "backward").sort("start")
    assert backward.group_by("rank", "step").last()["ms"].to_list() == pytest.approx([15.0] * 12)
    assert not build_operation_view(open_run(run.path)).unknown


def test_job_that_recorded_no_operations_has_none(tmp_path):
    run = gpu_job().write(tmp_path)
    assert operations_of(run) is None
    assert not build_graph(run).of_operations


def test_rank_begins_a_step_once_its_own_step_before_has_ended(tmp_path):
    # The stage that comes first in the model ends its step 30 ms before the other, and goes on at once.
    rows, steps = [], []
    for step in range(3, 7):
        at = 80 * step
        for rank, place, kind, start, end in (
            (1, 0, "forward", -20, -10), (0, 1, "forward", 10, 20), (0, 1, "backward", 20, 40),
            (1, 0, "backward", 40, 60),
        ):  # fmt: skip
            rows.append((rank, step, rank, 0, place, 0, kind, (at + start) * MS, (end - start) * MS))
        steps += [(0, step, (at + 10) * MS, 80 * MS, -1), (1, step, (at - 20) * MS, 80 * MS, -1)]
    names = ["rank", "step", "stage", "chunk", "place", "micro_batch", "kind", "start_ns", "duration_ns"]
    write_part(tmp_path, OPERATIONS, "a", complete(OPERATIONS, pl.DataFrame(rows, names, orient="row")))
    names = ["rank", "step", "start_ns", "duration_ns", "window"]
    write_part(tmp_path, STEPS, "a", complete(STEPS, pl.DataFrame(steps, names, orient="row")))
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    built = build_operation_view(open_run(tmp_path))
    trust = assess(built, replay(built.graph), built.graph.run.manifest)
    assert trust.steps["replayed_ns"].to_list()[1:] == [80 * MS] * (trust.steps.height - 1)
    assert trust.error_pct == 0
