"""Which paths a server may read: those below the folders that its user named.

In: a path as a client names it. Out: the path it resolves to. Whatever leads out of the folders is refused: a
path, a link anywhere below it, a URL. A run that is not finished is refused too, since reading it would write
into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpro.errors import InputError, UsageError
from dpro.remote import is_url

MAX_LISTED = 200  # runs
MAX_DEPTH = 6  # below a folder, where runs are searched for


def named_folders(folders: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """The folders that may be read, links followed; the working directory where none is named.

    Raises:
        UsageError: one of them is no folder.
    """
    named = tuple(Path(folder).resolve() for folder in folders or (".",))
    for folder in named:
        if folder.is_file():
            raise UsageError(f"{folder}: is a file; name its folder, {folder.parent}")
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
    return named


def readable(path: str, folders: Sequence[Path]) -> Path:
    """The path of a run, of traces, or of a file that an edit names, links followed.

    Args:
        folders: as `named_folders` returns them.

    Raises:
        InputError: it does not exist, leads out of the folders, or is a run that is not finished.
    """
    if is_url(path):
        raise InputError(f"{path}: is a URL; only what lies in {_named(folders)} is read")
    try:
        places = [(folder / path).resolve() for folder in folders]
        allowed = [place for place in places if _is_below(place, folders)]
        existing = [place for place in allowed if place.exists()]
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: is no path ({error})") from error
    if not allowed:
        raise InputError(f"{path}: leads out of {_named(folders)}")
    if not existing:
        raise InputError(f"{path}: no such file or folder in {_named(folders)}")
    for link in _links(existing[0]):
        if not _is_below(link.resolve(), folders):
            raise InputError(f"{path}: its link {link.name} leads out of {_named(folders)}")
    _ensure_finished(existing[0])
    return existing[0]


def runs_in(folders: Sequence[Path]) -> list[str]:
    """Run directories below the folders, sorted; of many the first."""
    from dpro.store import is_run

    runs: list[str] = []
    for folder in folders:
        for place, below, _ in os.walk(folder):
            path = Path(place)
            below[:] = sorted(name for name in below if not name.startswith("."))
            if is_run(path):
                runs.append(place)
                below.clear()
            elif len(path.relative_to(folder).parts) >= MAX_DEPTH:
                below.clear()
            if len(runs) >= MAX_LISTED:
                return sorted(runs)
    return sorted(runs)


def _ensure_finished(path: Path) -> None:
    from dpro.collectors.launch.recording import launches

    if path.is_dir() and any(launch.marker.exists() for launch in launches(path)):
        raise InputError(f"{path}: is still being recorded or not finished; `dpro info {path}` finishes it")


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _links(path: Path) -> Iterator[Path]:
    """Links below a path, and below the folders that they lead to."""
    waiting, seen = [path], set[Path]()
    while waiting:
        top = waiting.pop()
        if top in seen or not top.is_dir():
            continue
        seen.add(top)
        for place, folders, files in os.walk(top):
            for name in (*folders, *files):
                entry = Path(place) / name
                if entry.is_symlink():
                    yield entry
                    waiting.append(entry.resolve())


def _named(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))
