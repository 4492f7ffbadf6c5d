"""Conversion of Polars panics to errors that name a file.

Wraps code that may panic: a panic prints a backtrace and raises an exception that `except Exception` does not
catch. Raises an error of one line instead. Rust prints to file descriptor 2, bypassing `sys.stderr`, so
everything written there is held back while a panic is possible, and dropped after a panic.
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
    """Return whether an error is a panic of a Rust library; its class does not derive from `Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Turn a panic inside into the error that `error_of` makes from the panic's first line."""
    with _held.back():
        try:
            yield
        except BaseException as error:
            if not is_panic(error):
                raise
            _held.panicked = True
            raise error_of(first_line(error)) from error


class _HeldBack:
    """Standard error, held back while any thread is in a block that may panic; dropped after a panic."""

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
        with suppress(OSError), ExitStack() as undo:  # stderr is closed, or no more files can be opened
            self._stderr = os.dup(_STDERR)
            undo.callback(os.close, self._stderr)
            kept = os.fdopen(os.memfd_create("dpro-stderr"), "w+b")
            # Linux does not lock the position of such a file: without O_APPEND, concurrent writes of two
            # threads overwrote each other.
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
    with suppress(OSError, ValueError, AttributeError):  # stderr may be None or closed
        sys.stderr.flush()


_held = _HeldBack()
