"""Threads of ours inside the job: not listed, deaf to signals, and real whatever has been patched.

Takes functions to run beside the job. Runs them in threads of the kernel that `threading` does not know, so
that a job that counts, joins or traces its threads meets its own only. They block every signal: the kernel
delivers those of the process to threads that do not, and a signal that a job waits for with `sigwait` or
`signalfd`, or holds back with a mask, must not reach one of ours.

gevent and eventlet replace functions of `_thread` and `time`, often before torch is imported. Threads and
locks here are made of those that the interpreter was built with. Nothing here calls
`threading.current_thread`, which would list a thread that it does not know.
"""

from __future__ import annotations

import _imp
import _thread
import ctypes
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, ModuleType
from typing import Any

REIMPORTABLE = (3, 11)  # from this Python on a second copy of such a module leaves the first unchanged
LOOK_S = 0.001  # between two looks at what a `Monitor` waits for
_SIGNALS_BYTES = 128  # struct sigset_t
_SIG_BLOCK, _SIG_SETMASK = 0, 2


def as_built(module: ModuleType, *names: str) -> Any:
    """Return a module written in C as the interpreter was built with it, if its functions were replaced.

    Args:
        names: functions that are to be used.
    """
    replaced = any(type(getattr(module, name, None)) is not BuiltinFunctionType for name in names)
    spec = importlib.machinery.BuiltinImporter.find_spec(module.__name__)
    if not replaced or spec is None or sys.version_info < REIMPORTABLE:
        return module
    built: Any = _imp.create_builtin(spec)
    _imp.exec_builtin(built)
    return built


_threads = as_built(_thread, "start_new_thread", "allocate_lock", "get_ident", "get_native_id")
allocate_lock, get_ident, get_native_id = (
    _threads.allocate_lock,
    _threads.get_ident,
    _threads.get_native_id,
)
Local: Any = _threads._local  # values of each thread
sleep = as_built(time, "sleep").sleep


def is_main_thread() -> bool:
    """Return whether this is the main thread, by the kernel's number: patched modules number greenlets."""
    return bool(get_native_id() == os.getpid())


def main_thread_ident() -> int:
    """Return the number of the main thread, as `get_ident` returns it there."""
    return int(get_ident() if is_main_thread() else threading.main_thread().ident or 0)


def is_started_here(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a stack is that of a thread of ours.

    Args:
        frames: with `function`, also as `Class.function`; those of C may be among them.
    """
    return any(frame["function"].endswith(Thread._run_beside_job.__name__) for frame in frames)


class Thread:
    """A thread of ours that runs a function, from now on."""

    def __init__(self, action: Callable[..., object], *arguments: Any) -> None:
        """Start the thread.

        Args:
            action: should not raise: no record is kept of it.

        Raises:
            RuntimeError: the process may have no more threads.
        """
        self._running = allocate_lock()
        self._running.acquire()
        self._ident = 0
        with SignalsBlocked():  # the thread inherits the mask: it is deaf from the start
            _threads.start_new_thread(self._run_beside_job, (action, arguments))

    def _run_beside_job(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._ident = get_ident()
        try:
            action(*arguments)
        except BaseException:  # the interpreter would print it on the job's stderr
            return
        finally:
            self._running.release()

    def is_current(self) -> bool:
        """Return whether this code runs in the thread."""
        return bool(self._ident == get_ident())

    def join(self, timeout_s: float = -1) -> bool:
        """Wait for the thread's end, without limit if negative; return whether it has ended."""
        has_ended = bool(self._running.acquire(True, timeout_s))
        if has_ended:
            self._running.release()
        return has_ended


class Bell:
    """A signal between threads that wakes one sleeper."""

    def __init__(self) -> None:
        self._silence = allocate_lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or will."""
        try:
            self._silence.release()
        except RuntimeError:  # it rings already
            return

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell rings, or the time is over; return whether it has rung since the last wait."""
        return bool(self._silence.acquire(True, timeout_s))


class Monitor:
    """A lock under which threads wait, for a bounded time, for what others change under it."""

    def __init__(self) -> None:
        self._lock = allocate_lock()

    def __enter__(self) -> Monitor:
        """Take the lock."""
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """Release the lock again and again until the predicate holds, or the time is over."""
        until_s = time.monotonic() + timeout_s
        while not predicate() and time.monotonic() < until_s:
            self._lock.release()
            try:
                sleep(LOOK_S)
            finally:  # also where a handler of a signal raises
                self._lock.acquire()


class SignalsBlocked:
    """A context in which no signal reaches this thread or those that it starts; this one's come afterwards.

    The mask is set through C: Python's own function would run the job's handlers once it is set, and their
    exceptions would leave it so.
    """

    def __init__(self) -> None:
        self._mask = ctypes.PyDLL(None).pthread_sigmask
        self._before = ctypes.create_string_buffer(_SIGNALS_BYTES)
        self._mask(_SIG_BLOCK, None, self._before)

    def __enter__(self) -> None:
        """Block all signals."""
        self._mask(_SIG_BLOCK, b"\xff" * _SIGNALS_BYTES, None)

    def __exit__(self, *_: object) -> None:
        """Restore the mask."""
        self._mask(_SIG_SETMASK, self._before, None)
