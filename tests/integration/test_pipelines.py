"""Real jobs that pipeline: operations, layout, bubbles and slow stages, by what commands are made of."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.info import layout_document
from dpro.analysis.answers.whatif import what_if
from dpro.replay.pipeline.recorded import operations_by_ranges, pipeline_bubbles
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import OPERATIONS
from dpro.store import Run
from tests.jobs import ROOT, record, script

# Stages of layers that sleep, forward and twice as long backward.
STAGES = """
    import time
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    class Nap(torch.autograd.Function):
        @staticmethod
        def forward(context, x, seconds):
            context.seconds = seconds
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(2 * context.seconds)
            return gradient, None

    class Layer(torch.nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.linear, self.seconds = torch.nn.Linear(4, 4), seconds

        def forward(self, x):
            return Nap.apply(self.linear(x), self.seconds)

    schedule, batches, num_stages, steps, slow, *layers = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), int(num_stages)
    shape = (dist.get_world_size() // num_stages, num_stages)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    stage = mesh.get_local_rank("pp")
    seconds = 0.02 * (2 if rank == int(slow) else 1)
    model = torch.nn.Sequential(*(Layer(seconds) for _ in range(int(layers[stage]))))
    if mesh.size(0) > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    place = PipelineStage(model, stage, num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
    made = schedules.get_schedule_class(schedule)(
        place, int(batches), loss_fn=torch.nn.functional.mse_loss
    )
    optimizer = Descent(model.parameters())
    batch = torch.ones(8, 4, requires_grad=True)
    for _ in range(int(steps)):
        optimizer.zero_grad()
        given = (batch,) if stage == 0 else ()
        target = {"target": torch.ones(8, 4)} if stage == num_stages - 1 else {}
        made.step(*given, **target)
        optimizer.step()
    dist.destroy_process_group()
"""
MAX_ATTEMPTS = 3
WINDOW = ("--skip", "9", "--window-steps", "2", "--every", "1000000")


def ran(folder: Path, num_ranks: int, *arguments: object, options: tuple[str, ...] = WINDOW) -> Run:
    job = script(folder, STAGES, "torch.distributed.pipelining")
    ranks = [job[0], str(ROOT / "tests" / "ranks.py"), str(num_ranks)]
    run, done = record(folder, [*ranks, job[1], *map(str, arguments)], *options)
    assert done.returncode == 0, done.stderr.decode()
    return run


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_operations_of_a_real_pipeline_show_its_layout_its_bubbles_and_what_changes_would_do(tmp_path):
    # A job that waits for cores is refused, as it should be: so much time that nothing explains.
    for attempt in range(MAX_ATTEMPTS):
        run = ran(_made(tmp_path / str(attempt)), 2, "GPipe", 4, 2, 13, -1, 1, 1)
        analysis = Analysis(run)
        if analysis.operations is not None:
            break
    assert analysis.operations is not None, analysis.why_no_operations
    rows = run.table(OPERATIONS).filter(pl.col("step") >= 0)
    per_step = rows.group_by("rank", "stage", "step", "kind").len()
    assert per_step["len"].unique().to_list() == [4]
    assert set(per_step.select("rank", "stage", "kind").iter_rows()) == {
        (rank, rank, kind) for rank in (0, 1) for kind in ("forward", "backward")
    }
    assert rows["source"].unique().to_list() == ["torch.distributed.pipelining ScheduleGPipe"]
    assert "pp 2" in layout_document(run).line
    for stage in pipeline_bubbles(run).iter_rows(named=True):
        assert (stage["ranks"], stage["bubble_share"] > 0) == (1, True)
        assert stage["compute_ns"] >= 4 * 3 * 20e6  # layers sleep at least that long
    # Deep windows have ranges of PyTorch: the same operations.
    marked = operations_by_ranges(run).filter(pl.col("step") >= 0)
    key = ["rank", "step", "stage", "place", "micro_batch", "kind"]
    assert marked.height == 2 * 2 * 2 * 4
    assert marked.join(rows, on=key, how="anti").is_empty()
    edit = parse_edit("pipeline:schedule=gpipe,micro_batches=8")
    (found,) = what_if(analysis, [edit]).predictions
    assert found.low_ns <= found.predicted_ns <= found.high_ns
    assert not analysis.operations.trust.reasons


@pytest.mark.slow
def test_stage_with_more_layers_is_uneven_work_and_no_rank_is_at_fault(tmp_path):
    run = ran(tmp_path, 4, "1F1B", 4, 2, 16, -1, 1, 2)
    (finding,) = [each for each in Analysis(run).verdict[0] if each.severity > 0.05]
    assert (finding.class_, finding.component_id, finding.ranks) == ("imbalance.stage", "1", (1, 3))
    assert any("its ranks do more, they are not slower" in line for line in finding.evidence)


@pytest.mark.slow
def test_rank_that_is_slower_than_the_others_of_its_stage_is_named(tmp_path):
    run = ran(tmp_path, 4, "1F1B", 4, 2, 16, 2, 1, 1)
    (finding,) = [each for each in Analysis(run).verdict[0] if each.severity > 0.05]
    assert (finding.component_kind, finding.ranks) == ("rank", (2,))


@pytest.mark.slow
def test_recording_without_windows_has_stages_and_predictions_all_the_same(tmp_path):
    run = ran(tmp_path, 2, "1F1B", 4, 2, 8, -1, 1, 2, options=("--no-windows",))
    found = what_if(Analysis(run), [parse_edit("balance:over=stages")])
    assert found.predictions[0].speedup > 1.1
