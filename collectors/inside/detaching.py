"""Detaching CUPTI once a window has ended, so that launches are again as fast as before the first window.

Kineto tears CUPTI down where `TEARDOWN_CUPTI` is 1 when a session ends, but also when one begins after a
session that was not torn down: that one then loses its kernels. So the variable, which the launcher sets to
0, is 1 only from just before a session of ours ends until Kineto's thread that tears down is gone. It is
changed in place: `setenv` may move the environment while Kineto reads it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import torch

from .threads import allocate_lock, sleep

VARIABLE = "TEARDOWN_CUPTI"
KEPT, TORN_DOWN = b"0", b"1"
LONGEST_S, LOOK_S = 0.1, 0.001  # the longest wait for that thread, and the time between two looks
MIN_TORCH, MIN_CUDA = (2, 11), (12, 6)  # below, consecutive teardowns crash, or graphs do after one


class Detaching:
    """The detaching of one process.

    Attributes:
        is_attached: whether a window has attached CUPTI since it was last detached.
        is_stuck: whether Kineto has begun to tear CUPTI down and did not finish in time: it does so within
            some call of CUDA, so that no window may open. The variable stays 1 until its thread is gone.
    """

    def __init__(self) -> None:
        self.is_attached = self.is_stuck = False
        self._at_work = allocate_lock()
        self._left: set[str] = set()  # threads that may tear down

    def is_possible(self) -> bool:
        """Return whether the versions allow it, the launcher's variable is as it was, and none is stuck."""
        return not self.is_stuck and is_supported() and value() == KEPT

    @contextmanager
    def at_exit(self) -> Iterator[None]:
        """Have the session that ends meanwhile torn down, and wait until it is; nothing may be captured."""
        with self._at_work:
            before = threads_here()
            self.is_stuck = True  # until the end is seen, also where a handler of the job's raises
            set_value(TORN_DOWN)
            try:
                yield
            finally:
                self._left = threads_here() - before
                if _wait_for_end(self._left):
                    set_value(KEPT)
                    self.is_attached = self.is_stuck = False

    def let_finish(self) -> None:
        """Wait while another thread detaches, since a session is about to begin, which would lose kernels.

        Calls no CUDA: a graph may be captured.
        """
        if self._at_work.acquire(timeout=LONGEST_S):
            if self.is_stuck and not self._left & threads_here():
                set_value(KEPT)  # else that session would be torn down, too
            self._at_work.release()

    def on_fork(self) -> None:
        """Restore the variable in a forked child, which has no thread that tears down."""
        if self.is_stuck and value() == TORN_DOWN:
            set_value(KEPT)


def is_supported() -> bool:
    """Return whether this PyTorch and its CUDA can tear CUPTI down more than once."""
    release = torch.__version__.split("+")[0].split(".")[:2]
    cuda = torch.version.cuda
    return tuple(map(int, release)) >= MIN_TORCH and tuple(map(int, (cuda or "0").split("."))) >= MIN_CUDA


def threads_here() -> set[str]:
    """Return the kernel's numbers of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def value() -> bytes:
    """Return the variable's value as C reads it; empty if it is not set."""
    address = _address()
    return ctypes.string_at(address) if address else b""


def set_value(one_character: bytes) -> None:
    """Change the variable in place; it has to be set."""
    ctypes.memmove(_address(), one_character, 1)


def _address() -> int:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    return getenv(VARIABLE.encode()) or 0


def _wait_for_end(threads: set[str]) -> bool:
    """Call CUDA until threads have ended, at most for `LONGEST_S`; return whether they have.

    Kineto tears CUPTI down at the end of a call of CUDA, whichever thread makes it.
    """
    deadline_s = monotonic() + LONGEST_S
    while threads & threads_here():
        if monotonic() >= deadline_s:
            return False
        with suppress(RuntimeError):  # the GPU has failed, which the job is about to see itself
            torch.cuda.current_stream().query()
        sleep(LOOK_S)
    return True
