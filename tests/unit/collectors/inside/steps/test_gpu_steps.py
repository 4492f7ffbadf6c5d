"""Steps as their device times them, on a model of a launch queue: the host runs ahead of the device."""

from __future__ import annotations

import statistics
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dpro.collectors.convert.recorded import RecordedProcess  # noqa: E402
from dpro.collectors.convert.tables import frames_of  # noqa: E402
from dpro.collectors.inside import captures, records  # noqa: E402
from dpro.collectors.inside.records import Record  # noqa: E402
from dpro.collectors.inside.sampling import FARTHEST, Sampling  # noqa: E402
from dpro.collectors.inside.steps import gpu_steps  # noqa: E402
from dpro.collectors.inside.steps.gpu_steps import AGE, MAX_WAITING, PATIENCE, GpuSteps  # noqa: E402

MS = 1_000_000
FACTS = {
    "rank": 0, "local_rank": 0, "world_size": 1, "host": "h", "pid": 1, "gpu_uuid": "", "gpu_name": "G",
    "started_ns": 0,
}  # fmt: skip


class Device:
    """A device with one queue, and the host's clock: work is done in order, events happen when it is."""

    def __init__(self):
        self.now = 10**18
        self.done = 0  # when all that was enqueued is done
        self.stream = 7
        self.events = []
        self.asked = 0
        self.answers = True
        self.gone = False
        self.current = 0
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                device.events.append(self)

            def record(self, stream):
                device.check()
                assert stream.stream_id == device.stream
                self.at = max(device.done, device.now)

            def query(self):
                device.check()
                device.asked += 1
                return device.answers and self.at <= device.now

            def elapsed_time(self, later):
                assert self.query()
                assert later.query()
                return (later.at - self.at) / MS

        self.Event = Event

    def check(self):
        assert self.current == 3, "this claims memory of another device"
        if self.gone:
            raise RuntimeError("the device is gone")

    @contextmanager
    def device(self, index):
        self.current, before = index, self.current
        yield
        self.current = before

    def current_stream(self, index):
        assert index == 3
        return SimpleNamespace(stream_id=self.stream)

    def enqueue(self, host_ns, device_ns):
        self.now += host_ns
        self.done = max(self.done, self.now) + device_ns

    def synchronize(self):
        self.now = max(self.now, self.done)


class Job:
    """A job whose steps are recorded: the core's part is done here."""

    def __init__(self, device):
        self.device, self.written, self.step = device, [], 0
        own = SimpleNamespace(write=lambda *each: self.written.append(each))
        self.sampling = Sampling()
        where = SimpleNamespace(type="queued", index=3)
        self.probe = GpuSteps(SimpleNamespace(device=where, records=own, sampling=self.sampling))

    def end_step(self, ours_ns=0, sync=False, is_read=True):
        """Count a step; our own work after it may take long, and wait for the device."""
        end_ns = self.device.now
        self.step += 1
        if is_read:
            self.probe.on_step(self.step)
        self.device.now += ours_ns
        if sync:
            self.device.synchronize()
        if ours_ns:
            self.probe.on_resume(self.step)
        self.written.append((records.UPDATE, 0, self.step, end_ns, self.device.now))

    def backward(self, before_ns, backward_ns):
        """Enqueue a forward and a backward pass, each of which the host has enqueued after a tenth of it."""
        self.device.enqueue(before_ns // 10, before_ns)
        begun = self.device.now
        self.probe.on_pass(begun)
        self.device.enqueue(backward_ns // 10, backward_ns)
        self.probe.on_pass(self.device.now)
        self.written.append((records.PASS, begun, self.device.now))

    def steps(self):
        """Table `steps`, as the records are converted."""
        return self.tables()["steps"]

    def tables(self):
        """All tables, as the records are converted."""
        self.probe.on_end()
        recorded = [Record(*(*each[1:], 0, 0, 0, 0)[:4], each[0]) for each in self.written]
        return frames_of(RecordedProcess(folder=None, facts=FACTS), recorded, 0)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch, "queued", made, raising=False)
    monkeypatch.setattr("dpro.collectors.convert.tables.worker_row", lambda *_: {"rank": 0})
    monkeypatch.setattr(captures, "is_capturing_here", lambda: False)
    monkeypatch.setattr(gpu_steps, "time", SimpleNamespace(time_ns=lambda: made.now))
    return made


def run(device, num_steps, every=10, host_ns=10 * MS, device_ns=50 * MS):
    job = Job(device)
    for step in range(1, num_steps + 1):
        device.enqueue(host_ns, device_ns)
        if step % every == 0:
            device.synchronize()
        job.end_step()
    device.synchronize()
    return job


def test_steps_take_what_the_device_takes_and_not_what_enqueueing_does(device):
    steps = run(device, 100).steps()
    assert statistics.median(steps["duration_ns"]) == 10 * MS
    # After a synchronisation the device idles until the host has enqueued the next step.
    assert set(steps["gpu_step_ns"]) == {50 * MS, 60 * MS}
    assert (steps["gpu_step_ns"] == 60 * MS).sum() == 9
    deep = run(device, 100, every=1000).steps()
    assert set(deep["gpu_step_ns"]) == {50 * MS}
    assert statistics.median(deep["duration_ns"]) == 10 * MS


def test_pause_of_the_host_lasts_as_long_as_the_device_stands_idle(device):
    job = Job(device)
    for step in range(1, 21):
        device.enqueue((10 if step != 12 else 2000) * MS, 50 * MS)
        job.end_step()
    device.synchronize()
    times = job.steps()["gpu_step_ns"].to_list()  # of steps 1 to 19: the first has no beginning
    idle = 2000 - (11 * 50 - 10 * 10)  # what was enqueued before keeps the device busy for a while
    assert times == [50 * MS] * 10 + [(50 + idle) * MS] + [50 * MS] * 8


def test_steps_between_two_events_have_their_shares_of_the_time_between_them(device):
    job = Job(device)
    for step in range(1, 58):
        device.enqueue(0, (5 if step % 10 == 0 else 1) * MS)
        device.synchronize()
        job.end_step(is_read=step % 7 in (0, 1))
    times = job.steps()["gpu_step_ns"].to_list()  # of steps 1 to 56: the first has no beginning
    assert times == [(5 if step % 10 == 0 else 1) * MS for step in range(2, 58)]


def test_our_own_work_among_steps_without_events_is_in_none(device):
    job = Job(device)
    for step in range(1, 16):
        device.enqueue(0, MS)
        device.synchronize()
        job.end_step(ours_ns=3000 * MS if step == 4 else 0, is_read=step % 7 in (0, 1))
    times = job.steps()["gpu_step_ns"].to_list()
    assert times == [-1, -1, -1, *[MS] * 11]


def test_host_that_is_ahead_of_its_device_is_known_to_be(device):
    job = Job(device)
    for _ in range(10):
        device.enqueue(MS, 50 * MS)
        job.end_step()
    assert job.sampling.ahead
    device.synchronize()
    for _ in range(FARTHEST + AGE):
        device.enqueue(MS, MS)
        device.synchronize()
        job.end_step()
    assert not job.sampling.ahead


def test_events_are_few_and_used_again(device):
    run(device, 2000)
    assert len(device.events) <= 10 + AGE + 1


def test_event_of_the_two_latest_steps_is_not_asked_for(device):
    job = Job(device)
    for _ in range(AGE + 1):
        device.enqueue(10, 5)
        job.end_step()
    assert device.asked == 0
    device.enqueue(10, 5)
    job.end_step()
    assert device.asked > 0


def test_long_work_of_ours_between_two_steps_is_in_neither(device):
    job = Job(device)
    for step in range(1, 31):
        device.enqueue(10 * MS, 50 * MS)
        job.end_step(*((3000 * MS, True) if step == 15 else ()))
    device.synchronize()
    times = job.steps()["gpu_step_ns"]
    assert times[14] == 60 * MS  # the device idles while the first step after it is enqueued
    assert set(times) == {50 * MS, 60 * MS}


def test_nothing_is_called_while_a_graph_is_captured(device, monkeypatch):
    job = Job(device)
    for step in range(1, 31):
        capturing = 10 <= step < 14
        monkeypatch.setattr(captures, "is_capturing_here", lambda capturing=capturing: capturing)
        device.gone = capturing  # any call raises
        device.enqueue(10 * MS, 50 * MS)
        job.end_step()
    device.synchronize()
    times = job.steps()["gpu_step_ns"].to_list()
    unknown = [step for step, time in enumerate(times, start=1) if time < 0]  # numbers from 0
    assert unknown == [9, 10, 11, 12, 13]
    assert set(times) == {50 * MS, -1}


def test_time_between_events_of_different_streams_is_unknown(device):
    job = Job(device)
    for step in range(1, 21):
        device.stream = 7 if step < 10 else 8
        device.enqueue(10 * MS, 50 * MS)
        job.end_step()
    device.synchronize()
    times = job.steps()["gpu_step_ns"].to_list()
    assert [step for step, time in enumerate(times, start=1) if time < 0] == [9]


def test_events_that_never_answer_are_bounded_given_up_and_tried_again(device):
    job = Job(device)
    device.answers = False
    for _ in range(PATIENCE + 10):
        device.enqueue(MS, MS)
        job.end_step()
    assert len(device.events) <= MAX_WAITING + 10
    assert all(kind != records.GPU_STEP for kind, *_ in job.written)
    device.answers = True
    for _ in range(50):
        device.enqueue(MS, MS)
        job.end_step()
    assert (job.steps()["gpu_step_ns"] >= 0).sum() > 40


def test_host_that_is_further_ahead_than_events_are_kept_still_has_most_steps_timed(device):
    job = Job(device)
    for step in range(4000):
        device.enqueue(MS, 2 * MS)
        if step > 2 * MAX_WAITING:  # the queue is full: the host goes on as fast as the device
            device.now += MS
        job.end_step()
    device.synchronize()
    times = job.steps()["gpu_step_ns"]
    assert len(device.events) <= MAX_WAITING
    assert set(times) == {2 * MS, -1}
    assert (times > 0).mean() > 0.25


def test_device_that_is_gone_raises_for_the_core_to_silence_the_probe(device):
    job = run(device, 10)
    device.gone = True
    with pytest.raises(RuntimeError, match="gone"):
        job.end_step()


def test_other_accelerators_are_asked_through_pytorchs_own_interface(device, monkeypatch):
    def event(kind, enable_timing):
        assert kind == "queued"
        return device.Event(enable_timing)

    others = SimpleNamespace(
        current_accelerator=lambda: SimpleNamespace(type="queued"), current_stream=device.current_stream
    )
    monkeypatch.setattr(torch, "queued", SimpleNamespace())  # a module without events and streams
    monkeypatch.setattr(torch, "accelerator", others, raising=False)
    device.current = 3
    monkeypatch.setattr(torch, "Event", event)
    assert set(run(device, 30, every=100).steps()["gpu_step_ns"]) == {50 * MS}


def test_device_without_events_is_no_trouble(device, monkeypatch):
    monkeypatch.delattr(torch, "queued")
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(current_accelerator=lambda: None), raising=False
    )
    assert set(run(device, 30).steps()["gpu_step_ns"]) == {-1}


def test_only_the_thread_that_recorded_events_asks_for_them_at_the_end(device):
    job = run(device, 30)
    asked, before = device.asked, len(job.written)
    other = threading.Thread(target=job.probe.on_end)
    other.start()
    other.join()
    assert (device.asked, len(job.written)) == (asked, before)
    job.probe.on_end()
    assert device.asked > asked


def test_forked_child_leaves_its_parents_events_alone(device):
    job = run(device, 10)
    device.gone = True
    job.probe.on_fork()
    job.probe._recorder.device = None
    job.end_step()


def test_no_event_is_recorded_on_a_device_that_holds_no_memory_of_this_process(monkeypatch):
    probe = GpuSteps(SimpleNamespace(device=None, records=None, sampling=Sampling()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
    monkeypatch.setattr(captures, "is_capturing_here", lambda: False)
    for is_initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=is_initialized: answer)
        probe.on_step(1)
        assert probe._device is None
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 512)
    assert probe._find_device() == torch.device("cuda", 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.booleans()), min_size=3, max_size=60)
)
def test_steps_add_up_to_the_time_from_the_first_event_to_the_last(work):
    device = Device()
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(torch, "queued", device, raising=False)
        patching.setattr(gpu_steps.captures, "is_capturing_here", lambda: False)
        job = Job(device)
        ends = []
        for host_ns, device_ns, waits in work:
            device.enqueue(host_ns, device_ns)
            if waits:
                device.synchronize()
            job.end_step()
            ends.append(max(device.now, device.done))
        device.synchronize()
        job.probe.on_end()
    times = [each[3] for each in job.written if each[0] == records.GPU_STEP]
    assert len(times) == len(work) - 1
    assert sum(times) == ends[-1] - ends[0]


def passes_of(device, num_steps=40, each=1):
    """A job whose steps are 20 ms of forward and 50 ms of backward, some times, and 10 ms of update."""
    job = Job(device)
    job.end_step()
    for _ in range(num_steps):
        for _ in range(each):
            job.backward(20 * MS, 50 * MS)
        device.enqueue(MS, 10 * MS)
        device.synchronize()
        job.end_step()
    return job


@pytest.mark.parametrize("each", [1, 3])
def test_backward_passes_are_timed_on_the_device_whenever_the_host_enqueued_them(device, each):
    tables = passes_of(device, each=each).tables()
    passes, steps = tables["passes"], tables["steps"]
    assert passes.height == 40 * each == each * steps.height
    assert passes["duration_ns"].to_list() == [5 * MS] * passes.height
    assert passes["gpu_duration_ns"].to_list() == [50 * MS] * passes.height
    first = passes.group_by("step").agg(pl.col("gpu_start_ns").min())["gpu_start_ns"].to_list()
    assert first == [22 * MS] * 40  # the device waits for the host, which enqueues forward in 2 ms


def test_pass_on_another_stream_or_while_a_graph_is_captured_is_not_timed_on_the_device(device, monkeypatch):
    job = passes_of(device, 10)
    device.stream = 8
    monkeypatch.setattr(captures, "is_capturing", lambda: False)
    job.backward(20 * MS, 50 * MS)
    device.stream = 7
    device.synchronize()
    job.end_step()
    monkeypatch.setattr(captures, "is_capturing", lambda: True)
    job.backward(20 * MS, 50 * MS)
    monkeypatch.setattr(captures, "is_capturing", lambda: False)
    device.synchronize()
    job.end_step()
    passes = job.tables()["passes"]
    assert passes["gpu_duration_ns"].to_list() == [50 * MS] * 10 + [-1, -1]
    assert passes["duration_ns"].to_list() == [5 * MS] * 12


def test_of_many_passes_in_one_step_no_more_events_wait_than_there_may(device):
    job = passes_of(device, 9, each=20)
    assert max(len(each.passes) for each in [*job.probe._waiting]) == gpu_steps.MAX_MARKS
    passes = job.tables()["passes"]
    assert (passes["gpu_duration_ns"] >= 0).sum() == 9 * gpu_steps.MAX_MARKS // 2
    assert len(device.events) <= (AGE + 2) * (gpu_steps.MAX_MARKS + 1)  # they are used again


def test_pass_before_the_first_marked_end_of_a_step_calls_no_device(device):
    job = Job(device)
    job.backward(20 * MS, 50 * MS)
    assert device.events == []
