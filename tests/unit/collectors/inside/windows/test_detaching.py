"""Detaching CUPTI after windows: the real windows, on a model of how Kineto tears CUPTI down."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dpro.collectors.inside import captures, detaching, kineto, records, windows  # noqa: E402
from dpro.collectors.inside.budget import Budget  # noqa: E402
from dpro.collectors.inside.detaching import KEPT, TORN_DOWN, VARIABLE, Detaching  # noqa: E402
from dpro.collectors.inside.windows import Windows  # noqa: E402

PER_STEP, STEP_S = 3, 0.02  # kernels that a step launches, and how long it takes


class Kineto:
    """Kineto and CUPTI as far as tearing down goes, of August 2026; time passes where someone sleeps.

    The order is that of libkineto: `GenericActivityProfiler::configure` and the end of a session both reset
    the session, which is where `CuptiActivityApi::teardownContext` reads the variable. If that is 1 after
    CUPTI was enabled, a thread flushes, and the next call of CUDA finalizes CUPTI, whatever is recorded then.

    Attributes:
        flush_s: how long the thread that tears down takes to flush.
        sessions: launched and recorded kernels of each session.
    """

    def __init__(self):
        self.value, self.now_s, self.flush_s = KEPT, 0.0, 0.0
        self.is_enabled = self.is_used = self.is_subscribed = False
        self.flushed_at_s: float | None = None  # of the thread that tears down, where there is one
        self.finalized = 0
        self.session: list[int] | None = None
        self.sessions: list[list[int]] = []

    def begin(self):
        assert self.session is None, "Kineto has one session at a time"
        self._reset()
        self.is_enabled = self.is_used = self.is_subscribed = True
        self.session = [0, 0]
        self.sessions.append(self.session)

    def end(self):
        self.session, self.is_enabled = None, False
        self._reset()

    def _reset(self):
        if self.is_used and self.flushed_at_s is None and self.value == TORN_DOWN:
            self.flushed_at_s = self.now_s + self.flush_s

    def call(self, kernels=0):
        """A call of CUDA, at whose exit CUPTI may be finalized."""
        if self.session is not None:
            self.session[0] += kernels
            self.session[1] += kernels * self.is_enabled
        if self.flushed_at_s is not None and self.now_s >= self.flushed_at_s:
            self.is_enabled = self.is_used = False
            self.is_subscribed = self.value != TORN_DOWN  # the thread subscribes again unless that is lazy
            self.flushed_at_s = None
            self.finalized += 1

    def sleep(self, seconds):
        self.now_s += seconds

    def threads(self):
        return {"main"} | ({"teardown"} if self.flushed_at_s is not None else set())

    @property
    def lost(self):
        return [session for session in self.sessions if session[0] != session[1]]


class Profiler:
    """One of the user's."""


class Job:
    """A job on a GPU that waits for its host, recorded with `--detach`; the recorder's core is done here."""

    def __init__(self, model, folder, **config):
        self.model, self.step, self.written = model, 0, []
        config = {
            "every": None, "window_steps": 2, "skip": 20, "budget": 0.01, "detach": True
        } | config  # fmt: skip
        self.core = SimpleNamespace(
            config=config, folder=folder, last_step_s=0.0, own_ns=0, records=self, launch=folder, store=None,
            on_window=lambda _: None, answer=lambda *_: None, listen=lambda *_: None,
            sampling=SimpleNamespace(ahead=0),
        )  # fmt: skip
        self.windows = Windows(self.core)
        self.profiler = Profiler()
        self.profiles = False

    def write(self, kind, *values):
        self.written.append((kind, *values))

    def of(self, kind):
        return [each for each in self.written if each[0] == kind]

    def steps(self, count=1):
        for _ in range(count):
            self.step += 1
            self.model.sleep(STEP_S)
            self.model.call(PER_STEP)
            self.windows.on_step(self.step)

    def begin_profile(self):
        if not self.profiles:
            self.windows.on_profiler(self.profiler)
            self.windows.on_profiler_start(self.profiler)
            self.model.begin()
            self.profiles = True

    def end_profile(self):
        if self.profiles:
            self.windows.on_profiler_end(self.profiler)
            self.model.end()
            self.profiles = False

    def exit(self):
        self.end_profile()
        self.windows.on_end()
        kineto.finish_teardown()


def model_of_kineto(patch):
    """Put a model in the place of Kineto, and return it."""
    model = Kineto()

    class Recording:
        def __init__(self, *_):
            self.gpu = True
            model.begin()

        def stop(self, _path, around=None):
            with around or nullcontext():
                model.end()

    stream = SimpleNamespace(query=lambda: model.call())
    event = SimpleNamespace(record=lambda _: None, query=lambda: True)
    patch.setattr(windows, "Recording", Recording)
    patch.setattr(windows, "is_profiling", lambda: False)
    patch.setattr(windows, "devices", lambda: [0])
    patch.setattr(captures, "captured", captures.RunningCaptures())
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "Event", lambda: event)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(detaching, "is_supported", lambda: True)
    patch.setattr(detaching, "threads_here", lambda: model.threads())
    patch.setattr(detaching, "value", lambda: model.value)
    patch.setattr(detaching, "set_value", lambda value: setattr(model, "value", value))
    patch.setattr(detaching, "sleep", lambda seconds: model.sleep(seconds))
    patch.setattr(detaching, "monotonic", lambda: model.now_s)
    patch.setattr(kineto, "sleep", lambda seconds: model.sleep(seconds))
    patch.setenv("KINETO_LOG_LEVEL", "99")
    return model


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Make a job on a model."""
    model = model_of_kineto(monkeypatch)
    return lambda **config: Job(model, tmp_path, **config)


def test_model_loses_kernels_of_a_session_that_begins_with_1_after_one_that_was_kept():
    kineto_model = Kineto()
    kineto_model.begin()
    kineto_model.end()
    kineto_model.value = TORN_DOWN
    kineto_model.begin()
    kineto_model.call(5)
    kineto_model.call(5)
    assert kineto_model.lost == [[10, 5]]


def test_model_subscribes_again_where_the_variable_is_0_before_the_thread_is_gone():
    kineto_model = Kineto()
    kineto_model.value = TORN_DOWN
    kineto_model.begin()
    kineto_model.end()
    kineto_model.value = KEPT
    kineto_model.call()
    assert kineto_model.is_subscribed


ACTIONS = {
    "step": Job.steps,
    "steps": lambda job: job.steps(7),
    "windows": lambda job: job.steps(30),
    "profile": Job.begin_profile,
    "end of profile": Job.end_profile,
    "fork": lambda job: job.windows.before_fork(),
    "host ahead": lambda job: setattr(job.core.sampling, "ahead", 3),
    "host waited for": lambda job: setattr(job.core.sampling, "ahead", 0),
    "flush at once": lambda job: setattr(job.model, "flush_s", 0.0),
    "flush in time": lambda job: setattr(job.model, "flush_s", 0.03),
    "flush too late": lambda job: setattr(job.model, "flush_s", 0.15),
}


@given(st.lists(st.sampled_from(sorted(ACTIONS)), min_size=5, max_size=60), st.sampled_from([3, 5, 12]))
def test_no_kernel_is_lost_whatever_windows_profilers_forks_and_teardowns_meet(
    tmp_path_factory, actions, every
):
    with pytest.MonkeyPatch.context() as patch:
        model = model_of_kineto(patch)
        job = Job(model, tmp_path_factory.getbasetemp(), every=every, skip=2)
        for action in actions:
            was_stuck, opened = job.windows.is_stuck, len(job.of(records.OPENED))
            ACTIONS[action](job)
            assert model.value == KEPT or job.windows.is_stuck
            assert model.value == TORN_DOWN or model.flushed_at_s is None
            if was_stuck:
                assert len(job.of(records.OPENED)) == opened  # none opens any more
            else:
                assert model.lost == []
            if not job.windows.is_stuck:
                assert model.flushed_at_s is None
        job.exit()
        assert model.flushed_at_s is None  # else a destructor would wait for it forever


def test_each_window_at_a_fixed_distance_is_followed_by_a_teardown(job):
    made = job(every=5, skip=4)
    made.steps(42)
    assert len(made.of(records.OPENED)) == made.model.finalized >= 6
    assert len(made.of(records.DETACHED)) == made.model.finalized
    assert made.model.lost == []
    assert not made.model.is_subscribed
    assert made.model.value == KEPT


def test_automatic_windows_detach_from_when_steps_are_slower_after_one(job, monkeypatch):
    made = job(skip=4)
    made.steps(20)
    assert len(made.of(records.OPENED)) == 1
    assert made.model.finalized == 0
    monkeypatch.setattr(Budget, "is_slower", True)
    made.steps(20)
    assert made.model.finalized == 1
    assert len(made.of(records.OPENED)) == 1
    made.windows._plan.announce(windows.Window(1, 45, 2))
    made.steps(20)
    assert len(made.of(records.OPENED)) == made.model.finalized == 2


@pytest.mark.parametrize("reason", ["host ahead", "graph captured", "versions", "variable"])
def test_nothing_is_detached_where_that_is_not_known_to_be_safe(job, monkeypatch, reason):
    made = job(every=5, skip=4)
    if reason == "host ahead":
        made.core.sampling.ahead = 1
    elif reason == "graph captured":
        captures.begin_capture(graph := torch.nn.Module())
        captures.end_capture(graph)
    elif reason == "versions":
        monkeypatch.setattr(detaching, "is_supported", lambda: False)
    else:
        made.model.value = b""
    made.steps(40)
    assert len(made.of(records.OPENED)) >= 6
    assert made.model.finalized == 0
    assert not made.of(records.DETACHED)


def test_no_window_follows_a_teardown_that_does_not_end_in_time_and_the_exit_finishes_it(job):
    made = job(every=5, skip=4)
    made.model.flush_s = 0.15
    made.steps(10)
    [(_, _, took_ns, is_late)] = made.of(records.DETACHED)
    assert is_late
    assert took_ns >= 0
    made.steps(10)
    assert len(made.of(records.OPENED)) == 1
    assert {reason for *_, reason in made.of(records.MISSED)} == {records.MISSED_STUCK}
    assert made.model.value == TORN_DOWN
    made.exit()
    assert made.model.finalized == 1


def test_without_the_option_nothing_of_it_is_made(job, monkeypatch):
    monkeypatch.setattr(windows, "Detaching", None)
    monkeypatch.setattr(detaching, "set_value", None)
    made = job(every=5, skip=4, detach=False)
    made.steps(40)
    assert len(made.of(records.OPENED)) >= 6
    assert made.model.finalized == 0


# Without the model.


def test_variable_is_changed_in_place_and_only_there(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert detaching.value() == b""
    monkeypatch.setenv(VARIABLE, "0")
    detaching.set_value(TORN_DOWN)
    assert detaching.value() == TORN_DOWN
    assert os.environ[VARIABLE] == "0"  # programs that the job starts get this
    detaching.set_value(KEPT)
    assert detaching.value() == KEPT


@pytest.mark.parametrize(
    ("release", "cuda", "supported"),
    [
        ("2.11.0+cu130", "13.0", True),
        ("2.13.0+cpu", None, False),
        ("2.10.1", "12.8", False),
        ("2.11.0a0", "12.4", False),
        ("2.12.0", "12.10", True),
    ],
)
def test_versions_below_which_teardowns_crash_are_left_alone(monkeypatch, release, cuda, supported):
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert detaching.is_supported() is supported


def test_threads_that_a_session_leaves_behind_are_waited_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    called, detaches = threading.Event(), Detaching()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=called.set))
    monkeypatch.setattr(detaching, "LONGEST_S", 60)
    thread = threading.Thread(target=called.wait, daemon=True)
    with detaches.at_exit():
        assert detaching.value() == TORN_DOWN
        thread.start()
    assert called.is_set()
    assert detaching.value() == KEPT
    assert not detaches.is_stuck
    thread.join()


def test_a_profiler_of_the_job_begins_after_a_teardown_of_another_thread(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(detaching, "LONGEST_S", 60)
    detaches, order = Detaching(), []

    def begin_profile():
        detaches.let_finish()
        order.append("profile")

    thread = threading.Thread(target=begin_profile, daemon=True)
    with detaches.at_exit():
        detaches_before = detaching.threads_here()
        thread.start()
        monkeypatch.setattr(detaching, "threads_here", lambda: detaches_before)
        order.append("teardown")
    thread.join()
    assert order == ["teardown", "profile"]


def test_a_forked_child_has_the_variable_as_it_was(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    detaches = Detaching()
    with detaches.at_exit():
        detaches.on_fork()
        assert detaching.value() == KEPT
