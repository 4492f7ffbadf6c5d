"""Watching a job: reads new records, and lets five watches look at them.

Takes a run that is being recorded; returns notices of findings that begin and end. Nothing of it runs inside
the job, which is only asked, by files, for its latest calls, and for a deep window when a rank turns late or
the job slows down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from dpro.detect.findings_log import BEGINS, JOB_ENDED, Notice, OpenFindings
from dpro.errors import DproError, Unanswerable
from dpro.extensions.watch.deep import DeepWatch
from dpro.extensions.watch.evidence import keep_hang
from dpro.extensions.watch.hang import STILL_S, HangWatch
from dpro.extensions.watch.job import Job
from dpro.extensions.watch.late import LateWatch
from dpro.extensions.watch.memory import MemoryWatch
from dpro.extensions.watch.numbers import NumberWatch
from dpro.extensions.watch.request import WindowRequests

PATIENCE = 10  # steps for which a hang, a late rank or the like may be missing before its finding ends
HANGS, LATE, DEEP, MEMORY, NUMBERS = "hangs", "late", "deep", "memory", "numbers"


class Watcher:
    """A watched job.

    Attributes:
        findings: current findings.
        remarks: questions that it could not answer, since they were last taken.
    """

    def __init__(
        self,
        run: Path,
        findings: OpenFindings | None = None,
        keep_in: Path | None = None,
        requests: WindowRequests | None = None,
    ) -> None:
        """Begin without a look.

        Args:
            findings: open findings of an earlier watcher of the run; none if not given.
            keep_in: folder for evidence of hangs; none is kept if not given.
            requests: requests deep windows; none are requested if not given.
        """
        self.job = Job(run)
        self.findings = OpenFindings() if findings is None else findings
        self.looks = 0
        self.remarks: list[Exception] = []
        self._requests = requests
        self._keep_in = keep_in
        self._new_hangs: list[int] = []  # numbers of hangs whose evidence is not kept yet
        self.hang, self.late, self.deep = HangWatch(), LateWatch(), DeepWatch(run)
        self.memory, self.numbers = MemoryWatch(), NumberWatch()

    def look(self) -> Iterator[Notice]:
        """Read new records; yield a notice for each finding that begins or ends.

        Notices are yielded one by one: an error later in a look costs none of those before it.
        """
        self.looks += 1
        step = self.job.step
        if self.job.follow():
            yield from self.findings.close(None, step, "the job began again")
            self.deep.close()
            self.hang, self.late, self.deep = HangWatch(), LateWatch(), DeepWatch(self.job.run)
            self.memory, self.numbers = MemoryWatch(), NumberWatch()
            if self._requests is not None:
                self._requests.forget()
        self.job.read()
        moves = self.job.still_s < STILL_S
        if moves:
            yield from self.findings.close(HANGS, self.job.step, "the job moves on")
        if not self.job.tails:
            return
        yield from self._look_for_hangs()
        if moves:
            late = self._look_for_late_ranks()
            yield from late
            yield from self._look_deep()
            yield from self._look_at_memory()
            yield from self._look_at_numbers()
            if self._requests is not None and self._requests.look(self.job, late, self.late.unclear):
                self.deep.hurry()

    def end(self) -> list[Notice]:
        """End all findings, since the job is over."""
        self.deep.close()
        return self.findings.close(None, self.job.step, JOB_ENDED)

    def _look_for_hangs(self) -> list[Notice]:
        hangs = self.hang.look(self.job)
        if hangs is None:
            return []
        why = "nothing waits for it any more"
        notices = self.findings.observe(HANGS, hangs, self.job.step, PATIENCE, why)
        self._new_hangs += [notice.number for notice in notices if notice.event == BEGINS]
        return notices

    def _look_for_late_ranks(self) -> list[Notice]:
        late = self.late.look(self.job, self.findings.held_by(LATE))
        if late is None:
            return []
        late = [finding for finding in late if not {*finding.ranks} <= self.findings.ranks(DEEP)]
        return self.findings.observe(
            LATE, late, self.job.step, PATIENCE, "it is hardly later than its peers now"
        )

    def _look_deep(self) -> list[Notice]:
        """Look at deep windows; ranks that the late watch has found are not reported again."""
        try:
            since_ns = self._requests.slower_since_ns if self._requests is not None else 0
            deep = self.deep.look(list(self.job.tails.values()), since_ns)
        except Unanswerable as error:
            self.remarks.append(error)
            return []
        if deep is None:
            return []
        late = self.findings.ranks(LATE)
        deep = [finding for finding in deep if finding.of_job or not {*finding.ranks} <= late]
        why = "the latest deep windows no longer show it"
        return self.findings.observe(DEEP, deep, self.job.step, 0, why)

    def _look_at_memory(self) -> list[Notice]:
        growing = self.memory.look(self.job)
        if growing is None:
            return []
        return self.findings.observe(MEMORY, growing, self.job.step, PATIENCE, "it grows no longer")

    def _look_at_numbers(self) -> list[Notice]:
        bad = self.numbers.look(self.job)
        if bad is None:
            return []
        return self.findings.observe(
            NUMBERS, bad, self.job.step, PATIENCE, "the latest steps no longer show it"
        )

    def keep_evidence(self) -> None:
        """Keep dumps and stacks of all ranks if a hang was found since the last call."""
        numbers, self._new_hangs = self._new_hangs, []
        if numbers and self._keep_in is not None:
            folder = self._keep_in / f"hang-{numbers[0]}"
            keep_hang(self.job.run, folder, list(self.job.tails.values()))


def watch(
    watcher: Watcher,
    look_s: float,
    report: Callable[[Notice], Any],
    seen: Callable[[Watcher], Any],
    complain: Callable[[Exception], Any],
) -> None:
    """Look at a job again and again, until it is over.

    Args:
        look_s: time from one look to the next.
        seen: called after each look.
        complain: called with an error that ended a look early, since files come and go while they are read;
            and with the watcher's remarks.
    """
    while watcher.job.lives():
        begun_s = time.monotonic()
        try:
            for notice in watcher.look():
                report(notice)
            watcher.keep_evidence()
        except (DproError, OSError, ValueError, pl.exceptions.PolarsError) as error:
            complain(error)
        while watcher.remarks:
            complain(watcher.remarks.pop(0))
        seen(watcher)
        time.sleep(max(look_s - (time.monotonic() - begun_s), look_s / 10))
    for notice in watcher.end():
        report(notice)
