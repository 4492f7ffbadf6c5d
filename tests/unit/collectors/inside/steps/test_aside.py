"""What a training loop does beside training, as the recorder's probe counts it."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside import records  # noqa: E402
from dpro.collectors.inside.recorder import ENOUGH  # noqa: E402
from dpro.collectors.inside.steps import aside as probe  # noqa: E402
from dpro.collectors.inside.steps.aside import OtherWork  # noqa: E402
from dpro.collectors.inside.steps.checkpoints import Stopwatch  # noqa: E402


class Recorder:
    """A recorder of which a probe needs no more than this."""

    def __init__(self):
        self.written = []
        self.records = SimpleNamespace(add=self._add)
        self.training_thread = threading.get_ident()
        self.num_backward = 0

    def _add(self, record):
        *values, kind = records.RECORD.unpack(record)
        self.written.append((kind, *values))

    def listen(self, occasion, action):
        assert (occasion, action()) == ("work", None)  # it evaluates: that is not enough

    def call(self, action, *arguments):
        action(*arguments)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by 10 ms at each reading."""
    now = [10**18]

    def tick():
        now[0] += 10_000_000
        return now[0]

    monkeypatch.setattr(probe.time, "time_ns", tick)
    return now


def totals(recorder, kind=records.ASIDE):
    return [record[2:] for record in recorder.written if record[0] == kind]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_work_without_gradients_is_timed_as_context_and_as_decorator(mode, monkeypatch, clock):
    recorder = Recorder()
    aside = OtherWork(recorder, SimpleNamespace(held_up=Stopwatch()))
    kind = type(mode, (getattr(torch, mode),), {})
    aside.watch_mode(kind)
    with kind():
        assert not torch.is_grad_enabled()
    assert kind()(torch.is_grad_enabled)() is False
    assert torch.is_grad_enabled()
    aside.on_step(1)
    (saving, without, compiling), *_ = totals(recorder)
    assert (saving, compiling) == (0, 0)
    assert without >= 10_000_000


@pytest.fixture
def aside(clock):
    """The probe, a mode without gradients that it watches, and the milliseconds of it that it recorded."""
    recorder = Recorder()
    found = OtherWork(recorder, SimpleNamespace(held_up=Stopwatch()))
    mode = type("mode", (torch.no_grad,), {})
    found.watch_mode(mode)

    def without_ms():
        found.on_step(1)
        return totals(recorder)[-1][1] / 1e6

    return SimpleNamespace(probe=found, recorder=recorder, mode=mode, without_ms=without_ms, clock=clock)


def test_optimizer_that_updates_without_gradients_trains(aside):
    inner, outer = object(), object()
    with aside.mode():
        aside.clock[0] += 70_000_000
    evaluated_ms = aside.without_ms()
    begins, has_ended = aside.probe.update_hooks()
    begins(outer, (), {})
    with aside.mode():
        aside.clock[0] += 500_000_000
        begins(inner, (), {})
        has_ended(inner, (), {})
    assert aside.without_ms() == evaluated_ms  # a step ends in a hook of the optimizer, before this one
    has_ended(outer, (), {})
    assert aside.without_ms() == evaluated_ms


def test_update_that_failed_is_forgotten_with_the_next(aside):
    optimizer = object()
    begins, has_ended = aside.probe.update_hooks()
    begins(optimizer, (), {})
    begins(optimizer, (), {})
    has_ended(optimizer, (), {})
    with aside.mode():
        aside.clock[0] += 70_000_000
    assert aside.without_ms() >= 70


def test_loop_that_evaluates_counts_from_eval_to_its_last_work_without_gradients(aside):
    aside.probe.on_eval()
    for _ in range(3):
        aside.clock[0] += 100_000_000  # reads a batch
        with aside.mode():
            aside.clock[0] += 20_000_000
    aside.clock[0] += 900_000_000  # the forward pass of the next step
    aside.recorder.num_backward += 1
    assert aside.probe.on_work() is ENOUGH
    with aside.mode():
        aside.clock[0] += 50_000_000  # clips gradients
    assert 3 * 120 + 50 <= aside.without_ms() < 3 * 120 + 50 + 200  # readings of the clock take 10 ms each


def test_module_that_stays_in_evaluation_while_others_train_is_no_evaluation(aside):
    aside.probe.on_eval()
    aside.clock[0] += 900_000_000
    aside.recorder.num_backward += 1
    aside.probe.on_work()
    assert aside.without_ms() == 0
    aside.probe.on_eval()
    aside.probe.on_step(2)
    with aside.mode():
        aside.clock[0] += 30_000_000
    aside.recorder.num_backward += 1
    aside.probe.on_work()
    assert aside.without_ms() < 100


def test_compilation_is_timed_by_what_the_compiler_says_also_after_a_reset(monkeypatch, clock):
    class Handler:
        def __init__(self):
            self.start_callbacks, self.end_callbacks = [], []

        def register_start_callback(self, callback):
            self.start_callbacks.append(callback)

        def register_end_callback(self, callback):
            self.end_callbacks.append(callback)

    module = ModuleType("torch._dynamo.callback")
    module.callback_handler = handler = Handler()
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    recorder = Recorder()
    aside = OtherWork(recorder, SimpleNamespace(held_up=Stopwatch()))
    for _ in range(2):
        aside.look()
        aside.look()
        assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
        handler.start_callbacks[0]("args")
        handler.end_callbacks[0]("args")
        handler.start_callbacks.clear()
        handler.end_callbacks.clear()
    aside.on_step(1)
    assert totals(recorder) == [(0, 0, 20_000_000)]
