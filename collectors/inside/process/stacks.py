"""The present stacks of all threads of this process, for requests from outside.

Answers a request with the Python frames of every thread but ours. A process whose interpreter is held by a
call in C cannot answer; for it a handler in C is set on an unused signal, which writes the frames to
`stacks.txt` without asking Python. Only `dpro attach` sends the signal, and to a thread of ours, so that it
interrupts no system call of the job's. `stacks.json` names that thread, and the descriptor of the open file,
which is verified before the signal is sent. If the job replaces the handler or closes the file, the offer is
withdrawn.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import Any

from ..files import STACKS, STACKS_BY, OwnDescriptor
from ..recorder import Recorder
from ..threads import get_native_id, is_started_here
from ..tracebacks import stacks as stacks_of_threads

_DEFAULT = 0  # SIG_DFL
_register = faulthandler.register


class Stacks:
    """The stacks of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Forget the file: a forked child gets no requests."""
        self._file: OwnDescriptor | None = None
        self._signal = self._handler = 0
        self._has_announced = False

    def on_open(self) -> None:
        """Set the handler on an unused signal."""
        folder, number = self._recorder.folder, _unused_signal()
        if folder is None or number is None:
            return
        self._file = OwnDescriptor(folder / STACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _register(number, self._file.number, all_threads=True)
        self._signal, self._handler = number, handler_of(number)

    def on_second(self) -> None:
        """Announce the signal, for the thread that calls this, or that none must be sent any more."""
        if self._file is None:
            return
        where: dict[str, int] = {}
        if self._file.is_ours() and handler_of(self._signal) == self._handler:
            if self._has_announced:
                return
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._signal})
            where = {"signal": self._signal, "thread": get_native_id(), "descriptor": self._file.number}
            self._has_announced = True
        else:
            self._file = None
        self._recorder.write_file(STACKS_BY, json.dumps(where).encode())

    def on_request(self, request: dict[str, Any]) -> None:
        """Answer a request for stacks."""
        if request["kind"] == "stacks":
            self._recorder.answer(request["id"], {"threads": threads()})


def threads() -> list[dict[str, Any]]:
    """Return the threads, each with its name and its frames, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        (names.get(stack.ident, f"thread {stack.ident}"), stack.frames)
        for stack in stacks_of_threads()
        if not is_started_here(stack.frames)
    ]
    stacks.sort(key=lambda stack: (stack[0] != "MainThread", stack[0]))
    return [{"name": name, "frames": frames} for name, frames in stacks]


def install(recorder: Recorder) -> None:
    """Answer requests for stacks."""
    stacks = Stacks(recorder)
    recorder.listen("open", stacks.on_open)
    recorder.listen("second", stacks.on_second)
    recorder.listen("request", stacks.on_request)
    recorder.listen("fork", stacks.on_fork)


def _unused_signal() -> int | None:
    """Return a real-time signal with its default handler, the last first: it is the least used."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if handler_of(number) == _DEFAULT:
            return number
    return None


def handler_of(number: int) -> int:
    """Return the address of a signal's handler, whether it was set from Python or from C."""
    action = ctypes.create_string_buffer(256)  # struct sigaction, with room to spare: the handler comes first
    if ctypes.CDLL(None, use_errno=True).sigaction(number, None, action) != 0:
        raise OSError(ctypes.get_errno(), f"the handler of signal {number} cannot be read")
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
