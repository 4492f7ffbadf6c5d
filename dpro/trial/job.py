"""Run a job under the recorder, changed or not, and make sure that the change was really made.

In: a command, changes, a folder. Out: a run in it, and what the job printed in a file beside it. A job that
fails, and a change that could not be made on some rank, are errors; a job that says so early is ended then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from dpro.collectors.applied import refused_so_far
from dpro.collectors.launch import launches
from dpro.errors import DproError
from dpro.store import Run, open_run
from dpro.trial.changes import Change

LOOK_S = 0.5
GRACE_S = 30.0


class NotApplied(DproError):
    """A change could not be made to the job: what was measured would be no try of it."""


def record_job(
    run: Path, command: Sequence[str], changes: Sequence[Change], options: Sequence[str], show: bool
) -> None:
    """Record a job into a folder that is not there yet.

    Args:
        run: the folder.
        command: the job.
        changes: what to change in it.
        options: of `dpro record`.
        show: whether the job's output goes where ours does; else into a file beside the folder.

    Raises:
        DproError: the job failed.
        NotApplied: a change could not be made.
    """
    apply = json.dumps([change.document() for change in changes])
    words = [sys.executable, "-m", "dpro", "record", "-o", str(run), *options]
    words += ["--apply", apply, "--", *command]
    log = run.with_name(f"{run.name}.log")
    with log.open("wb") as file, _told_to_end():
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
        raise DproError(f"the job ended with {how}{_last_words(log)}")


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Where somebody ends us, as a scheduler does, leave by the way that ends the job, too."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(job: subprocess.Popen[bytes], run: Path) -> str:
    """Wait for the job to end, or to say that a change cannot be made; then why that is."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            job.wait(LOOK_S)
            return ""
        for launch in launches(run.resolve()):
            for reason in refused_so_far(launch):
                return reason


def _end(job: subprocess.Popen[bytes]) -> None:
    """Have a job end that still runs; a launcher ends its ranks."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_S)
    if job.poll() is None:
        job.kill()
        job.wait()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()} (all of it: {log})" if lines else ""


def ensure_applied(path: Path, changes: Sequence[Change]) -> Run:
    """Open the run of a job; all its ranks must be there, each with all changes made.

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
        for reason in made["refused"]:
            raise NotApplied(f"not applied: rank {made['rank']}: {made['edit']}: {reason}")
    wanted = {(rank, change.text) for rank in manifest.ranks for change in changes}
    for rank, edit in sorted(wanted - {(made["rank"], made["edit"]) for made in manifest.applied}):
        raise NotApplied(f"not applied: rank {rank}: {edit}: nothing tells that it was")
    return run
