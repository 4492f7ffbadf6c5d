"""Ranges (`record_function`) that outlive the recording in which they began.

In: ranges as they are entered and left. Out: none of them is left in the middle of another recording. PyTorch
writes the end of a range into the recording in which it began, which is freed memory where that one has ended
and another runs. Windows begin and end within the range around an optimizer's step, and the user's own
profilers within whatever ranges their framework has.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from torch.autograd import profiler

from ..torch_internals import end_range, has_profiler


class Ranges:
    """Those that were entered while a profiler ran, and have not been left."""

    def __init__(self) -> None:
        """There are none."""
        self.forget()

    def forget(self) -> None:
        """This is a forked child: it records nothing."""
        self._open: dict[int, tuple[Any, int]] = {}
        self._finished: weakref.WeakSet[Any] = weakref.WeakSet()

    def enter(self, entered: Any) -> None:
        """A range was entered."""
        if has_profiler():
            self._open[id(entered)] = entered, threading.get_ident()

    def leave(self, left: Any) -> bool:
        """Called before a range is left. Returns whether it has ended already."""
        if self._open:
            self._open.pop(id(left), None)
        if not self._finished or left not in self._finished:
            return False
        self._finished.discard(left)
        return True

    def finish(self) -> None:
        """No profiler runs: end the ranges of this thread here, where that writes nowhere."""
        me = threading.get_ident()
        for key, (entered, thread) in list(self._open.items()):
            if thread == me and entered.run_callbacks_on_exit:
                if end_range(entered.record):
                    self._finished.add(entered)
                del self._open[key]

    def install(self) -> None:
        """See ranges entered and left."""
        enter, leave = profiler.record_function.__enter__, profiler.record_function.__exit__

        @functools.wraps(enter)
        def entering(entered: Any) -> Any:
            result = enter(entered)
            self.enter(entered)
            return result

        @functools.wraps(leave)
        def leaving(left: Any, kind: Any, value: Any, traceback: Any) -> None:
            if not self.leave(left):
                leave(left, kind, value, traceback)
                return
            left.run_callbacks_on_exit = False
            leave(left, kind, value, traceback)
            left.run_callbacks_on_exit = True  # a decorator enters it again

        profiler.record_function.__enter__ = entering
        profiler.record_function.__exit__ = leaving
