"""How processes of the job end: with which exit code, or asked to by which signal.

In: the moments before an end that Python or libc announces. Out: records of kind ENDING; `raised.json`, the
exception that ends the interpreter and where it was raised; `replaced.json`, the program that takes its place
(`exec`); `exit`, written by libc itself once the interpreter is gone; and `reaped`, what a parent got to know
of a process that recorded.
The kernel reports all of this to any process from Linux 6.15 on, earlier ones only to the parent.

A process that is killed without warning (SIGKILL, a crash) leaves nothing here.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing.process
import os
import posix
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import environment, records
from ..files import FAILED, RAISED, REPLACED, image_folder, next_image, write_whole
from ..patching import patch, wrap
from ..recorder import Recorder
from ..tracebacks import OURS
from ..unseen import attributes, class_name, hide_frames, message_of, path_of, traceback_of

UNKNOWN = b"\xff\xfe"  # the file `exit` of a process that has not exited
DEEPEST = 16  # calls of a traceback that are kept, from the innermost
_QUOTED_CALL = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_UNBUFFERED = 2  # _IONBF
_MAP_FIXED = 0x10  # of Linux
QUOTED = "Traceback (most recent call last)"


class Exits:
    """The end of one process, and those it gets to see of its children."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted: set[int] = set()
        self._pages: list[int] = []  # addresses of those that exit codes are written to

    def on_open(self) -> None:
        """This process records: what it ends with is of interest."""
        assert self._recorder.folder is not None
        self.keep_exit_code(self._recorder.folder / "exit")

    def keep_exit_code(self, path: Path) -> None:
        """Have libc write the exit code to a file when the process exits: one byte, twice.

        Python is gone by then. `on_exit` calls a function with the exit code and a pointer, and `fputc`
        takes just that: a code, of which it writes the last byte, and a stream. Until then the file holds
        two bytes that differ, so that its block is there on a disk that is full in the end. The stream is one
        of memory, into which the file is mapped: a job may close all descriptors, and have its own file under
        the number of one of ours.

        Raises:
            OSError: it cannot be written.
        """
        path.write_bytes(UNKNOWN)
        with path.open("r+b") as file:
            page = _mapped(0, mmap.MAP_SHARED, file.fileno())
        libc = ctypes.CDLL(None)
        libc.fmemopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(libc.fmemopen(ctypes.c_void_p(page), ctypes.c_size_t(len(UNKNOWN)), b"r+"))
        if not stream.value:
            raise OSError(f"{path} cannot be written")
        libc.setvbuf(stream, None, _UNBUFFERED, ctypes.c_size_t(0))
        for _ in UNKNOWN:
            libc.on_exit(libc.fputc, stream)
        self._pages.append(page)

    def on_quit(self, code: object = 0) -> None:
        """`os._exit` was called: the code's last byte is what a parent gets."""
        if isinstance(code, int):
            self.note(code & 0xFF, -1)

    def on_raise(self, kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        """Record an uncaught exception, which is about to end the interpreter."""
        self._recorder.ending = "exception"
        if issubclass(kind, KeyboardInterrupt):  # Python then kills itself, so that a shell sees Ctrl-C
            self.note(-1, signal.SIGINT)
            return
        self.note(1, -1)
        self._recorder.on_raise(error, place)
        content = json.dumps(raised(kind, error, place)).encode()
        if self._recorder.folder is not None:
            self._recorder.write_file(RAISED, content)
        else:  # it fails before it trains
            path = self._recorder.launch / f"{FAILED}{socket.gethostname()}-{os.getpid()}.json"
            write_whole(path, content)

    def on_end(self) -> None:
        """The interpreter goes: after an exception that a hook of the job's own got in place of ours?"""
        error = getattr(sys, "last_value", None)
        if error is None or self._recorder.ending or hasattr(sys, "ps1"):
            return
        self.on_raise(type(error), error, traceback_of(error))

    def note(self, code: int, number: int) -> None:
        """Record how this process will end: an exit code or a signal, -1 for the other."""
        if self._recorder.records is not None:
            self._recorder.records.write(records.ENDING, time.time_ns(), code, number)

    def on_reaped(self, pid: int | None, code: int | None) -> None:
        """A child may have ended; say so where it has recorded. A negative code is a signal.

        Args:
            pid: of the child; None where there was none.
            code: its exit code, or minus the number of the signal; None where it is alive.
        """
        if pid is None or code is None or pid in self._noted:
            return
        self._noted.add(pid)
        host = socket.gethostname()
        last = next_image(self._recorder.launch, host, pid) - 1
        if last >= 0:
            (image_folder(self._recorder.launch, host, pid, last) / "reaped").write_text(str(code))

    def on_replace(self, path: Any, words: Sequence[Any]) -> None:
        """The process is about to become another program, or tries to: what is recorded so far is saved."""
        self._recorder.on_end()
        if self._recorder.folder is not None:
            command = [path_of(word) for word in (path, *words[1:])]
            facts = {"time_ns": time.time_ns(), "command": environment.masked_command(command)}
            self._recorder.write_file(REPLACED, json.dumps(facts).encode())

    def on_not_replaced(self) -> None:
        """It is the same program still."""
        if self._recorder.folder is not None:
            (self._recorder.folder / REPLACED).unlink(missing_ok=True)

    def on_fork(self) -> None:
        """This is a forked child: its exit code is not that of the process that recorded."""
        for page in self._pages:
            _mapped(page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        self._pages.clear()
        self._noted.clear()


def _mapped(address: int, flags: int, descriptor: int) -> int:
    """Map a page as `mmap` of C does, which keeps no descriptor open, unlike that of Python; its address.

    Raises:
        OSError: it cannot be mapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    sizes = ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)
    page: int = libc.mmap(*sizes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, ctypes.c_long(0))
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "a page cannot be mapped")
    return page


def install(recorder: Recorder) -> None:
    """Keep how this process ends, and what it learns of its children's ends."""
    exits = Exits(recorder)
    recorder.listen("open", exits.on_open)
    recorder.listen("fork", exits.on_fork)
    recorder.listen("end", exits.on_end)
    if os.getpid() == recorder.config.get("pid"):  # the process that was started as the job
        recorder.call(exits.keep_exit_code, recorder.launch / "exit")
    for name in ("execv", "execve"):  # which the others of `os` call
        wrap(os, name, lambda original: _replacing(recorder, exits, original))
        setattr(posix, name, getattr(os, name))  # where `pickle` looks for it
    patch(os, "_exit", before=lambda *code: recorder.call(exits.on_quit, *code), also=(posix,))
    _install_excepthook(recorder, exits)

    def after_popen(popen: subprocess.Popen[Any]) -> None:
        own = attributes(popen)
        recorder.call(exits.on_reaped, own.get("pid"), own.get("returncode"))

    def after_join(process: Any) -> None:
        recorder.call(lambda: exits.on_reaped(process.pid, process.exitcode))

    # Not `wait` and `poll`: they raise at times, and tracebacks of the script would show this patch.
    patch(subprocess.Popen, "_handle_exitstatus", after=after_popen)
    patch(multiprocessing.process.BaseProcess, "join", after=after_join)


def _replacing(recorder: Recorder, exits: Exits, original: Callable[..., Any]) -> Callable[..., Any]:
    def replace(path: Any, words: Any, *environment: Any) -> None:
        recorder.call(exits.on_replace, path, words)
        try:
            original(path, words, *environment)
        finally:
            recorder.call(exits.on_not_replaced)

    return replace


def _install_excepthook(recorder: Recorder, exits: Exits) -> None:
    original = sys.excepthook

    def excepthook(kind: type[BaseException], *details: Any) -> None:
        # A handler of a signal may raise meanwhile: Python would show that in place of the exception.
        with suppress(BaseException):
            recorder.call(exits.on_raise, kind, *details)
            recorder.call(hide_frames, details[0], OURS)
        original(kind, *details)

    sys.excepthook = excepthook


def raised(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> dict[str, Any]:
    """An exception as recorded: when, its type, the first line of its message without secrets, and its calls.

    Of a message that quotes another process's traceback, as `torch.multiprocessing.spawn` and workers of a
    DataLoader do, it is the last line, and the calls of that process come first. The calls are innermost
    first, each `file:line function`; none is ours.
    """
    calls = []
    while place is not None:
        code = place.tb_frame.f_code
        calls.append(f"{code.co_filename}:{place.tb_lineno} {code.co_name}")
        place = place.tb_next
    message = message_of(error)
    lines = message.strip().splitlines() or [""]
    line = lines[0]
    if QUOTED in message:
        line = lines[-1].removeprefix(f"{class_name(kind)}: ")
        calls += [f"{file}:{number} {function}" for file, number, function in _QUOTED_CALL.findall(message)]
    calls = [call for call in calls if not call.startswith(OURS)]
    return {
        "time_ns": time.time_ns(),
        "type": class_name(kind),
        "message": environment.mask(line)[: environment.LONGEST],
        "calls": calls[: -DEEPEST - 1 : -1],
    }
