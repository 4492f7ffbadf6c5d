"""Import of a run into an object store, whole or by several processes.

The manifest of the run is put last, so a run that has one is complete. A shard stages its files on its own
disk, and puts them, and then its mark, beside the place of the run. The shard that finds all marks fetches
the staged files and makes the run. Two that end together both make it, with the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro.errors import DproError, InputError, UsageError, first_line
from dpro.extensions.remote.copies import open_store
from dpro.ingest.importer import STAGING_SUFFIX, Reading, Traces, find_traces, import_sources
from dpro.ingest.shards import (
    DEFAULT,
    MARKS,
    PLAN,
    Shard,
    WaitingImport,
    check_plan,
    finish,
    mark_of,
    stage_part,
)
from dpro.ingest.staging import make_staging
from dpro.store import MANIFEST, Run, is_run, open_run

PATTERN = re.compile(r"[*?\[]")  # fsspec would remove or fetch all paths that match


def import_to_store(
    sources: Sequence[Path], url: str, shard: Shard | None, here: Path, reading: Reading = DEFAULT
) -> Run | WaitingImport:
    """Import files and folders as a run in an object store.

    Args:
        sources: the same in all shards.
        url: place of the run in the store.
        shard: the part of the files to read; None for all.
        here: an empty folder on this host, with room for staged files, visible to workers of an executor.

    Returns:
        The copy of the run in `here`, or only its manifest where another shard has made the run at the same
        time; while other shards have not ended, their numbers.

    Raises:
        UsageError: the URL exists or is not valid for a run, or other shards were given other sources.
        InputError: see `import_sources`; or the store cannot be read or written.
    """
    store, root = open_store(url)
    root = root.rstrip("/")
    if PATTERN.search(root) or {".", ".."} & set(root.split("/")):
        raise UsageError(
            f"{url}: contains *, ?, [ or dots, which match other paths, too; choose another output"
        )
    run = here / "run"
    with _store_errors(url):
        under_way = shard is not None and store.exists(f"{root}{STAGING_SUFFIX}/{PLAN}")
        if store.exists(f"{root}/{MANIFEST}" if under_way else root):
            raise UsageError(f"{url}: exists already; choose another output or remove it")
        if shard is not None:
            traces = find_traces(sources)
            waiting = _import_shard(store, root, run, traces, shard, reading)
            if waiting is not None:
                return waiting
        else:
            import_sources(sources, run, **vars(reading))
            _put(store, run, root, last=run / MANIFEST)
    return replace(open_run(run), source=url)


def _import_shard(
    store: Any, root: str, run: Path, traces: Traces, shard: Shard, reading: Reading
) -> WaitingImport | None:
    """Put a shard's part into the store, and the run if it is complete; None unless shards are missing."""
    staging, there = run.with_name(STAGING_SUFFIX), root + STAGING_SUFFIX
    place = store.unstrip_protocol(there)
    make_staging(staging)
    (staging / MARKS).mkdir()
    if store.exists(f"{there}/{PLAN}"):
        store.get_file(f"{there}/{PLAN}", str(staging / PLAN))
        check_plan(staging, traces, shard, place)
    else:  # put before files are read, so that shards with other sources find it
        check_plan(staging, traces, shard, place)
        store.put_file(str(staging / PLAN), f"{there}/{PLAN}")
    own_mark = mark_of(staging, shard.index)
    _remove(store, _store_path(there, staging, own_mark))
    stage_part(traces, staging, shard, reading)
    _put(store, staging, there, last=own_mark)
    try:
        store.invalidate_cache()  # other processes write to the store, too
        marks = [_store_path(there, staging, mark_of(staging, index)) for index in range(shard.count)]
        missing = [index for index, mark in enumerate(marks) if not store.exists(mark)]
        if not missing:
            store.get(f"{there}/", f"{staging}/", recursive=True)
            finish(traces, staging, run, reading)
            _put(store, run, root, last=run / MANIFEST)
            _remove(store, there)
    except FileNotFoundError:  # another shard has made the run and removed the staged files
        store.invalidate_cache()
        missing = []
    if missing and not store.exists(f"{root}/{MANIFEST}"):  # checked after the marks
        return WaitingImport(missing, place)
    if not is_run(run):
        if not store.exists(f"{root}/{MANIFEST}"):
            raise InputError(f"{place}: staged files are missing; run every shard again")
        run.mkdir(exist_ok=True)
        store.get_file(f"{root}/{MANIFEST}", str(run / MANIFEST))
    return None


def _put(store: Any, folder: Path, to: str, *, last: Path) -> None:
    """Put all files of a folder below a path of the store, `last` after all others."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != last]
    for part in (files, [last]):
        store.put([str(path) for path in part], [_store_path(to, folder, path) for path in part])


def _store_path(to: str, folder: Path, path: Path) -> str:
    return f"{to}/{path.relative_to(folder).as_posix()}"


def _remove(store: Any, path: str) -> None:
    try:
        store.rm(path, recursive=True)
    except FileNotFoundError:  # removed by another shard that has made the run
        return


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Raise errors of the store's library as one line."""
    try:
        yield
    except DproError:
        raise
    except Exception as error:
        raise InputError(f"{url}: cannot be read or written ({first_line(error)})") from error
