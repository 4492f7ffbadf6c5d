"""A Kineto trace read both ways: event by event, and by the compiled scanner."""

from __future__ import annotations

from pathlib import Path

import pytest

import dpro.ingest.kineto.reader as reader
from dpro.errors import DproError
from dpro.ingest.kineto.scanner import Scanner
from dpro.ingest.trace import RankTrace

_FACTS = ("rank", "world_size", "host", "gpus", "versions", "skipped", "warnings")


def read_both(path: Path) -> list[RankTrace | str]:
    """What the decoder makes of a trace, and what the scanner does; or why it is refused."""
    return [_read(path, lambda *_: None), _read(path, lambda _, columns, memory: Scanner(columns, memory))]


def _read(path: Path, choice) -> RankTrace | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "scanner_of", choice)
        try:
            return reader.read_trace(path)
        except DproError as error:
            return str(error)


def differences(path: Path) -> list[str]:
    """What the two make differently of a trace: tables, facts."""
    decoded, scanned = read_both(path)
    if isinstance(decoded, str) or isinstance(scanned, str):
        return [] if decoded == scanned else [f"{decoded} | {scanned}"]
    found = [name for name in _FACTS if getattr(decoded, name) != getattr(scanned, name)]
    found += sorted(decoded.frames.keys() ^ scanned.frames.keys())
    for name in decoded.frames.keys() & scanned.frames.keys():
        one, other = decoded.frames[name], scanned.frames[name]
        found += [] if one.schema == other.schema and one.equals(other) else [name]
    return found


def taken_lists(path: Path) -> list[bool]:
    """Of each list of events that the scanner is given: whether it takes it."""
    taken = []

    class Watched(Scanner):
        def take(self, text):
            scanned = super().take(text)
            taken.append(scanned is not None)
            return scanned

    _read(path, lambda _, columns, memory: Watched(columns, memory))
    return taken
