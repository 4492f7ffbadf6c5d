"""The findings log of a run: what a watcher of the job found, when each finding began, and when it ended.

Takes the detectors' findings at each look. Appends a `Notice` of each finding that begins or ends, as a line
of JSON, to `findings/findings.jsonl` of the run; returns to readers each finding once, with both times.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import asdict, replace

from dpro.detect.findings import (
    Finding,
    FindingDocument,
    class_in_words,
    finding_document,
    ranks_of,
)
from dpro.detect.observations import observations_of
from dpro.documents import SCHEMA_VERSION, encode
from dpro.folders import lock
from dpro.units import NS_PER_MS

FOLDER = "findings"
FILE = "findings.jsonl"
BEGINS, ENDS = "begins", "ends"
JOB_ENDED = "the job has ended"

Identity = tuple[str, str, str]


class NoticedFinding(FindingDocument, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A finding of a watched job, and when it was noticed.

    Attributes:
        number: of the finding, from 1; it does not change from begin to end.
        time_ns: when the begin or end was noticed.
        step: the latest step at that time; -1 unknown.
        why: why it ended; empty while it holds.
        detector: the detector that found it.
    """

    number: int
    time_ns: int
    step: int
    why: str
    detector: str


class NoticeDocument(NoticedFinding, frozen=True, kw_only=True):
    """A line of the log: a finding that begins or ends.

    Attributes:
        event: `begins` or `ends`.
    """

    event: str


class WatchDocument(NoticeDocument, frozen=True, kw_only=True):
    """A finding that begins or ends while the job runs; printed as one line, and sent to webhooks.

    Attributes:
        schema_version: of the documents; new keys do not change it.
        run: the run directory.
    """

    schema_version: int = SCHEMA_VERSION
    run: str


class LoggedFinding(NoticedFinding, frozen=True, kw_only=True):
    """A finding of the log, with its end.

    Attributes:
        over_ns: when it ended; -1 while it holds.
    """

    over_ns: int


@dataclass(frozen=True)
class Notice:
    """A finding that begins or ends.

    Attributes:
        number: of the finding, from 1; it does not change from begin to end.
        step: the latest step at that time; -1 unknown.
        why: why it ended; empty when it begins.
        source: the detector that found it.
    """

    event: str
    number: int
    time_ns: int
    step: int
    finding: Finding
    why: str = ""
    source: str = ""

    def document(self) -> NoticeDocument:
        """Return the line of the log: the finding's own keys, and when it was noticed."""
        return NoticeDocument(
            event=self.event,
            number=self.number,
            time_ns=self.time_ns,
            step=self.step,
            why=self.why,
            detector=self.source,
            **asdict(finding_document(self.finding)),
        )


def watch_document(run: Path, notice: Notice) -> WatchDocument:
    """Return a notice for programs that follow the watch of a run."""
    return WatchDocument(run=str(run), **asdict(notice.document()))


def finding_of(noticed: NoticedFinding) -> Finding:
    """Return the finding of a notice that was read from the log."""
    return Finding(
        noticed.class_,
        noticed.component.kind,
        noticed.component.id,
        tuple(noticed.ranks),
        noticed.severity or 0.0,
        noticed.confidence or 0.0,
        (noticed.cost_ms_per_step or 0.0) * NS_PER_MS,
        observations_of(noticed.evidence, noticed.observations),
        noticed.cause,
        axis=noticed.axis or "",
        place=noticed.place,
        remedy=noticed.remedy,
        waited_ns=round((noticed.waited_ms or 0.0) * NS_PER_MS),
    )


@dataclass(frozen=True)
class _Open:
    number: int
    finding: Finding
    last_step: int  # the step at which it was last found


class OpenFindings:
    """The findings that hold now, by detector."""

    def __init__(self, first: int = 1) -> None:
        """Start without open findings; `first` is the number of the next one."""
        self._next = first
        self._open: dict[tuple[str, Identity], _Open] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings that hold now."""
        return [item.finding for item in self._open.values()]

    def resume(self, notices: Iterable[NoticeDocument]) -> None:
        """Continue where an earlier watcher stopped: findings that it began and did not end still hold.

        Args:
            notices: of the log, in order.
        """
        for notice in notices:
            self._next = max(self._next, notice.number + 1)
            finding = finding_of(notice)
            key = notice.detector, identity_of(finding)
            if notice.event == BEGINS:
                self._open[key] = _Open(notice.number, finding, notice.step)
            else:
                self._open.pop(key, None)

    def ranks(self, source: str) -> set[int]:
        """Return the ranks that one detector's open findings name."""
        return ranks_of(finding for finding in self.held_by(source) if not finding.of_job)

    def held_by(self, source: str) -> list[Finding]:
        """Return one detector's open findings."""
        return [item.finding for (detector, _), item in self._open.items() if detector == source]

    def observe(
        self, source: str, findings: Iterable[Finding], step: int, patience: int, why: str
    ) -> list[Notice]:
        """Compare what one detector finds now with its open findings.

        Args:
            step: the latest step, -1 unknown.
            patience: number of steps for which an open finding may be missing from `findings` before it ends.

        Returns:
            A notice for each finding that begins and for each that ends.
        """
        notices = []
        for finding in findings:
            key = source, identity_of(finding)
            earlier = self._open.get(key)
            if earlier is None:
                earlier = _Open(self._next, finding, step)
                notices.append(Notice(BEGINS, self._next, time.time_ns(), step, finding, source=source))
                self._next += 1
            self._open[key] = _Open(earlier.number, earlier.finding, step)
        for key, item in list(self._open.items()):
            if key[0] == source and step - item.last_step > patience:
                notices.append(self._close(key, step, why))
        return notices

    def close(self, source: str | None, step: int, why: str) -> list[Notice]:
        """End all findings of one detector.

        Args:
            source: which detector; None for all.
            step: the latest step, -1 unknown.

        Returns:
            A notice for each.
        """
        return [self._close(key, step, why) for key in list(self._open) if source in (None, key[0])]

    def _close(self, key: tuple[str, Identity], step: int, why: str) -> Notice:
        closed = self._open.pop(key)
        return Notice(ENDS, closed.number, time.time_ns(), step, closed.finding, why, key[0])


def identity_of(finding: Finding) -> Identity:
    """Return the key that is equal for one finding at every look; the cause within a component may change."""
    return finding.class_.partition(".")[0], finding.component_kind, finding.component_id


class FindingsLog:
    """The file of the log, to which one watcher at a time appends."""

    def __init__(self, run: Path) -> None:
        """Open the file, and lock it unless another process has.

        Args:
            run: the run directory; the caller has checked that its folders belong to this user.
        """
        self.folder = run / FOLDER
        self.folder.mkdir(exist_ok=True)
        file = (self.folder / FILE).open("ab", buffering=0)
        is_writer = False
        with suppress(OSError):  # a file system that cannot lock
            is_writer = lock(file, wait=False)
        if not is_writer:
            file.close()
        self._file: IO[bytes] | None = file if is_writer else None
        # An earlier writer may have been killed within a line.
        self._is_cut = is_writer and os.fstat(file.fileno()).st_size > 0

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the log."""
        return self._file is not None

    def write(self, notice: Notice) -> None:
        """Append a line, unless another process writes the log.

        If the line before was cut off, for instance by a full disk, a newline ends it first; readers skip it.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        line = encode(notice.document()).encode() + b"\n"
        whole = b"\n" + line if self._is_cut else line
        self._is_cut = True
        written = self._file.write(whole)
        self._is_cut = written < len(whole)
        if self._is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_log(run: Path) -> list[NoticeDocument]:
    """Return the notices of a run's log in order, without lines that were cut off; empty without a log."""
    path = run / FOLDER / FILE
    notices = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            notices.append(msgspec.json.decode(line, type=NoticeDocument))
    return notices


def logged_findings(run: Path) -> list[LoggedFinding]:
    """Return each finding of a run's log once, with when and why it ended."""
    findings: dict[int, LoggedFinding] = {}
    for notice in read_log(run):
        if notice.event == BEGINS:
            begun = asdict(notice)
            del begun["event"]
            findings[notice.number] = LoggedFinding(**begun, over_ns=-1)
        elif notice.number in findings:
            ended = replace(findings[notice.number], over_ns=notice.time_ns, why=notice.why)
            findings[notice.number] = ended
    return list(findings.values())


def describe_logged(findings: Iterable[LoggedFinding]) -> list[str]:
    """Return a line for each finding of `logged_findings`."""
    lines = []
    for finding in findings:
        when = time_of_day(finding.time_ns)
        until = ""
        if finding.over_ns > 0:
            over = time_of_day(finding.over_ns)
            until = f", withdrawn at {over} because {finding.why}"
            if finding.why == JOB_ENDED:
                until = f", held until the job ended at {over}"
        kind, ident = finding.component.kind, finding.component.id
        component = ident if kind == "job" else f"{kind} {ident}"
        lines.append(f"at {when}, step {finding.step}: {class_in_words(finding.class_)}: {component}{until}")
    return lines


def time_of_day(time_ns: int) -> str:
    """Return a time in this machine's time zone, as `12:34:56`."""
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))
