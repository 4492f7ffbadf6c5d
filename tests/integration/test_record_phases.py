"""A rank that is slow in one part of its step, in real DDP jobs that are recorded without a deep window."""

from __future__ import annotations

import json

import pytest

from dpro.detect.stragglers.phases import PHASES
from dpro.schema import PASSES, STEPS
from tests.commands import dpro
from tests.jobs import COMPILER, TWO_RANKS, imports, record

pytest.importorskip("torch")

JOB = (
    imports("time", COMPILER)
    + """import torch.distributed as dist
torch.set_num_threads(1)
where = sys.argv[1]
dist.init_process_group("gloo")

def hold_up(phase):
    if phase == where and dist.get_rank() == 1:
        time.sleep(0.04)

class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        hold_up("before")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hold_up("backward")
        return gradient

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(80):
    optimizer.zero_grad()
    Held.apply(model(torch.ones(8, 64))).sum().backward()
    hold_up("after")
    optimizer.step()
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("before", marks=pytest.mark.slow),
        "backward",  # all ranks are in it for equally long
        pytest.param("after", marks=pytest.mark.slow),
    ],
)
def test_slow_rank_is_named_with_the_part_of_its_step_without_a_window(tmp_path, phase):
    (tmp_path / "job.py").write_text(JOB)
    run, _ = record(tmp_path, [*TWO_RANKS, "job.py", phase], "--no-windows")
    assert run.num_rows(PASSES) > run.num_rows(STEPS) / 10
    findings = json.loads(dpro("diagnose", run.path, "--json").stdout)["findings"]
    [late] = [finding for finding in findings if finding["ranks"] == [1]]
    assert late["place"]["name"] == PHASES[phase]
    assert f" in {PHASES[phase]}" in late["evidence"][0]
