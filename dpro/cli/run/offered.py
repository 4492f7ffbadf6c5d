"""The runs that the dashboard offers: those that were given, and those beside the first of them.

In: paths. Out: offers, each with a name, and why it cannot be opened. Listing writes nothing and leaves links
out, so that what is offered lies in the folders that the user named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dpro.cli.run.live import is_live
from dpro.errors import DproError, InputError, UsageError
from dpro.remote import is_url

if TYPE_CHECKING:
    from dpro.dashboards.runs import OfferedRun

MAX_RUNS = 500  # runs of a folder
FRESH_S = 5.0  # how long a list counts: the page asks for it with every link


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, finished or not, by name; links and hidden folders are left out.

    Args:
        folder: where to look; its own folders, not theirs.
    """
    try:
        entries = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError:
        return []
    return [each for each in entries if not each.is_symlink() and _is_run(each)][:MAX_RUNS]


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
    found = [each for each in runs_in(folder) if not why_not(each)]
    return max(found, key=lambda each: (is_live(each), each.stat().st_mtime_ns), default=None)


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
    known: list[tuple[float, list[OfferedRun]]] = []

    def offers() -> list[OfferedRun]:
        if not known or time.monotonic() - known[0][0] > FRESH_S:
            known[:] = [(time.monotonic(), list(_offers(given, folder)))]
        return known[0][1]

    return offers


def _offers(given: Sequence[str], folder: Path | None) -> Iterator[OfferedRun]:
    from dpro.dashboards.runs import OfferedRun

    names = names_of(given)
    own = {Path(path).resolve() for path in given if not is_url(path)}
    for path, name in names.items():
        local = not is_url(path) and _is_run(Path(path))
        lives = local and is_live(Path(path))
        yield OfferedRun(name, path, why_not(Path(path)) if local and not lives else "", lives)
    for each in runs_in(folder) if folder is not None else []:
        if each.resolve() not in own:
            lives = is_live(each)
            name = each.name if each.name not in names.values() else f"{folder}/{each.name}"
            yield OfferedRun(name, str(each), "" if lives else why_not(each), lives)


def names_of(given: Sequence[str]) -> dict[str, str]:
    """A name for each path: its last part, or all of it where that is another's, too.

    Raises:
        UsageError: a path was given twice.
    """
    if len(set(given)) < len(given):
        raise UsageError("a run was given twice: each is offered once")
    last = [Path(path).name or path for path in given]
    return {path: name if last.count(name) == 1 else path for path, name in zip(given, last, strict=True)}
