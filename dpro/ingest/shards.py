"""One run imported by several processes that share nothing but a file system, such as a Slurm array.

In: the same sources in every shard, and which shard this is. Out: the run, assembled by the shard that ends
last. A shard leaves a mark when its files are staged, so shards run in any order, at the same time, or again
after a failure: what is staged already is not read again. The lock only avoids repeated work: assembling
changes nothing that is staged, and ends with one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dpro._version import __version__
from dpro.documents import Document
from dpro.errors import UsageError
from dpro.folders import lock, written_whole
from dpro.ingest.assembly.assemble import assemble
from dpro.ingest.assembly.staging import is_staged, make_staging
from dpro.ingest.importer import (
    STAGING_SUFFIX,
    Progress,
    Traces,
    find_traces,
    refuse_existing,
    spread_over,
    stage_all,
    unwritable,
)
from dpro.store import Manifest, is_run, open_run
from dpro.words import whole_number

PLAN = "plan.json"
MARKS = "shards"


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` shares of an import, counted from 0."""

    index: int
    count: int


@dataclass(frozen=True)
class WaitingImport:
    """A run that is not whole yet: the shards that have not ended, and the folder of staged files."""

    missing: list[int]
    staging: Path | str


class ShardDocument(Document, frozen=True, kw_only=True):
    """A shard of an import has ended, and others have not.

    Attributes:
        run: the run that is to be.
        complete: false; the shard that ends last answers with what the run holds.
        missing_shards: those that have not ended, counted from 0.
    """

    run: str
    complete: bool
    missing_shards: list[int]


def parse_shard(text: str) -> Shard:
    """A shard written as `i/n`; job arrays that count from 0 and from 1 both work.

    Raises:
        UsageError: it is not of that form, or there is no such shard.
    """
    index, count = map(whole_number, text.partition("/")[::2])
    if not 0 <= index <= count > 0:
        raise UsageError(f"shard {text}: write it as i/n, such as 0/16 … 15/16, or 1/16 … 16/16")
    return Shard(index % count, count)


def import_shard(
    sources: Sequence[Path],
    run: Path,
    shard: Shard,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Manifest | WaitingImport:
    """Import a shard's part of the files; the last shard makes the run.

    Args:
        jobs: as in `import_sources`.
        executor: as in `import_sources`.
        progress: called after each file of this shard.

    Returns:
        The manifest of the run, where this was the last shard; else which ones have not ended.

    Raises:
        UsageError: the run directory exists and is not empty, or other shards were given other sources.
        InputError: as in `import_sources`.
    """
    refuse_existing(run)
    traces = find_traces(sources)
    staging = run.with_name(f".{run.name}{STAGING_SUFFIX}")
    try:
        make_staging(staging)
        (staging / MARKS).mkdir(exist_ok=True)
        agree(staging, traces, shard, staging)
        stage_part(traces, staging, shard, jobs, executor, progress)
        missing = [index for index in range(shard.count) if not mark_of(staging, index).exists()]
        if is_run(run):  # looked at last: marks are gone only once the run is there
            return open_run(run).manifest
        return WaitingImport(missing, staging) if missing else finish(traces, staging, run, jobs, executor)
    except OSError as error:
        # Shards that end together find the run made, and what it was made of gone.
        if is_run(run):
            return open_run(run).manifest
        raise unwritable(run, error) from error


def mark_of(staging: Path, index: int) -> Path:
    """The file that says that a shard has ended."""
    return staging / MARKS / f"{index:05d}"


def agree(staging: Path, traces: Traces, shard: Shard, shared: Path | str) -> None:
    """Refuse files, or a number of shards, other than those that the first shard wrote down.

    Args:
        shared: the folder that all shards see: `staging`, or its place in a store.

    Raises:
        UsageError: other shards were given other sources, or are another number.
    """
    names = "\0".join(f"{source.label}\0{name}" for source, name in traces.files)
    digest = hashlib.sha256(os.fsencode(names)).hexdigest()
    mine = {"dpro": __version__, "files": len(traces.files), "digest": digest, "shards": shard.count}
    plan = staging / PLAN
    if not plan.exists():
        with written_whole(staging.resolve(), PLAN) as file:
            file.write(json.dumps(mine).encode())
    theirs = json.loads(plan.read_text(encoding="utf-8"))
    if theirs != mine:
        raise UsageError(
            f"{shared}: started as {theirs['shards']} shards of {theirs['files']} files by dpro "
            f"{theirs['dpro']}, this is one of {mine['shards']} of {mine['files']} (or of other files); give "
            "every shard the same sources, or remove that folder to start over"
        )


def stage_part(
    traces: Traces,
    staging: Path,
    shard: Shard,
    jobs: int | None,
    executor: Executor | None,
    progress: Progress | None,
) -> None:
    """Read this shard's files, every n-th by name, and mark them as staged.

    Args:
        jobs: as in `import_sources`.
        executor: as in `import_sources`.
        progress: called after each file of this shard.

    Raises:
        OSError: the staging folder cannot be written.
    """
    mark = mark_of(staging, shard.index)
    mark.unlink(missing_ok=True)
    tasks = [task for task in traces.tasks(staging)[shard.index :: shard.count] if not is_staged(task)]
    stage_all(tasks, spread_over(tasks, jobs, executor), progress)
    mark.touch()


def finish(traces: Traces, staging: Path, run: Path, jobs: int | None, executor: Executor | None) -> Manifest:
    """Make the run from what all shards have staged, and remove that.

    Args:
        jobs: as in `import_sources`.
        executor: as in `import_sources`.

    Raises:
        OSError: the run cannot be written.
    """
    with _one_at_a_time(staging):
        if is_run(run):  # another shard that ended at the same time has made it
            return open_run(run).manifest
        tasks = traces.tasks(staging)
        spread = spread_over(tasks, jobs, executor)
        manifest = assemble(staging, run, tasks, spread, skipped=traces.passed_over, warnings=traces.warnings)
    # Renamed first: half a staging folder must not look like the beginning of another import.
    done = staging.with_name(f"{staging.name}.{socket.gethostname()}.{os.getpid()}.done{STAGING_SUFFIX}")
    shutil.rmtree(staging.rename(done), ignore_errors=True)
    return manifest


@contextmanager
def _one_at_a_time(staging: Path) -> Iterator[None]:
    """Keep other shards from assembling at the same time, where the file system can lock."""
    with (staging / "lock").open("w") as file:
        with suppress(OSError):
            lock(file)
        yield
