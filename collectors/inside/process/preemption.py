"""SIGTERM and SIGHUP where the job does not handle them: a last flush before they end the process.

In: the signal. Out: the occasion `end`, a record of kind ENDING, and the same signal once more, now deadly.

The handler must be invisible: frameworks ask `signal.getsignal` and chain what they find. Python's handlers
wait for the main thread, which may hang in a collective, and a blocked signal would be inherited by every
child. `faulthandler` sets a handler in C that Python does not list and that only writes to a descriptor. That
wakes a thread here. Where the script sets a handler, before or after, this one is not there or is replaced.

What the main thread holds, a deep window, only it can save. It is asked as signal handlers are, between two
bytecodes; where it is inside a call in C for too long the thread saves what it can.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

from .. import records
from ..main_thread import MainThreadCall
from ..patching import patch
from ..recorder import Recorder

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
MAIN_THREAD_S = 0.5  # how long the main thread may take to begin
FLUSH_S = 10.0  # how long it may take to save: a third of the usual grace
_DEFAULT = 0  # SIG_DFL
_register = faulthandler.register
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Preemption:
    """The signals before whose default action one process saves."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._forget()

    def _forget(self) -> None:
        self._pipes: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._handlers: dict[int, int] = {}  # addresses, while ours are set
        self._begun, self._saved = threading.Event(), threading.Event()
        self._in_main_thread = MainThreadCall(self._save_and_stay)

    def on_open(self) -> None:
        """Handle the signals that would end this process."""
        self._pipes = {number: _pipe() for number in SIGNALS if handler_of(number) == _DEFAULT}
        self._listen()
        threading.Thread(
            target=self._recorder.call,
            args=(self._watch, dict(self._pipes)),
            name="dpro-signals",
            daemon=True,
        ).start()

    def _listen(self) -> None:
        for number, (_, theirs) in self._pipes.items():
            if handler_of(number) == _DEFAULT:
                _register(number, theirs.fileno(), all_threads=False)
                self._handlers[number] = handler_of(number)

    def ignore(self) -> None:
        """Remove the handlers before a fork or the interpreter's exit."""
        while self._handlers:
            number, address = self._handlers.popitem()
            if handler_of(number) == address:  # the script has not set its own since
                faulthandler.unregister(number)

    def on_register(self, number: int = -1) -> None:
        """Forget our handler of a signal: the script has just replaced it with its own `faulthandler`."""
        self._handlers.pop(number, None)
        self._pipes.pop(number, None)

    def after_fork_in_parent(self) -> None:
        """Set the handlers again in the parent of a fork."""
        self._listen()

    def on_fork(self) -> None:
        """Forget the handlers in a forked child."""
        self._forget()

    def _watch(self, pipes: dict[int, tuple[socket.socket, socket.socket]]) -> None:
        poll = select.poll()
        numbers = {ours.fileno(): number for number, (ours, _) in pipes.items()}
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        try:
            while numbers:
                for descriptor, _ in poll.poll():
                    number = numbers[descriptor]
                    if (
                        _sender(pipes[number][0]) == os.getpid()
                    ):  # a child that inherited the handler is not us
                        self._leave(number)
        finally:
            self.ignore()  # a signal that no thread waits for must end the process itself

    def _leave(self, number: int) -> None:
        """Save what there is, then end the process by the signal."""
        try:
            self._recorder.ending = "signal"
            if self._recorder.records is not None:
                self._recorder.records.write(records.ENDING, time.time_ns(), -1, number)
            self._in_main_thread.ask()
            if self._begun.wait(MAIN_THREAD_S):
                self._saved.wait(FLUSH_S)
            else:
                self._save_from_here()
        finally:
            self.ignore()
            os.kill(os.getpid(), number)

    def _save_from_here(self) -> None:
        """Save what needs no main thread, in a thread of its own: what saving waits for may never come."""
        saving = threading.Thread(
            target=self._recorder.guarded, args=(self._recorder.on_end,), name="dpro-save", daemon=True
        )
        saving.start()
        saving.join(FLUSH_S)

    def _save_and_stay(self) -> None:
        """In the main thread: save, and do nothing more of the script until the signal comes again."""
        self._begun.set()
        self._recorder.guarded(self._recorder.on_end)
        self._saved.set()
        time.sleep(FLUSH_S)


def install(recorder: Recorder) -> None:
    """Flush before signals that would end a process."""
    preemption = Preemption(recorder)
    patch(faulthandler, "register", before=lambda *number: recorder.call(preemption.on_register, *number))
    recorder.listen("open", preemption.on_open)
    recorder.listen("fork", preemption.on_fork)
    recorder.listen("exit", preemption.ignore)
    os.register_at_fork(
        before=lambda: recorder.call(preemption.ignore),
        after_in_parent=lambda: recorder.call(preemption.after_fork_in_parent),
    )


def _pipe() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets: the first shows which process wrote to the second, which never blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    theirs.setblocking(False)
    return ours, theirs


def _sender(receiver: socket.socket) -> int:
    """The process that wrote to the other end."""
    _, ancillary, *_ = receiver.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
    return int(_CREDENTIALS.unpack(ancillary[0][2])[0]) if ancillary else -1


def handler_of(number: int) -> int:
    """The address of a signal's handler, be it set from Python or from C."""
    action = ctypes.create_string_buffer(256)  # struct sigaction, with room to spare: the handler comes first
    if ctypes.CDLL(None, use_errno=True).sigaction(number, None, action) != 0:
        raise OSError(ctypes.get_errno(), f"the handler of signal {number} cannot be read")
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
