"""Changes of the host's work: garbage collection, threads, an artificially late rank, the environment.

Takes `every` (steps from one collection to the next, 0 for none at all), or `num_threads`, or a `rank` and
`ms`. Then Python collects garbage only at those steps, within the step; or PyTorch uses that many threads,
whatever the script sets; or the process of that rank sleeps for `ms` as each step begins. Also checks that a
variable of the environment has reached the process.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _dpro_inside_the_job.recorder import Recorder, identity
from _dpro_inside_the_job.torch_internals import backend_configs

from . import ChangeReport, place

OF_WORKERS = "torch.utils.data._utils.worker"  # workers of DataLoaders use one thread, in every job


def change_host(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Change how the host works."""
    if "num_threads" in arguments:
        _use_threads(report, **arguments)
    elif "rank" in arguments:
        _delay(report, recorder, **arguments)
    else:
        _collect(report, recorder, **arguments)


def _collect(report: ChangeReport, recorder: Recorder, every: int) -> None:
    report.missing = "the job has no steps"
    begun, due = [False], [False]

    def on_step(step: int) -> None:
        if not begun[0]:
            begun[0] = True
            if not gc.isenabled():
                report.refuse("the script turns garbage collection off itself")
            gc.collect()
            gc.disable()
            report.applied("Python's garbage collection")
        elif gc.isenabled():
            report.refuse("the script turns garbage collection on again")
        due[0] = every > 0 and step % every == 0

    def on_work() -> None:  # `on_step` runs between two steps: a collection there would not be counted
        if due[0]:
            due[0] = False
            gc.collect()

    recorder.listen("step", on_step)
    recorder.listen("work", on_work)


def _delay(report: ChangeReport, recorder: Recorder, rank: int, ms: float) -> None:
    report.missing = "the job has no steps"
    due, is_checked = [False], [False]

    def on_step(step: int) -> None:
        this_rank, num_ranks = identity()
        if not is_checked[0]:
            is_checked[0] = True
            if rank >= num_ranks:
                report.refuse(f"the job has {num_ranks} ranks: there is no rank {rank}")
            report.applied("each step" if this_rank == rank else "nothing: the edit is for another rank")
        due[0] = this_rank == rank

    def on_work() -> None:  # within the step, as in `_collect`
        if due[0]:
            due[0] = False
            time.sleep(ms / 1e3)

    recorder.listen("step", on_step)
    recorder.listen("work", on_work)


def _use_threads(report: ChangeReport, num_threads: int) -> None:
    report.missing = f"the job already uses {num_threads} threads: nothing to change"
    original: Callable[[int], None] = torch.set_num_threads

    @functools.wraps(original)
    def patched(asked: int) -> None:
        if sys._getframe(1).f_globals.get("__name__") == OF_WORKERS:
            return original(asked)
        original(num_threads)
        if asked != num_threads:
            report.applied(f"torch.set_num_threads at {place()}", str(asked))

    before = torch.get_num_threads()
    original(num_threads)
    torch.set_num_threads = patched
    if before != num_threads:
        report.applied("torch", str(before))


def check_variable(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Check that the process has a variable set by the launcher when it begins to train.

    Another launcher or the script may have replaced its value. The change is refused also where no process
    group has the `backend` that the variable is for.
    """

    def on_open() -> None:
        actual = os.environ.get(arguments["name"])
        wanted, backends = arguments.get("backend", ""), backend_configs()
        if wanted and not any(wanted in backend for backend in backends):
            used = ", ".join(backends) or "no process group"
            line = f"{arguments['name']}={arguments['value']}"
            report.refuse(f"the job has {used}: with {wanted}, set {line} in its environment")
            return
        if actual == arguments["value"]:
            report.applied("environment")
        else:
            report.refuse(f"the job sets {arguments['name']} itself" + (f" to {actual}" if actual else ""))

    recorder.listen("open", lambda: report.attempt(on_open))
