"""Ctrl-C that ends a command wherever it comes.

In: nothing. Out: a process in which no Ctrl-C is lost. Python raises `KeyboardInterrupt` at whatever it is
doing. In a destructor, in a callback, or in Python code that a library in C calls, nothing can be raised: the
error is printed, and the command goes on as if no key had been pressed.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_SOON_S = 0.01  # by then the destructor or callback is over


def keep_interrupts() -> None:
    """From now on a Ctrl-C that was lost is raised again soon after; to be called in the main thread."""
    report = sys.unraisablehook

    def raise_later(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SOON_S)
        else:
            report(unraisable)

    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = raise_later


def _raise(_signal: int, _frame: FrameType | None) -> None:
    """Raise a lost Ctrl-C, unless one is being handled: its cleaning up is not disturbed."""
    handled = sys.exception()
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    if handled is None:
        raise KeyboardInterrupt
