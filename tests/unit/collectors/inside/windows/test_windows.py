"""When windows open and close, on the CPU and on a GPU that is behind its host; Kineto is replaced."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dpro.cli.attach import first_window  # noqa: E402
from dpro.collectors.attach import Answers  # noqa: E402
from dpro.collectors.inside import (  # noqa: E402
    captures,
    records,
    windows,
)
from dpro.collectors.inside.budget import GUESSED_NS  # noqa: E402
from dpro.collectors.inside.kineto import TEARDOWN_CALLS, finish_teardown  # noqa: E402
from dpro.collectors.inside.windows import PATIENCE, Windows  # noqa: E402
from dpro.errors import InputError  # noqa: E402

CONFIG = {"every": None, "window_steps": 2, "skip": 5, "budget": 0.01}


class Gpu:
    """A GPU that has done all but the latest `lag` of the steps handed to it."""

    def __init__(self):
        self.lag, self.step, self.asked, self.fails = 0, 0, 0, False

    def event(self):
        return SimpleNamespace(record=self.record, query=self.query)

    def record(self, _stream):
        self.at = self.step

    def query(self):
        self.asked += 1
        if self.fails:
            raise RuntimeError("device-side assert")
        return self.step - self.lag >= self.at


@pytest.fixture
def gpu(monkeypatch):
    """A GPU; without this fixture the job is one of the CPU."""
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(windows, "devices", lambda: [0])
    return made


class Job:
    """A process that makes steps; the recorder's core is done here."""

    def __init__(self, folder, gpu=None, **config):
        self.gpu, self.step, self.log, self.written, self.answers = gpu, 0, [], [], []
        core = SimpleNamespace(
            config=CONFIG | config, folder=folder, last_step_s=time.monotonic(), own_ns=0, records=self,
            on_window=lambda name: self.log.append(("saved", self.step)),
            answer=lambda request, facts: self.answers.append(facts["why_not"]),
            launch=folder, store=None, listen=lambda *_: None,
        )  # fmt: skip
        self.core = core
        self.windows = Windows(core)

    def write(self, kind, *values):
        self.written.append((kind, *values))

    def steps(self, count):
        for _ in range(count):
            self.step += 1
            if self.gpu is not None:
                self.gpu.step = self.step
            self.windows.on_step(self.step)

    def of(self, kind):
        return [each for each in self.written if each[0] == kind]


@pytest.fixture
def kineto(monkeypatch):
    """Kineto, which writes down between which steps it runs."""
    spans = []

    class Recording:
        job = None

        def __init__(self, _options, _trace):
            self.gpu = torch.cuda.is_initialized()
            spans.append([self.job.step, None])

        def stop(self, _path, _around=None):
            spans[-1][1] = self.job.step

    monkeypatch.setattr(windows, "Recording", Recording)
    monkeypatch.setattr(windows, "is_profiling", lambda: False)
    monkeypatch.setattr(captures, "captured", captures.RunningCaptures())
    spans_of = SimpleNamespace(spans=spans, job=lambda job: setattr(Recording, "job", job) or job)
    return spans_of


def test_window_of_a_cpu_is_recorded_during_its_steps(tmp_path, kineto):
    job = kineto.job(Job(tmp_path))
    job.steps(20)
    assert kineto.spans == [[5, 7]]
    assert not job.of(records.CUT)
    assert len(job.of(records.WINDOW)) == 1


@pytest.mark.parametrize(("lag", "closed"), [(0, 7), (1, 8), (4, 11)])
def test_window_of_a_gpu_begins_a_step_early_and_ends_when_the_gpu_has(tmp_path, kineto, gpu, lag, closed):
    gpu.lag = lag
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(30)
    assert kineto.spans == [[4, closed]]
    [(_, number, start_ns, end_ns, seen)] = job.of(records.CUT)
    assert (number, seen) == (0, 1)
    [window] = job.of(records.WINDOW)
    assert window[1:4] == (number, start_ns, end_ns)
    assert window[4] >= end_ns


def test_gpu_that_does_not_get_there_is_not_waited_for_longer_than_some_steps(tmp_path, kineto, gpu):
    gpu.lag = 1000
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(40)
    assert kineto.spans == [[4, 7 + PATIENCE]]
    assert job.of(records.CUT)[0][4] == 0


def test_gpu_that_has_failed_is_asked_once(tmp_path, kineto, gpu):
    gpu.fails = True
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(40)
    assert kineto.spans == [[4, 7]]
    assert gpu.asked == 1


@pytest.mark.parametrize(
    ("every", "spans"), [(2, [[4, 7], [7, 9], [9, 11]]), (3, [[4, 7], [7, 10], [10, 13]])]
)
def test_windows_that_follow_at_once_end_before_the_gpu_has(tmp_path, kineto, gpu, every, spans):
    gpu.lag = 3
    job = kineto.job(Job(tmp_path, gpu, every=every))
    job.steps(14)
    assert kineto.spans[:3] == spans
    assert {cut[4] for cut in job.of(records.CUT)} == {0}
    assert not job.of(records.MISSED)


def test_first_window_right_after_the_first_known_step_begins_with_it(tmp_path, kineto, gpu):
    job = kineto.job(Job(tmp_path, gpu, skip=2))
    job.step = 1  # what a step is shows in the second
    job.steps(10)
    assert kineto.spans == [[2, 4]]


def test_end_of_the_process_waits_a_moment_for_the_gpu(tmp_path, kineto, gpu, monkeypatch):
    monkeypatch.setattr(windows, "FINISH_S", 0.05)
    gpu.lag = 3
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(8)
    asked = gpu.asked
    job.windows.on_end()
    assert kineto.spans == [[4, 8]]
    assert gpu.asked - asked > 2
    assert job.of(records.CUT)[0][4] == 0


def test_window_that_has_not_begun_when_the_job_ends_is_not_kept(tmp_path, kineto, gpu):
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(4)
    job.windows.on_end()
    assert kineto.spans == [[4, 4]]
    assert not job.of(records.WINDOW)
    assert job.of(records.DROPPED)


def test_window_is_saved_where_the_loop_stops_making_steps(tmp_path, kineto, gpu):
    gpu.lag = 1
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(7)
    job.windows.on_work()
    assert job.windows.is_open
    job.core.last_step_s -= 10
    job.windows.on_work()
    assert job.windows.is_open
    gpu.step += 1
    job.windows.on_work()
    assert not job.windows.is_open
    assert job.of(records.WINDOW)


def test_nothing_is_opened_or_closed_while_a_graph_is_captured(tmp_path, kineto, gpu):
    graph = type("Graph", (), {})()
    job = kineto.job(Job(tmp_path, gpu, every=10))
    job.steps(3)
    captures.captured.graphs.add(graph)
    job.steps(1)  # without the step before it
    captures.captured.graphs.discard(graph)
    job.steps(2)
    captures.captured.graphs.add(graph)
    asked = gpu.asked
    job.steps(2)  # it would end
    assert kineto.spans == [[5, None]]
    captures.captured.graphs.discard(graph)
    job.steps(5)
    captures.captured.graphs.add(graph)
    job.steps(10)  # the next would begin
    assert kineto.spans == [[5, 9]]
    assert gpu.asked > asked
    assert len(job.of(records.MISSED)) == 1


@pytest.mark.parametrize(("steps", "kept"), [(4, False), (5, False), (6, True), (7, True)])
def test_capture_ends_the_window_first(tmp_path, kineto, gpu, steps, kept):
    gpu.lag = 1
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(steps)
    job.windows.on_capture()
    assert kineto.spans == [[4, steps]]
    assert bool(job.of(records.WINDOW)) == kept


def test_trouble_at_a_step_stops_kineto(tmp_path, kineto, gpu, monkeypatch):
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(6)
    monkeypatch.setattr(windows.OpenWindow, "end_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.steps(1)
    assert kineto.spans == [[4, 7]]


def test_request_for_a_window_of_a_job_without_any_is_answered_at_once():
    answers, listening = [], {}
    recorder = SimpleNamespace(
        config={"windows": False}, listen=listening.__setitem__,
        answer=lambda request, facts: answers.append((request, facts)),
    )  # fmt: skip
    windows.install(recorder)
    assert set(listening) == {"request"}
    for kind in ("window", "off", "stacks"):
        listening["request"]({"id": kind, "kind": kind})
    assert [request for request, _ in answers] == ["window", "off"]
    with pytest.raises(InputError, match="--no-windows"):
        first_window(Answers({0: answers[0][1]}, []))


class Profiler:
    """A profiler of the user."""

    def __init__(self):
        self.prepared = 0

    def _prepare_trace(self):
        self.prepared += 1


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_users_warm_up_keeps_windows_off_at_every_offset(tmp_path, kineto, gpu, warmup):
    for offset in range(12):
        kineto.spans.clear()
        job, user = kineto.job(Job(tmp_path, gpu, every=7)), Profiler()
        job.steps(offset)
        job.windows.on_profiler(user)
        job.steps(warmup)
        assert not job.windows.is_open
        job.windows.on_profiler_start(user)
        job.steps(2)
        job.windows.on_profiler_end(user)
        before = len(kineto.spans)
        job.steps(14)
        assert len(kineto.spans) > before, offset
        assert not user.prepared


def test_profiler_that_is_deleted_while_it_warms_up_keeps_no_windows_off(tmp_path, kineto):
    job, user = kineto.job(Job(tmp_path)), Profiler()
    job.windows.on_profiler(user)
    job.steps(3)
    del user
    job.steps(10)
    assert kineto.spans == [[5, 7]]


def test_profiler_that_was_left_prepared_is_prepared_again_should_it_start(tmp_path, kineto):
    every = windows.FORGOTTEN + 20
    job, user = kineto.job(Job(tmp_path, every=every)), Profiler()
    job.windows.on_profiler(user)
    job.steps(windows.FORGOTTEN)
    assert not kineto.spans
    job.steps(26)
    assert job.windows.is_open
    job.windows.on_profiler_start(user)
    assert not job.windows.is_open
    assert user.prepared == 1
    assert job.of(records.DROPPED)


def test_steps_recorded_beside_a_window_count_as_its_cost(tmp_path, kineto, gpu):
    gpu.lag = 4
    job = kineto.job(Job(tmp_path, gpu))
    job.steps(30)
    assert kineto.spans == [[4, 11]]
    assert len(job.windows._budget._inside) == 11 - 4 + 1  # and the step after it


class Clock:
    """What time it is in a job whose steps are slower once it has recorded a window."""

    def __init__(self, monkeypatch):
        self.now_ns = 0
        named = {"monotonic_ns": lambda: self.now_ns, "monotonic": lambda: self.now_ns / 1e9}
        monkeypatch.setattr(windows, "time", SimpleNamespace(**named, time_ns=lambda: self.now_ns))

    def steps(self, job, count, step_ns, slower_ns=0):
        """Let the job make steps; rank 0 decides on windows after each tenth."""
        for _ in range(count):
            self.now_ns += step_ns + slower_ns * bool(job.of(records.WINDOW))
            job.steps(1)
            if job.step % 10 == 0:
                job.windows.on_second()


def test_windows_go_on_at_the_least_distance_where_they_cost_nothing(tmp_path, kineto, monkeypatch):
    job = kineto.job(Job(tmp_path, skip=60))
    Clock(monkeypatch).steps(job, 1000, 10_000_000)
    begins = [begin for begin, _ in kineto.spans]
    assert begins == [60, 262, 462, 662, 862]  # 200 steps later, where asked at 260 for two steps ahead
    assert not job.of(records.STOPPED)


def test_windows_end_where_steps_stay_slower_and_still_come_on_request(tmp_path, kineto, monkeypatch):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, skip=60))
    clock.steps(job, 3000, 10_000_000, slower_ns=2_700_000)
    assert kineto.spans == [[60, 62]]
    [(_, step, spent_ns, elapsed_ns, millionths)] = job.of(records.STOPPED)
    assert (step, millionths) == (263, 270_000)
    assert elapsed_ns == 61 * 10_000_000 + 201 * 12_700_000
    assert spent_ns == 200 * 2_700_000 + (
        2 * 10_000_000 + 12_700_000 - 3 * 10_540_000
    )  # and the window's own
    job.windows.on_request({"id": "me", "kind": "window", "steps": 3})
    clock.steps(job, 50, 12_700_000)
    assert [end - begin for begin, end in kineto.spans] == [2, 3]
    assert not job.of(records.RESUMED)


def test_job_on_request_has_the_windows_it_is_asked_for_and_its_own_once_they_are_switched_on(
    tmp_path, kineto, monkeypatch
):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, on_request=True))
    clock.steps(job, 1000, 10_000_000)
    assert not kineto.spans
    job.windows.on_request({"id": "me", "kind": "window", "steps": 3})
    clock.steps(job, 1000, 10_000_000)
    assert [end - begin for begin, end in kineto.spans] == [3]
    assert job.answers == [""]
    job.core.answer = lambda _request, facts: job.answers.append(facts["from_step"])
    job.windows.on_request({"id": "me", "kind": "on"})
    clock.steps(job, 500, 10_000_000)
    [_, own, later, *_] = kineto.spans
    assert own[0] == job.answers[1]
    assert later[0] - own[0] >= 200


UNASKED = {"id": "watcher", "kind": "window", "within_budget": True}


def refusals(job):
    """What requests are answered from now on."""
    replies = []
    job.core.answer = lambda _request, facts: replies.append(facts)
    return replies


@pytest.mark.parametrize("on_request", [False, True])
def test_window_that_no_person_asked_for_is_put_off_until_it_is_paid(
    tmp_path, kineto, monkeypatch, on_request
):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, on_request=on_request, skip=10**6))
    replies = refusals(job)
    clock.steps(job, 100, 10_000_000)
    job.windows.on_request(UNASKED)
    clock.steps(job, 10, 10_000_000)
    [put_off] = replies
    assert put_off["why_not"] == windows.UNPAID
    assert put_off["paid_in_s"] == pytest.approx(GUESSED_NS / 0.01 / 1e9 - 1.11)
    clock.steps(job, 2500, 10_000_000)
    assert not kineto.spans
    job.windows.on_request(UNASKED)
    clock.steps(job, 30, 10_000_000)
    assert [end - begin for begin, end in kineto.spans] == [2]
    assert replies[1:] == [{"window": 0, "steps": [*kineto.spans[0]], "why_not": ""}]


def test_window_that_no_person_asked_for_is_refused_after_off_and_where_windows_have_stopped(
    tmp_path, kineto, monkeypatch
):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, skip=60))
    replies = refusals(job)
    clock.steps(job, 3000, 10_000_000, slower_ns=2_700_000)
    job.windows.on_request(UNASKED)
    job.windows.on_request({"id": "me", "kind": "off"})
    clock.steps(job, 50, 12_700_000)
    job.windows.on_request(UNASKED)
    clock.steps(job, 50, 12_700_000)
    assert [facts.get("why_not") for facts in replies] == [windows.STOPPED, None, windows.HELD]
    job.windows.on_request({"id": "me", "kind": "window", "steps": 3})
    clock.steps(job, 50, 12_700_000)
    assert [end - begin for begin, end in kineto.spans] == [2, 3]


def test_forked_child_of_a_job_on_request_has_no_window_of_its_own(tmp_path, kineto, monkeypatch):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, on_request=True))
    job.windows.on_fork()
    clock.steps(job, 300, 10_000_000)
    assert not kineto.spans


def test_what_other_ranks_measure_is_not_written(tmp_path, kineto, monkeypatch):
    monkeypatch.setattr(windows, "identity", lambda: (1, 2))
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, skip=60))
    job.windows.on_second = lambda: None
    clock.steps(job, 1000, 10_000_000, slower_ns=2_700_000)
    assert kineto.spans == [[60, 62]]
    assert not job.of(records.STOPPED)


def test_windows_at_a_fixed_distance_are_taken_whatever_they_cost(tmp_path, kineto, monkeypatch):
    clock, job = Clock(monkeypatch), kineto.job(Job(tmp_path, skip=60, every=300))
    clock.steps(job, 1000, 10_000_000, slower_ns=2_700_000)
    assert [begin for begin, _ in kineto.spans] == [60, 360, 660, 960]
    assert not job.of(records.STOPPED)


@pytest.mark.parametrize(
    ("teardown", "on_gpu", "fails", "asked"),
    [
        ("1", True, False, TEARDOWN_CALLS),
        ("1", True, True, 1),
        ("0", True, False, 0),
        ("1", False, False, 0),
    ],
)
def test_the_exit_calls_cuda_where_kineto_has_cupti_to_tear_down_within_a_call(
    monkeypatch, teardown, on_gpu, fails, asked
):
    gpu = Gpu()
    gpu.at, gpu.fails = 0, fails
    monkeypatch.setenv("TEARDOWN_CUPTI", teardown)
    monkeypatch.setattr("dpro.collectors.inside.kineto.TEARDOWN_S", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.event)
    finish_teardown()
    assert gpu.asked == asked
