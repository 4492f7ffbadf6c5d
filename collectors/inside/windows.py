"""Deep windows: every operator, kernel and launch of some steps, as Kineto sees them.

Takes the ends of steps, and requests from outside. Writes `windowNNNN.json`, a Kineto file, `traceNNNN.json`,
an execution trace where asked for, and records of when each window was. Rank 0 decides which steps they are.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import profile

from . import captures, records
from .budget import Budget, WindowsChange
from .detaching import Detaching
from .files import refuse_beyond_limit, write_whole
from .kineto import (
    Mark,
    OwnProfile,
    Recording,
    ensure_silent,
    finish_teardown,
    leave_out_destructors,
    silence,
    start_in_main_thread,
)
from .main_thread import MainThreadCall
from .patching import patch
from .plan import Window, WindowPlan
from .recorder import ENOUGH, Recorder, identity
from .records import RecordWriter
from .threads import Local, get_ident, is_main_thread, main_thread_ident, sleep
from .torch_internals import (
    PROFILER_RUNS,
    end_range,
    has_context,
    has_cuspy,
    has_profiler,
    internal,
    is_profiling,
    prepare_profiler,
    profiler_hooks,
)

BACKWARD = "dpro::backward"  # the range around each backward call within a window
MIN_PERIOD = 200  # least steps from one window to the next, where cost decides
FINISH_S = 2.0  # the longest wait for the GPU's work of a window when the process ends
IDLE_S = 1.0  # without a step, after which the loop does something else
LATE = "this rank was notified of the window too late"
OCCUPIED = "another profiler was already running"
CAPTURED = "a CUDA graph was being captured"
UNPREPARED = "the loop is not in the thread that imported torch, which ran no Python since to start Kineto"
DROPPED = "a profiler or another process was started meanwhile"
STUCK = "CUPTI was not detached in time after an earlier window"
_REASONS = {
    LATE: records.MISSED_LATE,
    UNPREPARED: records.MISSED_UNPREPARED,
    STUCK: records.MISSED_STUCK,
}
REQUESTS = ("window", "off", "on")
_imported_in = get_ident()  # where Kineto has to start first, else it prints a line on stderr
UNWANTED = "the job is recorded without deep windows (--no-windows)"
ENDED = "the job ended before the window began"
UNPAID = "the budget does not allow another window yet"
STOPPED = "windows have stopped, since steps stay slower after a window"
HELD = "windows are switched off (dpro attach --off)"


class Windows:
    """The deep windows of one process: at most one is open.

    Attributes:
        foreign: the user's own profilers.
        ranges: the ranges that may outlive a window, or a profiler of the user.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.foreign = UserProfilers()
        self.ranges = Ranges()
        self._preparing = MainThreadCall(lambda: recorder.call(self.prepare))
        self._forget()

    def _forget(self) -> None:
        config = self._recorder.config
        every, steps = config["every"], config["window_steps"]
        self._off = bool(config.get("on_request"))  # as after `dpro attach --off`: requests are granted
        self._held = False  # after `--off`: no requests of watchers are granted either
        self._plan = WindowPlan(None if self._off else config["skip"], steps, every)
        self._budget = Budget(config["budget"], max(MIN_PERIOD, 2 * steps))
        self._agreement = Agreement(self._recorder)
        self._decides = every is None
        self._detaching = Detaching() if config.get("detach") else None
        self._detaches = every is not None  # after each window; else from when steps are slower after one
        self._requests: list[dict[str, Any]] = []
        self._is_prepared = False
        self._of_thread = Local()
        self._open: OpenWindow | None = None
        self._latest = 0  # steps before the latest window
        self._used = False
        self._step = self._resumed_ns = 0
        self._window_ns = 0  # time of opening or closing one, at the latest end of a step

    @property
    def is_open(self) -> bool:
        """Whether a window is being recorded."""
        return self._open is not None

    @property
    def is_stuck(self) -> bool:
        """Whether no window may open any more, since CUPTI was not detached in time."""
        return self._detaching is not None and self._detaching.is_stuck

    # In the training thread.

    def on_step(self, step: int) -> None:
        """End or begin a deep window, where one is due after this step."""
        now_ns = time.monotonic_ns()
        self._step = step
        change = None
        if self._resumed_ns:
            own_ns = max(self._recorder.own_ns - self._window_ns, 0)
            change = self._budget.step(now_ns - self._resumed_ns, own_ns)
        if not self._is_prepared:
            if get_ident() == _imported_in:
                self._is_prepared = True  # the first window starts Kineto there
            elif _imported_in == main_thread_ident():
                self._preparing.ask()
        try:
            if change is not None and self._decides and identity()[0] == 0:
                self._record_change(change)
            upcoming = self._plan.upcoming
            is_due = self._open is not None or (upcoming is not None and step >= upcoming.step - 1)
            if is_due:
                self._advance(step)
            elif self._detaching is not None and self._detaching.is_attached and self._budget.is_slower:
                self._detach(step)
        except Exception:
            # Kineto left running would slow the job down, and crash it at its exit.
            opened, self._open = self._closable(), None
            if opened is not None:
                opened.close(keep=False)
            raise
        self._resumed_ns = time.monotonic_ns()
        self._window_ns = self._resumed_ns - now_ns if is_due else 0

    def _record_change(self, change: WindowsChange) -> None:
        """Record that windows stop or resume because of their cost."""
        if self._recorder.records is not None:
            kind = records.STOPPED if change.stops else records.RESUMED
            millionths = round(change.longer * 1e6)
            self._recorder.records.write(kind, self._step, change.spent_ns, change.elapsed_ns, millionths)

    def _advance(self, step: int) -> None:
        if self._open is not None and self._open.end_step(step):
            self.close(save=True, detach=self._detaches)
        upcoming, lead = self._plan.upcoming, _lead()
        if upcoming is None or step < upcoming.step - lead:
            return
        if self._open is not None and self._open.has_ended and not captures.is_capturing_here():
            self.close(save=True)  # even if the GPU is still busy: the next window needs its place
        if step < upcoming.step and self._hindrance(step):
            return
        self._begin(step, self._plan.take(step + lead))

    def _hindrance(self, step: int) -> str:
        """Return why no window can be opened now; empty where one can."""
        if self.is_stuck:
            return STUCK
        if self._open is not None or self.foreign.are_active(step):
            return OCCUPIED
        return CAPTURED if captures.is_capturing_here() else ""

    def prepare(self) -> None:
        """Start Kineto for the first time; runs in the main thread, where the loop runs in another one."""
        if not self._is_prepared and not self._hindrance(self._step) and not is_profiling():
            ensure_silent()
            start_in_main_thread()
            self._is_prepared = self._used = True

    def _begin(self, step: int, window: Window | None) -> None:
        if window is None or not window.steps:
            return
        why_not = LATE if step > window.step else self._hindrance(step)
        if not self._is_prepared:
            why_not = why_not or UNPREPARED
        if why_not:
            if self._recorder.records is not None:
                reason = _REASONS.get(why_not, records.MISSED_OCCUPIED)
                self._recorder.records.write(records.MISSED, window.number, window.step, reason)
            self._answer(window, why_not)
        else:
            self._start(window)

    def _start(self, window: Window) -> None:
        folder, writer = self._recorder.folder, self._recorder.records
        if folder is None or writer is None:
            return
        ensure_silent()
        refuse_beyond_limit()  # execution traces are written while they are recorded
        begun_ns = time.monotonic_ns()
        self.foreign.override()
        self.ranges.finish()
        if self._detaching is not None:
            self._detaching.is_attached = True
        self._open = OpenWindow(self._recorder.config, folder, writer, window, self._step)
        self._recorder.listen("work", self.on_work)
        self._latest = window.step
        self._used = True
        if not (is_main_thread() or hasattr(self._of_thread, "guard")):
            self._of_thread.guard = _AtThreadEnd(partial(self._recorder.call, self.on_end))
        self._budget.opened(time.monotonic_ns() - begun_ns)

    def _closable(self) -> OpenWindow | None:
        """Return the open window, if this thread can close it; else None."""
        is_ours = self._open is not None and self._open.thread == get_ident()
        return self._open if is_ours else None

    def close(self, save: bool, why_not: str = DROPPED, detach: bool = False) -> None:
        """End the open window, if this thread can stop it; then detach CUPTI, if asked to and possible."""
        opened = self._closable()
        if opened is None:
            return
        begun_ns = time.monotonic_ns()
        self._open = None
        kept = opened.close(save, self._detached() if detach and opened.is_complete() else None)
        self.ranges.finish()
        if kept:
            self._recorder.on_window(f"window{opened.window.number:04d}")
        self._answer(opened.window, "" if kept else why_not)
        self._budget.closed(time.monotonic_ns() - begun_ns)

    def _detach(self, step: int) -> None:
        """Detach CUPTI by an empty session, since steps are slower after a window; later after each."""
        if self._hindrance(step) or (around := self._detached()) is None:
            return
        self._detaches = True
        ensure_silent()
        self.foreign.override()
        Recording({}, None).stop(None, around)

    def _detached(self) -> AbstractContextManager[None] | None:
        """Return a context to end a session in, which detaches CUPTI; None where that is not to be done.

        It waits for all work of the GPU, so that the GPU must be waiting for the host; and no graph may have
        been captured, since on a GPU replays failed after CUPTI had been detached in this way.
        """
        detaching = self._detaching
        if detaching is None or self._recorder.sampling.ahead or captures.captured.has_any_begun:
            return None
        return self._recorded(detaching) if detaching.is_possible() else None

    @contextmanager
    def _recorded(self, detaching: Detaching) -> Iterator[None]:
        with captures.guard() as is_free:
            if not is_free or captures.is_capturing_here():
                yield
                return
            begun_ns = time.monotonic_ns()
            with detaching.at_exit():
                yield
        took_ns = time.monotonic_ns() - begun_ns
        if self._recorder.records is not None:
            self._recorder.records.write(records.DETACHED, self._step, took_ns, int(detaching.is_stuck))

    def _answer(self, window: Window, why_not: str) -> None:
        """Answer the request for a window with its outcome on this rank."""
        if window.request:
            facts = {"window": window.number, "steps": [window.step, window.step + window.steps]}
            self._recorder.answer(window.request, facts | {"why_not": why_not})

    def on_work(self) -> object:
        """Save a complete window while the loop makes no steps, since none may come to close it."""
        opened = self._open
        if opened is None:
            return ENOUGH
        idle = time.monotonic() - self._recorder.last_step_s > IDLE_S
        if idle and opened is self._closable() and opened.is_complete():
            self.close(save=True)
        return None

    def on_end(self) -> None:
        """Save what there is of the open window: no step may follow."""
        opened = self._closable()
        if opened is not None:
            begun = opened.has_begun
            if begun:
                opened.finish(FINISH_S)
            self.close(begun, ENDED)

    def on_capture(self) -> None:
        """Close the window before a CUDA graph is captured; later steps may be replays, which run no hook."""
        opened = self._closable()
        if opened is not None:
            whole = opened.has_whole_step
            if whole:
                opened.finish(0.0)
            self.close(whole, CAPTURED)

    def on_profiler(self, profiler: profile) -> None:
        """Give way to a profiler of the user's that is about to be prepared."""
        if not isinstance(profiler, OwnProfile):
            self.foreign.prepare(profiler, self._step)
            self.close(save=False)
            if self._detaching is not None:
                self._detaching.let_finish()

    def on_profiler_start(self, profiler: profile) -> None:
        """Give way to a starting profiler of the user's, also one that counted as abandoned."""
        if not isinstance(profiler, OwnProfile):
            self.close(save=False)
            if self._open is None:
                self.foreign.start(profiler)

    def on_profiler_end(self, profiler: profile) -> None:
        """Forget a profiler that is about to stop."""
        self.foreign.end(profiler)

    def on_observer(self) -> None:
        """Close the window: the user records an execution trace, and only one can be recorded."""
        self.close(save=False)

    def before_fork(self) -> None:
        """Close the window: a child that inherits a running Kineto would keep gathering events."""
        self.close(save=False)

    def on_fork(self) -> None:
        """Start without windows in a forked child."""
        if self._used:
            leave_out_destructors()
        if self._detaching is not None:
            self._detaching.on_fork()
        self.ranges.forget()
        self._forget()

    # In a thread of ours.

    def on_request(self, request: dict[str, Any]) -> None:
        """Queue a request for one window, or to switch windows off or on; rank 0 handles it."""
        if identity()[0] == 0 and request["kind"] in REQUESTS:
            self._requests.append(request)

    def on_second(self) -> None:
        """Decide on windows and announce them, on rank 0; receive announcements on the others."""
        if identity()[0] == 0:
            self._decide()
            return
        announced = self._agreement.receive()
        if announced is not None:
            self._plan.announce(Window(**announced))

    def _decide(self) -> None:
        step_ns = self._budget.median_step_ns
        if not step_ns:
            return
        ahead = 2 + _lead()
        if identity()[1] > 1:
            ahead += math.ceil(self._agreement.slow_s * 1e9 / step_ns)
        if self._requests:
            self._grant(self._requests[0], ahead)
        elif self._decides and not self._off and self._plan.upcoming is None and self._open is None:
            self._continue(ahead)

    def _continue(self, ahead: int) -> None:
        """Announce a window once it is due, not earlier: steps may have become slower since the last."""
        if self.is_stuck:
            return
        if self._step + ahead >= self._latest + self._budget.least and self._budget.affords(ahead):
            self._announce(self._plan.place(self._step, ahead, self._plan.steps))

    def _grant(self, request: dict[str, Any], ahead: int) -> None:
        """Announce what was requested, unless another window has to come first."""
        kind, name = request["kind"], request["id"]
        if request.get("within_budget") and (refusal := self._refusal(ahead)):
            self._recorder.answer(name, refusal)
            self._requests.pop(0)
            return
        steps = {"window": request.get("steps") or self._plan.steps, "off": 0, "on": self._plan.steps}[kind]
        window = self._plan.place(self._step, ahead, steps)
        if window is None:
            return
        self._off = kind == "off" or (self._off and kind == "window")
        self._held = kind == "off" or (self._held and kind == "window")
        asked = name if kind == "window" else ""
        self._announce(window._replace(goes_on=not self._off, request=asked))
        self._requests.pop(0)
        if not asked:
            self._recorder.answer(name, {"from_step": window.step})

    def _refusal(self, ahead: int) -> dict[str, Any]:
        """Return why a window that no person asked for is refused, and for how long; empty if it is not."""
        wait_ns = self._budget.wait_ns(ahead)
        if self._held or wait_ns is None:
            return {"why_not": HELD if self._held else STOPPED}
        return {"why_not": UNPAID, "paid_in_s": wait_ns / 1e9} if wait_ns else {}

    def _announce(self, window: Window | None) -> None:
        if window is not None:
            self._agreement.send(window._asdict())
            self._plan.announce(window)


class _AtThreadEnd:
    """An object kept by a thread that calls a function at the thread's end: no other can stop Kineto."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()


def _lead() -> int:
    """Return how many steps before a window are recorded with it: on a GPU one, to be dropped."""
    return int(torch.cuda.is_initialized())


def _refuse(recorder: Recorder, request: dict[str, Any]) -> None:
    """Answer a request from outside a job that is recorded without deep windows."""
    if request["kind"] in REQUESTS:
        recorder.answer(request["id"], {"why_not": UNWANTED})


def install(recorder: Recorder) -> None:
    """Record deep windows."""
    if not recorder.config.get("windows", True):
        recorder.listen("request", lambda request: _refuse(recorder, request))
        return
    silence()
    windows = Windows(recorder)
    recorder.listen("step", windows.on_step)
    recorder.listen("second", windows.on_second)
    recorder.listen("request", windows.on_request)
    recorder.listen("end", windows.on_end)
    recorder.listen("exit", finish_teardown)
    recorder.listen("fork", windows.on_fork)
    windows.ranges.install()
    _install_backward(windows)
    _install_disable(recorder, windows)
    prepare, start = profiler_hooks()
    patch(profile, start, before=lambda profiler: recorder.call(windows.on_profiler_start, profiler))
    patch(profile, prepare, before=lambda profiler: recorder.call(windows.on_profiler, profiler))  # first
    patch(profile, "__exit__", before=lambda profiler: recorder.call(windows.on_profiler_end, profiler))
    captures.listen(windows.on_capture)
    observer = getattr(torch.profiler, "ExecutionTraceObserver", None)
    if observer is not None and recorder.config["execution_trace"]:
        patch(observer, "register_callback", before=lambda *_: recorder.call(windows.on_observer))
    os.register_at_fork(before=lambda: recorder.call(windows.before_fork))


def _install_disable(recorder: Recorder, windows: Windows) -> None:
    """Close our window in its own way before a framework ends any profiler, to begin its own."""
    original = internal("torch.autograd._disable_profiler")
    if original is None:
        return

    @functools.wraps(original)
    def disable() -> Any:
        if windows.is_open:
            recorder.call(windows.close, False)
            if not windows.is_open:
                return None
        windows.foreign.end_all()
        return original()

    torch.autograd._disable_profiler = disable


def _install_backward(windows: Windows) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if windows._open is None:
            return original(*args, **kwargs)
        with Mark(BACKWARD):
            return original(*args, **kwargs)

    torch.autograd.backward = backward


# One deep window, from when Kineto starts to when it stops; on a GPU that is longer than its steps.

PATIENCE = 10  # most steps recorded after a window, for the GPU to finish its work


class OpenWindow:
    """A window that is being recorded.

    Attributes:
        thread: the thread that started Kineto: no other can stop it.
        has_whole_step: whether one of its steps has ended.
    """

    def __init__(
        self, options: Mapping[str, Any], folder: Path, writer: RecordWriter, window: Window, step: int
    ) -> None:
        self.window = window
        self.thread = get_ident()
        self.has_whole_step = False
        self._folder, self._writer = folder, writer
        writer.write(records.OPENED, window.number, time.time_ns(), window.step)
        self._recording = Recording(options, folder / f"trace{window.number:04d}.json")
        self._started_ns = time.time_ns() if step >= window.step else 0
        self._ended_ns = self._ended_after = 0
        self._tail: PendingGpuWork | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its first step has begun."""
        return self._started_ns > 0

    @property
    def has_ended(self) -> bool:
        """Whether its last step has ended: of what is recorded since, only the GPU's work is of use."""
        return self._ended_ns > 0

    def end_step(self, step: int) -> bool:
        """Record how many steps have ended; return whether recording can stop."""
        if not self.has_begun and step >= self.window.step:
            self._started_ns = time.time_ns()
        self.has_whole_step = self.has_whole_step or step > self.window.step
        if not self.has_ended and step >= self.window.step + self.window.steps:
            self._end(step)
        if captures.is_capturing_here():
            return False
        return self.has_ended and (step >= self._ended_after + PATIENCE or self.is_complete())

    def is_complete(self) -> bool:
        """Return whether all work of its steps is done, on the GPU too."""
        return self.has_ended and (self._tail is None or self._tail.has_passed())

    def finish(self, longest_s: float) -> None:
        """End the last step now, if it has not ended, and wait at most this long for the GPU."""
        if not self.has_ended:
            self._end(self.window.step)
        if self._tail is not None:
            self._tail.wait(longest_s)

    def close(self, keep: bool, around: AbstractContextManager[None] | None = None) -> bool:
        """Stop recording, in a context if there is one.

        Returns:
            Whether the window is saved: not into a run that was deleted.

        Raises:
            OSError: it cannot be saved, as where the process has given up its rights; Kineto has stopped.
        """
        number, end_ns = self.window.number, self._ended_ns or time.time_ns()
        path: Path | None = None
        try:
            if keep and _is_there(self._folder):
                if self._recording.gpu:
                    seen = self.is_complete() and not captures.is_capturing_here()
                    self._writer.write(records.CUT, number, self._started_ns, end_ns, int(seen))
                path = self._folder / f"window{number:04d}.json"
        finally:
            self._recording.stop(path, around)
        if path is not None:
            self._writer.write(records.WINDOW, number, self._started_ns, end_ns, time.time_ns())
        else:
            self._writer.write(records.DROPPED, number, time.time_ns())
        return path is not None

    def _end(self, step: int) -> None:
        self._ended_ns, self._ended_after = time.time_ns(), step
        if self._recording.gpu:
            self._tail = PendingGpuWork()


def _is_there(folder: Path) -> bool:
    """Return whether a folder exists: where the run was deleted, Kineto would say so on stderr.

    Raises:
        OSError: this process may no longer enter it, or write files as large as those of Kineto.
    """
    refuse_beyond_limit()
    try:
        os.stat(folder / ".")
    except FileNotFoundError:
        return False
    return True


# The progress of the GPU's work on steps that the host has ended.

LOOK_S = 0.005


class PendingGpuWork:
    """Unfinished GPU work; all streams are assumed to join the current one by the step's end."""

    def __init__(self) -> None:
        """Begin at the end of the last step."""
        self._events: list[Any] | None = None
        self.has_passed()

    def has_passed(self) -> bool:
        """Return whether the GPU has got there, if it may be asked now; True where it has failed."""
        with captures.guard() as free:
            if not free or captures.is_capturing_here():
                return False
            try:
                if self._events is None:
                    self._events = [_record_event(device) for device in devices()]
                return all(event.query() for event in self._events)
            except RuntimeError:  # an earlier error of the GPU, which the job is about to see itself
                self._events = []
                return True

    def wait(self, longest_s: float) -> bool:
        """Ask `has_passed` again and again for this long; return its answer."""
        deadline = time.monotonic() + longest_s
        while not self.has_passed():
            if time.monotonic() >= deadline:
                return False
            sleep(LOOK_S)
        return True


def _record_event(device: int | None) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def devices() -> list[int | None]:
    """Return the devices that this process uses: on others an event would claim memory for a context."""
    if internal("torch._C._cuda_hasPrimaryContext") is None:
        return [None]  # the current one
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


# What rank 0 announces to the other ranks, without a collective and without blocking any rank.

KEY = "dpro/windows"
STORE_EVERY = 5  # looks at the file per question to the store


class Agreement:
    """Rank 0's latest announcement, as one process sends or receives it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.forget()

    def forget(self) -> None:
        """Start without announcements in a forked child: it is not a rank yet."""
        self._received = b""
        self._looks = 0

    @property
    def _path(self) -> Path:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._recorder.launch.parent / f"windows-{attempt}.json"

    @property
    def slow_s(self) -> float:
        """The longest time until all ranks have received an announcement."""
        return 3.0 if _one_host() else 2.0 * STORE_EVERY

    def send(self, document: dict[str, Any]) -> None:
        """Announce something to all other ranks, in place of the previous announcement.

        Raises:
            OSError: the run folder cannot be written.
        """
        if identity()[1] == 1:
            return
        content = json.dumps(document).encode()
        write_whole(self._path, content)
        if not _one_host():
            self._recorder.store.ask(lambda store: store.set(KEY, content))

    def receive(self) -> dict[str, Any] | None:
        """Return what was announced since the last call; None for nothing."""
        content = self._read()
        if content == self._received:
            return None
        self._received = content
        document: dict[str, Any] = json.loads(content)
        return document

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            pass
        self._looks += 1
        if _one_host() or self._looks % STORE_EVERY:
            return self._received
        announced = self._recorder.store.ask(lambda store: store.get(KEY) if store.check([KEY]) else None)
        return self._received if announced is None else bytes(announced)


def _one_host() -> bool:
    """Return whether the launcher says that all ranks are on this host; they see the same folder then."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(identity()[1])


# The user's own profilers: our windows give way to them.

FORGOTTEN = 500  # steps after which a profiler that was prepared and has not started counts as abandoned


class UserProfilers:
    """The profilers of the user, from when they are prepared until they end or are deleted."""

    def __init__(self) -> None:
        self._prepared: weakref.WeakKeyDictionary[profile, int] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakSet[profile] = weakref.WeakSet()
        self._undone: weakref.WeakSet[profile] = weakref.WeakSet()

    def prepare(self, profiler: profile, step: int) -> None:
        """Record a profiler that is about to be prepared."""
        self._prepared[profiler] = step
        self._undone.discard(profiler)

    def end(self, profiler: profile) -> None:
        """Forget a profiler that is about to stop."""
        self._prepared.pop(profiler, None)
        self._running.discard(profiler)

    def end_all(self) -> None:
        """Forget the running profilers: Kineto was stopped without calling them."""
        self._running.clear()

    def are_active(self, step: int) -> bool:
        """Return whether one runs, is prepared and not abandoned, or keeps CUPTI, after `step` steps."""
        prepared = any(step - since < FORGOTTEN for since in self._prepared.values())
        return prepared or bool(self._running) or is_profiling() or has_cuspy()

    def override(self) -> None:
        """Record that all prepared profilers lose their preparation to a window that opens now."""
        self._undone.update(self._prepared)

    def start(self, profiler: profile) -> None:
        """Record a profiler that starts while no other runs; prepare it again if a window undid that."""
        if profiler in self._undone:
            prepare_profiler(profiler)
        self._prepared.pop(profiler, None)
        self._running.add(profiler)


# Ranges (`record_function`) that outlive the recording in which they began.


class Ranges:
    """The ranges that were entered while a profiler ran, and have not been left."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start without ranges in a forked child, which records nothing."""
        self._open: dict[int, tuple[Any, int]] = {}
        self._finished: weakref.WeakSet[Any] = weakref.WeakSet()

    def enter(self, entered: Any) -> None:
        """Remember a range that was entered while a profiler runs."""
        if has_profiler():
            self._open[id(entered)] = entered, get_ident()

    def leave(self, left: Any) -> bool:
        """Forget a range that is about to be left; return whether it has ended already."""
        if self._open:
            self._open.pop(id(left), None)
        if not self._finished or left not in self._finished:
            return False
        self._finished.discard(left)
        return True

    def finish(self) -> None:
        """End this thread's open ranges while no profiler runs, so that nothing is written."""
        me = get_ident()
        for key, (entered, thread) in list(self._open.items()):
            if thread == me and entered.run_callbacks_on_exit:
                if entered.end() if type(entered) is Mark else end_range(entered.record):
                    self._finished.add(entered)
                del self._open[key]

    def install(self) -> None:
        """Watch ranges being entered and left."""
        enter, leave = profiler.record_function.__enter__, profiler.record_function.__exit__

        @functools.wraps(enter)
        def entering(entered: Any) -> Any:
            result = entered if type(entered) is Mark and entered.begin() else enter(entered)
            if getattr(profiler, PROFILER_RUNS, False):
                self.enter(entered)
            return result

        @functools.wraps(leave)
        def leaving(left: Any, kind: Any, value: Any, traceback: Any) -> None:
            if not ((self._open or self._finished) and self.leave(left)):
                if type(left) is not Mark or not left.end():
                    leave(left, kind, value, traceback)
                return
            left.run_callbacks_on_exit = False
            leave(left, kind, value, traceback)
            left.run_callbacks_on_exit = True  # a decorator enters it again

        profiler.record_function.__enter__ = entering
        profiler.record_function.__exit__ = leaving
