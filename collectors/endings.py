"""How a process of the job ended, from everybody who saw it.

In: the wait status, where the kernel told the sidecar, and the files that `inside/exits.py` left. Out: an
exit code or a signal. Who saw the end is believed before who announced it: a process may crash on its way
out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpro.collectors.inside import records


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
    """How one process ended.

    Args:
        folder: what it left.
        recorded: its records.
        status: its wait status as the sidecar read it, None where unknown.
    """
    if status is not None:
        return _of_status(os.waitstatus_to_exitcode(status))
    announced = [Ending(r.b, r.c) for r in recorded if r.kind == records.ENDING]
    seen = [_reaped(folder / "reaped"), exited(folder / "exit"), *announced[-1:]]
    return next((each for each in seen if each.known), UNKNOWN)


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
