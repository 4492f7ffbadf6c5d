"""A run imported into an object store, whole or by shards that share nothing but the store.

In: sources on this host, and the URL of the run to be. Out: the run under that URL; its manifest is put last,
so a run that has one is whole. A shard stages its files on its own disk, and puts them, and then its mark,
beside the run's place. The one that finds the marks of all fetches what they have staged and makes the run.
Two that end together both make it, of the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro.errors import DproError, InputError, UsageError, first_line
from dpro.ingest.assembly.staging import make_staging
from dpro.ingest.importer import STAGING_SUFFIX, Progress, Traces, find_traces, import_sources
from dpro.ingest.shards import MARKS, PLAN, Shard, WaitingImport, agree, finish, mark_of, stage_part
from dpro.remote import open_store
from dpro.store import MANIFEST, Run, is_run, open_run

PATTERN = re.compile(r"[*?\[]")  # in a path that fsspec removes or fetches: any that match


def import_to_store(
    sources: Sequence[Path],
    url: str,
    shard: Shard | None,
    here: Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Run | WaitingImport:
    """Import files and folders as a run in an object store.

    Args:
        sources: as in `import_sources`; the same in all shards.
        shard: which part of the files to read; None for all.
        here: an empty folder on this host, with room for what is staged.
        jobs: as in `import_sources`.
        executor: as in `import_sources`; its workers see `here`.
        progress: called after each file.

    Returns:
        The copy of the run in `here`, or of its manifest where another shard has made it at the same time;
        while other shards have not ended, which ones.

    Raises:
        UsageError: there is something at the URL, or it is no name for a run, or other shards were given
            other sources.
        InputError: as in `import_sources`, or the store cannot be read or written.
    """
    store, root = open_store(url)
    root = root.rstrip("/")
    if PATTERN.search(root) or {".", ".."} & set(root.split("/")):
        raise UsageError(f"{url}: names other places, too, with *, ?, [ or dots; choose another output")
    run = here / "run"
    with _store_errors(url):
        under_way = shard is not None and store.exists(f"{root}{STAGING_SUFFIX}/{PLAN}")
        if store.exists(f"{root}/{MANIFEST}" if under_way else root):
            raise UsageError(f"{url}: exists already; choose another output or remove it")
        if shard is not None:
            traces = find_traces(sources)
            waiting = _import_shard(
                store, root, run, traces, shard, jobs=jobs, executor=executor, progress=progress
            )
            if waiting is not None:
                return waiting
        else:
            import_sources(sources, run, jobs=jobs, executor=executor, progress=progress)
            _put(store, run, root, last=run / MANIFEST)
    return replace(open_run(run), source=url)


def _import_shard(
    store: Any,
    root: str,
    run: Path,
    traces: Traces,
    shard: Shard,
    *,
    jobs: int | None,
    executor: Executor | None,
    progress: Progress | None,
) -> WaitingImport | None:
    """Put a shard's part into the store, and the run if it is the last; return which have not ended."""
    staging, there = run.with_name(STAGING_SUFFIX), root + STAGING_SUFFIX
    place = store.unstrip_protocol(there)
    make_staging(staging)
    (staging / MARKS).mkdir()
    if store.exists(f"{there}/{PLAN}"):
        store.get_file(f"{there}/{PLAN}", str(staging / PLAN))
        agree(staging, traces, shard, place)
    else:  # put before the files are read, so that others that are given other sources find it
        agree(staging, traces, shard, place)
        store.put_file(str(staging / PLAN), f"{there}/{PLAN}")
    own_mark = mark_of(staging, shard.index)
    _remove(store, _there(there, staging, own_mark))
    stage_part(traces, staging, shard, jobs, executor, progress)
    _put(store, staging, there, last=own_mark)
    try:
        missing = _missing(store, staging, there, shard)
        if not missing:
            store.get(f"{there}/", f"{staging}/", recursive=True)
            finish(traces, staging, run, jobs, executor)
            _put(store, run, root, last=run / MANIFEST)
            _remove(store, there)
    except FileNotFoundError:  # another shard has removed what was staged, which it does at the end
        store.invalidate_cache()
        missing = []
    if missing and not store.exists(f"{root}/{MANIFEST}"):  # looked at last
        return WaitingImport(missing, place)
    if not is_run(run):
        if not store.exists(f"{root}/{MANIFEST}"):
            raise InputError(f"{place}: files are gone that shards have staged; run every shard again")
        run.mkdir(exist_ok=True)
        store.get_file(f"{root}/{MANIFEST}", str(run / MANIFEST))
    return None


def _missing(store: Any, staging: Path, there: str, shard: Shard) -> list[int]:
    """The shards that have not left their marks in the store."""
    store.invalidate_cache()  # other processes write there too
    marks = [_there(there, staging, mark_of(staging, index)) for index in range(shard.count)]
    return [index for index, mark in enumerate(marks) if not store.exists(mark)]


def _put(store: Any, folder: Path, to: str, *, last: Path) -> None:
    """Put all files of a folder below a path of the store, one of them when all others are there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != last]
    for part in (files, [last]):
        store.put([str(path) for path in part], [_there(to, folder, path) for path in part])


def _there(to: str, folder: Path, path: Path) -> str:
    return f"{to}/{path.relative_to(folder).as_posix()}"


def _remove(store: Any, path: str) -> None:
    try:
        store.rm(path, recursive=True)
    except FileNotFoundError:  # another shard that has made the run has removed it
        return


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Raise what the store's library raises as one line."""
    try:
        yield
    except DproError:
        raise
    except Exception as error:
        raise InputError(f"{url}: cannot be read or written ({first_line(error)})") from error
