"""How processes of a job ended, and the job itself.

From the wait status, where the kernel gave it to the sidecar, and from the files of
`inside/process/exits.py`. An observed end takes precedence over an announced one, because a process may crash
on its way out. Uses the standard library only, since the sidecar words the end of a job before it imports
anything large.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dpro.collectors.inside import records
from dpro.collectors.inside.files import EXIT, FAILED, LAST, RAISED, image_folder, next_image
from dpro.collectors.launch.recording import Launch
from dpro.words import from_json


class Ending(NamedTuple):
    """An exit code or a signal; the other is -1, and both are -1 where unknown."""

    code: int
    signal: int

    @property
    def is_known(self) -> bool:
        """Whether the code or the signal is known."""
        return self != UNKNOWN

    @property
    def status(self) -> int | None:
        """The code, or minus the signal, as from `os.waitstatus_to_exitcode`; None where unknown."""
        return None if not self.is_known else -self.signal if self.code < 0 else self.code

    def failure(self, error: str) -> str:
        """Word how a job failed, with the first exception of its processes; empty if no failure is known."""
        if not self.status:
            return ""
        how = f"exit code {self.code}" if self.code >= 0 else _signal_name(self.signal)
        return f"{how}: {error}" if error else how


UNKNOWN = Ending(-1, -1)
LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessExitedException")  # report other processes
QUOTING = ("ProcessRaisedException",)


def ending(folder: Path, recorded: Sequence[records.Record], status: int | None) -> Ending:
    """Return how a process ended; its exit code where it received SIGTERM only after it had exited.

    Args:
        status: its wait status as the sidecar read it; None where unknown.
    """
    announced = [Ending(r.b, r.c) for r in recorded if r.kind == records.ENDING]
    reported = UNKNOWN if status is None else _of_status(os.waitstatus_to_exitcode(status))
    by_libc = exited(folder / EXIT)
    seen = [reported, _reaped(folder / "reaped"), by_libc, *announced[-1:]]
    ended = next((end for end in seen if end.is_known), UNKNOWN)
    return by_libc if by_libc.is_known and ended.signal == signal.SIGTERM else ended


def exception(folder: Path, recorded: Sequence[records.Record]) -> dict[str, Any]:
    """Return the columns of `workers` about the exception that ended a process.

    Of Ctrl-C only the time is recorded; the process may take many seconds to be gone.
    """
    path = folder / RAISED
    if not path.is_file():
        interrupted = [r.a for r in recorded if r.kind == records.ENDING and r.c == signal.SIGINT]
        if interrupted:
            return {"error": KeyboardInterrupt.__name__, "failed_ns": interrupted[0]}
        return {"error": "", "failed_ns": -1}
    raised = from_json(path.read_text(encoding="utf-8"))
    line = f"{raised['type']}: {raised['message']}" if raised["message"] else raised["type"]
    return {"error": "\n".join([line, *raised["calls"]]), "failed_ns": raised["time_ns"]}


def left_ns(folder: Path) -> int:
    """Return when the interpreter exited with all its calls saved, ns since 1970; -1 where it did not."""
    path = folder / LAST
    return path.stat().st_mtime_ns if path.is_file() else -1


def first_error(folder: Path) -> str:
    """Return the first exception that ended a process of the job, as one line: `ValueError: no (train.py:7)`.

    Returns:
        The line; empty without such an exception, or if launchers only reported other processes.
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
    if type in QUOTING:  # the message contains the original traceback
        return message
    said = f"{type}: {message}" if message else type
    return f"{said} ({calls[0].rpartition(' ')[0].rpartition('/')[2]})" if calls else said


def exited(path: Path) -> Ending:
    """Return how a process exited, from the name to which libc renamed a file at that time.

    Args:
        path: the file under its original name.
    """
    begin = os.fsencode(f"{path.name}-")
    names = os.listdir(os.fsencode(path.parent)) if path.parent.is_dir() else []
    codes = [name[len(begin) :] for name in names if name.startswith(begin) and len(name) <= len(begin) + 1]
    return Ending(codes[0][0] if codes[0] else 0, -1) if codes else UNKNOWN


def _reaped(path: Path) -> Ending:
    """Return the status that the parent wrote; `UNKNOWN` where it was killed before writing."""
    text = path.read_text() if path.is_file() else ""
    return _of_status(int(text)) if text.lstrip("-").isdigit() else UNKNOWN


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_status(status: int) -> Ending:
    return Ending(status, -1) if status >= 0 else Ending(-1, -status)


def ending_of_job(launch: Launch, status: int | None) -> Ending:
    """Return how the process started as the job ended: a rank, or a launcher that may import torch."""
    facts = launch.facts()
    last = next_image(launch.raw, facts["host"], facts["pid"]) - 1
    folder = image_folder(launch.raw, facts["host"], facts["pid"], max(last, 0))
    seen = ending(folder, records.read_records(folder / "records.bin"), status)
    return seen if seen.is_known else exited(launch.raw / EXIT)
