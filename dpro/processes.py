"""Processes among which a command divides its work: how many there may be, and how they begin.

In: a number of processes. Out: a pool of them; or the workers that the user named instead, if an extension
knows them. The module imports nothing large, since it is the first that such a process loads.
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
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


_STARTING = threading.Lock()


class _Worker(SpawnProcess):
    """A process that does not run the program of the one that starts it.

    It would, to find what was defined there: a script without `if __name__ == "__main__"` would then do all
    over again what it has asked for, in each process. What workers do is defined in modules.
    """

    def start(self) -> None:
        with _STARTING:  # else one thread would put back what another has put there
            program = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = program


class _Context(SpawnContext):
    """Starts such processes; not forked: threads of the libraries that are loaded would not come along."""

    Process = _Worker


@contextmanager
def named_workers(paths: Sequence[Path]) -> Iterator[Executor | None]:
    """The workers that the user named, which may be on other machines; None where none are named.

    Args:
        paths: that they have to see.

    Raises:
        DproError: they are not there, or cannot do the work.
    """
    for workers_of in hooks_of("workers"):
        workers = workers_of(paths)
        if workers is not None:
            with workers as executor:
                yield executor
            return
    yield None


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of processes with one core each."""
    return ProcessPoolExecutor(jobs, _Context(), _prepare_worker)


def _prepare_worker() -> None:
    """Limit a worker to one core; it ends with its parent.

    Ctrl-C ends it silently, since its parent reports the interrupt. Where the parent is killed, the worker
    would wait for work for ever: it holds the other end of the pipe from which it reads.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
