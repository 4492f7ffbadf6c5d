"""How far a process has come on its way to the first step: the parts of a job's start.

Watches the moments at which the scheduler started the job and the kernel the process, torch was imported, the
process group was asked for and made, and the loop first asked for a batch or for gradients. Writes
`started.json`, whole at each of these once the process records, or asks for its process group. When its first
step ended is in its records.
"""

from __future__ import annotations

import json
import os
import time

import torch.distributed as dist

from ..files import STARTED, write_whole
from ..kernel import start_ticks
from ..patching import patch
from ..recorder import ENOUGH, Recorder
from . import start_parts
from .start_parts import StartParts

SCHEDULED = "SLURM_JOB_START_TIME"  # seconds since 1970
NS_PER_S = 1_000_000_000


class Starting:
    """The first moments of one process, ns on the host's clock; -1 for those that have not come."""

    def __init__(self, recorder: Recorder, parts: StartParts) -> None:
        """Start just after the import of torch."""
        self._recorder, self._parts = recorder, parts
        self._asked_ns = 0
        self._moments = {"process_ns": process_start_ns(), "imported_ns": time.time_ns()}
        self._moments |= dict.fromkeys(("group_begin_ns", "group_ns", "work_ns"), -1)
        self._moments["scheduled_ns"] = scheduled_ns()

    def on_group_begin(self) -> None:
        """Record that the process asks for its process group."""
        self._asked_ns = time.time_ns()
        self._recorder.on_joining()
        self._note("group_begin_ns")

    def on_group(self) -> None:
        """Record that the process has its process group."""
        self._note("group_ns")
        self._parts.on_group(dist.group.WORLD, self._asked_ns)

    def on_work(self) -> object:
        """Record the loop's first request; requests while the process group is made are not the loop's."""
        in_group = self._moments["group_begin_ns"] >= 0 > self._moments["group_ns"]
        if in_group:
            return None
        self._note("work_ns")
        return ENOUGH

    def save(self) -> None:
        """Write the moments so far, where the process records or may be about to."""
        folder = self._recorder.folder or self._recorder.joining
        if folder is not None:
            write_whole(folder / STARTED, json.dumps(self._moments).encode())

    def on_fork(self) -> None:
        """Start now, without other moments, in a forked child."""
        self._moments |= dict.fromkeys(self._moments, -1) | {"process_ns": time.time_ns()}

    def _note(self, moment: str) -> None:
        if self._moments[moment] < 0:
            self._moments[moment] = time.time_ns()
            self.save()


def process_start_ns() -> int:
    """Return when the kernel started this process, in ns, to 10 ms; -1 where it does not say."""
    ticks = start_ticks(os.getpid())
    if ticks >= 0:
        booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return booted_ns + ticks * NS_PER_S // os.sysconf("SC_CLK_TCK")
    return -1


def scheduled_ns() -> int:
    """Return when the scheduler started the job, in ns; -1 where it does not say."""
    said = os.environ.get(SCHEDULED, "")
    return int(said) * NS_PER_S if said.isdigit() else -1


def install(recorder: Recorder) -> None:
    """Record how the process starts."""
    starting = Starting(recorder, start_parts.install(recorder))
    recorder.listen("open", starting.save)
    recorder.listen("work", starting.on_work)
    recorder.listen("fork", starting.on_fork)
    if dist.is_available():
        from torch.distributed import device_mesh, distributed_c10d

        patch(
            distributed_c10d,
            "init_process_group",
            before=lambda *_: recorder.call(starting.on_group_begin),
            after=lambda *_: recorder.call(starting.on_group),
            also=(dist, device_mesh),
        )
