"""The device of checks: a GPU, or, in a rehearsal, the CPU behind the same few names.

All differences between the two are here, so that a rehearsal runs the very lines of each check.
Import it only in a process that may load torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class FirstGpu:
    """The first GPU."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        """Make the GPU current, and measure the rate of its spinning kernel."""
        torch.cuda.set_device(0)
        torch.cuda._sleep(1_000_000)
        begin, end = self.event(), self.event()
        torch.cuda.synchronize()
        begin.record()
        torch.cuda._sleep(50_000_000)
        end.record()
        torch.cuda.synchronize()
        self._cycles_per_ms = 50_000_000 / max(begin.elapsed_time(end), 1e-3)

    def event(self) -> Any:
        """Return a timing event."""
        return torch.cuda.Event(enable_timing=True)

    def sync(self) -> None:
        """Wait for all work."""
        torch.cuda.synchronize()

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue work on a stream."""
        return torch.cuda.stream(stream)

    def spin(self, ms: float) -> None:
        """Queue a kernel that spins."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))

    def used_bytes(self) -> int:
        """Return the bytes of the device's memory that any process uses."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work as a graph in the usual way, which waits for earlier work; return its replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def captured_amid(self, work: Callable[[], None], mode: str) -> Callable[[], None]:
        """Capture work while other work is in flight, as jobs with several streams do; return its replay."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode=mode)
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


class _Moment:
    """Stands in for an event where work is done at once."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, _stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end._at_s - self._at_s)


class _Line:
    """Stands in for a stream where work is done at once."""

    def wait_stream(self, _other: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Rehearsal:
    """The CPU in the place of a GPU."""

    name = "cpu"
    backend = "gloo"

    def event(self) -> Any:
        """Return a stand-in for an event."""
        return _Moment()

    def sync(self) -> None:
        """Do nothing: all work is done already."""

    def stream(self) -> Any:
        """Return a stand-in for a stream."""
        return _Line()

    def on(self, _stream: Any) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def spin(self, ms: float) -> None:
        """Take a hundredth of the time."""
        time.sleep(ms / 1e5)

    def used_bytes(self) -> int:
        """Return 0."""
        return 0

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work, and again for each replay."""
        work()
        return work

    def captured_amid(self, work: Callable[[], None], _mode: str) -> Callable[[], None]:
        """Do the work, and again for each replay; the mode has no effect."""
        return self.captured(work)


def device_of(dry: bool) -> FirstGpu | Rehearsal:
    """Return the device of a check.

    Args:
        dry: whether it is a rehearsal.
    """
    return Rehearsal() if dry else FirstGpu()


def timed(device: FirstGpu | Rehearsal, step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Measure ms per step by the device's events, and by the host's clock from idle to idle."""
    device.sync()
    begin, end = device.event(), device.event()
    begun = time.perf_counter()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    device.sync()
    wall_ms = 1e3 * (time.perf_counter() - begun)
    return float(begin.elapsed_time(end)) / steps, wall_ms / steps


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yield a list that gets the ms of the block when it ends."""
    took: list[float] = []
    begun = time.perf_counter()
    try:
        yield took
    finally:
        took.append(1e3 * (time.perf_counter() - begun))
