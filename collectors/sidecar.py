"""What runs beside the job: waits for its end and has the recorder's files turned into tables.

In: a launch and the job to watch. Out: a sampler of telemetry beside it, and calls of two functions, one
that converts what is whole while the job runs and one that finishes the run. It reads no trace itself, and
stays light: it imports neither polars nor torch until the job has ended.
"""

from __future__ import annotations

import glob
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from dpro.collectors.inside.files import image_folder, next_image, pid_and_image
from dpro.collectors.launch import absence
from dpro.collectors.launch.processes import LaunchedProcess, changes_in, oom_kills, wait_for_any
from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry.sampler import start as start_sampler
from dpro.collectors.telemetry.samples import sample_files
from dpro.folders import written_whole

LOOK_S = 1.0  # how often to look for new processes and windows
BATCH = 32  # windows, or dumps, waiting before a batch is converted while the job runs: spares short jobs
_WAITING = ("window*.json", "flight-*.json", "flight-*.pickle")
FREQUENT_LOOKS = 10  # this many looks for what keeps the recorder out, then one at each power of two
ABSENCE = "absence.txt"  # what they found
GONE = "gone"  # in a process's folder: when it was first seen to have ended
ELSEWHERE_S, ELSEWHERE_LOOKS = 2.5, 5  # how long, and how often, to wait for processes on other hosts
RANKS_OUTLIVE_JOB_S = 5.0  # how long to wait for ranks when the launcher was killed


def attend(
    recording: Launch,
    job: LaunchedProcess,
    convert: Callable[[Launch], None],
    finish: Callable[[Launch, int | None, dict[int, int]], None],
) -> None:
    """Watch a job to its end.

    Args:
        job: the launcher's process, which became the job.
        convert: turns whole windows into tables; called in a child, at idle priority.
        finish: makes the run whole, from the wait status of the job, None where unknown, and those of its
            processes by pid.
    """
    killed_before = oom_kills()
    sampler = start_sampler(recording)
    ranks: dict[int, LaunchedProcess] = {}
    helper = 0
    absent: dict[str, int] = {}
    looks = count(1)
    changes = changes_in(recording.raw)  # a process may end moments after it has begun to record
    while not job.ended():
        wait_for_any([job, *ranks.values()], LOOK_S, changes)
        _meet(recording, ranks)
        if not ranks:
            _note_absence(recording, job, next(looks), absent)
        if helper:
            helper = 0 if os.waitpid(helper, os.WNOHANG)[0] else helper
        elif _enough_waits(recording):
            helper = _at_idle_priority(convert, recording)
    _outlast(recording, ranks)
    if (killed := oom_kills() - killed_before) > 0:
        recording.log(
            f"{socket.gethostname()}: for lack of memory the kernel killed {killed} process(es), of the "
            "job or of others, while the job ran",
        )
    if sampler is not None:
        sampler.stop()
    if helper:  # at idle priority it may take forever; what it has begun is done again
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    status = _final_status(job)  # waits a moment, so that what it started has a status, too
    statuses = {pid: rank.status for pid, rank in ranks.items() if rank.ended() and rank.status is not None}
    finish(recording, status, statuses)


def _enough_waits(recording: Launch) -> bool:
    """Whether there is so much to convert that the end of the job is not to be waited for."""
    waiting = [len(list(recording.raw.glob(f"*/{name}"))) for name in _WAITING]
    return max(waiting) >= BATCH or bool(sample_files(recording.raw, whole=True))


def _meet(recording: Launch, ranks: dict[int, LaunchedProcess]) -> None:
    """Begin to watch the processes of this host that have begun to record."""
    host = socket.gethostname()
    for folder in recording.raw.glob(f"{glob.escape(host)}-*/"):
        with suppress(ValueError):  # another folder
            pid, _ = pid_and_image(folder.name)
            if folder.name.rpartition("-")[0] == host and pid not in ranks:
                ranks[pid] = LaunchedProcess(pid)
    for pid, rank in ranks.items():
        if rank.ended():  # reads the exit status while it is there
            last = next_image(recording.raw, host, pid) - 1
            folder = image_folder(recording.raw, host, pid, last)
            # The time at which it was first seen to be gone is kept.
            if folder.is_dir() and not (folder / GONE).exists():
                with suppress(OSError), written_whole(folder, GONE) as file:  # on a full disk there is none
                    file.write(str(time.time_ns()).encode())


def _note_absence(recording: Launch, job: LaunchedProcess, look: int, absent: dict[str, int]) -> None:
    """Find out why nothing is recorded, ever more rarely: in some jobs there is nothing to record."""
    if look < FREQUENT_LOOKS or look & (look - 1) == 0:
        absent |= absence.reasons(job.pid, recording.inject, recording.raw) | absent
        with suppress(OSError):
            text = "\n".join(absence.in_words(absent))
            (recording.raw / ABSENCE).write_bytes(text.encode(errors="backslashreplace"))


def _outlast(recording: Launch, ranks: dict[int, LaunchedProcess]) -> None:
    """Wait for ranks to end, too: they outlive a launcher that was killed."""
    deadline = time.monotonic() + RANKS_OUTLIVE_JOB_S
    _meet(recording, ranks)
    while time.monotonic() < deadline and not all(rank.ended() for rank in ranks.values()):
        wait_for_any(list(ranks.values()), 0.1)
    alive = sorted(pid for pid, rank in ranks.items() if not rank.ended())
    if alive:
        pids = ", ".join(map(str, alive))
        recording.log(f"the job's own process ended before process {pids}: what came later is not recorded")
    _meet(recording, ranks)
    _outlast_elsewhere(recording)


def _outlast_elsewhere(recording: Launch) -> None:
    """Wait for processes on other hosts, as of a Ray cluster: what they write each second shows them."""
    beginning = f"{socket.gethostname()}-"
    sizes: dict[str, int] | None = None
    for _ in range(ELSEWHERE_LOOKS):
        before, sizes = sizes, {}
        for path in recording.raw.glob("*/records.bin"):
            if not path.parent.name.startswith(beginning):
                sizes[path.parent.name] = path.stat().st_size
        if not sizes or sizes == before:
            return
        time.sleep(ELSEWHERE_S)
    recording.log("processes on other hosts outlived the job's own: what came later is not recorded")


def _final_status(job: LaunchedProcess) -> int | None:
    """The wait status; the kernel reports it once the shell has reaped the job, moments after its end."""
    for _ in range(20):
        if job.ended() and job.status is not None:
            break
        time.sleep(0.01)
    return job.status


def _at_idle_priority(convert: Callable[[Launch], None], recording: Launch) -> int:
    """Convert in a child that runs only on cores that are otherwise idle; returns its pid."""
    child = os.fork()
    if child:
        return child
    try:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        convert(recording)
    finally:
        os._exit(0)
