"""Profilers of the job, as frameworks use them, during deep windows: their recordings are complete."""

import importlib.util

import polars as pl
import pytest

from dpro.collectors.convert.process import OCCUPIED
from dpro.schema import STEPS
from tests.jobs import complete, record, script

pytest.importorskip("torch")

# As Lightning does: it stops any running profiler first, and enters ranges that it never leaves.
REPLICA = """
from torch.profiler import profile, record_function, schedule, ProfilerActivity

def fit(steps, warmup):
    if torch.autograd._profiler_enabled():
        torch.autograd._disable_profiler()
    seen = []
    profiler = profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=warmup, active=3),
        on_trace_ready=lambda each: seen.append(sum(e.name == "aten::addmm" for e in each.events())),
    ).__enter__()
    outer = record_function("[pl][profile]run_training_epoch")
    outer.__enter__()
    for _ in range(steps):
        with record_function("[pl][profile]run_training_batch"):
            train_step()
        profiler.step()
    print(seen)
    return profiler, outer

for _ in range(6): train_step()  # a window is open
kept = []
for warmup in (1, 2, 3):
    kept += fit(13, warmup)
    for _ in range(9): train_step()
kept[-2].__exit__(None, None, None)
for each in kept[1::2]:
    each.__exit__(None, None, None)
for _ in range(20): train_step()
print("end")
"""


@pytest.mark.slow
def test_profiler_that_ends_ours_and_leaves_ranges_open_does_no_harm(tmp_path):
    run, done = record(tmp_path, script(tmp_path, REPLICA), "--every", "7")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"[3, 3]\n[3]\n[3]\nend\n"
    windows = run.table(STEPS).filter(pl.col("window") >= 0).group_by("window").len()
    assert set(windows["len"]) == {2}
    assert windows["window"].max() == 12


# As if a profiler with a `CuspyConfig` had started after the first window.
CUSPY = """
import sys, types
for _ in range(9): train_step()
sys.modules |= {name: types.ModuleType(name) for name in ("torch.profiler._cuspy", "cupti.cupti")}
for _ in range(20): train_step()
print("end")
"""


def test_no_window_takes_cupti_from_cuspy_and_steps_are_recorded_all_the_same(tmp_path):
    run, done = record(tmp_path, script(tmp_path, CUSPY), "--every", "7")
    assert (done.returncode, done.stdout) == (0, b"end\n")
    steps = run.table(STEPS)
    assert steps["step"].n_unique() == 28  # the first call begins no step
    assert steps.filter(pl.col("window") >= 0)["step"].max() < 9
    assert run.manifest.skipped[OCCUPIED] >= 2


LIGHTNING = """
import lightning, torch
from lightning.pytorch.profilers import PyTorchProfiler

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
quiet = dict.fromkeys(quiet, False)

def fit(steps, profiler=None):
    data = torch.utils.data.DataLoader(torch.ones(steps, 4), batch_size=1)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=steps, profiler=profiler, **quiet)
    trainer.fit(Model(), data)

def ready(profiler):
    seen.append(sum(event.name == "aten::addmm" for event in profiler.events()))

fit(6)  # a window is open
for warmup in (1, 2, 3):
    seen = []
    cycle = torch.profiler.schedule(wait=2, warmup=warmup, active=3)
    fit(30, PyTorchProfiler(schedule=cycle, on_trace_ready=ready))
    print("seen", seen)
fit(40)
"""

TRANSFORMERS = """
import torch
from torch.profiler import profile, schedule, ProfilerActivity
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Profile(TrainerCallback):
    def __init__(self, profiler):
        self.profiler = profiler
    def on_step_end(self, *_, **__):
        self.profiler.step()

def ready(profiler):
    seen.append(sum(event.name.startswith("Optimizer.step#") for event in profiler.events()))

sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(96)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, max_steps=44, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True,
)
for warmup in (1, 2, 3):
    seen = []
    cycle = schedule(wait=8, warmup=warmup, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=cycle, on_trace_ready=ready) as profiler:
        model = GPT2LMHeadModel(GPT2Config(**sizes))
        Trainer(model, arguments, train_dataset=data, callbacks=[Profile(profiler)]).train()
    print("seen", seen)
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs

def ready(profiler):
    seen.append(sum(event.name == "aten::addmm" for event in profiler.events()))

for warmup in (1, 2, 3):
    seen = []
    kwargs = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 8, "warmup": warmup, "active": 2}, on_trace_ready=ready
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.profile() as profiler:
        for _ in range(44):
            train_step()
            profiler.step()
    print("seen", seen)
"""

OTHERS = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}


@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_profiler_of_a_framework_sees_its_steps_and_the_job_ends_well(tmp_path, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    command = script(tmp_path, OTHERS[framework])
    run, done = record(tmp_path, command, "--every", "7", HF_HUB_OFFLINE=1)
    assert done.returncode == 0, done.stderr.decode()
    plain = complete(command, tmp_path, HF_HUB_OFFLINE=1)
    seen, expected = (
        [line for line in each.stdout.decode().splitlines() if line.startswith("seen")]
        for each in (done, plain)
    )
    assert seen == expected
    assert len(seen) == 3
    windows = run.table(STEPS).filter(pl.col("window") >= 0).group_by("window").len()
    assert set(windows["len"]) <= {1, 2}
    assert windows.height >= 1
    assert run.manifest.exit_status == 0
