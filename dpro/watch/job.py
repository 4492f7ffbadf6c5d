"""The job that is watched: its processes as they come, what they have recorded, and whether it moves.

In: a run directory. Out: a `ProcessTail` per process, and `Progress`. There may be a thousand processes: what
each says of itself is read when its file's time stamp has changed.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess, attempts, process_facts
from dpro.collectors.inside.files import WANTED
from dpro.collectors.launch.recording import RAW, Launch, is_locked, launches
from dpro.collectors.liveness import job_lives
from dpro.folders import written_whole
from dpro.units import NS_PER_S
from dpro.watch.tail import ProcessTail, workers_of

MAX_PAUSES = 500  # steps whose durations are remembered
SILENT_S = 60.0  # without a record, a job whose locks cannot be seen from this host is over


@dataclass(frozen=True)
class Progress:
    """How a job moves.

    Attributes:
        updates: ends of steps so far, of all ranks together.
        moved_s: when the latest was read, or a process joined, on this host's monotonic clock.
        pauses_s: seconds between the ends of the latest steps of the first rank, oldest first.
    """

    updates: int = 0
    moved_s: float = 0.0
    pauses_s: tuple[float, ...] = ()


def advance(progress: Progress, updates: int, pause_s: float | None, now_s: float) -> Progress:
    """Return the progress after records were read.

    Args:
        pause_s: seconds between the first rank's latest two ends of steps; None where it ended none.
    """
    if updates <= progress.updates:
        return progress
    pauses = progress.pauses_s if pause_s is None else (*progress.pauses_s, pause_s)[-MAX_PAUSES:]
    return Progress(updates, now_s, pauses)


class JobProcesses:
    """The processes that have recorded so far."""

    def __init__(self, run: Path) -> None:
        """None was met yet."""
        self.all: list[RecordedProcess] = []
        self._run = run
        self._met: dict[str, tuple[int, RecordedProcess]] = {}

    def look(self) -> bool:
        """Read what new and changed processes say of themselves; return whether there were any."""
        before = self._met
        self._met = {}
        for launch in launches(self._run):
            with suppress(OSError), os.scandir(launch.raw) as folders:
                for folder in folders:
                    self._meet(folder.path, before)
        changed = self._met.keys() != before.keys() or any(
            self._met[path][1] is not before[path][1] for path in before
        )
        self.all = [process for _, process in self._met.values()]
        return changed

    def _meet(self, folder: str, before: dict[str, tuple[int, RecordedProcess]]) -> None:
        with suppress(OSError, ValueError):  # no process's folder, or one whose facts are still to come
            stamp = os.stat(f"{folder}/facts.json").st_mtime_ns
            met = before.get(folder)
            if met is None or met[0] != stamp:
                met = stamp, RecordedProcess(Path(folder), process_facts(Path(folder)))
            self._met[folder] = met


class Job:
    """The processes that train now, and what they have recorded.

    Attributes:
        tails: by folder.
    """

    def __init__(self, run: Path) -> None:
        """Nothing is read yet."""
        self.run = run
        self.tails: dict[Path, ProcessTail] = {}
        self.progress = Progress(moved_s=time.monotonic())
        self._heard_s = time.monotonic()
        self._processes = JobProcesses(run)
        self._workers: pl.DataFrame | None = None

    @property
    def step(self) -> int:
        """The latest step that ended on any rank; -1 before the first."""
        return max((tail.num_updates for tail in self.tails.values()), default=0) - 1

    @property
    def still_s(self) -> float:
        """Seconds since any rank last ended a step."""
        return time.monotonic() - self.progress.moved_s

    @property
    def workers(self) -> pl.DataFrame:
        """Rows of table `workers`."""
        if self._workers is None:
            self._workers = workers_of(self.tails.values())
        return self._workers

    def lives(self) -> bool:
        """Return whether the job is still being recorded."""
        return any(self._lives(launch) for launch in launches(self.run))

    def _lives(self, launch: Launch) -> bool:
        with suppress(OSError, ValueError):
            launch.facts()
            seen = job_lives(launch)
            return is_locked(launch) or time.monotonic() - self._heard_s < SILENT_S if seen is None else seen
        return False

    def follow(self) -> bool:
        """Follow the processes of the latest attempt; return whether the job began again."""
        if not self._processes.look():
            return False
        starts = attempts(self._processes.all)
        current = {process.folder: process for process in (starts[-1] if starts else [])}
        if not current:
            return False
        began_again = bool(self.tails) and not self.tails.keys() <= current.keys()
        if began_again:
            self.progress = replace(self.progress, updates=0)
        if current.keys() - self.tails.keys():
            self.progress = replace(self.progress, moved_s=time.monotonic())
        self.tails = {folder: self._followed(process) for folder, process in current.items()}
        self._workers = None
        return began_again

    def _followed(self, process: RecordedProcess) -> ProcessTail:
        tail = self.tails.get(process.folder) or ProcessTail(process)
        tail.process = process  # what it says of itself may have changed
        return tail

    def read(self) -> None:
        """Read all new records."""
        before = {folder: tail.last_update_ns for folder, tail in self.tails.items()}
        new = [tail.read_records() for tail in self.tails.values()]
        if any(new):
            self._heard_s = time.monotonic()
        updates = sum(tail.num_updates for tail in self.tails.values())
        self.progress = advance(self.progress, updates, self._pause_s(before), time.monotonic())

    def _pause_s(self, before: dict[Path, int]) -> float | None:
        """Return the seconds between the first rank's latest two ends of steps; None where it ended none."""
        if not self.tails:
            return None
        first = min(self.tails, key=lambda folder: self.tails[folder].process.rank)
        last_ns = self.tails[first].last_update_ns
        return (last_ns - before[first]) / NS_PER_S if 0 <= before[first] < last_ns else None

    def ask_for_calls(self) -> None:
        """Ask all processes to save their latest calls."""
        # The disk may be full, or the recording over.
        with suppress(OSError), written_whole(self.run / RAW, WANTED) as wanted:
            wanted.write(str(time.time_ns()).encode())
