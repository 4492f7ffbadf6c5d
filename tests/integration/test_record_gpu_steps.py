"""Steps of a real recorded job on a simulated device: host and device have separate clocks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dpro.cli import cli
from dpro.schema import STEPS
from tests.jobs import record, script

pytest.importorskip("torch")

MS = 1_000_000
STEPS_RUN, EVERY = 60, 10
# Work is done in order and takes 50 ms; to enqueue it takes the host 10 ms; every tenth step waits.
JOB = f"""
from contextlib import nullcontext
from types import SimpleNamespace
now = done = 0

class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing
    def record(self, stream):
        assert stream.stream_id == 7
        self.at = max(now, done)
    def query(self):
        return self.at <= now
    def elapsed_time(self, later):
        assert self.query() and later.query()
        return (later.at - self.at) / {MS}

def never():
    raise AssertionError("the recorder waits for the device")

cuda = torch.cuda
cuda.is_initialized = lambda: True
cuda.current_device = lambda: 0
cuda.device = lambda index: nullcontext()
cuda.memory_allocated = lambda index=None: 1 << 20
cuda.is_current_stream_capturing = lambda: False
cuda.get_device_properties = lambda index: SimpleNamespace(name="Model of a GPU", uuid="GPU-model")
cuda.current_stream = lambda index=None: SimpleNamespace(stream_id=7)
cuda.synchronize = lambda *_: never()
cuda.Event = Event

for step in range(1, {STEPS_RUN + 1}):
    now += 10 * {MS}
    done = max(now, done) + 50 * {MS}
    if step % {EVERY} == 0:
        now = max(now, done)
    train_step()
now = max(now, done)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    run, done = record(folder, script(folder, JOB), "--skip", "100000", "--telemetry-period", "0")
    return SimpleNamespace(run=run, done=done)


def test_times_of_the_device_are_in_the_table_of_steps(job):
    assert (job.done.returncode, job.done.stderr) == (0, b"")
    assert not job.run.manifest.warnings
    steps = job.run.table(STEPS)
    assert steps["step"].to_list() == list(range(1, STEPS_RUN))
    known = steps.filter(steps["gpu_step_ns"] > 0)
    assert known.height >= STEPS_RUN - 4  # but those before it was known what ends steps
    waited = known["step"] % EVERY == 0  # before these the device stood still until work was enqueued
    assert set(known.filter(waited)["gpu_step_ns"]) == {60 * MS}
    assert set(known.filter(~waited)["gpu_step_ns"]) == {50 * MS}


def test_info_says_how_long_steps_take_on_the_device(job):
    words, document = (
        CliRunner().invoke(cli, ["info", str(job.run.path), *options], catch_exceptions=False).stdout
        for options in ([], ["--json"])
    )
    assert "typical step 50 ms" in words
    assert "timed by the device" in " ".join(words.split())
    step_time = json.loads(document)["step_time"]
    assert (step_time["typical_ms"], step_time["clock"]) == (50, "device")
