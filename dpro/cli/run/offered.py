"""The runs that the dashboard offers: those that were given, and those beside the first of them.

In: paths. Out: offers, each with a name, and why it cannot be opened. Listing writes nothing and leaves links
out, so that what is offered lies in the folders that the user named. Of a run that a job is being recorded
into: an opened copy now and then, and the run itself when the job is over, which does not notice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dpro.errors import DproError, InputError, UsageError
from dpro.remote import is_url

if TYPE_CHECKING:
    from dpro.dashboards.runs import OfferedRun
    from dpro.store import Run


MAX_RUNS = 500  # runs of a folder
FRESH_S = 5.0  # how long a list counts: the page asks for it with every link


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, finished or not, by name; links and hidden folders are left out.

    Args:
        folder: where to look; its own folders, not theirs.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []
    return [entry for entry in entries if not entry.is_symlink() and _is_run(entry)][:MAX_RUNS]


def _is_run(folder: Path) -> bool:
    from dpro.collectors.launch.recording import launches
    from dpro.store import holds_tables, is_run

    try:
        return folder.is_dir() and (is_run(folder) or holds_tables(folder) or bool(launches(folder)))
    except (OSError, DproError):
        return False


def latest_in(folder: Path) -> Path | None:
    """The run to show first of a folder of runs: the latest that can be opened; None where it is none."""
    if is_url(str(folder)) or _is_run(folder) or not folder.is_dir():
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


def offers_of(given: Sequence[str], folder: Path | None = None) -> Callable[[], list[OfferedRun]]:
    """What lists the runs that were given, and those of a folder.

    Args:
        given: paths as typed, the first run first; these may be traces.
    """
    listed: list[tuple[float, list[OfferedRun]]] = []

    def offers() -> list[OfferedRun]:
        if not listed or time.monotonic() - listed[0][0] > FRESH_S:
            listed[:] = [(time.monotonic(), list(_offers(given, folder)))]
        return listed[0][1]

    return offers


def _offers(given: Sequence[str], folder: Path | None) -> Iterator[OfferedRun]:
    from dpro.dashboards.runs import OfferedRun

    names = names_of(given)
    given_folders = {Path(path).resolve() for path in given if not is_url(path)}
    for path, name in names.items():
        local = not is_url(path) and _is_run(Path(path))
        lives = local and is_live(Path(path))
        yield OfferedRun(name, path, why_not(Path(path)) if local and not lives else "", lives)
    for run in runs_in(folder) if folder is not None else []:
        if run.resolve() not in given_folders:
            lives = is_live(run)
            name = run.name if run.name not in names.values() else f"{folder}/{run.name}"
            yield OfferedRun(name, str(run), "" if lives else why_not(run), lives)


def names_of(given: Sequence[str]) -> dict[str, str]:
    """A name for each path: its last part, or all of it where that is another's, too.

    Raises:
        UsageError: a path was given twice.
    """
    if len(set(given)) < len(given):
        raise UsageError("a run was given twice: each is offered once")
    last = [Path(path).name or path for path in given]
    return {path: name if last.count(name) == 1 else path for path, name in zip(given, last, strict=True)}


# A run that is still being recorded.


MIN_S = 2.0  # from one copy to the next
SHARE = 0.1  # of the time that copies may take
KEPT = 2  # the latest may still be read when the next is there


def is_live(run: Path) -> bool:
    """Whether a job is being recorded into a folder."""
    from dpro.collectors.launch.recording import launches
    from dpro.collectors.liveness import job_lives

    return any(job_lives(recording) for recording in launches(run.resolve()))


def copies(run: Path, least_s: float = MIN_S) -> Iterator[Run]:
    """Copies of a recording, the run itself last.

    Args:
        least_s: from one copy to the next, at least.

    Raises:
        InputError: the run cannot be opened when its job is over.
    """
    import polars as pl

    from dpro.opening import open_path

    with TemporaryDirectory(prefix="dpro-live-", ignore_cleanup_errors=True) as folder:
        for number in count():
            if not is_live(run):
                break
            began = time.monotonic()
            shutil.rmtree(Path(folder) / str(number - KEPT), ignore_errors=True)
            with suppress(DproError, OSError, ValueError, pl.exceptions.PolarsError):  # it changes meanwhile
                yield replace(_copied(run.resolve(), Path(folder) / str(number)), source=run)
            took = time.monotonic() - began
            time.sleep(max(least_s, took / SHARE))
        yield open_path(run)


def _copied(run: Path, to: Path) -> Run:
    """A copy of what there is so far, with what was found while the job ran."""
    from dpro.collectors.attach import copy_run
    from dpro.collectors.finish import finish
    from dpro.detect.findings_log import FOLDER
    from dpro.opening import readers
    from dpro.store import open_run

    copy_run(run, to, lambda launch: finish(launch, readers(), None, {}))
    if (run / FOLDER).is_dir():
        shutil.copytree(run / FOLDER, to / FOLDER)
    return open_run(to)
