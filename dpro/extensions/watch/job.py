"""The watched job: its processes as they appear, what they have recorded, and whether it moves.

Takes a run directory; returns a `ProcessTail` per process, and `Progress`. There may be a thousand processes:
the facts of each are read only when the timestamp of their file has changed.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess, attempts, of_training, process_facts
from dpro.collectors.convert.tables import frames_of, number_of, worker_row
from dpro.collectors.inside import records
from dpro.collectors.inside.files import WANTED
from dpro.collectors.inside.records import Record
from dpro.collectors.inside.stepping import Boundary, number_steps
from dpro.collectors.launch.recording import RAW, Launch, is_locked, launches
from dpro.collectors.liveness import job_lives
from dpro.detect.load_model import WORKLOAD
from dpro.folders import written_whole
from dpro.schema import CLOCK_SAMPLES, COUNTERS, STEPS, WORKERS, conform
from dpro.units import NS_PER_S

MAX_PAUSES = 500  # steps whose durations are kept
SILENT_S = 60.0  # after this time without a record, a job whose locks are invisible from this host is over


@dataclass(frozen=True)
class Progress:
    """How a job moves.

    Attributes:
        updates: ends of steps so far, over all ranks.
        moved_s: when the latest happened, or a process joined, on this host's monotonic clock.
        pauses_s: seconds between the ends of the first rank's latest steps, oldest first.
    """

    updates: int = 0
    moved_s: float = 0.0
    pauses_s: tuple[float, ...] = ()


def advance(progress: Progress, updates: int, pause_s: float | None, now_s: float) -> Progress:
    """Return the progress after records were read.

    Args:
        pause_s: seconds between the first rank's latest two ends of steps; None if it ended none.
    """
    if updates <= progress.updates:
        return progress
    pauses = progress.pauses_s if pause_s is None else (*progress.pauses_s, pause_s)[-MAX_PAUSES:]
    return Progress(updates, now_s, pauses)


class JobProcesses:
    """Processes that have recorded so far."""

    def __init__(self, run: Path) -> None:
        self.all: list[RecordedProcess] = []
        self._run = run
        self._met: dict[str, tuple[int, RecordedProcess]] = {}

    def look(self) -> bool:
        """Read the facts of new and changed processes; return whether there were any."""
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
        with suppress(OSError, ValueError):  # not a process's folder, or its facts are not written yet
            stamp = os.stat(f"{folder}/facts.json").st_mtime_ns
            met = before.get(folder)
            if met is None or met[0] != stamp:
                met = stamp, RecordedProcess(Path(folder), process_facts(Path(folder)))
            self._met[folder] = met


class Job:
    """Processes that train now, and what they have recorded.

    Attributes:
        tails: by folder.
        attempt: how many times the job has begun again.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.attempt = 0
        self.tails: dict[Path, ProcessTail] = {}
        self.progress = Progress(moved_s=time.monotonic())
        self._heard_s = time.monotonic()
        self._processes = JobProcesses(run)
        self._workers: pl.DataFrame | None = None

    @property
    def step(self) -> int:
        """The latest step that ended on any rank; -1 before the first."""
        return max((tail.step for tail in self.tails.values()), default=-1)

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
        starts = attempts(of_training(self._processes.all))
        current = {process.folder: process for process in (starts[-1] if starts else [])}
        if not current:
            return False
        began_again = bool(self.tails) and not self.tails.keys() <= current.keys()
        if began_again:
            self.progress = replace(self.progress, updates=0)
            self.attempt += 1
        if current.keys() - self.tails.keys():
            self.progress = replace(self.progress, moved_s=time.monotonic())
        self.tails = {folder: self._followed(process) for folder, process in current.items()}
        self._workers = None
        return began_again

    def _followed(self, process: RecordedProcess) -> ProcessTail:
        tail = self.tails.get(process.folder) or ProcessTail(process)
        tail.process = process  # its facts may have changed
        return tail

    def read(self) -> None:
        """Read all new records."""
        before = {folder: tail.last_update_ns for folder, tail in self.tails.items()}
        new = [tail.read_records() for tail in self.tails.values()]
        if any(new):
            self._heard_s = time.monotonic()
        updates = sum(tail.num_updates for tail in self.tails.values())
        quiet_s = min((tail.quiet_s for tail in self.tails.values()), default=0.0)
        self.progress = advance(self.progress, updates, self._pause_s(before), time.monotonic() - quiet_s)

    def _pause_s(self, before: dict[Path, int]) -> float | None:
        """Return the seconds between the first rank's latest two ends of steps; None where it ended none."""
        if not self.tails:
            return None
        first = min(self.tails, key=lambda folder: self.tails[folder].process.rank)
        last_ns = self.tails[first].last_update_ns
        return (last_ns - before[first]) / NS_PER_S if 0 <= before[first] < last_ns else None

    def ask_for_calls(self) -> None:
        """Ask all processes to save their latest calls."""
        # Fails if the disk is full or the recording over.
        with suppress(OSError), written_whole(self.run / RAW, WANTED) as wanted:
            wanted.write(str(time.time_ns()).encode())


# Records of one process since the last look: its latest steps and records, in memory and bounded. Nothing is
# read twice. In a job of a thousand ranks each look reads a thousand such files, so only flat numbers are
# kept, and modules that need frames make them.

MIN_RECENT = 2000  # records that are kept: a few hundred steps
MIN_STEPS = 240  # steps that are kept
RARE = (records.ANCHOR, records.PEER)  # all records of these kinds are kept, not only the latest
MAX_WINDOWS = 8  # latest deep windows that are kept
BLOCK = 1000 * records.SIZE  # bytes read at once
_FIELDS = 4  # of a step: number, start, duration, elements of its batches
OPEN_NS = (1 << 63) - 1


class Anchor(NamedTuple):
    """The optimizer that ends steps, the offset of step numbers from its updates, the first number."""

    optimizer: int
    base: int
    first: int


class ProcessTail:
    """The latest records of one process.

    Attributes:
        num_updates: updates of all optimizers so far; the job moves while they grow.
        last_update_ns: time of the latest, on that host's clock; -1 before the first. Of several optimizers
            only the one that ends steps counts, once it is known.
        heartbeat: the latest record of its clock; None before the first.
        heard_s: when that was read, on this host's monotonic clock.
        behind_ns: least age of a record when it was read, by the two hosts' clocks; None before the first.
        compared: comparisons of its host's clock with another host's.
        windows: the latest deep windows: number, begin, end (`OPEN_NS` if open).
        has_numbers: whether losses or gradient norms are recorded.
    """

    def __init__(self, process: RecordedProcess) -> None:
        self.process = process
        self.num_updates = 0
        self.last_update_ns = -1
        self.heartbeat: Record | None = None
        self.heard_s = 0.0
        self.least_age_ns: int | None = None
        self.compared: list[Record] = []
        self.windows: deque[tuple[int, int, int]] = deque(maxlen=MAX_WINDOWS)
        self.has_numbers = False
        self._path = str(process.folder / "records.bin")
        self._offset = 0
        self._rare: list[Record] = []
        self._recent = bytearray()
        self._until_bad = b""  # `_recent` when a number was not finite for the first time
        self._anchor: Anchor | None = None
        self._before: tuple[int, int] = (-1, 0)  # the latest step, and the start of the next
        self._steps = array("q")
        self._inputs: list[int] = []  # counts of elements recorded since the latest step
        self._input_before = -1  # last count of the previous step

    @property
    def step(self) -> int:
        """The latest step that ended; -1 before the first. Updates count until the steps are known."""
        return self._before[0] if self._anchor is not None else self.num_updates - 1

    @property
    def quiet_s(self) -> float:
        """Seconds from the latest update to the latest record of the clock; 0 before either."""
        if self.heartbeat is None or self.last_update_ns < 0:
            return 0.0
        return max(self.heartbeat.a - self.last_update_ns, 0) / NS_PER_S

    @property
    def recorded(self) -> list[Record]:
        """The latest records, and all rare ones."""
        return [*self._rare, *_unpacked(self._recent)]

    @property
    def numbers(self) -> list[Record]:
        """The latest records up to the first loss or gradient norm that was not finite."""
        return [*self._rare, *_unpacked(self._until_bad or self._recent)]

    @property
    def steps(self) -> np.ndarray:
        """[N, 4] int64 latest steps: number, start, duration (ns), elements of batches (-1 unknown)."""
        return np.array(self._steps, np.int64).reshape(-1, _FIELDS)

    def read_records(self) -> bool:
        """Read new records; return whether there were any."""
        new = self._new_records()
        for record in new:
            self._handle(record)
        return bool(new)

    def frames(self) -> Mapping[str, pl.DataFrame]:
        """Return the latest rows of `steps`, `passes`, `counters`, `clock_samples` and `workers`."""
        return frames_of(self.process, self.recorded, None)

    def _handle(self, record: Record) -> None:
        if record.kind in RARE:
            self._rare.append(record)
        else:
            self._remember(record)
        if record.kind == records.UPDATE:
            self.num_updates += 1
            if self._anchor is None or record.a == self._anchor.optimizer:
                self.last_update_ns = record.c
            self._end_step(record)
        elif record.kind == records.ANCHOR:
            self._anchor = Anchor(record.a, record.b, record.c)
            self._number_again()
        elif record.kind == records.INPUT:
            self._inputs.append(record.b)
        elif record.kind == records.CLOCK:
            least_age_ns = time.time_ns() - record.a
            self.least_age_ns = (
                least_age_ns if self.least_age_ns is None else min(self.least_age_ns, least_age_ns)
            )
            self.heartbeat, self.heard_s = record, time.monotonic()
        elif record.kind == records.PEER:
            self.compared.append(record)
        elif record.kind == records.OPENED:
            self.windows.append((record.a, record.b, OPEN_NS))
        elif record.kind == records.WINDOW:
            self._close_window(record)
        elif record.kind == records.LOSS:
            self.has_numbers = True
            if not self._until_bad and not record.d and not math.isfinite(number_of(record)):
                self._until_bad = bytes(self._recent)

    def _remember(self, record: Record) -> None:
        self._recent += records.packed(record)
        if len(self._recent) >= 2 * MIN_RECENT * records.SIZE:
            del self._recent[: MIN_RECENT * records.SIZE]

    def _end_step(self, record: Record) -> None:
        """Add the step that an update ends, if it is the anchor's."""
        if self._anchor is None:
            return
        optimizer, base, first = self._anchor
        if record.a == optimizer and base + record.b > first:
            self._add_step(base + record.b - 1, record.c, record.d)

    def _add_step(self, step: int, end_ns: int, resume_ns: int) -> None:
        before, start_ns = self._before
        elements = -1
        if self._inputs:  # the first is of the step's end, later ones of when the recorder's own work ended
            elements = self._inputs[0] - self._input_before if self._input_before >= 0 else -1
            self._input_before = self._inputs[-1]
            self._inputs.clear()
        if before == step - 1 and before >= 0:
            self._steps.extend((step, start_ns, end_ns - start_ns, elements))
            if len(self._steps) >= 2 * MIN_STEPS * _FIELDS:
                del self._steps[: MIN_STEPS * _FIELDS]
        self._before = step, resume_ns

    def _number_again(self) -> None:
        """Renumber all kept steps once the optimizer that ends steps is known or has changed."""
        recorded = self.recorded
        updates = [(r.a, r.b, Boundary(r.c, r.d)) for r in recorded if r.kind == records.UPDATE]
        anchors = [(r.a, r.b, r.c) for r in self._rare if r.kind == records.ANCHOR]
        del self._steps[:]
        self._inputs.clear()
        self._before, self._input_before = (-1, 0), -1
        for step, (_, boundary) in number_steps(updates, anchors).items():
            self._add_step(step, boundary.end_ns, boundary.resume_ns)

    def _close_window(self, record: Record) -> None:
        number, begin_ns, end_ns = record.a, record.b, record.c
        others = [window for window in self.windows if window[0] != number]
        self.windows = deque([*others, (number, begin_ns, end_ns)], maxlen=MAX_WINDOWS)

    def _new_records(self) -> list[Record]:
        """Return the complete records added to the file since the last look."""
        taken: list[Record] = []
        with suppress(OSError), open(self._path, "rb", buffering=0) as file:
            file.seek(self._offset)
            while block := _unpacked(file.read(BLOCK)):
                taken += block
                self._offset += len(block) * records.SIZE
                file.seek(self._offset)
        return taken


def steps_of(tails: Iterable[ProcessTail]) -> pl.DataFrame:
    """Return the latest steps of processes: columns of table `steps`, times on each host's own clock."""
    tails = list(tails)
    parts = [tail.steps for tail in tails]
    windows = [_windows_of(tail, part) for tail, part in zip(tails, parts, strict=True)]
    rows = np.concatenate([np.empty((0, _FIELDS), np.int64), *parts])
    ranks = np.repeat([tail.process.rank for tail in tails], [len(part) for part in parts])
    columns = {
        "rank": ranks,
        "step": rows[:, 0],
        "window": np.concatenate([np.empty(0, np.int64), *windows]),
        "start_ns": rows[:, 1],
        "duration_ns": rows[:, 2],
    }
    return pl.DataFrame(columns, schema={name: STEPS.dtypes[name] for name in columns}, strict=False)


def amounts_of(tails: Iterable[ProcessTail]) -> pl.DataFrame:
    """Return the amount of work of steps, where known: rows of table `counters`."""
    frames = []
    for tail in tails:
        steps = tail.steps
        counted = steps[steps[:, 3] >= 0]
        if len(counted):
            rank = np.full(len(counted), tail.process.rank)
            frames.append(np.column_stack([rank, counted[:, 1], counted[:, 3]]))
    rows = np.concatenate(frames) if frames else np.empty((0, 3), np.int64)
    columns = {"rank": rows[:, 0], "time_ns": rows[:, 1], "value": rows[:, 2].astype(float)}
    frame = pl.DataFrame(columns, schema={name: COUNTERS.dtypes[name] for name in columns}, strict=False)
    return conform(COUNTERS, frame.with_columns(counter=pl.lit(WORKLOAD)))


def workers_of(tails: Iterable[ProcessTail]) -> pl.DataFrame:
    """Return rows of table `workers`."""
    rows = [worker_row(tail.process, tail.recorded, None) for tail in tails]
    schema = {name: WORKERS.dtypes[name] for row in rows for name in row}
    return conform(WORKERS, pl.DataFrame(rows, schema=schema, orient="row"))


def clock_samples_of(tails: Iterable[ProcessTail]) -> pl.DataFrame:
    """Return comparisons of clocks, and each clock's latest time: rows of table `clock_samples`."""
    rows = []
    for tail in tails:
        rank, beat = tail.process.rank, tail.heartbeat
        rows += [(rank, beat.a, beat.b, -1, 0, 0)] if beat is not None else []
        rows += [(rank, r.a, -1, r.b, r.c, r.d) for r in tail.compared]
    return pl.DataFrame(rows, schema=CLOCK_SAMPLES.dtypes, orient="row")


def heartbeats_of(tails: Iterable[ProcessTail]) -> pl.DataFrame:
    """Return when each process was last alive, on this host's clock: rows of table `clock_samples`.

    Clocks of hosts may be far apart, and a shared file system may delay records: neither may look like a
    stalled process.
    """
    beats = [(t, t.heartbeat, t.least_age_ns) for t in tails]
    rows = [
        (tail.process.rank, beat.a + least_age_ns, beat.b, -1, 0, 0)
        for tail, beat, least_age_ns in beats
        if beat is not None and least_age_ns is not None
    ]
    return pl.DataFrame(rows, schema=CLOCK_SAMPLES.dtypes, orient="row")


def _windows_of(tail: ProcessTail, steps: np.ndarray) -> np.ndarray:
    """Return [N] the deep window of each step, -1 for none; an open window counts."""
    windows = np.full(len(steps), -1, np.int64)
    start, end = steps[:, 1], steps[:, 1] + steps[:, 2]
    for number, begin_ns, end_ns in tail.windows:
        windows[(start >= begin_ns) & (end <= end_ns)] = number
    return windows


def _unpacked(content: bytes | bytearray) -> list[Record]:
    return [Record(*values) for values in records.unpacked(content)]
