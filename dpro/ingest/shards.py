"""Import of one run by several processes that share only a file system or an object store.

Takes the same sources in every shard, and the number of this shard. The shard that ends last assembles the
run. A shard leaves a mark when its files are staged, so shards run in any order, at the same time, or again
after a failure: staged files are not read again. The lock only avoids repeated work: assembling changes no
staged file, and ends with one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpro._version import __version__
from dpro.documents import Document
from dpro.errors import DproError, InputError, UsageError, first_line
from dpro.folders import lock, written_whole
from dpro.ingest.assembly import assemble
from dpro.ingest.importer import (
    STAGING_SUFFIX,
    Reading,
    Traces,
    find_traces,
    import_sources,
    refuse_existing,
    stage_all,
    unwritable,
)
from dpro.ingest.staging import is_staged, make_staging
from dpro.remote import open_store
from dpro.store import MANIFEST, Manifest, Run, is_run, open_run
from dpro.words import whole_number

PLAN = "plan.json"
MARKS = "shards"
DEFAULT = Reading()


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` shares of an import, counted from 0."""

    index: int
    count: int


@dataclass(frozen=True)
class WaitingImport:
    """A run that is not complete yet: shards that have not ended, and the folder of staged files."""

    missing: list[int]
    staging: Path | str


class ShardDocument(Document, frozen=True, kw_only=True):
    """An import of which this shard has ended, and others have not.

    Attributes:
        run: the future run directory.
        complete: false; the shard that ends last answers with the content of the run.
        missing_shards: shards that have not ended, counted from 0.
    """

    run: str
    complete: bool
    missing_shards: list[int]


def parse_shard(text: str) -> Shard:
    """Parse a shard written as `i/n`; job arrays that count from 0 and from 1 both work.

    Raises:
        UsageError: it is not of that form, or there is no such shard.
    """
    index, count = map(whole_number, text.partition("/")[::2])
    if not 0 <= index <= count > 0:
        raise UsageError(f"shard {text}: write it as i/n, such as 0/16 … 15/16, or 1/16 … 16/16")
    return Shard(index % count, count)


def import_shard(
    sources: Sequence[Path], run: Path, shard: Shard, reading: Reading = DEFAULT
) -> Manifest | WaitingImport:
    """Import a shard's part of the files; the last shard makes the run.

    Returns:
        The manifest of the run if this was the last shard; else the shards that have not ended.

    Raises:
        UsageError: the run directory exists and is not empty, or other shards were given other sources.
        InputError: see `import_sources`.
    """
    refuse_existing(run)
    traces = find_traces(sources)
    staging = run.with_name(f".{run.name}{STAGING_SUFFIX}")
    try:
        make_staging(staging)
        (staging / MARKS).mkdir(exist_ok=True)
        check_plan(staging, traces, shard, staging)
        with reading.by_workers([*sources, staging]) as divided:
            stage_part(traces, staging, shard, divided)
        missing = [index for index in range(shard.count) if not mark_of(staging, index).exists()]
        if is_run(run):  # checked after the marks, which are removed once the run exists
            return open_run(run).manifest
        return WaitingImport(missing, staging) if missing else finish(traces, staging, run, reading)
    except OSError as error:
        # Another shard that ended at the same time may have made the run and removed the staged files.
        if is_run(run):
            return open_run(run).manifest
        raise unwritable(run, error) from error


def mark_of(staging: Path, index: int) -> Path:
    """Return the file that marks a shard as ended."""
    return staging / MARKS / f"{index:05d}"


def check_plan(staging: Path, traces: Traces, shard: Shard, shared: Path | str) -> None:
    """Raise unless this shard has the files and number of shards that the first shard wrote down.

    Args:
        shared: the folder that all shards see: `staging`, or its place in a store.

    Raises:
        UsageError: other shards were given other sources, or have another count.
    """
    names = "\0".join(f"{source.label}\0{name}" for source, name in traces.files)
    digest = hashlib.sha256(os.fsencode(names)).hexdigest()
    ours = {"dpro": __version__, "files": len(traces.files), "digest": digest, "shards": shard.count}
    plan = staging / PLAN
    if not plan.exists():
        with written_whole(staging.resolve(), PLAN) as file:
            file.write(json.dumps(ours).encode())
    theirs = json.loads(plan.read_text(encoding="utf-8"))
    if theirs != ours:
        raise UsageError(
            f"{shared}: started as {theirs['shards']} shards of {theirs['files']} files by dpro "
            f"{theirs['dpro']}, this is one of {ours['shards']} of {ours['files']} (or of other files); give "
            "every shard the same sources, or remove that folder to start over"
        )


def stage_part(traces: Traces, staging: Path, shard: Shard, reading: Reading) -> None:
    """Read this shard's files, every n-th by name, and mark them as staged.

    Raises:
        OSError: the staging folder cannot be written.
    """
    mark = mark_of(staging, shard.index)
    mark.unlink(missing_ok=True)
    tasks = [task for task in traces.tasks(staging)[shard.index :: shard.count] if not is_staged(task)]
    stage_all(tasks, reading.spread_over(tasks), reading.progress)
    mark.touch()


def finish(traces: Traces, staging: Path, run: Path, reading: Reading) -> Manifest:
    """Make the run from the staged files of all shards, and remove them.

    Raises:
        OSError: the run cannot be written.
    """
    with _one_at_a_time(staging):
        if is_run(run):  # made by another shard that ended at the same time
            return open_run(run).manifest
        tasks = traces.tasks(staging)
        spread = reading.spread_over(tasks)
        manifest = assemble(staging, run, tasks, spread, skipped=traces.passed_over, warnings=traces.warnings)
    # Renamed first, since a partly deleted staging folder would look like the beginning of another import.
    done = staging.with_name(f"{staging.name}.{socket.gethostname()}.{os.getpid()}.done{STAGING_SUFFIX}")
    shutil.rmtree(staging.rename(done), ignore_errors=True)
    return manifest


@contextmanager
def _one_at_a_time(staging: Path) -> Iterator[None]:
    """Keep other shards from assembling at the same time, where the file system supports locks."""
    with (staging / "lock").open("w") as file:
        with suppress(OSError):
            lock(file)
        yield


# A run imported into an object store; its manifest is put last, so a run that has one is complete. A shard
# stages its files on its own disk, and puts them, and then its mark, beside the place of the run. The shard
# that finds all marks fetches the staged files and makes the run. Two that end together both make it, with
# the same bytes.

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
