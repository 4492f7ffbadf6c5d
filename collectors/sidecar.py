"""The process beside the job that waits for its end and has the recorder's files turned into tables.

Takes a launch and the job to watch. Starts a telemetry sampler, and calls two functions: one converts
complete files while the job runs, the other finishes the run. It reads no trace itself and stays light:
polars and torch are not imported until the job has ended.
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

from dpro.collectors.inside.files import IMPORTED, image_folder, next_image, pid_and_image
from dpro.collectors.launch import absence
from dpro.collectors.launch.endings import ending_of_job, first_error
from dpro.collectors.launch.notices import LastWord
from dpro.collectors.launch.processes import LaunchedProcess, oom_kills, wait_for_any, watch_folder
from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry.sampler import start as start_sampler
from dpro.collectors.telemetry.samples import sample_files
from dpro.errors import InputError
from dpro.folders import written_whole

LOOK_S = 1.0  # how often to look for new processes and windows
BATCH = 32  # waiting windows or dumps that start a conversion while the job runs; short jobs have fewer
_WAITING = ("window*.json", "flight-*.json", "flight-*.pickle")
FREQUENT_LOOKS = 10  # checks for absent recorders at each look, then at powers of two only
GONE = "gone"  # file in a process's folder: when it was first seen to have ended
ELSEWHERE_S, ELSEWHERE_LOOKS = 2.5, 5  # how long, and how often, to wait for processes on other hosts
RANKS_OUTLIVE_JOB_S = 5.0  # how long to wait for ranks when the launcher was killed


def attend(
    recording: Launch,
    job: LaunchedProcess,
    convert: Callable[[Launch], None],
    finish: Callable[[Launch, int | None, dict[int, int]], None],
    last_word: LastWord,
) -> None:
    """Watch a job to its end.

    Args:
        job: the launcher's process, which became the job.
        convert: turns complete windows into tables; called in a child at idle priority.
        finish: completes the run, from the wait status of the job, None where unknown, and the wait statuses
            of its processes by pid.
        last_word: says at once why nothing was recorded; else `finish` may say why there is no step.
    """
    killed_before = oom_kills()
    sampler = start_sampler(recording)
    ranks: dict[int, LaunchedProcess] = {}
    helper = 0
    absent: dict[str, int] = {}
    looks = count(1)
    changes = watch_folder(recording.raw)  # a process may end moments after it began to record
    while not job.ended():
        wait_for_any([job, *ranks.values()], LOOK_S, changes)
        _watch_new_processes(recording, ranks)
        if ranks:
            last_word.release()
        else:
            _note_absence(recording, job, next(looks), absent)
        if helper:
            helper = 0 if os.waitpid(helper, os.WNOHANG)[0] else helper
        elif _has_batch(recording):
            helper = _at_idle_priority(convert, recording)
    _wait_for_ranks(recording, ranks)
    if any(recording.raw.glob("*/records.bin")):
        last_word.release()
    else:
        last_word.say(_why_nothing(recording, _final_status(job)))
    if (killed := oom_kills() - killed_before) > 0:
        recording.log(
            f"{socket.gethostname()}: the kernel killed {killed} process(es) for lack of memory, of the "
            "job or of others, while the job ran",
        )
    if sampler is not None:
        sampler.stop()
    if helper:  # at idle priority it may never finish; `finish` repeats its unfinished work
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    status = _final_status(job)  # first: it waits a moment, in which the ranks get a status, too
    statuses = {pid: rank.status for pid, rank in ranks.items() if rank.ended() and rank.status is not None}
    finish(recording, status, statuses)


def _has_batch(recording: Launch) -> bool:
    """Return whether enough files wait for conversion to begin before the job ends."""
    waiting = [len(list(recording.raw.glob(f"*/{name}"))) for name in _WAITING]
    return max(waiting) >= BATCH or bool(sample_files(recording.raw, whole=True))


def _watch_new_processes(recording: Launch, ranks: dict[int, LaunchedProcess]) -> None:
    """Start to watch processes of this host that began to record; save when ended ones were first gone."""
    host = socket.gethostname()
    for folder in recording.raw.glob(f"{glob.escape(host)}-*/"):
        with suppress(ValueError):  # not the folder of a process
            pid, _ = pid_and_image(folder.name)
            if folder.name.rpartition("-")[0] == host and pid not in ranks:
                ranks[pid] = LaunchedProcess(pid)
    for pid, rank in ranks.items():
        if rank.ended():  # reads the exit status while the kernel has it
            last = next_image(recording.raw, host, pid) - 1
            folder = image_folder(recording.raw, host, pid, last)
            # Keep the time at which the process was first seen to have ended.
            if folder.is_dir() and not (folder / GONE).exists():
                with suppress(OSError), written_whole(folder, GONE) as file:  # the disk may be full
                    file.write(str(time.time_ns()).encode())


def _note_absence(recording: Launch, job: LaunchedProcess, look: int, absent: dict[str, int]) -> None:
    """Record why nothing is recorded, at ever longer intervals: some jobs have nothing to record."""
    if look < FREQUENT_LOOKS or look & (look - 1) == 0:
        absent |= absence.reasons(job.pid, recording.inject, recording.raw) | absent
        with suppress(OSError):
            text = "\n".join(absence.in_words(absent))
            (recording.raw / absence.ABSENCE).write_bytes(text.encode(errors="backslashreplace"))


def _why_nothing(recording: Launch, status: int | None) -> str:
    """Word why a job that has ended was not recorded, from its wait status, before its run is complete."""
    imported, failure = (recording.raw / IMPORTED).exists(), ""
    with suppress(OSError, InputError):
        failure = ending_of_job(recording, status).failure(first_error(recording.raw))
    return absence.why_no_steps([], imported, absence.seen_in(recording.raw), failure)


def _wait_for_ranks(recording: Launch, ranks: dict[int, LaunchedProcess]) -> None:
    """Wait for ranks to end, which outlive a launcher that was killed."""
    deadline = time.monotonic() + RANKS_OUTLIVE_JOB_S
    _watch_new_processes(recording, ranks)
    while time.monotonic() < deadline and not all(rank.ended() for rank in ranks.values()):
        wait_for_any(list(ranks.values()), 0.1)
    alive = sorted(pid for pid, rank in ranks.items() if not rank.ended())
    if alive:
        pids = ", ".join(map(str, alive))
        recording.log(f"the job's own process ended before process {pids}: later work is not recorded")
    _watch_new_processes(recording, ranks)
    _wait_for_other_hosts(recording)


def _wait_for_other_hosts(recording: Launch) -> None:
    """Wait for processes on other hosts, as in a Ray cluster, until their files stop growing."""
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
    recording.log("processes on other hosts outlived the job's own process: later work is not recorded")


def _final_status(job: LaunchedProcess) -> int | None:
    """Return the wait status; the kernel reports it once the shell has reaped the job, just after its end."""
    for _ in range(20):
        if job.ended() and job.status is not None:
            break
        time.sleep(0.01)
    return job.status


def _at_idle_priority(convert: Callable[[Launch], None], recording: Launch) -> int:
    """Convert in a child that runs only on idle cores; return its pid."""
    child = os.fork()
    if child:
        return child
    try:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        convert(recording)
    finally:
        os._exit(0)
