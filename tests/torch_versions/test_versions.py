"""The recorder on real versions of PyTorch: `make test-torch` makes an environment of each and runs this.

The job runs in that environment, dpro in its own. CUDA builds do on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.collectors.inside.torch_internals import INTERNALS
from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, write_plan
from dpro.extensions.trial.changes import parse_change
from dpro.schema import BUCKETS, COLLECTIVES, COUNTERS, DEPENDENCIES, PROCESS_GROUPS, SPANS, STEPS
from dpro.store import Run
from tests.jobs import ROOT, TRAIN, record, script

VERSIONS = os.environ.get("DPRO_TORCH_VERSIONS", "").split()
ENVIRONMENTS = Path(os.environ.get("DPRO_TORCH_ENVIRONMENTS", "build/torch")).resolve()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERSIONS, reason="make test-torch runs the recorder on older versions of PyTorch"),
]
NO_GLOO = {"2.6", "2.7"}  # whose flight recorder has NCCL's calls alone
STEPS_RUN, EVERY, SKIP = 30, 12, 5
WINDOWED = [5, 6, 17, 18, 29]

# A compiled model, updates included, and a profiler of the user's own with a warm-up.
COMPILED = """
def train():
    optimizer.zero_grad()
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()

compiled = torch.compile(model, backend="aot_eager")
for _ in range(30):
    train()
"""
PROFILED = """
schedule = torch.profiler.schedule(wait=4, warmup=1, active=3)
activities = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
    for _ in range(30):
        train_step()
        profiler.step()
print(len(profiler.events()) > 0)
"""


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO_RANKS = [*LAUNCHER, str(TRAIN), "--steps", str(STEPS_RUN)]


@dataclass(frozen=True)
class Recorded:
    """A recording of one version's job."""

    version: str
    run: Run
    output: str
    errors: str


def recorded(folder: Path, version: str, command: list[str], *options: str) -> Recorded:
    python = ENVIRONMENTS / version / "bin" / "python"
    assert python.exists(), f"{python} does not exist: make test-torch makes it"
    run, done = record(folder, [str(python), *command], *options)
    assert done.returncode == 0, done.stderr.decode()
    return Recorded(version, run, done.stdout.decode(), done.stderr.decode())


def alone(folder: Path, version: str, body: str, *options: str) -> Recorded:
    [_, job] = script(folder, body)
    return recorded(folder, version, [job], "--skip", str(SKIP), *options)


@pytest.fixture(scope="module", params=VERSIONS)
def ddp(request, tmp_path_factory) -> Recorded:
    options = ["--every", str(EVERY), "--skip", str(SKIP)]
    return recorded(tmp_path_factory.mktemp("ddp"), request.param, TWO_RANKS, *options)


def test_steps_and_windows_are_the_same_on_all_ranks(ddp):
    assert ddp.run.manifest.versions["torch"].startswith(f"{ddp.version}.")
    for rank in (0, 1):
        steps = ddp.run.table(STEPS).filter(rank=rank)
        assert steps["step"].to_list() == list(range(1, STEPS_RUN))
        assert steps.filter(pl.col("window") >= 0)["step"].to_list() == WINDOWED
        assert ddp.run.table(SPANS).filter(rank=rank)["window"].unique().sort().to_list() == [0, 1, 2]


def test_every_collective_call_is_there_or_its_absence_is_explained(ddp):
    calls = ddp.run.table(COLLECTIVES)
    assert calls.filter(pl.col("window") >= 0).height
    if ddp.version in NO_GLOO:
        [warning] = ddp.run.manifest.warnings
        assert f"PyTorch {ddp.version}" in warning
        assert "does not record the calls of gloo" in warning
        return
    assert ddp.run.manifest.warnings == []
    for rank in (0, 1):
        mine = calls.filter(rank=rank)
        assert mine.height >= 5 * STEPS_RUN  # four buckets and the loss
        assert mine["bytes_in"].min() >= 0
    assert ddp.run.table(PROCESS_GROUPS).height


def test_ddp_reduces_as_a_plan_says(tmp_path, ddp):
    names = ddp.run.table(BUCKETS).filter(rank=0).sort("bucket")["names"].explode().to_list()
    plan = [names[1::2], names[::2]]
    write_plan(TensorPlan(tuple(PlannedReduction(tuple(each), 2) for each in plan)), tmp_path / "plan.json")
    apply = json.dumps([parse_change(f"tensors:plan={tmp_path / 'plan.json'}").document()])
    run = recorded(tmp_path, ddp.version, TWO_RANKS, "--no-windows", "--apply", apply).run
    assert [reason for made in run.manifest.applied for reason in made.refused] == []
    for rank in (0, 1):
        assert run.table(BUCKETS).filter(rank=rank).sort("bucket")["names"].to_list() == plan


@pytest.mark.parametrize("command", ["info", "report", "replay", "whatif", "diagnose"])
def test_every_command_has_an_answer(ddp, command):
    done = CliRunner().invoke(cli, [command, str(ddp.run.path)])
    assert done.exit_code == 0, done.output
    assert done.output


@pytest.mark.parametrize("version", VERSIONS)
def test_windows_have_what_was_asked_for(tmp_path, version):
    body = "for _ in range(30): train_step()"
    options = ["--shapes", "--stacks", "--modules", "--memory", "--execution-trace"]
    run = alone(tmp_path, version, body, "--every", "12", *options).run
    assert run.manifest.warnings == []
    spans = run.table(SPANS)
    assert spans["window"].unique().sort().to_list() == [0, 1, 2]
    assert "nn.Module: model" in set(spans["name"]) or spans["name"].str.starts_with("nn.Module").any()
    assert spans["name"].str.contains("job.py").any()
    assert run.table(DEPENDENCIES).height
    assert "memory_allocated_bytes" in set(run.table(COUNTERS)["counter"])


PRESENT = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import torch.distributed.pipelining.schedules, torch.testing._internal.distributed.fake_pg, torch.utils.data
from inside.torch_internals import INTERNALS, internal
present = [each.path for each in INTERNALS if internal(each.path) is not None]
print(json.dumps([present, torch.version.cuda is not None]))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_private_attributes_are_in_the_versions_that_are_said_to_have_them(version):
    command = [str(ENVIRONMENTS / version / "bin" / "python"), "-c", PRESENT, str(ROOT / "collectors")]
    present, is_cuda = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    number = _number(version)
    expected = {
        each.path
        for each in INTERNALS
        if (not each.since or _number(each.since) <= number)
        and (not each.until or number < _number(each.until))
        and (is_cuda or each.build != "cuda")
    }
    none_by_default = {
        "torch.nn.Module._compiled_call_impl", "torch.autograd.profiler._is_profiler_enabled"
    }  # fmt: skip
    assert expected - set(present) <= none_by_default
    assert set(present) <= expected


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_of_ours_is_compiled_nor_anything_said(tmp_path, version):
    done = alone(tmp_path, version, COMPILED, "--every", "6")
    assert (done.output, done.run.manifest.warnings) == ("", [])
    lines = [line for line in done.errors.splitlines() if "Profiler" not in line]
    assert lines == []
    assert done.run.table(STEPS)["step"].to_list() == list(range(1, 30))


@pytest.mark.parametrize("version", VERSIONS)
def test_profiler_of_the_user_comes_first(tmp_path, version):
    done = alone(tmp_path, version, PROFILED, "--every", "3")
    assert done.output == "True\n"
    assert done.run.table(STEPS)["step"].to_list() == list(range(1, 30))
