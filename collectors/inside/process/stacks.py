"""Where all threads of this process are now, for requests from outside.

In: a request. Out: an answer with the Python frames of every thread but ours. A process whose interpreter is
held by a call in C cannot answer; for it a handler in C is set on an unused signal, which writes the
frames to `stacks.txt` without asking Python. The signal is meant for a thread of ours, which only sleeps, so
that it interrupts no system call of the job's. Where a signal ends the process that it causes itself, such as
SIGSEGV, or SIGABRT of a library, a handler like it writes to `fatal.txt` first, unless the job has its own.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import threading
from typing import IO, Any

from ..files import FATAL
from ..recorder import Recorder
from ..tracebacks import stacks as stacks_of_threads
from .preemption import handler_of

OURS = "dpro-"  # what names of our threads begin with
_register, _enable, _disable = faulthandler.register, faulthandler.enable, faulthandler.disable


class Stacks:
    """The stacks of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._file: IO[bytes] | None = None
        self._fatal: IO[bytes] | None = None
        self._has_announced = False

    def on_open(self) -> None:
        """Set the handler."""
        folder, number = self._recorder.folder, _unused_signal()
        if folder is not None and not faulthandler.is_enabled():
            self._fatal = (folder / FATAL).open("wb")
            _enable(self._fatal.fileno(), all_threads=True)
        if folder is None or number is None:
            return
        self._file = (folder / "stacks.txt").open("ab")
        _register(number, self._file.fileno(), all_threads=True)
        self._signal = number

    def on_second(self) -> None:
        """Say where to send the signal: to the thread that calls this."""
        if not self._has_announced and self._file is not None:
            self._has_announced = True
            where = {"signal": self._signal, "thread": threading.get_native_id()}
            self._recorder.write_file("stacks.json", json.dumps(where).encode())

    def on_request(self, request: dict[str, Any]) -> None:
        """Answer with where the threads are."""
        if request["kind"] == "stacks":
            self._recorder.answer(request["id"], {"threads": threads()})

    def on_fork(self) -> None:
        """Forget the file: a forked child gets no requests."""
        self._file, self._has_announced = None, False
        if self._fatal is not None:  # how it ends is not how its parent does
            _disable()
            self._fatal = None


def threads() -> list[dict[str, Any]]:
    """The threads, each with its name and its frames, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        (names.get(stack.ident, f"thread {stack.ident}"), stack.frames) for stack in stacks_of_threads()
    ]
    stacks.sort(key=lambda stack: (stack[0] != "MainThread", stack[0]))
    return [{"name": name, "frames": frames} for name, frames in stacks if not name.startswith(OURS)]


def install(recorder: Recorder) -> None:
    """Answer questions for stacks."""
    stacks = Stacks(recorder)
    recorder.listen("open", stacks.on_open)
    recorder.listen("second", stacks.on_second)
    recorder.listen("request", stacks.on_request)
    recorder.listen("fork", stacks.on_fork)


def _unused_signal() -> int | None:
    """A real-time signal that still has its default handler; the last are the least likely to be used."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if handler_of(number) == 0:  # SIG_DFL
            return number
    return None
