"""The findings log of a run: what a watcher of the job found, when each finding began, and when it ended.

In: what detectors find at each look. Out: `Notice`s of what begins and ends, lines of JSON in
`findings/findings.jsonl` of the run, and, for readers of the run, each finding once with both times.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dpro.detect.findings import Finding
from dpro.folders import lock
from dpro.units import NS_PER_MS, ms

FOLDER = "findings"
FILE = "findings.jsonl"
BEGINS, ENDS = "begins", "ends"
JOB_ENDED = "the job has ended"

Identity = tuple[str, str, str]


@dataclass(frozen=True)
class Notice:
    """A finding begins or ends.

    Attributes:
        event: `begins` or `ends`.
        number: of the finding, from 1; the same when it begins and when it ends.
        time_ns: when this was noticed.
        step: the latest step then, -1 unknown.
        finding: what was found.
        why: why it ended; empty when it begins.
        source: which detector found it.
    """

    event: str
    number: int
    time_ns: int
    step: int
    finding: Finding
    why: str = ""
    source: str = ""

    def document(self) -> dict[str, Any]:
        """Return it as a line of JSON has it: the finding's own keys, and when."""
        found = self.finding
        hangs = found.class_.startswith(("hang", "dead"))
        return {
            "event": self.event,
            "number": self.number,
            "time_ns": self.time_ns,
            "step": self.step,
            "class": found.class_,
            "component": {"kind": found.component_kind, "id": found.component_id},
            "ranks": list(found.ranks),
            "severity": _finite(found.severity),
            "confidence": _finite(found.confidence),
            "cost_ms_per_step": None if hangs else _finite(ms(found.cost_ns)),
            "evidence": list(found.evidence),
            "why": self.why,
            "cause": found.cause,
            "detector": self.source,
        }


def finding_of(notice: Mapping[str, Any]) -> Finding:
    """Return the finding of a notice that was read from the log."""
    component, cost_ms = notice["component"], notice["cost_ms_per_step"] or 0.0
    return Finding(
        notice["class"],
        component["kind"],
        component["id"],
        tuple(notice["ranks"]),
        notice["severity"] or 0.0,
        notice["confidence"] or 0.0,
        cost_ms * NS_PER_MS,
        tuple(notice["evidence"]),
        notice.get("cause", ""),
    )


@dataclass(frozen=True)
class _Open:
    number: int
    finding: Finding
    seen_at: int  # the step when it was last found


class OpenFindings:
    """The findings that hold now, by the detector that found them."""

    def __init__(self, first: int = 1) -> None:
        """No finding is open.

        Args:
            first: number of the first finding.
        """
        self._next = first
        self._open: dict[tuple[str, Identity], _Open] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings that hold now."""
        return [each.finding for each in self._open.values()]

    def resume(self, notices: Iterable[Mapping[str, Any]]) -> None:
        """Continue where an earlier watcher of the run stopped: what it began and did not end still holds.

        Args:
            notices: of the log, in order.
        """
        for notice in notices:
            self._next = max(self._next, int(notice["number"]) + 1)
            finding = finding_of(notice)
            key = str(notice.get("detector", "")), identity_of(finding)
            if notice["event"] == BEGINS:
                self._open[key] = _Open(int(notice["number"]), finding, int(notice["step"]))
            else:
                self._open.pop(key, None)

    def ranks(self, source: str) -> set[int]:
        """Return the ranks that one detector's open findings name."""
        own = [each.finding for (detector, _), each in self._open.items() if detector == source]
        return {rank for finding in own if finding.component_kind != "job" for rank in finding.ranks}

    def observe(
        self, source: str, found: Iterable[Finding], step: int, patience: int, why: str
    ) -> list[Notice]:
        """Compare what one detector finds now with its open findings.

        Args:
            source: which detector.
            found: what it finds now.
            step: the latest step, -1 unknown.
            patience: number of steps for which an open finding may be missing from `found` before it ends.
            why: the reason given for the findings that end.

        Returns:
            A notice for each finding that begins and for each that ends.
        """
        notices = []
        for finding in found:
            key = source, identity_of(finding)
            known = self._open.get(key)
            if known is None:
                known = _Open(self._next, finding, step)
                notices.append(Notice(BEGINS, self._next, time.time_ns(), step, finding, source=source))
                self._next += 1
            self._open[key] = _Open(known.number, known.finding, step)
        for key, each in list(self._open.items()):
            if key[0] == source and step - each.seen_at > patience:
                notices.append(self._close(key, step, why))
        return notices

    def close(self, source: str | None, step: int, why: str) -> list[Notice]:
        """End all findings of one detector.

        Args:
            source: which detector; None for all.
            step: the latest step, -1 unknown.
            why: the reason.

        Returns:
            A notice for each.
        """
        return [self._close(key, step, why) for key in list(self._open) if source in (None, key[0])]

    def _close(self, key: tuple[str, Identity], step: int, why: str) -> Notice:
        each = self._open.pop(key)
        return Notice(ENDS, each.number, time.time_ns(), step, each.finding, why, key[0])


def _finite(number: float) -> float | None:
    """Return a number as JSON has it, which has no NaN and no infinity."""
    return number if math.isfinite(number) else None


def identity_of(finding: Finding) -> Identity:
    """Return what makes two findings the same; the cause within a component may change."""
    return finding.class_.partition(".")[0], finding.component_kind, finding.component_id


class FindingsLog:
    """The log's file, to which one watcher at a time appends."""

    def __init__(self, run: Path) -> None:
        """Open the file and lock it, if no other process has.

        Args:
            run: the run directory; whoever opens a log has made sure that its folders are this user's own.
        """
        self.folder = run / FOLDER
        self.folder.mkdir(exist_ok=True)
        file = (self.folder / FILE).open("ab", buffering=0)
        mine = False
        with suppress(OSError):  # its file system cannot lock
            mine = lock(file, wait=False)
        if not mine:
            file.close()
        self._file: IO[bytes] | None = file if mine else None
        # An earlier writer may have been killed within a line.
        self._is_cut = mine and os.fstat(file.fileno()).st_size > 0

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one that writes the log."""
        return self._file is not None

    def write(self, notice: Notice) -> None:
        """Append a line, unless another process writes the log.

        A line that was cut off, for instance by a full disk, ends before this one begins; readers skip it.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        line = json.dumps(notice.document(), allow_nan=False).encode() + b"\n"
        whole = b"\n" + line if self._is_cut else line
        self._is_cut = True
        written = self._file.write(whole)
        self._is_cut = written < len(whole)
        if self._is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_log(run: Path) -> list[Mapping[str, Any]]:
    """Return the notices of a run's log in order, without lines that were cut off; empty without a log."""
    path = run / FOLDER / FILE
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def logged_findings(run: Path) -> list[dict[str, Any]]:
    """Return each finding of a run's log once.

    Returns:
        The keys of `Notice.document` of its begin without `event`; `over_ns`, -1 while it holds; and why it
        ended.
    """
    found: dict[int, dict[str, Any]] = {}
    for notice in read_log(run):
        if notice["event"] == BEGINS:
            found[notice["number"]] = {**notice, "over_ns": -1}
        elif notice["number"] in found:
            found[notice["number"]] |= {"over_ns": notice["time_ns"], "why": notice["why"]}
    return [{key: each[key] for key in each if key != "event"} for each in found.values()]


def describe_logged(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each finding of `logged_findings`."""
    lines = []
    for each in found:
        when = time_of_day(each["time_ns"])
        until = f", {_end_in_words(each)}" if each["over_ns"] > 0 else ""
        component = f"{each['component']['kind']} {each['component']['id']}"
        lines.append(f"at {when}, step {each['step']}: {each['class']}: {component}{until}")
    return lines


def _end_in_words(logged: Mapping[str, Any]) -> str:
    when = time_of_day(logged["over_ns"])
    held = logged["why"] == JOB_ENDED
    return f"held until the job ended at {when}" if held else f"withdrawn at {when} because {logged['why']}"


def time_of_day(time_ns: int) -> str:
    """Return a time in this machine's time zone, as `12:34:56`."""
    return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))
