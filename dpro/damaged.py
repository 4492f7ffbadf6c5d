"""What is left of a run some of whose files are damaged, as a copy that was cut short leaves them.

In: an opened run. Out: the same without what cannot be read, and a line for each rank or table that is left
out. A rank without its spans, calls or steps would look like one that did less: it is left out as a whole. Of
other tables only what the file held is missing. Of tables of many bytes only the footers are read: damage
within them is an error once their rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dpro.errors import InputError
from dpro.schema import (
    CLOCK_SAMPLES,
    COLLECTIVES,
    DEPENDENCIES,
    OPERATIONS,
    PROCESS_GROUPS,
    SENDS,
    SPANS,
    STEPS,
    SYNCS,
    TABLES,
    WORKERS,
)  # fmt: skip
from dpro.store import Run, rank_of
from dpro.table import Table
from dpro.words import counted

MAX_READ = 16 << 20  # bytes of a table on disk: up to here all of it is read

# What a rank cannot be judged without: where it ran, on which clock, and what it did.
_OF_RANK = (
    SPANS, COLLECTIVES, SENDS, PROCESS_GROUPS, SYNCS, DEPENDENCIES, STEPS, OPERATIONS, CLOCK_SAMPLES, WORKERS,
)  # fmt: skip


def without_damaged(run: Run) -> Run:
    """The run without its damaged files, nor ranks that cannot be judged without them; as it was if none is.

    Returns:
        The run; its manifest lacks those ranks, and has a warning for each damaged file.

    Raises:
        InputError: no rank is left.
    """
    damaged = [unreadable for table in TABLES.values() for unreadable in _damaged_parts(run, table)]
    if not damaged:
        return run
    lost = {rank_of(part) for table, part, _ in damaged if table in _OF_RANK} - {None}
    ranks = [rank for rank in run.manifest.ranks if rank not in lost]
    if run.manifest.ranks and not ranks:
        files = f"{counted(len(damaged), 'file')} of it cannot be read"
        raise InputError(f"{run.label}: no rank is left, since {files}; copy the run again: {damaged[0][2]}")
    left_out = {part for _, part, _ in damaged}
    for table in TABLES.values():
        left_out |= {part for part in run.parts(table) if rank_of(part) in lost}
    lines = _lines(damaged)
    manifest = replace(run.manifest, ranks=ranks, warnings=[*run.manifest.warnings, *lines])
    return replace(run, manifest=manifest, damage=lines, left_out=frozenset(left_out))


def _lines(damaged: Sequence[tuple[Table, Path, str]]) -> tuple[str, ...]:
    """One for each rank, or table of a rank, that is left out: it names the first of its files."""
    why: dict[str, list[str]] = {}
    for table, part, of_part in damaged:
        why.setdefault(_what(table, part), []).append(of_part)
    return tuple(
        f"left out: {what}: {first}" + (f", and {counted(len(others), 'more file')}" if others else "")
        for what, (first, *others) in why.items()
    )


def _what(table: Table, part: Path) -> str:
    """What is missing without a file: `rank 3`, or `table counters of rank 3`."""
    rank = rank_of(part)
    if rank is None:
        return f"a part of table {table.name}"
    return f"rank {rank}" if table in _OF_RANK else f"table {table.name} of rank {rank}"


def _damaged_parts(run: Run, table: Table) -> list[tuple[Table, Path, str]]:
    """The files of a table that cannot be read, and why."""
    parts = run.parts(table)
    if not parts:
        return []
    deep = sum(part.stat().st_size for part in parts) <= MAX_READ
    with suppress(InputError):
        run.check(table, parts, deep)
        return []
    return [(table, part, why) for part in parts if (why := _why_unreadable(run, table, part, deep))]


def _why_unreadable(run: Run, table: Table, part: Path, deep: bool) -> str:
    """Why one file cannot be read; empty where it can."""
    try:
        run.check(table, [part], deep)
    except InputError as error:
        return str(error)
    return ""
