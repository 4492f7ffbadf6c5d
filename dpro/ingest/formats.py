"""What kinds of file dpro can import, told by content, and who reads each.

In: the first bytes of a file. Out: its `Format`, or the reason why it is passed over. A new format is one
line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpro.ingest.flight_recorder import is_dump, read_dump
from dpro.ingest.kineto import read_trace
from dpro.ingest.trace import RankTrace


class Reader(Protocol):
    """Reads one rank's file."""

    def __call__(self, path: Path, *, rank: int | None = None) -> RankTrace:
        """Read the file; `rank` overrides what the file says.

        Raises:
            InputError: the file cannot be read as what it should be.
        """
        ...


@dataclass(frozen=True)
class Format:
    """A kind of file: its name, whether the head of a file is of it, and its reader."""

    name: str
    matches: Callable[[bytes], bool]
    read: Reader


def _has_keys(*keys: str) -> Callable[[bytes], bool]:
    """The head is JSON that holds one of the keys."""
    pattern = re.compile(rb'"(?:' + "|".join(keys).encode() + rb')"\s*:')
    return lambda head: head.lstrip()[:1] in (b"{", b"[") and pattern.search(head) is not None


_is_execution_trace = _has_keys("op_schema", "ctrl_deps", "rf_id")

# First match wins.
FORMATS = (
    Format("flight recorder", is_dump, read_dump),
    Format("kineto", _has_keys("traceEvents", "schemaVersion", "deviceProperties", "ph"), read_trace),
)


def find_format(head: bytes) -> Format | None:
    """The format of a file by its first bytes (gunzipped), None where dpro does not know it."""
    return next((known for known in FORMATS if known.matches(head)), None)


def why_passed_over(head: bytes) -> str:
    """What to call a file of no known format when it is counted."""
    if not head:
        return "empty or damaged files"
    return "execution traces" if _is_execution_trace(head) else "files that are not traces"
