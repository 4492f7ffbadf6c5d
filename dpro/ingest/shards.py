"""Import of one run by several processes that share only a file system.

Takes the same sources in every shard, and the number of this shard. The shard that ends last assembles the
run. A shard leaves a mark when its files are staged, so shards run in any order, at the same time, or again
after a failure: staged files are not read again. The lock only avoids repeated work: assembling changes no
staged file, and ends with one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpro._version import __version__
from dpro.documents import Document
from dpro.errors import UsageError
from dpro.folders import lock, written_whole
from dpro.ingest.assembly import assemble
from dpro.ingest.importer import (
    STAGING_SUFFIX,
    Reading,
    Traces,
    find_traces,
    refuse_existing,
    stage_all,
    unwritable,
)
from dpro.ingest.staging import is_staged, make_staging
from dpro.store import Manifest, is_run, open_run
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
