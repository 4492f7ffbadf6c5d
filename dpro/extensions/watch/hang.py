"""The hang watch: requests the latest calls of a stalled job, and searches them for a hang.

Takes the job; returns findings, once per search. The state is a record, and `next_state` alone decides what
comes next:

    MOVING      no step for STILL_S                        → PATIENT PATIENT     patience is nearly over
    → ASKED ASKED       it is over, and all live ranks answered    → SEARCHING SEARCHING   done
    → PATIENT, until a share of the time has passed any         a step ends                                →
    MOVING
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from dpro.detect.findings import Finding
from dpro.detect.hang.find import find_hangs
from dpro.detect.hang.stacks import COMPILE, doing_of
from dpro.extensions.watch.evidence import Snapshot, with_gpu_errors
from dpro.extensions.watch.job import Job, ProcessTail

STILL_S = 5.0  # time without a step after which the job may hang
AHEAD_S = 2.5  # processes are asked this long before patience ends
MAX_ANSWER_S = 4.0  # longest wait for another answer after the latest one
SILENT_BEATS_S = 3.0  # a process without a clock record for this long is stopped, or holds the GIL
MIN_REST_S = 2.0  # between two searches
SHARE = 0.5  # share of the time that searches may take
MIN_PATIENCE_S = 7.5  # time without a step before a hang is reported
STARTING_S = 60.0  # time without a second step before a hang is reported: programs compile, data loads
BUSY_S = 30.0  # added to the patience for a host that works: it may be writing a checkpoint
COMPILE_S = 1800.0  # added to the patience for a host that compiles, as its stack shows
LONGER = 1.5  # times the longest pause so far: a job that paused for a checkpoint will pause again


class HangWatchPhase(Enum):
    """Phases of the hang watch."""

    MOVING = "steps end"
    PATIENT = "the job is stalled, for less than its patience or since a search"
    ASKED = "processes were asked for their calls"
    SEARCHING = "the calls are searched for a hang"


@dataclass(frozen=True)
class HangState:
    """State of the hang watch; times on this host's monotonic clock.

    Attributes:
        due_s: earliest time of the next request to processes.
        asked_s: time of the latest request.
        num_answers: number of answers when the latest one was noticed.
        answered_s: when that was.
    """

    phase: HangWatchPhase = HangWatchPhase.MOVING
    due_s: float = 0.0
    asked_s: float = 0.0
    num_answers: int = 0
    answered_s: float = 0.0


@dataclass(frozen=True)
class HangObservation:
    """What one look shows of a job.

    Attributes:
        still_s: time without a step.
        patience_s: how long a job like this one may take for a step.
        num_answers: processes that have saved their calls since the request.
        is_awaited: whether a live process has not answered yet.
    """

    now_s: float
    still_s: float
    patience_s: float
    num_answers: int = 0
    is_awaited: bool = False


def next_state(state: HangState, seen: HangObservation) -> HangState:
    """Return the state after a look."""
    if seen.still_s < STILL_S:
        return HangState()
    if state.phase in (HangWatchPhase.MOVING, HangWatchPhase.PATIENT):
        if seen.now_s < state.due_s or seen.still_s < seen.patience_s - AHEAD_S:
            return replace(state, phase=HangWatchPhase.PATIENT)
        return HangState(HangWatchPhase.ASKED, asked_s=seen.now_s)
    if seen.still_s < seen.patience_s:
        return state
    if seen.num_answers > state.num_answers:
        state = replace(state, num_answers=seen.num_answers, answered_s=seen.now_s)
    waits_s = seen.now_s - max(state.asked_s, state.answered_s)
    if seen.is_awaited and waits_s <= MAX_ANSWER_S:
        return state
    return replace(state, phase=HangWatchPhase.SEARCHING)


def after_search(now_s: float, took_s: float) -> HangState:
    """Return the state after a search."""
    return HangState(HangWatchPhase.PATIENT, due_s=now_s + max(MIN_REST_S, took_s / SHARE))


def patience_of(step: int, pauses_s: Sequence[float]) -> float:
    """Return how long a job like this one may be without a step, in seconds.

    Args:
        step: the latest step, -1 before the first.
        pauses_s: seconds between the ends of steps so far.
    """
    if step < 1:
        return STARTING_S
    usual = statistics.median(pauses_s) if pauses_s else 0.0
    return max(MIN_PATIENCE_S, 3 * usual, LONGER * max(pauses_s, default=0.0))


def may_go_on(finding: Finding, seen: HangObservation, is_busy: Callable[[int], bool]) -> bool:
    """Return whether a stuck host may only be busy: it compiles or works, and has not done so for long."""
    if finding.class_ != "hang.host":
        return False
    beyond_s = seen.still_s - seen.patience_s
    if doing_of(finding) == COMPILE:
        return beyond_s <= COMPILE_S
    return beyond_s <= BUSY_S and any(is_busy(rank) for rank in finding.ranks)


class HangWatch:
    """Searches a stalled job for a hang."""

    def __init__(self) -> None:
        self.state = HangState()
        self._snapshot, self._activity = Snapshot(), HostActivity()

    def look(self, job: Job) -> list[Finding] | None:
        """Look at a job; return what a search found, None without a search."""
        tails, before = list(job.tails.values()), self.state
        now_s, begun_s = time.monotonic(), time.thread_time()
        if before.phase is HangWatchPhase.ASKED:
            self._snapshot.read(tails)
        seen = self._seen(job, now_s)
        self.state = next_state(before, seen)
        if self.state.phase is not HangWatchPhase.MOVING:
            self._activity.sample(tails)
        if self.state.phase is HangWatchPhase.ASKED and before.phase is not HangWatchPhase.ASKED:
            self._snapshot.read(tails)
            self._snapshot.begin()
            job.ask_for_calls()
        if self.state.phase is not HangWatchPhase.SEARCHING:
            return None
        try:
            hangs = find_hangs(self._snapshot.records(tails))
        finally:
            self.state = after_search(now_s, time.thread_time() - begun_s)
        hangs = [hang for hang in hangs if not may_go_on(hang, seen, self._activity.is_busy)]
        return with_gpu_errors(hangs, job.run, tails)

    def _seen(self, job: Job, now_s: float) -> HangObservation:
        still_s = now_s - job.progress.moved_s
        patience_s = patience_of(job.step, job.progress.pauses_s)
        if self.state.phase is not HangWatchPhase.ASKED:
            return HangObservation(now_s, still_s, patience_s)
        answered = self._snapshot.answered()
        is_awaited = any(
            now_s - tail.heard_s < SILENT_BEATS_S and folder not in answered
            for folder, tail in job.tails.items()
        )
        return HangObservation(now_s, still_s, patience_s, len(answered), is_awaited)


# Whether a process that others wait for is working, judging by this host's kernel.

MIN_COMPUTING = 0.05  # share of the time: a thread that waits takes none
MIN_BYTES_PER_S = 1 << 20


class _Sample(NamedTuple):
    at_s: float
    cpu_s: float
    moved_bytes: int
    ready: bool  # it runs, or waits for a core


class HostActivity:
    """Activity of this host's processes between the latest two looks."""

    def __init__(self) -> None:
        self._latest: dict[int, _Sample] = {}
        self._busy: dict[int, bool] = {}

    def sample(self, tails: Iterable[ProcessTail]) -> None:
        """Look at the processes that run on this host."""
        for tail in tails:
            facts = tail.process.facts
            if facts["host"] != socket.gethostname():
                continue
            now, before = _sample(int(facts["pid"])), self._latest.get(tail.process.rank)
            if now is not None:
                self._latest[tail.process.rank] = now
                self._busy[tail.process.rank] = before is not None and _is_active(before, now)

    def is_busy(self, rank: int) -> bool:
        """Return whether a rank worked; False for ranks of other hosts, whose activity is unknown."""
        return self._busy.get(rank, False)


def _is_active(before: _Sample, now: _Sample) -> bool:
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    computed = (now.cpu_s - before.cpu_s) / elapsed_s > MIN_COMPUTING
    return (
        computed
        or (before.ready and now.ready)
        or (now.moved_bytes - before.moved_bytes) / elapsed_s > MIN_BYTES_PER_S
    )


def _sample(pid: int) -> _Sample | None:
    """Return CPU time of the main thread, and bytes read and written; None if the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(words[11]) + int(words[12])
        moved = 0
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            moved = sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
        return _Sample(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), moved, words[0] == "R")
    return None
