"""Real pipelines on gloo under schedules of torch.distributed.pipelining, and late ranks of real layouts."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from benchmarks.recording import TORCHRUN, dpro, job
from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import layout_document
from dpro.analysis.answers.whatif import what_if
from dpro.opening import ensure_finished
from dpro.replay.pipeline.recorded import operations_by_backwards, operations_by_ranges, pipeline_bubbles
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import OPERATIONS, STEPS
from dpro.store import Run, open_run
from dpro.timed import with_times
from tests.jobs import record, script

pytestmark = pytest.mark.slow
STEP_COUNT, BATCHES, STAGES = 12, 8, 4
FIRST = [] if os.geteuid() else ["--first"]  # layers sleep: ranks take next to nothing of what others run
KEY = ["rank", "step", "stage", "place", "micro_batch", "kind"]
LOOPED = {(stage, chunk): chunk * STAGES + stage for stage in range(STAGES) for chunk in (0, 1)}
V_SHAPED = {(stage, chunk): 7 - stage if chunk else stage for stage in range(STAGES) for chunk in (0, 1)}


def recorded(folder: Path, *arguments: object) -> Run:
    command = job("pipeline_job.py", [*arguments, "--steps", STEP_COUNT, *FIRST], STAGES)
    done = dpro("record", "-o", folder, "--", *command)
    assert done.returncode == 0, done.stderr
    ensure_finished(folder)
    return open_run(folder)


@pytest.mark.parametrize(
    ("arguments", "source", "places", "kinds"),
    [
        (["looped-bfs"], "LoopedBFS", LOOPED, {"forward", "backward"}),
        (["zb-h1"], "InterleavedZeroBubble", LOOPED, {"forward", "backward_input", "backward_weight"}),
        (
            ["dualpipev"], "DualPipeV", V_SHAPED,
            {"forward", "backward", "backward_input", "backward_weight"},
        ),
    ],
)  # fmt: skip
def test_schedules_of_several_chunks_have_all_operations_their_places_and_bubbles(
    tmp_path, arguments, source, places, kinds
):
    run = recorded(tmp_path / "run", *arguments)
    rows = run.table(OPERATIONS).filter(pl.col("step") >= 0)
    assert rows["source"].unique().to_list() == [f"torch.distributed.pipelining Schedule{source}"]
    assert set(rows["kind"].unique().cast(pl.String)) == kinds
    found = {(stage, chunk): at for stage, chunk, at in rows.select("stage", "chunk", "place").iter_rows()}
    assert found == places
    forwards = rows.filter(pl.col("kind") == "forward").group_by("rank", "step").len()["len"]
    assert forwards.unique().to_list() == [2 * BATCHES]
    whole = rows.filter(pl.col("kind").is_in(["backward", "backward_input"]))
    assert whole.height == forwards.sum()
    later = rows.filter(pl.col("kind") == "backward_weight").height
    assert later == rows.filter(pl.col("kind") == "backward_input").height
    assert "pp 4" in layout_document(run).line
    marked = operations_by_ranges(run).filter(pl.col("step") >= 0)
    assert marked.height > 0
    assert marked.join(rows, on=KEY, how="anti").is_empty()
    analysis = Analysis(run)
    assert analysis.why_no_operations == ""
    assert analysis.operations is not None
    assert analysis.operations.trust.error_pct < 3
    # Work of eight micro-batches, and a bubble that is less than that of one chunk, 3 of 11.
    inner = pipeline_bubbles(run).filter(pl.col("stage") > 0)["bubble_share"].to_numpy()
    assert ((inner > 0.03) & (inner < 3 / 11 + 0.05)).all()


def test_operations_by_backward_passes_are_those_that_dpro_recorded_of_the_same_job(tmp_path):
    run = recorded(tmp_path / "run", "1f1b")
    rows = run.table(OPERATIONS).filter(pl.col("step") >= 0)
    found = operations_by_backwards(run).filter(pl.col("step") >= 0)
    inside = run.table(STEPS).filter(pl.col("window") >= 0).select("rank", "step").unique()
    assert found.height == inside.height * 2 * BATCHES
    both = found.join(rows, on=KEY, suffix="_recorded")
    assert both.height == found.height
    off = (both["duration_ns"] - both["duration_ns_recorded"]).abs().median()
    assert off < 2e6  # of 10 to 20 ms


def test_even_pipeline_has_no_finding(tmp_path):
    findings = Analysis(recorded(tmp_path / "run", "1f1b")).verdict[0]
    assert [each for each in findings if each.class_ not in ("jitter", "slow.host")] == []


def median_ms(run: Run) -> float:
    times = with_times(run.table(STEPS)).filter((pl.col("duration_ns") > 0) & (pl.col("step") > 2))
    each = times.group_by("step").agg(pl.col("duration_ns").max())["duration_ns"]
    return float(each.median()) / 1e6


def test_healed_stage_takes_what_the_job_with_an_even_stage_takes(tmp_path):
    uneven = recorded(tmp_path / "uneven", "1f1b", "--layers", "2/4/2/2")
    even = recorded(tmp_path / "even", "1f1b")
    (found,) = what_if(Analysis(uneven), [parse_edit("heal:stage=1")]).predictions
    assert found.predicted_ns / 1e6 == pytest.approx(median_ms(even), rel=0.08)
    stages = [each for each in Analysis(uneven).verdict[0] if each.class_ == "imbalance.stage"]
    assert [each.component_id for each in stages] == ["1"]


LATE = """
    import time
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = Descent([weight])
    for _ in range(24):
        optimizer.zero_grad()
        for _ in range(4):
            time.sleep(0.02 + 0.02 * (dist.get_rank() == 3))
            partial = torch.ones(64)
            dist.all_reduce(partial, group=mesh.get_group("tp"))
        (weight * partial).sum().backward()
        dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        optimizer.step()
    dist.destroy_process_group()
"""


def test_rank_that_is_late_for_its_tensor_parallel_peer_is_late_along_tp(tmp_path):
    command = [*TORCHRUN, str(STAGES), script(tmp_path, LATE)[1]]
    run, done = record(tmp_path, command, "--skip", "6", "--every", "1000000", "--window-steps", "8")
    assert done.returncode == 0, done.stderr.decode()
    findings = [each for each in Analysis(run).verdict[0] if each.severity > 0.1]
    assert [(each.component_kind, each.component_id, each.axis) for each in findings] == [("rank", "3", "tp")]
    assert any("rank 3 (dp 1, tp 1)" in line and "along tp" in line for line in findings[0].evidence)
