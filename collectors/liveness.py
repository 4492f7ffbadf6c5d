"""Whether the job of a recording still runs, and waiting until its tables are complete.

Reads a run directory; returns the recordings whose sidecar was killed, once no process of their jobs lives.
Where processes are not visible, on another host or from within a container, their files decide: each recorded
process and the sampler of a node write once a second.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dpro.collectors.convert.recorded import processes
from dpro.collectors.inside.kernel import is_alive
from dpro.collectors.launch.recording import Launch, is_locked, launches
from dpro.errors import InputError

QUIET_S = 180.0  # without a change, it has ended: other hosts see a mapped file change within two minutes
ORPHANS_S = 5.0  # how long ranks may outlive their launcher before that is an error


def job_lives(recording: Launch) -> bool | None:
    """Return whether a process of the job lives: the one started as the job, or one that records.

    Returns:
        None where no process is seen to live and some are not visible from here.
    """
    if _launched_lives(recording):
        return True
    with suppress(OSError, InputError):
        seen = [
            is_alive(facts)
            for facts in (recording.facts(), *(process.facts for process in processes(recording)))
        ]
        return True if True in seen else None if None in seen else False
    return False


def is_running(recording: Launch) -> bool:
    """Return whether a recording is in progress: its sidecar lives, or its job is seen to live."""
    return is_locked(recording) or bool(job_lives(recording))


def wait_until_finished(run: str | os.PathLike[str], timeout_s: float = 60.0) -> list[Launch]:
    """Wait until the sidecars of a run whose job has ended have written its tables.

    Returns:
        Recordings whose sidecar was killed; their tables are not made yet.

    Raises:
        InputError: the job still runs, may still run where it is not visible, or its sidecar exceeds the
            timeout.
    """
    began_s = time.monotonic()
    while True:
        recordings = launches(Path(run).resolve())
        locked = [recording for recording in recordings if is_locked(recording)]
        alive = [recording for recording in recordings if job_lives(recording)]
        if not locked and not alive:
            left = [recording for recording in recordings if recording.marker.exists()]
            for recording in left:
                quiet_s = _quiet_s(recording) if job_lives(recording) is None else QUIET_S
                if quiet_s < QUIET_S:
                    raise InputError(
                        f"{run}: may still be recorded on {recording.facts()['host']}: it changed "
                        f"{quiet_s:.0f} s ago, and processes there are not visible from here; read it there, "
                        f"or {QUIET_S:.0f} s after its last change"
                    )
            return left
        waited_s = time.monotonic() - began_s
        for recording in alive:
            if _launched_lives(recording) or (recording not in locked and waited_s > ORPHANS_S):
                raise InputError(
                    f"{run}: still being recorded{_progress(recording)}; read it when the job has ended; "
                    f"if it hangs, or to look now: dpro attach {run} -o COPY, then dpro diagnose COPY"
                )
        if waited_s > timeout_s and locked:
            raise InputError(_still_writing(run, locked[0]))
        time.sleep(0.05)


def unseen_end_warning(recording: Launch) -> list[str]:
    """Return at most one warning: that a recording is finished without seeing its processes end."""
    if job_lives(recording) is not None:
        return []
    host = recording.facts()["host"]
    changed = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(_changed_s(recording)))
    return [
        f"finished on {socket.gethostname()}, which cannot see the processes of {host}: if they were still "
        f"running, their work after {changed} UTC is missing"
    ]


def _launched_lives(recording: Launch) -> bool:
    """Return whether the process started as the job is seen to live."""
    with suppress(OSError, InputError):
        return is_alive(recording.facts()) is True
    return False


def _quiet_s(recording: Launch) -> float:
    """Return the seconds since the last change of a recording, by the clock of its file system."""
    now_s = time.time()
    with suppress(OSError), tempfile.TemporaryFile(dir=recording.marker.parent) as file:
        now_s = os.fstat(file.fileno()).st_mtime
    return abs(now_s - _changed_s(recording))  # a change in the far future is not recent


def _changed_s(recording: Launch) -> float:
    """Return when a file of a recording last changed, s since 1970."""
    times = [0.0]
    for path in (recording.marker, *recording.raw.glob("*"), *recording.raw.glob("*/*")):
        with suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times)


def _progress(recording: Launch) -> str:
    """Word the progress of a recording: ` (since 12:30:00, pid 7, 2 ranks so far)`; empty where unknown."""
    with suppress(OSError, InputError):
        begun = time.strftime("%H:%M:%S", time.localtime(recording.marker.stat().st_mtime))
        ranks = len(list(recording.raw.glob("*/facts.json")))
        pid = recording.facts()["pid"]
        return f" (since {begun}, pid {pid}, {ranks or 'no'} rank{'s' * (ranks != 1)} so far)"
    return ""


def _still_writing(run: str | os.PathLike[str], recording: Launch) -> str:
    with suppress(OSError, InputError):
        facts = recording.facts()
        if is_alive(facts) is None:
            return (
                f"{run}: still being recorded or finished on {facts['host']}; read it when the job has ended"
            )
    return f"{run}: its tables are still being written; try again in a minute"
