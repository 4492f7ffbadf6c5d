"""Flight recorder dumps of a job as tables in memory, enough to search for a hang without making a run.

Reads a folder; returns its tables, or None where it contains anything but dumps (and reports of NCCL's RAS),
or dumps that do not state their rank, which have to be imported. Of several dumps of one rank the newest
counts, and any that describes other groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.errors import DproError
from dpro.ingest.assembly import LEFT_OUT
from dpro.ingest.flight_recorder import in_words, newest
from dpro.ingest.formats import FLIGHT_RECORDER, NCCL_RAS, registry
from dpro.ingest.importer import Reading, find_traces
from dpro.ingest.staging import ImportTask, read_task
from dpro.schema import COLLECTIVES, COUNTERS, PROCESS_GROUPS, TABLES, WORKERS, conform
from dpro.schema.members import GROUP_RANKS
from dpro.store import Manifest
from dpro.table import Table, complete
from dpro.words import missing_in_words

_AT_A_TIME = 32  # dumps per task


@dataclass(frozen=True)
class DumpFolder:
    """Content of a folder of dumps.

    Attributes:
        manifest: ranks, missing ranks, and warnings.
    """

    frames: Mapping[str, pl.DataFrame]
    manifest: Manifest


class _File(NamedTuple):
    """A file: its number, the ranks that it describes, and why it could not be read; empty where it could."""

    number: int
    path: str
    ranks: list[int]
    world_size: int
    warnings: list[str]
    failure: str = ""


class _Batch(NamedTuple):
    files: list[_File]
    frames: dict[str, pl.DataFrame]


def read_dumps(folder: Path) -> DumpFolder | None:
    """Read all dumps of a folder, in parallel where there are many; None where they must be imported.

    Raises:
        InputError: there is no trace in the folder.
    """
    traces = find_traces([folder])
    formats = {name for _, name in traces.files}
    if FLIGHT_RECORDER not in formats or formats - {FLIGHT_RECORDER, NCCL_RAS}:
        return None
    tasks = traces.tasks(folder)
    if any(task.source.member for task in tasks):
        return None
    spread = Reading().spread_over(tasks)
    ordered = sorted(tasks, key=_by_numbers)
    starts = range(0, len(tasks), _AT_A_TIME)
    batches = list(spread(_read, [ordered[start : start + _AT_A_TIME] for start in starts], _lost))
    files = sorted(file for batch in batches for file in batch.files)
    frames = {}
    for table in (COLLECTIVES, PROCESS_GROUPS, WORKERS, COUNTERS):
        parts = [batch.frames[table.name] for batch in batches if table.name in batch.frames]
        if parts := [rows for rows in parts if rows.height]:
            frames[table.name] = pl.concat(parts).with_columns(pl.col(pl.Categorical).cast(pl.String))
    ranks = [rank for file in files for rank in file.ranks]
    if len(set(ranks)) < len(ranks):  # files of one rank are ordered by name, as in an import
        frames = {name: rows.sort("file", maintain_order=True) for name, rows in frames.items()}
    dumps = {task.number for task in tasks if task.format == FLIGHT_RECORDER}
    if not any(file.ranks for file in files if file.number in dumps):
        return None
    if min(ranks) < 0 or _stated(frames).is_duplicated().any():  # a name with several sets of ranks
        return None
    left, said = _superseded([file for file in files if file.number in dumps], frames)
    counted = {name: rows.filter(~pl.col("file").is_in(left)).drop("file") for name, rows in frames.items()}
    if WORKERS.name in counted:
        # A rank has one row, with each fact from the first file that states it.
        workers = counted[WORKERS.name]
        defaults = {name: WORKERS.columns[name].default for name in workers.columns}
        stated = (
            pl.col(n).filter(pl.col(n).ne(default)).first() for n, default in defaults.items() if n != "rank"
        )
        first = workers.group_by("rank", maintain_order=True).agg(stated)
        counted[WORKERS.name] = first.with_columns(
            pl.col(name).fill_null(defaults[name]) for name in first.columns
        )
    tables = {name: conform(table, counted.get(name, table.empty())) for name, table in TABLES.items()}
    return DumpFolder(tables, _manifest(files, dumps, [*traces.warnings, *said]))


def _by_numbers(task: ImportTask) -> list[tuple[int, str]]:
    """Return a sort key by the numbers in a file name, in which dumps are usually ordered by rank."""
    parts = re.split(r"([0-9]+)", task.source.label)  # alternating text and number
    return [(int(part) if place % 2 else -1, part) for place, part in enumerate(parts)]


def _read(tasks: Sequence[ImportTask]) -> _Batch:
    """Read some files; rows get the number of their file."""
    files: list[_File] = []
    rows_of_files: dict[str, list[tuple[int, pl.DataFrame]]] = {}
    for task in tasks:
        label = task.source.label
        try:
            traces = list(read_task(registry().named(task.format), task))
        except DproError as error:
            files.append(_File(task.number, label, [], -1, [], str(error)))
            continue
        ranks, size = [trace.rank for trace in traces], max(trace.world_size for trace in traces)
        said = [line for trace in traces for line in trace.warnings]
        files.append(_File(task.number, label, ranks, size, said))
        for trace in traces:
            for name, rows in trace.frames.items():
                rows_of_files.setdefault(name, []).append((task.number, rows))
    return _Batch(files, {name: _numbered(TABLES[name], parts) for name, parts in rows_of_files.items()})


def _numbered(table: Table, parts: Sequence[tuple[int, pl.DataFrame]]) -> pl.DataFrame:
    """Concatenate rows of several files, with column `file`; texts as categories, which return faster."""
    by_columns: dict[tuple[str, ...], list[tuple[int, pl.DataFrame]]] = {}
    for number, rows in parts:
        by_columns.setdefault(tuple(rows.columns), []).append((number, rows))
    frames = []
    for files in by_columns.values():
        numbers = np.repeat([number for number, _ in files], [rows.height for _, rows in files])
        rows = complete(table, pl.concat([rows for _, rows in files]))
        frames.append(rows.with_columns(file=pl.Series(numbers, dtype=pl.Int64)))
    return pl.concat(frames).with_columns(pl.col(pl.String).cast(pl.Categorical))


def _lost(tasks: Sequence[ImportTask], why: str) -> _Batch:
    labels = [(task.number, task.source.label) for task in tasks]
    return _Batch([_File(number, label, [], -1, [], f"{label}: {why}") for number, label in labels], {})


def _stated(frames: Mapping[str, pl.DataFrame]) -> pl.Series:
    """Return names of groups with known ranks, once for each distinct set of ranks."""
    groups = frames.get(PROCESS_GROUPS.name, PROCESS_GROUPS.empty())
    return groups.filter(pl.col(GROUP_RANKS) != "").unique(["group", GROUP_RANKS])["group"]


def _superseded(dumps: Sequence[_File], frames: Mapping[str, pl.DataFrame]) -> tuple[list[int], list[str]]:
    """Return numbers of files that newer ones of the same rank supersede, and one line per affected rank."""
    by_rank: dict[int, list[_File]] = {}
    for file in dumps:
        for rank in file.ranks:
            by_rank.setdefault(rank, []).append(file)
    left: list[int] = []
    said: list[str] = []
    for rank, files in sorted(by_rank.items()):
        if len(files) < 2:
            continue
        tables = [
            {name: rows.filter(pl.col("file") == file.number) for name, rows in frames.items()}
            for file in files
        ]
        kept = newest(tables)
        others = [file for place, file in enumerate(files) if place not in kept]
        left += [file.number for file in others]
        if others:
            said.append(in_words(rank, [files[place].path for place in kept], [file.path for file in others]))
    return left, said


def _manifest(files: Sequence[_File], dumps: Collection[int], said: Sequence[str]) -> Manifest:
    """Return a manifest of the files; ranks that only reports of other ranks mention count as missing."""
    ranks = sorted({rank for file in files if file.number in dumps for rank in file.ranks})
    world_size = max([*(file.world_size for file in files), ranks[-1] + 1])
    of_files = [warning for file in files for warning in file.warnings]
    failed = [LEFT_OUT + file.failure for file in files if file.failure]
    manifest = Manifest(world_size=world_size, ranks=ranks, warnings=[*said, *of_files, *failed])
    if manifest.missing_ranks:
        manifest.warnings.append(missing_in_words(manifest.missing_ranks, world_size))
    return manifest
