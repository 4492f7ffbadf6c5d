"""Panics of polars as errors that name a file.

In: what may panic, which prints a backtrace and raises what no `except Exception` sees. Out: an error of one
line. What a library in Rust prints goes to the standard error of the process, whatever `sys.stderr` is: that
is held back for as long as a panic may come, and dropped if one came.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from dpro.errors import first_line

_STDERR = 2


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust: its class is none of Python's `Exception`s."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Turn a panic inside into an error."""
    with _held.back():
        try:
            yield
        except BaseException as error:
            if not is_panic(error):
                raise
            _held.panicked = True
            raise error_of(first_line(error)) from error


class _HeldBack:
    """Standard error, held back while any thread is where a panic may come; dropped if one came."""

    def __init__(self) -> None:
        self.panicked = False
        self._lock = threading.Lock()
        self._inside = 0
        self._kept: IO[bytes] | None = None
        self._stderr = -1

    @contextmanager
    def back(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._end()

    def _begin(self) -> None:
        self.panicked, self._kept = False, None
        _flush()
        with suppress(OSError), ExitStack() as undo:  # it is closed, or no more files can be opened
            self._stderr = os.dup(_STDERR)
            undo.callback(os.close, self._stderr)
            kept = os.fdopen(os.memfd_create("dpro-stderr"), "w+b")
            # Linux does not lock the position of such a file: of two threads that write at once one overwrote
            # what the other wrote.
            fcntl.fcntl(kept, fcntl.F_SETFL, os.O_APPEND)
            os.dup2(kept.fileno(), _STDERR)
            self._kept = kept
            undo.pop_all()

    def _end(self) -> None:
        if self._kept is None:
            return
        _flush()
        os.dup2(self._stderr, _STDERR)
        os.close(self._stderr)
        with self._kept as kept:
            kept.seek(0)
            said = b"" if self.panicked else kept.read()
        if said:
            os.write(_STDERR, said)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):  # there may be none, or it is closed
        sys.stderr.flush()


_held = _HeldBack()
