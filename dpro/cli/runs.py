"""The run that a command is given, opened, with progress and warnings on stderr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpro.cli.output import stderr_console, warn
from dpro.opening import open_path

if TYPE_CHECKING:
    from dpro.ingest.importer import Progress
    from dpro.store import Run


def open_or_import(path: str | os.PathLike[str]) -> Run:
    """Open a run; import what is not one, and repeat the warnings of its import.

    Raises:
        InputError: as `open_path`.
    """
    run = open_quietly(path)
    if run.source is not None:
        for warning in run.manifest.warnings:
            warn(warning)
    return run


def open_quietly(path: str | os.PathLike[str]) -> Run:
    """Open a run; import what is not one. Warnings stay in its manifest.

    Raises:
        InputError: as `open_path`.
    """
    return open_path(path, progress_bar)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr of bytes read and time left; nothing where stderr is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading traces", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
