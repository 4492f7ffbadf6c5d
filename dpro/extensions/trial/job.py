"""Run a job under the recorder, changed or not, and check that the change was really made.

Takes a command, changes, and a folder; leaves a run in the folder, and the job's output in a file beside it.
A job that fails, and a change that cannot be made on some rank, are errors; the job is ended as soon as one
is reported.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from dpro.collectors.finish import refused_so_far
from dpro.collectors.launch.recording import launches
from dpro.collectors.liveness import wait_until_finished
from dpro.errors import DproError
from dpro.extensions.trial.changes import Change
from dpro.store import Run, open_run

LOOK_S = 0.5
GRACE_S = 30.0
_PREFIX = re.compile(r"(?:\[(?:rank|default)?\d+\]: ?)+")  # names the rank of a line, as launchers print it
_TRACEBACK = "Traceback (most recent call last)"
_LAUNCHER = re.compile(  # output of the launchers themselves
    r"ChildFailedError|SignalException|ProcessRaisedException|distributed[/.]elastic|^[=\-*_]{5,}$"
    r"|^(?:\*+ )?(?:Setting OMP_NUM_THREADS|\w+ \d+ closing signal)"
)


class NotApplied(DproError):
    """A change could not be made to the job, so that a measurement would not be a trial of it."""


def record_job(
    run: Path, command: Sequence[str], changes: Sequence[Change], options: Sequence[str], show: bool
) -> None:
    """Record a job into a new folder.

    Args:
        show: whether the job's output goes to stderr; else it goes to a file beside the folder.

    Raises:
        DproError: the job failed.
        NotApplied: a change could not be made.
    """
    apply = json.dumps([change.document() for change in changes])
    words = [sys.executable, "-m", "dpro", "record", "--quiet", "-o", str(run), *options]
    words += ["--watch-loss", "--apply", apply, "--", *command]
    log = run.with_name(f"{run.name}.log")
    with log.open("wb") as file, _ends_job_on_sigterm():
        output = sys.stderr if show else file
        job = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            refused = _watch(job, run)
        finally:
            _end(job)
    if refused:
        raise NotApplied(f"not applied: {refused}")
    if job.returncode:
        how = f"signal {-job.returncode}" if job.returncode < 0 else f"exit code {job.returncode}"
        raise DproError(f"the job ended with {how}{_first_words(run, log)}")


@contextmanager
def _ends_job_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, such as from a scheduler, into an exception, so that the job is ended, too."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(job: subprocess.Popen[bytes], run: Path) -> str:
    """Wait for the job to end; return early, with the reason, if a change cannot be made."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            job.wait(LOOK_S)
            return ""
        for launch in launches(run.resolve()):
            for reason in refused_so_far(launch):
                return reason


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a running job; its launcher ends the ranks."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_S)
    if job.poll() is None:
        job.kill()
        job.wait()


def _first_words(run: Path, log: Path) -> str:
    """Return why the job failed: the first exception of its processes as recorded, else as printed."""
    error = ""
    with suppress(DproError):
        wait_until_finished(run)
        error = open_run(run).manifest.error
    error = error or first_error_in(log.read_text(errors="replace").splitlines())
    return f": {error} (all of it: {log})" if error else ""


def first_error_in(lines: Sequence[str]) -> str:
    """Find the first error in a job's output, except a launcher's report of which process failed.

    Args:
        lines: as printed by ranks and launchers, in order.

    Returns:
        The exception of the first traceback, else the last line that no launcher printed; may be empty.
    """
    printed: list[str] = []
    for number, line in enumerate(lines):
        prefix = _PREFIX.match(line)
        ranks = prefix[0] if prefix else ""
        if _TRACEBACK in line:
            after = [below for below in lines[number + 1 :] if below.startswith(ranks)]
            error = _exception_of([below.removeprefix(ranks) for below in after])
            if error and _LAUNCHER.search(error):
                break
            if error:
                return error
        elif line.strip() and not _LAUNCHER.search(line):
            printed.append(line.removeprefix(ranks).strip())
    return printed[-1] if printed else ""


def _exception_of(after: Sequence[str]) -> str:
    """Return the exception that a traceback ends with: its first line that is not indented."""
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), "")


def ensure_applied(path: Path, changes: Sequence[Change]) -> Run:
    """Open the run of a job; check that it has all ranks, each with all changes made.

    Raises:
        DproError: nothing was recorded, or a rank is missing.
        NotApplied: a change was not made on some rank.
    """
    run = open_run(path)
    manifest = run.manifest
    if not manifest.ranks or manifest.missing_ranks:
        missing = ", ".join(map(str, manifest.missing_ranks))
        what = f"nothing was recorded of rank {missing}" if manifest.ranks else "nothing was recorded"
        raise DproError("; ".join([f"{path}: {what}", *manifest.warnings[:1]]))
    for made in manifest.applied:
        for reason in made.refused:
            raise NotApplied(f"{_where_applied(run, made.edit)}: rank {made.rank}: {made.edit}: {reason}")
    wanted = {(rank, change.text) for rank in manifest.ranks for change in changes}
    for rank, edit in sorted(wanted - {(made.rank, made.edit) for made in manifest.applied}):
        raise NotApplied(f"{_where_applied(run, edit)}: rank {rank}: {edit}: nothing shows that it was")
    return run


def _where_applied(run: Run, edit: str) -> str:
    """Return `not applied`, or to how many ranks an edit was applied."""
    manifest = run.manifest
    done = sum(made.edit == edit and not made.refused for made in manifest.applied)
    return f"applied to {done} of {len(manifest.ranks)} ranks" if done else "not applied"
