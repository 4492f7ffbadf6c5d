"""Processes among which a command divides its work: how many there may be, and how they begin.

In: a number of processes. Out: a pool of them. The module imports nothing large, since it is the first that
such a process loads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of processes with one core each.

    Args:
        jobs: how many.
    """
    # Not forked: the threads of the libraries that are loaded already would not come along.
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare_worker)


def _prepare_worker() -> None:
    """Limit a worker to one core; Ctrl-C ends it silently, since its parent reports the interrupt."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
