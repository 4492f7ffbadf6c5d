"""How long steps take on the device, by a timing event at each step's end on the stream that trains.

Takes the ends of steps, and the beginnings and ends of backward passes in them. Writes a record for each step
whose two events have happened, and one for each event of a pass in it. The host only enqueues work, so where
it runs ahead of its device the time between two ends of steps on the host is that of enqueueing. The time
between two events is the device's time for the step, idle time included.

Nothing here waits: an event is queried at the end of a later step, by the thread that recorded it, and no
call is made to the device while a graph is captured. Time is measured between events of one stream only.
Where our own work between two steps was long, a second event begins the next step. Short steps have events at
some of their ends only, as `sampling` decides: then the time of several is known together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import captures, records
from ..recorder import Recorder
from ..threads import get_ident
from ..unseen import unseen

AGE = 2  # steps before an event is queried: the host is ahead of its device, and a query has a cost
AT_ONCE = 8  # events queried at the end of one step
MAX_WAITING = 256  # events: a host runs ahead by the length of the launch queue, about a thousand launches
MAX_MARKS = 16  # events of passes in one step: the first eight micro-batches count
PATIENCE = 1000  # steps without an answer, after which the events are given up


class PassEvent(NamedTuple):
    """An event where a backward pass begins or has ended; fields as in `StepEvent`."""

    event: Any
    stream: int
    time_ns: int


class StepEvent(NamedTuple):
    """An event at a step's end, or where the next one begins.

    Attributes:
        stream: the stream that it was recorded on.
        time_ns: when the host recorded it.
        step: steps ended by then.
        is_end: whether one step or several lie between the previous event and this one.
        passes: events of backward passes between this one and the next.
    """

    event: Any
    stream: int
    time_ns: int
    step: int
    is_end: bool
    passes: list[PassEvent]


class DeviceApi(NamedTuple):
    """The calls of a device that are used.

    Attributes:
        current_stream: returns the stream that the calling thread enqueues work on.
        selected: makes it the current device for a while. A query of an event may claim memory on the current
            device, and a job that names its device everywhere may have another one there.
    """

    event: Callable[[], Any]
    current_stream: Callable[[], Any]
    selected: Callable[[], AbstractContextManager[Any]]


def interface_of(device: torch.device) -> DeviceApi | None:
    """Return events and streams of a device: from its module for CUDA and ROCm, else from the accelerator's.

    None for a device that has neither.
    """
    module: Any = getattr(torch, device.type, None)
    if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
        accelerator: Any = getattr(torch, "accelerator", None)
        current = accelerator.current_accelerator() if accelerator is not None else None
        if current is None or current.type != device.type:
            return None
        event = partial(torch.Event, device.type, enable_timing=True)
        return DeviceApi(event, partial(accelerator.current_stream, device.index), nullcontext)
    event = partial(module.Event, enable_timing=True)
    selected = partial(module.device, device.index) if hasattr(module, "device") else nullcontext
    return DeviceApi(event, partial(module.current_stream, device.index), selected)


class GpuSteps:
    """The timing events of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._left: list[Any] = []  # events of the parent of a fork: destroying them would call the device
        self._waiting: deque[StepEvent] = deque()
        self._free: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._device: DeviceApi | None = None
        self._waiting, self._free = deque(), []
        self._is_gap = True  # the step that ends now has no event at its beginning
        self._is_full = False
        self._thread = self._looks = 0  # thread of the latest event; looks for a device

    def on_fork(self) -> None:
        """Forget the parent's device in a forked child, which must not touch it."""
        self._left += [*self._waiting, *self._free]
        self._forget()

    def on_step(self, step: int) -> None:
        """Mark the end of a step, and read the times of earlier ones."""
        device = self._find()
        if device is not None:
            with device.selected():
                if not self._is_capturing():
                    self._recorder.sampling.see(self._read(step - AGE, AT_ONCE))
                    self._mark(device, step, is_end=not self._is_gap)

    def on_resume(self, step: int) -> None:
        """Mark the beginning of the next step, since work of the recorder took long after this one."""
        device = self._find()
        if device is not None:
            with device.selected():
                if not self._is_capturing():
                    self._mark(device, step, is_end=False)

    def on_pass(self, time_ns: int) -> None:
        """Mark where a backward pass begins or has ended, in a step whose beginning is marked."""
        device = self._device
        if device is None or self._is_gap or self._thread != get_ident() or captures.is_capturing():
            return
        with device.selected():
            passes = self._waiting[-1].passes
            if len(passes) < MAX_MARKS and not captures.is_capturing_here():
                passes.append(PassEvent(*self._record_event(device), time_ns))

    def _is_capturing(self) -> bool:
        """Return whether a graph is captured on the selected device: then a gap begins."""
        is_capturing = captures.is_capturing_here()
        self._is_gap |= is_capturing
        return is_capturing

    def on_end(self) -> None:
        """Read the events that have happened; the others stay unknown.

        Where a thread of ours ends the recording, since the job's own hangs, the device is left alone.
        """
        if self._device is None or self._thread != get_ident() or captures.is_capturing():
            return
        with self._device.selected():
            if self._waiting and not captures.is_capturing_here():
                self._read(self._waiting[-1].step, MAX_WAITING)
        self._waiting.clear()
        self._free.clear()
        self._is_gap = True

    def _find(self) -> DeviceApi | None:
        """Return the device that trains, if it may be called; while unknown, look for it ever more rarely."""
        if self._device is None:
            self._looks += 1
            device = self._find_device() if self._looks & (self._looks - 1) == 0 else None
            self._device = None if device is None else interface_of(device)
        if self._device is None or captures.is_capturing():
            self._is_gap = True
            return None
        return self._device

    def _find_device(self) -> Any:
        """Return the device that trains: where parameters are, or where the allocator holds memory.

        On a device that this process does not compute on, even the current one, an event would claim memory.
        """
        device = self._recorder.device
        if device is None and torch.cuda.is_initialized():
            index = torch.cuda.current_device()
            device = unseen(torch.device, "cuda", index) if torch.cuda.memory_allocated(index) else None
        return device

    def _mark(self, device: DeviceApi, step: int, is_end: bool) -> None:
        waiting = self._waiting
        if waiting and step - waiting[0].step > PATIENCE:
            waiting.clear()  # an event may be destroyed before it has happened
        self._is_full = len(waiting) >= (MAX_WAITING // 2 if self._is_full else MAX_WAITING)
        if self._is_full:  # half of them have to be free again: events of single boundaries time no step
            self._is_gap = True
            return
        waiting.append(StepEvent(*self._record_event(device), time.time_ns(), step, is_end, []))
        self._is_gap, self._thread = False, get_ident()

    def _record_event(self, device: DeviceApi) -> tuple[Any, int]:
        """Record an event on this thread's current stream; return it and the stream."""
        stream = device.current_stream()
        event = self._free.pop() if self._free else device.event()
        event.record(stream)
        return event, stream.stream_id

    def _read(self, until: int, most: int) -> bool:
        """Query the oldest events, up to those of a step, and record the time between them.

        Returns:
            Whether one of them has yet to happen: the host is ahead.
        """
        waiting = self._waiting
        for _ in range(most):
            if len(waiting) < 2 or waiting[1].step > until:
                return False
            if not waiting[1].event.query():
                return True
            first, second = waiting.popleft(), waiting[0]
            if second.is_end and first.stream == second.stream:
                elapsed_ns = round(first.event.elapsed_time(second.event) * 1e6)
                writer = self._recorder.records
                if writer is not None and elapsed_ns >= 0:
                    writer.write(records.GPU_STEP, first.time_ns, second.time_ns, elapsed_ns)
                    self._write_passes(writer, first)
            self._free += [first.event, *(marked.event for marked in first.passes)]
        return False

    def _write_passes(self, writer: records.RecordWriter, begun: StepEvent) -> None:
        """Record when the device reached the events of passes of a step that it has finished."""
        for event, stream, time_ns in begun.passes:
            if stream == begun.stream:
                elapsed_ns = round(begun.event.elapsed_time(event) * 1e6)
                writer.write(records.PASS_ON_GPU, begun.time_ns, time_ns, elapsed_ns)


def install(recorder: Recorder) -> None:
    """Time steps on the device."""
    steps = GpuSteps(recorder)
    recorder.listen("sample", steps.on_step)
    recorder.listen("pass", steps.on_pass)
    recorder.listen("resume", steps.on_resume)
    recorder.listen("end", steps.on_end)
    recorder.listen("fork", steps.on_fork)
