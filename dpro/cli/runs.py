"""Runs in a folder: which there are, which can be opened, and which are being recorded.

In: a folder. Out: paths, and why one of them cannot be opened; no run is opened for it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dpro.errors import DproError, InputError
from dpro.remote import is_url

MAX_RUNS = 500  # runs of a folder


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, finished or not, by name; links and hidden folders are left out.

    Args:
        folder: where to look; its own folders, not theirs.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
    return [entry for entry in entries if not entry.is_symlink() and is_run_folder(entry)][:MAX_RUNS]


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run, finished or not."""
    from dpro.collectors.launch.recording import launches
    from dpro.store import holds_tables, is_run

    try:
        return folder.is_dir() and (is_run(folder) or holds_tables(folder) or bool(launches(folder)))
    except (OSError, DproError):
        return False


def latest_in(folder: Path) -> Path | None:
    """The run to show first of a folder of runs: the latest that can be opened; None where it is none."""
    if is_url(str(folder)) or is_run_folder(folder) or not folder.is_dir():
        return None
    runs = [run for run in runs_in(folder) if not why_not(run)]
    return max(runs, key=lambda run: (is_live(run), run.stat().st_mtime_ns), default=None)


def why_not(run: Path) -> str:
    """Why a run cannot be opened, in one line; empty where it can, be it after finishing it."""
    from dpro.collectors.launch.recording import launches
    from dpro.store import open_run

    with suppress(DproError):
        if launches(run):
            return ""
    try:
        open_run(run)
    except InputError as error:
        return str(error).removeprefix(f"{run}: ").removeprefix(f"{run}/")
    return ""


def is_live(run: Path) -> bool:
    """Whether a job is being recorded into a folder."""
    from dpro.collectors.launch.recording import launches
    from dpro.collectors.liveness import job_lives

    return any(job_lives(recording) for recording in launches(run.resolve()))
