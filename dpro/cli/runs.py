"""What a command is pointed at, as an opened run.

In: a path: a run directory, or traces. Out: a `Run`. Traces are imported into a cache, once for as long as
the files do not change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpro._version import __version__
from dpro.cli.output import stderr_console, warn
from dpro.errors import DproError, InputError
from dpro.store import FORMAT_VERSION, Run, holds_tables, is_run, open_run

if TYPE_CHECKING:
    from dpro.ingest.importer import Progress


def open_or_import(path: str | os.PathLike[str]) -> Run:
    """Open a run; import what is not one, and repeat what was to be said of that when it was imported.

    Args:
        path: a run directory, a folder of traces, or one trace.

    Raises:
        InputError: as `open_quietly`.
    """
    run = open_quietly(path)
    if run.source is not None:
        for warning in run.manifest.warnings:
            warn(warning)
    return run


def open_quietly(path: str | os.PathLike[str]) -> Run:
    """Open a run; import what is not one. What to know of it is in its manifest.

    A recording that is still being finished is waited for; one whose recorder was killed is finished here.

    Args:
        path: a run directory, a folder of traces, or one trace.

    Raises:
        InputError: there is no such path, it holds neither a run nor a trace, or it is still being recorded.
    """
    from dpro.cli.record import ensure_finished

    source = Path(path)
    if not source.exists():
        raise InputError(f"{source}: no such file or folder")
    if source.is_dir():
        ensure_finished(source)
        if is_run(source) or holds_tables(source):
            return open_run(source)
    return _open_cached(source)


def cache_folder() -> Path:
    """Where imports are kept: `$DPRO_CACHE`, else `~/.cache/dpro`."""
    chosen = os.environ.get("DPRO_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "dpro"


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr that tells bytes read and time left; nothing where stderr is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading traces", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _open_cached(source: Path) -> Run:
    from dpro.ingest.importer import import_sources

    run = cache_folder() / "imports" / _fingerprint(source)
    if not is_run(run):
        try:
            with progress_bar() as progress:
                import_sources([source], run, progress=progress)
        except DproError:
            if not is_run(run):  # else another command has just imported the same files
                raise
    return replace(open_run(run), source=source)


def _fingerprint(source: Path) -> str:
    """Changes with any file's path, size or time of change, and with what dpro makes of them."""
    from dpro.classify import table_version
    from dpro.ingest.formats import registry

    importers = " ".join(importer.name for importer in registry().importers)
    digest = hashlib.sha256(f"{__version__} {FORMAT_VERSION} {table_version()} {importers}".encode())
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    for file in files:
        if file.is_file():
            status = file.stat()
            digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
