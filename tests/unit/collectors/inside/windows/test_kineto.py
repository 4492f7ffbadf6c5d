"""Starting Kineto where it fails, or where a handler of the job's raises meanwhile."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside import kineto  # noqa: E402


def test_what_a_handler_raises_as_a_recording_starts_leaves_no_profiler_running(monkeypatch):
    start = kineto.start_profiler

    def interrupted(profiler):
        start(profiler)
        raise KeyboardInterrupt

    monkeypatch.setattr(kineto, "start_profiler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kineto.Recording({}, None)
    assert not torch.autograd._profiler_enabled()
    assert kineto._running == []


def test_what_a_handler_raises_before_a_recording_has_started_is_the_job_s_alone(monkeypatch):
    def interrupted(_profiler):
        raise KeyboardInterrupt

    monkeypatch.setattr(kineto, "start_profiler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kineto.Recording({}, None)
    assert kineto._running == []


def test_recording_that_cannot_start_leaves_the_profiler_of_the_job_running(monkeypatch):
    def occupied(_profiler):
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(kineto, "start_profiler", occupied)
    with torch.profiler.profile():
        with pytest.raises(RuntimeError, match="already enabled"):
            kineto.Recording({}, None)
        assert torch.autograd._profiler_enabled()
    assert kineto._running == []
