"""Worker processes for a command's work: how many may run, and how they start.

Takes a number of processes; returns a pool of them, or the workers that the user named instead, if an
extension provides them. Imports nothing large, since each worker loads this module first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType

from dpro.plugins import hooks_of


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


_STARTING = threading.Lock()


class _Worker(SpawnProcess):
    """A process that does not import the main program of its parent.

    By default `multiprocessing` imports it, so a script without `if __name__ == "__main__"` would repeat all
    of its work in each process. Workers only run functions of modules.
    """

    def start(self) -> None:
        with _STARTING:  # two threads that start workers must not restore each other's placeholder
            program = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = program


class _Context(SpawnContext):
    """Context that spawns `_Worker`s; a fork would lack the threads of the loaded libraries."""

    Process = _Worker


@contextmanager
def named_workers(paths: Sequence[Path]) -> Iterator[Executor | None]:
    """Yield the workers that the user named, possibly on other machines; None if none are named.

    Args:
        paths: files and folders that the workers must be able to read.

    Raises:
        DproError: the workers cannot be reached, or cannot do the work.
    """
    for workers_of in hooks_of("workers"):
        workers = workers_of(paths)
        if workers is not None:
            with workers as executor:
                yield executor
            return
    yield None


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of worker processes with one core each."""
    return ProcessPoolExecutor(jobs, _Context(), _prepare_worker)


def _prepare_worker() -> None:
    """Limit a worker to one core, and make it end with its parent.

    Ctrl-C ends the worker silently, since the parent reports the interrupt. After a killed parent, a worker
    would wait for work forever, since it has the write end of its own pipe open.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
