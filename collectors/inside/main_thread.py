"""Calls of our functions in the job's main thread, between two of its bytecodes, like handlers of signals.

Takes a function, and requests for it from any thread. Calls it as soon as the main thread runs Python. There
it may walk the frames that it interrupted: no other thread can do so safely. Like a handler of a signal it
must take no lock, and it should be short.

A signal that arrives meanwhile has its handler called within ours. An exception of that handler, such as
`KeyboardInterrupt`, is meant for the job and reaches it: the interpreter calls `PyObject_IsTrue` of an
object, not a callback made by ctypes, which would print the exception and drop it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from .patching import run_uncompiled
from .unseen import code_of, traceback_of

_KEPT: list[Any] = []  # the interpreter may still call these, if only in a forked child


class MainThreadCall:
    """A function for the main thread, requested at most once at a time."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._process, self._is_asked = action, os.getpid(), False
        self._pending = _Pending(self._run)
        _KEPT.append(self._pending)

    def ask(self) -> None:
        """Have the main thread call the function soon, unless that is still to come."""
        if not self._is_asked:
            self._is_asked = True
            python = ctypes.pythonapi
            if python.Py_AddPendingCall(python.PyObject_IsTrue, ctypes.py_object(self._pending)) != 0:
                self._is_asked = False  # the interpreter's queue is full

    def _run(self) -> None:
        self._is_asked = False
        if os.getpid() == self._process:
            run_uncompiled(self._action)


class _Pending:
    """An object whose truth the interpreter tests: it continues if false, and raises what the test raises."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __bool__(self) -> bool:
        self._action()
        return False


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the job's raised an exception, wherever the main thread was."""
    place, codes = traceback_of(error), set(_codes_of_handlers())
    while place is not None:
        if place.tb_frame.f_code in codes:
            return True
        place = place.tb_next
    return False


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        code = code_of(signal.getsignal(number))
        if code is not None:
            yield code
