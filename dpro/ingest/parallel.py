"""Tasks run in processes or by any executor, so that memory stays flat however many there are.

In: one picklable function and its tasks. Out: the results, as they come. If a process dies, only its own task
is lost. The module imports nothing large, since it is the first that a worker process loads.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from dpro.errors import first_line
from dpro.processes import process_pool

Task = TypeVar("Task")
Result = TypeVar("Result")

DIED = "the process that read it died, perhaps for lack of memory; try with fewer --jobs"


def run_tasks(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    lost: Callable[[Task, str], Result],
    *,
    jobs: int = 1,
    executor: Executor | None = None,
) -> Iterator[Result]:
    """Run all tasks and yield what they return, in no order.

    Args:
        work: the function of a task; picklable, unless this process runs all.
        jobs: processes of this machine, one task in each at a time; 1 is this process.
        executor: runs them instead; it is left running.

    Raises:
        OSError: a task could not read or write; the others are dropped.
    """
    if executor is not None:
        return _in_executor(work, tasks, lost, executor)
    if jobs <= 1 or len(tasks) <= 1:
        return map(work, tasks)
    return _in_processes(work, tasks, lost, min(jobs, len(tasks)))


def _in_executor(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    lost: Callable[[Task, str], Result],
    executor: Executor,
) -> Iterator[Result]:
    futures = {executor.submit(work, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield _outcome(future, futures[future], lost)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # what still runs writes into a folder that is about to be removed


def _outcome(future: Future[Result], task: Task, lost: Callable[[Task, str], Result]) -> Result:
    try:
        return future.result()
    except OSError:
        raise
    except Exception as error:  # executors raise errors of their own for a lost worker
        return lost(task, f"{type(error).__name__}: {first_line(error)}")


def _in_processes(
    work: Callable[[Task], Result], tasks: Sequence[Task], lost: Callable[[Task, str], Result], jobs: int
) -> Iterator[Result]:
    """Submit no more tasks than there are processes: if one dies, few tasks can be the cause."""
    waiting = deque(tasks)
    while waiting:
        suspects: list[Task] = []
        yield from _until_a_process_dies(work, waiting, jobs, suspects)
        for task in suspects:
            again: list[Task] = []
            yield from _until_a_process_dies(work, deque([task]), 1, again)
            if again:
                yield lost(task, DIED)


def _until_a_process_dies(
    work: Callable[[Task], Result], waiting: deque[Task], jobs: int, suspects: list[Task]
) -> Iterator[Result]:
    """Run the waiting tasks; those that were running when a process died become suspects."""
    before = set(multiprocessing.active_children())
    pool = process_pool(jobs)
    running: dict[Future[Result], Task] = {}
    try:
        while (waiting and not suspects) or running:
            while waiting and len(running) < jobs and not suspects:
                task = waiting.popleft()
                running[_submit(pool, work, task)] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    suspects.append(task)
                else:
                    yield future.result()
    finally:
        # Reached by Ctrl-C too: what runs is not waited for, and must not write any more.
        if running:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Task], Result], task: Task) -> Future[Result]:
    """Submit a task; where the pool has just broken, return a future as if the task had been running."""
    try:
        return pool.submit(work, task)
    except BrokenProcessPool as error:
        refused: Future[Result] = Future()
        refused.set_exception(error)
        return refused
