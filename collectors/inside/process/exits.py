"""How processes of the job end: with which exit code, or by which signal they were asked to.

Watches the moments before an end that Python or libc announces. Writes records of kind ENDING; `raised.json`,
the exception that ends the interpreter and where it was raised; `replaced.json`, the program that takes its
place (`exec`); `exit`, renamed by libc itself once the interpreter is gone; and `reaped`, what a parent
learned of the end of a process that recorded. The kernel reports all of this to any process from Linux 6.15
on, earlier ones only to the parent.

A process that a signal ends leaves nothing here, and no signal is handled: signals are the job's.
"""

from __future__ import annotations

import ctypes
import json
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
from ..files import EXIT, FAILED, RAISED, REPLACED, image_folder, next_image, write_whole
from ..patching import patch, wrap
from ..recorder import Recorder
from ..tracebacks import OURS
from ..unseen import attributes, class_name, hide_frames, message_of, path_of, traceback_of

DEEPEST = 16  # calls of a traceback that are kept, from the innermost
_QUOTED_CALL = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_FULLY_BUFFERED = 0  # _IOFBF
QUOTED = "Traceback (most recent call last)"


class Exits:
    """The end of one process, and the ends of its children that it sees."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted: set[int] = set()
        self._names: list[tuple[int, int]] = []  # addresses and lengths of names that get exit codes

    def on_open(self) -> None:
        """Keep the exit code of a process that records."""
        assert self._recorder.folder is not None
        self.keep_exit_code(self._recorder.folder / EXIT)

    def keep_exit_code(self, path: Path) -> None:
        """Make libc rename a file when the process exits, to a name that ends with the exit code.

        Python is gone by then. `on_exit` calls a function with the exit code and a pointer, and `fputc` takes
        exactly these: a code, whose last byte it writes, and a stream. The buffer of this stream
        contains the new name but for its last byte, and is full with that byte; at the next call the stream
        writes the buffer, for which it calls `rename` with the old name and the buffer. So no descriptor is
        kept, which might be that of a file of the job by then, and no file is mapped, which a user may
        truncate.

        Raises:
            OSError: the file cannot be made.
        """
        write_whole(path, b"")
        libc = ctypes.CDLL(None)
        for function in (libc.strdup, libc.calloc, libc.fopencookie):
            function.restype = ctypes.c_void_p
        old, new = os.fsencode(path), os.fsencode(path) + b"-"
        buffer = libc.calloc(ctypes.c_size_t(1), ctypes.c_size_t(len(new) + 2))
        functions = _StreamFunctions(write=ctypes.cast(libc.rename, ctypes.c_void_p).value)
        stream = ctypes.c_void_p(libc.fopencookie(ctypes.c_void_p(libc.strdup(old)), b"w", functions))
        if not stream.value:
            raise OSError(f"{path} cannot be renamed at the exit")
        libc.setvbuf(stream, ctypes.c_void_p(buffer), _FULLY_BUFFERED, ctypes.c_size_t(len(new) + 1))
        for byte in new:
            libc.fputc(byte, stream)
        for _ in ("the last byte", "the rename"):
            libc.on_exit(libc.fputc, stream)
        self._names.append((buffer, len(new)))

    def on_quit(self, code: object = 0) -> None:
        """Record a call of `os._exit`: a parent gets the last byte of the code."""
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
        content = json.dumps(describe_exception(kind, error, place)).encode()
        if self._recorder.folder is not None:
            self._recorder.write_file(RAISED, content)
        else:  # it fails before it trains
            path = self._recorder.launch / f"{FAILED}{socket.gethostname()}-{os.getpid()}.json"
            write_whole(path, content)

    def on_end(self) -> None:
        """Record an exception that a hook of the job got instead of ours, as the interpreter exits."""
        error = getattr(sys, "last_value", None)
        if error is None or self._recorder.ending or hasattr(sys, "ps1"):
            return
        self.on_raise(type(error), error, traceback_of(error))

    def note(self, code: int, number: int) -> None:
        """Record how this process will end: an exit code or a signal, -1 for the other."""
        if self._recorder.records is not None:
            self._recorder.records.write(records.ENDING, time.time_ns(), code, number)
            self._recorder.records.flush()

    def on_reaped(self, pid: int | None, code: int | None) -> None:
        """Record the end of a child that has recorded itself.

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
        """Save what is recorded so far: the process becomes another program, or tries to."""
        self._recorder.on_end()
        if self._recorder.folder is not None:
            command = [path_of(word) for word in (path, *words[1:])]
            facts = {"time_ns": time.time_ns(), "command": environment.masked_command(command)}
            self._recorder.write_file(REPLACED, json.dumps(facts).encode())

    def on_not_replaced(self) -> None:
        """Remove the record of a program that did not start."""
        if self._recorder.folder is not None:
            (self._recorder.folder / REPLACED).unlink(missing_ok=True)

    def on_fork(self) -> None:
        """Forget the exit code's file and the children in a forked child: they are the parent's."""
        for address, length in self._names:
            ctypes.memset(address, 0, length)  # libc cannot rename a file to an empty name
        self._names.clear()
        self._noted.clear()


class _StreamFunctions(ctypes.Structure):
    """`cookie_io_functions_t` of libc: the functions that a stream calls."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("read", "write", "seek", "close"))


def install(recorder: Recorder) -> None:
    """Record how this process ends, and what it learns of its children's ends."""
    exits = Exits(recorder)
    recorder.listen("open", exits.on_open)
    recorder.listen("fork", exits.on_fork)
    recorder.listen("end", exits.on_end)
    if os.getpid() == recorder.config.get("pid"):  # the process that was started as the job
        recorder.call(exits.keep_exit_code, recorder.launch / EXIT)
    for name in ("execv", "execve"):  # other functions of `os` call these
        wrap(os, name, lambda original: _wrap_exec(recorder, exits, original))
        setattr(posix, name, getattr(os, name))  # where `pickle` looks for it
    patch(os, "_exit", before=lambda *code: recorder.call(exits.on_quit, *code), also=(posix,))
    _install_excepthook(recorder, exits)

    def after_popen(popen: subprocess.Popen[Any]) -> None:
        held = attributes(popen)
        recorder.call(exits.on_reaped, held.get("pid"), held.get("returncode"))

    def after_join(process: Any) -> None:
        recorder.call(lambda: exits.on_reaped(process.pid, process.exitcode))

    # Not `wait` and `poll`: they raise at times, and tracebacks of the script would show this patch.
    patch(subprocess.Popen, "_handle_exitstatus", after=after_popen)
    patch(multiprocessing.process.BaseProcess, "join", after=after_join)


def _wrap_exec(recorder: Recorder, exits: Exits, original: Callable[..., Any]) -> Callable[..., Any]:
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


def describe_exception(
    kind: type[BaseException], error: BaseException, place: TracebackType | None
) -> dict[str, Any]:
    """Return an exception as recorded: its time, type and calls, and the first line of its message, masked.

    If the message quotes another process's traceback, as from `torch.multiprocessing.spawn` and workers of a
    DataLoader, its last line is recorded, and the calls of that process come first. The calls are innermost
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
        "message": _whole_sentences(environment.mask(line)),
        "calls": calls[: -DEEPEST - 1 : -1],
    }


def _whole_sentences(text: str) -> str:
    """Return the beginning of a text that is kept, up to the end of a sentence where one ends there."""
    if len(text) <= environment.LONGEST:
        return text
    begun = text[: environment.LONGEST]
    return begun[: begun.rfind(". ") + 1] or begun
