"""Findings of a job that is watched: each is told once, and once more when it is over.

In: what detectors find at each look. Out: `Notice`s, and lines of `findings/findings.jsonl` in the run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dpro.analysis.told import BEGINS, ENDS, FILE, FOLDER, finding_of
from dpro.collectors.ownership import ensure_mine
from dpro.detect.findings import Finding
from dpro.units import ms

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Notice:
    """One thing to tell.

    Attributes:
        event: `begins` or `ends`.
        number: of the finding, from 1; the same when it begins and when it ends.
        time_ns: when it is told.
        step: the latest step then, -1 unknown.
        finding: what was found.
        why: why it is over; empty when it begins.
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
        """As a line of JSON: the finding's own keys, and when."""
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
            "severity": _known(found.severity),
            "confidence": _known(found.confidence),
            "cost_ms_per_step": None if hangs else _known(ms(found.cost_ns)),
            "evidence": list(found.evidence),
            "why": self.why,
            "cause": found.cause,
            "detector": self.source,
        }


@dataclass
class _Open:
    number: int
    finding: Finding
    seen_at: int  # the step when it was last found


class Ledger:
    """What is wrong now, by what looked for it."""

    def __init__(self, first: int = 1) -> None:
        """Nothing is.

        Args:
            first: number of the first finding.
        """
        self._next = first
        self._open: dict[tuple[str, Key], _Open] = {}

    @property
    def findings(self) -> list[Finding]:
        """What is wrong now."""
        return [each.finding for each in self._open.values()]

    def resume(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Go on where an earlier watcher of the run ended: what it told and did not end still holds.

        Args:
            told: the notices it kept.
        """
        for notice in told:
            self._next = max(self._next, int(notice["number"]) + 1)
            finding = finding_of(notice)
            key = str(notice.get("detector", "")), _key(finding)
            if notice["event"] == BEGINS:
                self._open[key] = _Open(int(notice["number"]), finding, int(notice["step"]))
            else:
                self._open.pop(key, None)

    def ranks(self, source: str) -> set[int]:
        """Ranks that one detector finds wrong now."""
        mine = [each.finding for (detector, _), each in self._open.items() if detector == source]
        return {rank for finding in mine if finding.component_kind != "job" for rank in finding.ranks}

    def observe(
        self, source: str, found: Iterable[Finding], step: int, patience: int, why: str
    ) -> list[Notice]:
        """Take in what one detector finds now.

        Args:
            source: which detector.
            found: what it finds; what it found before and does not find any more is over.
            step: the latest step, -1 unknown.
            patience: for so many steps something may be missing from `found` before it is over.
            why: what to say of what is over.
        """
        notices = []
        for finding in found:
            key = source, _key(finding)
            if key not in self._open:
                self._open[key] = _Open(self._next, finding, step)
                notices.append(Notice(BEGINS, self._next, time.time_ns(), step, finding, source=source))
                self._next += 1
            self._open[key].seen_at = step
        for key, each in list(self._open.items()):
            if key[0] == source and step - each.seen_at > patience:
                notices.append(self._close(key, step, why))
        return notices

    def close(self, source: str | None, step: int, why: str) -> list[Notice]:
        """All that one detector found, or any, is over."""
        return [self._close(key, step, why) for key in list(self._open) if source in (None, key[0])]

    def _close(self, key: tuple[str, Key], step: int, why: str) -> Notice:
        each = self._open.pop(key)
        return Notice(ENDS, each.number, time.time_ns(), step, each.finding, why, key[0])


def _known(number: float) -> float | None:
    """A number as JSON has it, which knows no NaN."""
    return number if math.isfinite(number) else None


def _key(finding: Finding) -> Key:
    """What makes two findings the same: what is known of a cause within a component may change."""
    return finding.class_.partition(".")[0], finding.component_kind, finding.component_id


class FindingsFile:
    """The file of findings of a run; one watcher at a time writes it, others only tell."""

    def __init__(self, run: Path) -> None:
        """Open it, if nobody else does.

        Raises:
            InputError: the run is somebody else's, or its folder of findings holds links.
        """
        self.folder = run / FOLDER
        ensure_mine([run.resolve()], within=False)
        self.folder.mkdir(exist_ok=True)
        ensure_mine([self.folder])
        self._file: IO[bytes] | None = (self.folder / FILE).open("ab", buffering=0)
        self._cut_off = True  # whoever wrote here before may have been killed within a line
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            self._file = None

    @property
    def is_mine(self) -> bool:
        """Whether this watcher keeps the findings."""
        return self._file is not None

    def write(self, notice: Notice) -> None:
        """Add a line; what was cut off before it, by a full disk say, is a line of its own, and left out.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        line = json.dumps(notice.document(), allow_nan=False).encode() + b"\n"
        whole = b"\n" + line if self._cut_off and self._file.tell() else line
        self._cut_off = True
        written = self._file.write(whole)
        self._cut_off = written < len(whole)
        if self._cut_off:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
