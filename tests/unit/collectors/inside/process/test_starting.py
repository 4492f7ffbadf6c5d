"""How far a process has come on its way to the first step."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside.process import starting as probe
from dpro.collectors.inside.process.start_parts import StartParts
from dpro.collectors.inside.process.starting import Starting, process_start_ns, scheduled_ns


@pytest.fixture
def recorder(tmp_path):
    return SimpleNamespace(folder=tmp_path, joining=None, on_joining=lambda: None)


def started(recorder):
    return Starting(recorder, StartParts(recorder))


def moments(recorder):
    return json.loads((recorder.folder / "started.json").read_text())


def test_kernel_started_this_process_before_now_and_after_the_machine():
    started_ns = process_start_ns()
    uptime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert time.time_ns() - uptime_ns - 10**8 < started_ns < time.time_ns()


def test_start_that_cannot_be_read_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "start_ticks", lambda _: -1)
    assert process_start_ns() == -1


def test_scheduler_says_when_it_started_the_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    assert scheduled_ns() == -1
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1700000000")
    assert scheduled_ns() == 1_700_000_000 * 10**9


def test_moments_come_in_order_and_the_first_of_each_counts(recorder):
    starting = started(recorder)
    starting.on_group_begin()
    starting.on_work()  # of the process group itself: no loop asks for anything yet
    assert moments(recorder)["work_ns"] == -1
    starting.on_group()
    starting.on_work()
    first = moments(recorder)
    starting.on_work()
    starting.on_group()
    assert moments(recorder) == first
    order = ["process_ns", "imported_ns", "group_begin_ns", "group_ns", "work_ns"]
    times = [first[name] for name in order]
    assert times == sorted(times)
    assert times[0] > 0


def test_job_without_process_group_has_none_and_works(recorder):
    starting = started(recorder)
    starting.on_work()
    assert moments(recorder)["group_ns"] == -1 < moments(recorder)["work_ns"]


def test_nothing_is_written_before_the_process_records(tmp_path, recorder):
    recorder.folder = None
    started(recorder).on_work()
    assert os.listdir(tmp_path) == []


def test_rank_that_never_gets_its_process_group_leaves_that_it_asked(tmp_path):
    recorder = SimpleNamespace(folder=None, joining=None)
    recorder.on_joining = lambda: setattr(recorder, "joining", tmp_path)
    started(recorder).on_group_begin()
    found = json.loads((tmp_path / "started.json").read_text())
    assert found["group_ns"] == -1 < found["group_begin_ns"]
