"""How a process of the job ended, from everybody who saw it.

In: the wait status, where the kernel told the sidecar, and the files that `inside/exits.py` left. Out: an
exit code or a signal, and the exception. Who saw the end is believed before who announced it: a process may
crash on its way out.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpro.collectors.inside import records
from dpro.collectors.inside.names import LAST, RAISED


class Ending(NamedTuple):
    """An exit code or a signal; -1 for the one it was not, and for both where nobody knows."""

    code: int
    signal: int

    @property
    def known(self) -> bool:
        """Whether anybody saw it."""
        return self != UNKNOWN

    @property
    def status(self) -> int | None:
        """As `os.waitstatus_to_exitcode` puts it: the code, or minus the signal; None where unknown."""
        return None if not self.known else -self.signal if self.code < 0 else self.code


UNKNOWN = Ending(-1, -1)
NOT_EXITED = b"\xff\xfe"  # two bytes that differ; on exit both become the code


def ending(folder: Path, recorded: Sequence[records.Record], status: int | None) -> Ending:
    """How one process ended; one that had exited already when it was told to end (SIGTERM) by its exit code.

    Args:
        folder: what it left.
        recorded: its records.
        status: its wait status as the sidecar read it, None where unknown.
    """
    announced = [Ending(r.b, r.c) for r in recorded if r.kind == records.ENDING]
    told = UNKNOWN if status is None else _of_status(os.waitstatus_to_exitcode(status))
    own = exited(folder / "exit")
    seen = [told, _reaped(folder / "reaped"), own, *announced[-1:]]
    found = next((each for each in seen if each.known), UNKNOWN)
    return own if own.known and found.signal == signal.SIGTERM else found


def exception(folder: Path) -> dict[str, Any]:
    """The columns of `workers` about the exception that ended a process."""
    path = folder / RAISED
    if not path.is_file():
        return {"error": "", "failed_ns": -1}
    told = json.loads(path.read_text(encoding="utf-8"))
    said = f"{told['type']}: {told['message']}" if told["message"] else told["type"]
    return {"error": "\n".join([said, *told["calls"]]), "failed_ns": told["time_ns"]}


def left_ns(folder: Path) -> int:
    """When the interpreter of a process went, all its calls saved; -1 where it did not come to that."""
    path = folder / LAST
    return path.stat().st_mtime_ns if path.is_file() else -1


def exited(path: Path) -> Ending:
    """What libc wrote when a process exited."""
    once, twice = (path.read_bytes() if path.is_file() else b"")[:2] or NOT_EXITED
    return Ending(once, -1) if once == twice else UNKNOWN


def _reaped(path: Path) -> Ending:
    """What the parent wrote; nothing where it was killed meanwhile."""
    text = path.read_text() if path.is_file() else ""
    return _of_status(int(text)) if text.lstrip("-").isdigit() else UNKNOWN


def _of_status(status: int) -> Ending:
    return Ending(status, -1) if status >= 0 else Ending(-1, -status)
