"""How a process of the job ended, from all that saw it.

In: the wait status, where the kernel gave it to the sidecar, and the files that `inside/process/exits.py`
left. Out: an exit code or a signal, and the exception. What saw the end counts before what announced it: a
process may crash on its way out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dpro.collectors.inside import records
from dpro.collectors.inside.names import FAILED, LAST, RAISED
from dpro.words import from_json


class Ending(NamedTuple):
    """An exit code or a signal; -1 for the one it was not, and for both where unknown."""

    code: int
    signal: int

    @property
    def known(self) -> bool:
        """Whether the code or the signal is known."""
        return self != UNKNOWN

    @property
    def status(self) -> int | None:
        """As `os.waitstatus_to_exitcode` puts it: the code, or minus the signal; None where unknown."""
        return None if not self.known else -self.signal if self.code < 0 else self.code

    def failure(self, error: str) -> str:
        """How a job failed, with the first exception of its processes; empty if it is not known to have."""
        if not self.status:
            return ""
        how = f"exit code {self.code}" if self.code >= 0 else _name(self.signal)
        return f"{how}: {error}" if error else how


UNKNOWN = Ending(-1, -1)
LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessExitedException")  # say that others failed
QUOTING = ("ProcessRaisedException",)
NOT_EXITED = b"\xff\xfe"  # two bytes that differ; on exit both become the code


def ending(folder: Path, recorded: Sequence[records.Record], status: int | None) -> Ending:
    """Return how one process ended; its exit code where SIGTERM came only after it had exited.

    Args:
        status: its wait status as the sidecar read it, None where unknown.
    """
    announced = [Ending(r.b, r.c) for r in recorded if r.kind == records.ENDING]
    reported = UNKNOWN if status is None else _of_status(os.waitstatus_to_exitcode(status))
    by_libc = exited(folder / "exit")
    seen = [reported, _reaped(folder / "reaped"), by_libc, *announced[-1:]]
    ended = next((end for end in seen if end.known), UNKNOWN)
    return by_libc if by_libc.known and ended.signal == signal.SIGTERM else ended


def exception(folder: Path) -> dict[str, Any]:
    """The columns of `workers` about the exception that ended a process."""
    path = folder / RAISED
    if not path.is_file():
        return {"error": "", "failed_ns": -1}
    raised = from_json(path.read_text(encoding="utf-8"))
    line = f"{raised['type']}: {raised['message']}" if raised["message"] else raised["type"]
    return {"error": "\n".join([line, *raised["calls"]]), "failed_ns": raised["time_ns"]}


def left_ns(folder: Path) -> int:
    """Return when the interpreter exited with all its calls saved; -1 where it did not."""
    path = folder / LAST
    return path.stat().st_mtime_ns if path.is_file() else -1


def first_error(folder: Path) -> str:
    """The first exception that ended a process of the job, in a line: `ValueError: no (train.py:7)`.

    Returns:
        The line; empty where no exception did, or only those by which launchers report other processes.
    """
    errors = []
    for path in [*folder.glob(f"{FAILED}*.json"), *folder.glob(f"*/{RAISED}")]:
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            facts = from_json(path.read_text(encoding="utf-8"))
            errors.append((int(facts["time_ns"]), _in_a_line(**facts)))
    return next((error for _, error in sorted(errors) if error), "")


def _in_a_line(type: str, message: str, calls: Sequence[str], time_ns: int) -> str:
    if type in LAUNCHERS:
        return ""
    if type in QUOTING:  # the message says it all
        return message
    said = f"{type}: {message}" if message else type
    return f"{said} ({calls[0].rpartition(' ')[0].rpartition('/')[2]})" if calls else said


def exited(path: Path) -> Ending:
    """What libc wrote when a process exited."""
    said = path.read_bytes() if path.is_file() else b""
    once, twice = said[:2] if len(said) > 1 else NOT_EXITED
    return Ending(once, -1) if once == twice else UNKNOWN


def _reaped(path: Path) -> Ending:
    """What the parent wrote; nothing where it was killed meanwhile."""
    text = path.read_text() if path.is_file() else ""
    return _of_status(int(text)) if text.lstrip("-").isdigit() else UNKNOWN


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_status(status: int) -> Ending:
    return Ending(status, -1) if status >= 0 else Ending(-1, -status)
