"""Watching a job: what is new is read, and detectors look at it when there is something to see.

In: a run that is being recorded. Out: notices of what begins and ends to be wrong. Nothing of this runs
inside the job: it is only asked, by a file, for its latest calls.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.attach import stacks
from dpro.collectors.attempts import attempts
from dpro.collectors.convert import Process
from dpro.collectors.inside.names import WANTED
from dpro.collectors.launch import RAW, Launch, is_locked, job_lives, launches
from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, JOB_ENDED, Notice, OpenFindings
from dpro.detect.hang.find import find_hangs
from dpro.errors import DproError, Unanswerable
from dpro.folders import written_whole
from dpro.schema import COUNTERS
from dpro.units import NS_PER_S
from dpro.watch.activity import Activity, why_silent
from dpro.watch.calls import CallTable
from dpro.watch.deep import DeepLooks
from dpro.watch.gpu_errors import with_gpu_errors
from dpro.watch.late import Lateness, Latest, since_of
from dpro.watch.processes import Processes
from dpro.watch.snapshot import Snapshot, latest_dumps
from dpro.watch.tail import Tail, amounts_of, clock_samples_of, steps_of, workers_of

ASK_S = 2.0  # between two requests for the latest calls: a dump costs the job some 20 ms of CPU
ANSWER_S = 1.2  # until all have answered: each looks for requests once a second
LONGEST_ANSWER_S = 4.0  # without another answer until nobody is waited for any more
SILENT_BEATS_S = 3.0  # a process whose clock has not been heard for so long is stopped, or holds the GIL
AHEAD_S = 2.5  # of the end of patience processes are asked
SHARE = 0.1  # of its time that looks at lateness may take
HANG_SHARE = 0.5  # the same of looks at a job that stands still
STILL_S = 5.0  # without a step: the latest calls are asked for, and looked at for a hang
MIN_PATIENCE_S = 7.5  # without a step before a hang is told
STARTING_S = 60.0  # the same before the second step: programs are compiled then, and data loaded
BUSY_S = 30.0  # how much longer a host is waited for that works: it may be writing a checkpoint
LONGER = 1.5  # than the longest pause so far: a job that paused for a checkpoint will again
PAUSES = 500  # steps whose pauses are remembered
OVER_AFTER = 10  # steps without the finding
SILENT_S = 60.0  # without a sign from a host whose locks cannot be seen from here: the job is over
STACKS_S = 3.0
HANGS, LATE, DEEP = "hangs", "late", "deep"


@dataclass
class Watcher:
    """A job that is watched.

    Attributes:
        run: its run directory.
        findings: what is wrong now.
        folder: where evidence of hangs is kept; None for nowhere.
        remarks: what it cannot tell, since the latest look.
    """

    run: Path
    findings: OpenFindings = field(default_factory=OpenFindings)
    folder: Path | None = None
    remarks: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing was seen yet."""
        self.tails: dict[Path, Tail] = {}
        self.moved_s = time.monotonic()
        self.looks = 0
        self._heard_s = time.monotonic()
        self._pauses: deque[float] = deque(maxlen=PAUSES)
        self._processes = Processes(self.run)
        self._workers: pl.DataFrame | None = None
        self._late_due_s = self._asked_s = self._hang_due_s = 0.0
        self._asked_at = 0
        self._asking = self._questioned = False
        self._answers, self._answered_s = 0, 0.0
        self._deep = DeepLooks(self.run)
        self._begin()
        self._unproven: list[int] = []  # hangs that were told and whose evidence is still to be kept
        self._activity = Activity()

    @property
    def step(self) -> int:
        """Steps that have ended so far, as far as signs of them tell; -1 before the first."""
        return max((tail.num_updates for tail in self.tails.values()), default=0) - 1

    @property
    def still_s(self) -> float:
        """For how long no rank has ended a step."""
        return time.monotonic() - self.moved_s

    def lives(self) -> bool:
        """Whether the job is still being recorded."""
        return any(self._lives(recording) for recording in launches(self.run))

    def _lives(self, recording: Launch) -> bool:
        with suppress(OSError, ValueError):
            if recording.facts()["host"] == socket.gethostname():
                return job_lives(recording)
            return is_locked(recording) or time.monotonic() - self._heard_s < SILENT_S
        return False

    def look(self) -> list[Notice]:
        """Read what is new, and tell what begins and ends to be wrong."""
        self.looks += 1
        notices = self._meet()
        self._read()
        moves = self.still_s < STILL_S
        if moves:
            notices += self.findings.close(HANGS, self.step, "the job moves on")
            self._questioned, self._hang_due_s = False, 0.0
        if not self.tails:
            return notices
        if moves:
            notices += self._look_for_late()
            notices += self._look_deep()
        else:
            notices += self._look_for_hangs()
        return notices

    def end(self) -> list[Notice]:
        """The job is over, and with it all that was wrong."""
        self._deep.close()
        return self.findings.close(None, self.step, JOB_ENDED)

    def _meet(self) -> list[Notice]:
        """Follow the processes that train now; a restarted job is another one."""
        if not self._processes.look():
            return []
        found = attempts(self._processes.found)
        current = {process.folder: process for process in (found[-1] if found else [])}
        if not current:
            return []
        again = bool(self.tails) and not self.tails.keys() <= current.keys()
        notices = self.findings.close(None, self.step, "the job began again") if again else []
        if again:
            self._begin()
        joined = current.keys() - self.tails.keys()
        self.tails = {folder: self._followed(each) for folder, each in current.items()}
        self._workers = None
        if joined:
            self.moved_s = time.monotonic()
        return notices

    def _begin(self) -> None:
        """Nothing is known of how the job moves."""
        self._lateness, self._calls, self._snapshot = Lateness(), CallTable(), Snapshot()
        self._deep.close()
        self._deep = DeepLooks(self.run)
        self._updates = 0

    def _followed(self, process: Process) -> Tail:
        tail = self.tails.get(process.folder) or Tail(process)
        tail.process = process  # what it says of itself may have changed
        return tail

    def _read(self) -> None:
        """Read on in all records, and note whether steps have ended."""
        before = {folder: tail.last_update_ns for folder, tail in self.tails.items()}
        new = [tail.read_records() for tail in self.tails.values()]
        if any(new):
            self._heard_s = time.monotonic()
        updates = sum(tail.num_updates for tail in self.tails.values())
        if updates > self._updates:
            first = min(self.tails, key=lambda folder: self.tails[folder].process.rank)
            if 0 <= before[first] < self.tails[first].last_update_ns:
                self._pauses.append((self.tails[first].last_update_ns - before[first]) / NS_PER_S)
            self._updates, self.moved_s = updates, time.monotonic()

    def _ask(self) -> None:
        """Ask all processes for their latest calls."""
        self._asked_s, self._asked_at = time.monotonic(), self._updates
        # The disk may be full, or the recording over.
        with suppress(OSError), written_whole(self.run / RAW, WANTED) as wanted:
            wanted.write(str(time.time_ns()).encode())

    def _look_for_late(self) -> list[Notice]:
        """Ask, give the processes the time to answer, and see who is late; a part of the time is for that."""
        now_s = time.monotonic()
        if now_s < self._late_due_s:
            return []
        if not self._asking:
            if self._updates > self._asked_at:
                self._asking = True
                self._ask()
            return []
        if now_s < self._asked_s + ANSWER_S:
            return []
        self._asking, begun_s = False, time.thread_time()
        tails = list(self.tails.values())
        found = None
        if self._calls.read(tails):
            found = self._lateness.look(self._latest(tails))
        took_s = time.thread_time() - begun_s
        self._late_due_s = max(self._asked_s + ASK_S, now_s - ANSWER_S + took_s / SHARE)
        if found is None:
            return []
        found = [each for each in found if not {*each.ranks} <= self.findings.ranks(DEEP)]
        return self.findings.observe(LATE, found, self.step, OVER_AFTER, "its peers hardly wait for it now")

    def _look_deep(self) -> list[Notice]:
        """What the latest deep windows show, when that has just become known; not once more who is late."""
        try:
            found = self._deep.look(list(self.tails.values()))
        except Unanswerable as error:
            self.remarks.append(error)
            return []
        if found is None:
            return []
        late = self.findings.ranks(LATE)
        found = [each for each in found if each.component_kind == "job" or not {*each.ranks} <= late]
        return self.findings.observe(DEEP, found, self.step, 0, "the latest deep windows do not show it")

    def _latest(self, tails: Sequence[Tail]) -> Latest:
        """What is known of the job; calls of steps that are not looked at again are forgotten."""
        steps = steps_of(tails)
        self._calls.forget_before(since_of(steps, self._calls.frame))
        if self._workers is None:
            self._workers = workers_of(tails)
        samples = clock_samples_of(tails)
        by_rank = {tail.process.rank: tail for tail in tails}

        def counters(ranks: Sequence[int]) -> pl.DataFrame:
            return pl.concat([by_rank[rank].frames()[COUNTERS.name] for rank in ranks])

        calls = self._calls
        amounts = amounts_of(tails)
        return Latest(calls.frame, steps, self._workers, samples, amounts, calls.messages, counters)

    def _look_for_hangs(self) -> list[Notice]:
        """Ask once patience is about to end, and tell when all who can have answered."""
        now_s, patience_s, tails = time.monotonic(), self._patience_s(), list(self.tails.values())
        self._activity.sample(tails)
        if now_s < self._hang_due_s or self.still_s < patience_s - AHEAD_S:
            return []
        begun_s = time.thread_time()
        self._snapshot.read(tails)
        if not self._questioned:
            self._questioned, self._answers = True, 0
            self._snapshot.begin()
            self._ask()
            return []
        if self.still_s < patience_s or self._some_may_answer():
            return []
        self._questioned = False
        found = find_hangs(self._snapshot.records(tails))
        self._hang_due_s = now_s + max(ASK_S, (time.thread_time() - begun_s) / HANG_SHARE)
        found = [each for each in found if not self._may_go_on(each)]
        found = with_gpu_errors(found, self.run, tails)
        notices = self.findings.observe(HANGS, found, self.step, OVER_AFTER, "nothing waits for it any more")
        self._unproven += [notice.number for notice in notices if notice.event == BEGINS]
        return notices

    def _some_may_answer(self) -> bool:
        """Whether a process that was asked for its calls has still to say them, and may."""
        now_s, answered = time.monotonic(), self._snapshot.answered()
        if len(answered) > self._answers:
            self._answers, self._answered_s = len(answered), now_s
        if now_s - max(self._asked_s, self._answered_s) > LONGEST_ANSWER_S:
            return False
        return any(
            now_s - tail.heard_s < SILENT_BEATS_S and tail.process.folder not in answered
            for tail in self.tails.values()
        )

    def _patience_s(self) -> float:
        """How long a job like this one may stand still."""
        if self.step < 1:
            return STARTING_S
        usual = statistics.median(self._pauses) if self._pauses else 0.0
        return max(MIN_PATIENCE_S, 3 * usual, LONGER * max(self._pauses, default=0.0))

    def _may_go_on(self, finding: Finding) -> bool:
        """Whether a host that others wait for works on something, and has not done so for long."""
        if finding.class_ != "hang.host" or self.still_s > self._patience_s() + BUSY_S:
            return False
        return any(self._activity.is_busy(rank) for rank in finding.ranks)

    def keep_evidence(self) -> None:
        """Keep dumps and stacks of all ranks in the run where a hang was told: the job may be killed soon."""
        numbers, self._unproven = self._unproven, []
        if not numbers or self.folder is None:
            return
        to = self.folder / f"hang-{numbers[0]}"
        with suppress(OSError, DproError):
            dumps = to / "dumps"
            dumps.mkdir(parents=True, exist_ok=True)
            for tail in self.tails.values():
                for backend, dump in latest_dumps(tail.process.folder).items():
                    if dump.suffix != ".parquet":
                        _keep(dump, dumps / f"{backend}-rank{tail.process.rank:05d}{dump.suffix}")
            answers = stacks(self.run, STACKS_S)
            told = [answers.given[rank] for rank in sorted(answers.given)]
            by_rank = {tail.process.rank: tail.process for tail in self.tails.values()}
            silent = [rank for rank in answers.silent if rank in by_rank]
            why = {str(rank): why_silent(by_rank[rank]) for rank in silent}
            document = {"ranks": told, "silent_ranks": answers.silent, "why_silent": why}
            (to / "stacks.json").write_text(json.dumps(document), encoding="utf-8")


def _keep(path: Path, to: Path) -> None:
    """Keep what a file has now: others never write into it, they put another in its place."""
    try:
        os.link(path, to)
    except OSError:  # some file systems cannot
        shutil.copy2(path, to)


def watch(
    watcher: Watcher,
    look_s: float,
    tell: Callable[[Notice], Any],
    seen: Callable[[Watcher], Any],
    complain: Callable[[Exception], Any],
) -> None:
    """Look at a job again and again, until it is over.

    Args:
        watcher: of the job.
        look_s: time from one look to the next.
        tell: is given each notice.
        seen: is called after each look.
        complain: is given what kept a look from its end, files come and go while they are read; and what
            cannot be told.
    """
    while watcher.lives():
        begun_s = time.monotonic()
        try:
            for notice in watcher.look():
                tell(notice)
            watcher.keep_evidence()
        except (DproError, OSError, ValueError, pl.exceptions.PolarsError) as error:
            complain(error)
        while watcher.remarks:
            complain(watcher.remarks.pop(0))
        seen(watcher)
        time.sleep(max(look_s - (time.monotonic() - begun_s), look_s / 10))
    for notice in watcher.end():
        tell(notice)
