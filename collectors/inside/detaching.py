"""Detaching CUPTI once a window has ended, so that launches are again as fast as before the first window.

Kineto tears CUPTI down where `TEARDOWN_CUPTI` is 1 when a session ends, but also when one begins after a
session that was not torn down: that one then loses its kernels. So the variable, which the launcher sets to
0, is 1 only from just before a session of ours ends until Kineto's thread that tears down is gone. It is
changed in place: `setenv` may move the environment while Kineto reads it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from .threads import sleep

VARIABLE = "TEARDOWN_CUPTI"
LONGEST_S, LOOK_S = 0.1, 0.001  # the longest wait for that thread, and the time between two looks
MIN_TORCH, MIN_CUDA = (2, 11), (12, 6)  # below, consecutive teardowns crash, or graphs do after one
KEPT, TORN_DOWN = b"0", b"1"


class Detaching:
    """The detaching of one process.

    Attributes:
        is_stuck: whether Kineto has not torn CUPTI down in time: it will do so within some later call of
            CUDA, so that no window may open.
    """

    def __init__(self) -> None:
        self.is_stuck = False

    def is_possible(self) -> bool:
        """Return whether the versions allow it, the launcher's variable is as it was, and none is stuck."""
        return not self.is_stuck and _is_supported() and _value() == KEPT

    @contextmanager
    def at_exit(self) -> Iterator[None]:
        """Have the session that ends meanwhile torn down, and wait until it is; nothing may be captured."""
        before = _threads()
        _set(TORN_DOWN)
        try:
            yield
        finally:
            self.is_stuck = True  # also where a handler of the job's raises during the wait
            self.is_stuck = not wait_for_end(_threads() - before)
            if not self.is_stuck:
                _set(KEPT)

    def on_fork(self) -> None:
        """Start anew in a forked child, which has no thread that tears down."""
        if self.is_stuck and _value() == TORN_DOWN:
            _set(KEPT)
        self.is_stuck = False


def wait_for_end(threads: set[str]) -> bool:
    """Call CUDA until threads have ended, at most for `LONGEST_S`; return whether they have.

    Kineto tears CUPTI down at the end of a call of CUDA, whichever thread makes it.
    """
    deadline = time.monotonic() + LONGEST_S
    while threads & _threads():
        if time.monotonic() >= deadline:
            return False
        with suppress(RuntimeError):  # the GPU has failed, which the job is about to see itself
            torch.cuda.current_stream().query()
        sleep(LOOK_S)
    return True


def _is_supported() -> bool:
    torch_version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    cuda = torch.version.cuda
    return torch_version >= MIN_TORCH and cuda is not None and tuple(map(int, cuda.split("."))) >= MIN_CUDA


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _address() -> int:
    """Return where C reads the variable's value; 0 if it is not set."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return getenv(VARIABLE.encode()) or 0


def _value() -> bytes:
    address = _address()
    return ctypes.string_at(address) if address else b""


def _set(value: bytes) -> None:
    ctypes.memmove(_address(), value, 1)
