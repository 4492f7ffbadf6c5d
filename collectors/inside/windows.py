"""Deep windows: every operator, kernel and launch of some steps, as Kineto sees them.

In: the ends of steps, and requests from outside. Out: `windowNNNN.json`, a Kineto file, `traceNNNN.json`, an
execution trace where asked for, and records of when each window was. Rank 0 decides which steps they are.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from . import records
from .agreement import Agreement
from .kineto import OwnProfile, Recording, is_profiling, let_child_exit
from .patching import patch
from .plan import Budget, Plan, Window
from .recorder import Recorder, identity

BACKWARD = "dpro::backward"  # the range around each backward call within a window
LEAST = 200  # steps from one window to the next, where their cost decides
LATE = "this rank learned of it too late"
OCCUPIED = "a profiler ran already"
DROPPED = "a profiler or another process was started meanwhile"


class Windows:
    """The deep windows of one process: at most one is open."""

    def __init__(self, recorder: Recorder) -> None:
        """No window is open yet."""
        self._recorder = recorder
        # The user's profilers, from when they are prepared until they stop. While one warms up, PyTorch
        # reports none as active, but ends the process if that one starts while another runs.
        self._foreign: weakref.WeakSet[profile] = weakref.WeakSet()
        self._forget()

    def _forget(self) -> None:
        config = self._recorder.config
        every, steps = config["every"], config["window_steps"]
        self._plan = Plan(config["skip"], steps, every)
        self._budget = Budget(config["budget"], max(LEAST, 2 * steps))
        self._agreement = Agreement(self._recorder)
        self._decides = every is None
        self._requests: list[dict[str, Any]] = []
        self._off = False
        self._open: Recording | None = None
        self._window = Window(-1, 0, 0)
        self._started_ns = 0
        self._thread = 0
        self._used = False
        self._step = self._resumed_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether a window is being recorded."""
        return self._open is not None

    # In the training thread.

    def on_step(self, step: int) -> None:
        """A step has ended: a window may, too, and another may begin."""
        now_ns = time.monotonic_ns()
        if self._resumed_ns:
            self._budget.step(now_ns - self._resumed_ns)
        self._step = step
        if self._open is not None and step >= self._window.step + self._window.steps:
            self.close(save=True)
        upcoming = self._plan.upcoming
        if upcoming is not None and step >= upcoming.step:
            self._begin(step, self._plan.take(step))
        self._resumed_ns = time.monotonic_ns()

    def _begin(self, step: int, window: Window | None) -> None:
        if window is None or not window.steps:
            return
        if step > window.step:
            self._miss(window, LATE)
        elif self._open is not None or self._foreign or is_profiling():
            self._miss(window, OCCUPIED)
        else:
            self._start(window)

    def _start(self, window: Window) -> None:
        folder, own = self._recorder.folder, self._recorder.records
        if folder is None or own is None:
            return
        begun_ns = time.monotonic_ns()
        own.write(records.OPENED, window.number, time.time_ns(), window.step)
        self._open = Recording(self._recorder.config, folder / f"trace{window.number:04d}.json")
        self._window, self._started_ns = window, time.time_ns()
        self._thread = threading.get_ident()
        self._used = True
        self._budget.opened(time.monotonic_ns() - begun_ns)

    def close(self, save: bool) -> None:
        """End the window, if one is being recorded.

        Args:
            save: whether to keep it.
        """
        folder, own = self._recorder.folder, self._recorder.records
        if self._open is None or folder is None or own is None:
            return
        if threading.get_ident() != self._thread:
            return  # only the thread that started Kineto can stop it
        save = save and folder.is_dir()  # Kineto would say on stderr that the run was deleted
        begun_ns = time.monotonic_ns()
        recording, self._open = self._open, None
        number, end_ns = self._window.number, time.time_ns()
        recording.stop(folder / f"window{number:04d}.json" if save else None)
        if save:
            own.write(records.WINDOW, number, self._started_ns, end_ns)
            self._recorder.on_window(f"window{number:04d}")
        else:
            own.write(records.DROPPED, number)
        self._answer(self._window, "" if save else DROPPED)
        self._budget.closed(time.monotonic_ns() - begun_ns)

    def _miss(self, window: Window, why: str) -> None:
        if self._recorder.records is not None:
            self._recorder.records.write(records.MISSED, window.number, window.step, int(why == LATE))
        self._answer(window, why)

    def _answer(self, window: Window, why_not: str) -> None:
        """Tell who asked for a window what became of it on this rank."""
        if window.request:
            facts = {"window": window.number, "steps": [window.step, window.step + window.steps]}
            self._recorder.answer(window.request, facts | {"why_not": why_not})

    def on_end(self) -> None:
        """No step may follow: keep what there is."""
        self.close(save=True)

    def on_profiler(self, profiler: profile) -> None:
        """A profiler is about to be prepared; give way to the user's own."""
        if not isinstance(profiler, OwnProfile):
            self._foreign.add(profiler)
            self.close(save=False)

    def on_profiler_end(self, profiler: profile) -> None:
        """A profiler is about to stop."""
        self._foreign.discard(profiler)

    def on_observer(self, _: Any) -> None:
        """The user records an execution trace; one at a time can be."""
        self.close(save=False)

    def before_fork(self) -> None:
        """A child that inherits a running Kineto would keep gathering events that nobody collects."""
        self.close(save=False)

    def on_fork(self) -> None:
        """This is a forked child."""
        if self._used:
            let_child_exit()
        self._forget()

    # In a thread of ours.

    def on_request(self, request: dict[str, Any]) -> None:
        """Somebody asks for a window, or for none or some from now on; rank 0 sees to it."""
        if identity()[0] == 0 and request["kind"] in ("window", "off", "on"):
            self._requests.append(request)

    def on_second(self) -> None:
        """Rank 0 decides where windows are, the others hear of it."""
        if identity()[0] == 0:
            self._decide()
            return
        heard = self._agreement.hear()
        if heard is not None:
            self._plan.announce(Window(**heard))

    def _decide(self) -> None:
        step_ns = self._budget.hurried_ns
        if not step_ns:
            return
        ahead = 2
        if identity()[1] > 1:
            ahead += math.ceil(self._agreement.slow_s * 1e9 / step_ns)
        if self._requests:
            self._grant(self._requests[0], ahead)
        elif self._decides and not self._off and self._plan.upcoming is None and self._open is None:
            period = self._budget.period()
            if period is not None:
                ahead = max(ahead, self._window.step + period - self._step)
                self._announce(self._plan.place(self._step, ahead, self._plan.steps))

    def _grant(self, request: dict[str, Any], ahead: int) -> None:
        """Announce what was asked for, unless another window has to come first."""
        kind, name = request["kind"], request["id"]
        steps = {"window": request.get("steps"), "off": 0, "on": self._plan.steps}[kind]
        window = self._plan.place(self._step, ahead, steps or 0)
        if window is None:
            return
        self._off = kind == "off" or (self._off and kind == "window")
        asked = name if kind == "window" else ""
        self._announce(window._replace(goes_on=not self._off, request=asked))
        self._requests.pop(0)
        if not asked:
            self._recorder.answer(name, {"from_step": window.step})

    def _announce(self, window: Window | None) -> None:
        if window is not None:
            self._agreement.say(window._asdict())
            self._plan.announce(window)


def install(recorder: Recorder) -> None:
    """Record deep windows."""
    windows = Windows(recorder)
    recorder.listen("step", windows.on_step)
    recorder.listen("second", windows.on_second)
    recorder.listen("request", windows.on_request)
    recorder.listen("end", windows.on_end)
    recorder.listen("fork", windows.on_fork)
    _install_backward(windows)
    patch(profile, "_prepare_trace", before=lambda profiler: recorder.call(windows.on_profiler, profiler))
    patch(profile, "__exit__", before=lambda profiler: recorder.call(windows.on_profiler_end, profiler))
    observer = getattr(torch.profiler, "ExecutionTraceObserver", None)
    if observer is not None and recorder.config["execution_trace"]:
        patch(observer, "register_callback", before=lambda each: recorder.call(windows.on_observer, each))
    os.register_at_fork(before=lambda: recorder.call(windows.before_fork))


def _install_backward(windows: Windows) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not windows.is_open:
            return original(*args, **kwargs)
        with record_function(BACKWARD):
            return original(*args, **kwargs)

    torch.autograd.backward = backward
