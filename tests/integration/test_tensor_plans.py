"""A tensor plan, made to a real job of two ranks: what the run and the job itself show of it."""

import json

import pytest

from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, write_plan
from dpro.schema import BUCKETS, COLLECTIVES
from tests.integration.test_changes_to_jobs import JOB, STEPS, changed
from tests.jobs import ABORTED_AT_EXIT, TWO_RANKS, complete

pytest.importorskip("torch")

# Neither contiguous nor in the order in which gradients become ready; DDP alone makes one bucket of all.
PLAN = TensorPlan(
    (
        PlannedReduction(("layers.2.linear.weight", "layers.0.linear.bias")),
        PlannedReduction(("layers.2.linear.bias",)),
        PlannedReduction(("layers.0.linear.weight", "layers.1.linear.weight", "layers.1.linear.bias")),
    )
)


def test_both_ranks_reduce_as_planned_and_train_the_same_to_the_last_bit(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    done = complete([*TWO_RANKS, "job.py", "ddp", str(STEPS)], tmp_path)
    assert done.returncode == 0 or done.stderr == ABORTED_AT_EXIT, done.stderr.decode()
    plain = json.loads((tmp_path / "seen.json").read_text())
    write_plan(PLAN, tmp_path / "plan.json")
    seen, run, refused = changed(tmp_path, f'tensors:plan="{tmp_path / "plan.json"}"')
    assert not refused
    for rank in (0, 1):
        buckets = run.table(BUCKETS).filter(rank=rank).sort("bucket")
        assert buckets["names"].to_list() == [list(each.gradients) for each in PLAN.reductions]
    calls = run.table(COLLECTIVES, ["rank", "op", "bytes_in", "start_ns"]).filter(rank=0, op="all_reduce")
    planned = run.table(BUCKETS).filter(rank=0).sort("bucket")["bytes"].to_list()
    assert calls.sort("start_ns")["bytes_in"].to_list() == planned * seen["passes"]
    assert seen["same"]
    assert seen["sum"] == plain["sum"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fsdp", "with FSDP2 call fully_shard() on other modules"),
        ("bare", "the job wraps no module in DistributedDataParallel"),
        ("ddp", "the plan has no gradient layers.2.linear.bias, which DDP of Model reduces"),
    ],
)
def test_a_job_that_cannot_reduce_so_goes_on_as_it_is(tmp_path, kind, reason):
    reductions = (PLAN.reductions[0], PLAN.reductions[2]) if kind == "ddp" else PLAN.reductions
    write_plan(TensorPlan(reductions), tmp_path / "plan.json")
    seen, _, refused = changed(tmp_path, f'tensors:plan="{tmp_path / "plan.json"}"', kind)
    assert any(reason in each for each in refused), refused
    assert seen["passes"] == STEPS
