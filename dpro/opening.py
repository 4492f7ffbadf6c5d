"""Opening a path as a run: a recording is finished first, and traces are imported into a cache.

Takes the path of a run directory or of traces; returns a `Run`. Traces are imported again only when their
files change. Here the recorder gets the importers that read PyTorch's files; neither imports the other.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpro._version import __version__
from dpro.cache import cache_folder, mark_used, remove_unused
from dpro.errors import DproError, InputError
from dpro.remote import is_url, local_copy
from dpro.words import nearest_of

if TYPE_CHECKING:
    from dpro.collectors.convert.recorded import Readers
    from dpro.collectors.launch.recording import Launch
    from dpro.ingest.importer import Progress
    from dpro.store import Run

    Watched = Callable[[], AbstractContextManager[Progress | None]]


def open_path(path: str | os.PathLike[str], watched: Watched = nullcontext) -> Run:
    """Open a run, or import traces and open the result; the manifest has its warnings.

    Waits for a recording that is being finished, and finishes one whose recorder was killed. Leaves out
    damaged files.

    Args:
        path: a run directory, a folder of traces, one trace, or the URL of any of these, which is copied
            first.
        watched: context that shows the progress of an import.

    Raises:
        InputError: the path does not exist, contains neither a run nor a trace, has no readable rank, or is
            still being recorded.
    """
    from dpro.damaged import without_damaged
    from dpro.store import open_run

    if is_url(path):
        copy = open_path(local_copy(str(path)), watched)
        return replace(copy, source=str(path))
    source = Path(path)
    return without_damaged(open_run(source) if names_a_run(source) else _open_cached(source, watched))


def names_a_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a local path is a run directory rather than traces; finish its recording if needed.

    Raises:
        InputError: the path does not exist, cannot be read, or is still being recorded.
    """
    from dpro.store import has_tables, is_run

    source = Path(path)
    try:
        kind = source.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise InputError(f"{source}: no such file or folder{_instead_of(source)}") from error
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror or error})") from error
    if not stat.S_ISDIR(kind):
        return False
    ensure_finished(source)
    return is_run(source) or has_tables(source)


def is_trace_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder on this machine, but not a run directory.

    Raises:
        InputError: the path does not exist, cannot be read, or is still being recorded.
    """
    return not is_url(path) and not names_a_run(path) and Path(path).is_dir()


def _instead_of(path: Path) -> str:
    """Return the end of a message about a missing path: a path of similar name, and how to make a run."""
    meant = ""
    wrong = next((part for part in (*reversed(path.parents), path) if not part.exists()), path)
    rest = path.relative_to(wrong)
    with suppress(OSError):  # a folder that cannot be listed
        there = [name for name in os.listdir(wrong.parent) if (wrong.parent / name / rest).exists()]
        if near := nearest_of(wrong.name, there):
            meant = f" (did you mean {wrong.parent / near / rest}?)"
    return f"{meant}; `dpro record -o RUN -- COMMAND` makes a run, `dpro demo` a small one to look at"


def ensure_finished(run: str | os.PathLike[str], timeout_s: float = 60.0) -> None:
    """Complete a run of `dpro record` before it is opened; do nothing for other runs.

    Waits for a sidecar that is still writing; does the sidecar's work if it was killed with the job.

    Raises:
        InputError: the run is still being recorded, or cannot be finished, or not within the timeout.
    """
    from dpro.collectors.liveness import wait_until_finished

    while abandoned := wait_until_finished(run, timeout_s):
        for recording in abandoned:
            try:
                _finish(recording)
            except OSError as error:
                raise InputError(
                    f"{run}: its tables cannot be written ({error.strerror or error})"
                ) from error


def _finish(recording: Launch) -> None:
    """Do the work of a killed sidecar, unless another command is doing it.

    Raises:
        OSError: the tables cannot be written.
    """
    from dpro.collectors.finish import finish
    from dpro.collectors.launch.recording import to_be_finished
    from dpro.collectors.liveness import unseen_end_warning

    with to_be_finished(recording) as is_mine:
        if is_mine:
            finish(recording, readers(), None, {}, unseen_end_warning(recording))


def readers() -> Readers:
    """Return the readers of PyTorch's files, for the recorder."""
    from dpro.collectors.convert.recorded import Readers
    from dpro.ingest.flight_recorder import read_dump
    from dpro.ingest.kineto import read_trace

    return Readers(trace=read_trace, dump=read_dump)


def _open_cached(source: Path, watched: Watched) -> Run:
    from dpro.ingest.importer import import_sources
    from dpro.store import is_run, open_run

    imports = cache_folder("imports")
    run = imports / _fingerprint(source)
    mark_used(run)
    if not is_run(run):
        remove_unused(imports)
        try:
            with watched() as progress:
                import_sources([source], run, progress=progress)
        except DproError:
            if not is_run(run):  # otherwise another command has just imported the same files
                raise
    return replace(open_run(run), source=source)


def _fingerprint(source: Path) -> str:
    """Return a hash of all files' paths, sizes and modification times, and of the code that reads them."""
    import dpro.ingest
    from dpro.classify import table_version
    from dpro.ingest.formats import registry
    from dpro.plugins import code_of
    from dpro.store import FORMAT_VERSION

    importers = " ".join(importer.name for importer in registry().importers)
    digest = hashlib.sha256(f"{__version__} {FORMAT_VERSION} {table_version()} {importers}".encode())
    code = {*Path(dpro.ingest.__file__).parent.rglob("*.py"), *code_of("importers")}
    # Unlike `rglob`, `walk` skips folders that vanish or cannot be read while it looks.
    inside = [Path(folder, name) for folder, _, names in os.walk(source) for name in names]
    for file in [*sorted(code), *(sorted(inside) if source.is_dir() else [source])]:
        try:
            status = file.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            digest.update(b"\0%s\0%d\0%d" % (os.fsencode(file.resolve()), status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:32]
