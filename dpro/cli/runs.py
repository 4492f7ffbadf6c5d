"""Runs in a folder: which exist, which can be opened, and which are being recorded.

Takes a folder; returns paths, and the reasons why runs cannot be opened. Reads at most their manifests.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dpro.errors import DproError, InputError
from dpro.remote import is_url

MAX_RUNS = 500  # runs of a folder


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, finished or not, sorted by name, at most `MAX_RUNS`.

    Links and hidden folders are left out; a folder that cannot be read has no runs.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
    return [entry for entry in entries if not entry.is_symlink() and is_run_folder(entry)][:MAX_RUNS]


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is a run, finished or not."""
    from dpro.collectors.launch.recording import launches
    from dpro.store import has_tables, is_run

    try:
        return folder.is_dir() and (is_run(folder) or has_tables(folder) or bool(launches(folder)))
    except (OSError, DproError):
        return False


def latest_in(folder: Path) -> Path | None:
    """Return the latest run in a folder that can be opened, live ones first; None if it has none.

    None also for URLs, for a folder that is itself a run, and for anything that is not a folder.
    """
    if is_url(str(folder)) or is_run_folder(folder) or not folder.is_dir():
        return None
    runs = [run for run in runs_in(folder) if not why_not(run)]
    return max(runs, key=lambda run: (is_live(run), run.stat().st_mtime_ns), default=None)


def why_not(run: Path) -> str:
    """Return why a run cannot be opened, in one line; empty if it can, perhaps after it is finished."""
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
    """Return whether a job is being recorded into a folder."""
    from dpro.collectors.launch.recording import launches
    from dpro.collectors.liveness import job_lives

    return any(job_lives(recording) for recording in launches(run.resolve()))
