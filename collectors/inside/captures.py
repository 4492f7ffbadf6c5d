"""Captures of CUDA graphs: while one runs, nothing of ours may call CUDA.

Watches the calls that begin and end a capture. Says whether one runs, and has a guard that keeps new ones
waiting for a moment. A capture in the `global` mode, which is the default, is invalidated by any thread's
event query or synchronisation. Seen are the captures of `torch.cuda.CUDAGraph`, which PyTorch, its compiler
and the common libraries use; a capture that C++ code begins by itself is seen only on the current stream of a
thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .recorder import Recorder
from .threads import Monitor

WAIT_S = 1.0  # the longest that our work delays a capture


class RunningCaptures:
    """The graphs that capture, and the guards that keep captures waiting.

    Attributes:
        has_any_begun: whether any capture of this process has.
    """

    def __init__(self) -> None:
        self.changed = Monitor()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # a deleted one captures no more
        self.guards = 0
        self.has_any_begun = False


captured = RunningCaptures()
_before: list[Callable[[], None]] = []


def listen(action: Callable[[], None]) -> None:
    """Have an action called before each capture, in the thread that captures."""
    _before.append(action)


def is_capturing() -> bool:
    """Return whether any thread captures a CUDA graph; calls no CUDA."""
    return bool(captured.graphs)


def is_capturing_here() -> bool:
    """Return whether any thread captures, or this thread's current stream; for threads that use CUDA."""
    return is_capturing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def guard() -> Iterator[bool]:
    """Keep captures from beginning, for at most `WAIT_S`, while CUDA is called from a thread of ours.

    Yields:
        Whether CUDA may be called: False while a capture runs, whose end is not waited for.
    """
    state = captured
    with state.changed:
        free = not state.graphs
        state.guards += free
    try:
        yield free
    finally:
        if free:
            with state.changed:
                state.guards -= 1


def begin_capture(graph: Any) -> None:
    """Add a graph that captures, once no guard keeps it waiting."""
    state = captured
    with state.changed:
        state.changed.wait_for(lambda: not state.guards, WAIT_S)
        state.graphs.add(graph)
        state.has_any_begun = True


def end_capture(graph: Any) -> None:
    """Remove a graph whose capture has ended."""
    captured.graphs.discard(graph)


def _forget() -> None:
    """Start without captures, and with a new lock, in a forked child."""
    global captured
    captured = RunningCaptures()


def install(recorder: Recorder) -> None:
    """Watch captures begin and end."""
    owner: Any = torch.cuda.CUDAGraph
    begin, end = owner.capture_begin, owner.capture_end

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for action in _before:
            recorder.call(action)
        recorder.call(begin_capture, graph)
        try:
            return begin(graph, *args, **kwargs)
        except BaseException:
            recorder.call(end_capture, graph)
            raise

    @functools.wraps(end)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(graph, *args, **kwargs)
        finally:  # an invalidated capture has ended, too
            recorder.call(end_capture, graph)

    owner.capture_begin, owner.capture_end = capture_begin, capture_end
    recorder.listen("fork", _forget)
