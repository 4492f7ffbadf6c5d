"""Captures of CUDA graphs: while one runs, nothing of ours may call CUDA.

In: the calls that begin and end a capture. Out: whether one runs, and a guard that keeps new ones waiting for
a moment. A capture in the `global` mode, which is the default, is invalidated by any thread's query of an
event or synchronisation. Seen are the captures of `torch.cuda.CUDAGraph`, which PyTorch, its compiler and the
common libraries use; one that C++ code begins by itself is seen only on the stream that a thread works on.
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

WAIT_S = 1.0  # a capture begins after this long, whatever we still do


class RunningCaptures:
    """What captures, and what keeps captures waiting."""

    def __init__(self) -> None:
        self.changed = Monitor()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # one that is deleted captures no more
        self.guards = 0


captured = RunningCaptures()
_before: list[Callable[[], None]] = []


def listen(action: Callable[[], None]) -> None:
    """Have an action called before a capture begins, in the thread that captures."""
    _before.append(action)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured by any thread; calls no CUDA."""
    return bool(captured.graphs)


def is_capturing_here() -> bool:
    """The same, and whether this thread's current stream captures: for a thread that uses CUDA already."""
    return is_capturing() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def guard() -> Iterator[bool]:
    """Keep captures from beginning, for at most `WAIT_S`, while CUDA is called from a thread of ours.

    Yields:
        Whether CUDA may be called: False while a capture runs. It never waits for one to end.
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
    """Note that a graph captures, once no guard keeps it waiting."""
    state = captured
    with state.changed:
        state.changed.wait_for(lambda: not state.guards, WAIT_S)
        state.graphs.add(graph)


def end_capture(graph: Any) -> None:
    """Note that a graph has ended its capture."""
    captured.graphs.discard(graph)


def _forget() -> None:
    """This is a forked child: no thread of its parent captures here, or holds a lock that is released."""
    global captured
    captured = RunningCaptures()


def install(recorder: Recorder) -> None:
    """See captures begin and end."""
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
        finally:  # one that was invalidated has ended, too
            recorder.call(end_capture, graph)

    owner.capture_begin, owner.capture_end = capture_begin, capture_end
    recorder.listen("fork", _forget)
