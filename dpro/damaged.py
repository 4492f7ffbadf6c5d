"""Opening a run some of whose files are damaged, for instance by an interrupted copy.

Takes an opened run; returns it without its unreadable parts, with one line per rank or table left out. A rank
without its spans, calls or steps would look like one that did less work, so it is left out entirely; of other
tables, only the rows of the damaged file are missing. Of large tables only the footers are checked: damage
within one is an error when its rows are read.
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

MAX_CHECKED_BYTES = 16 << 20  # bytes on disk up to which a table is checked in full

# Tables without which a rank cannot be judged: where it ran, on which clock, and what it did.
_RANK_TABLES = (
    SPANS, COLLECTIVES, SENDS, PROCESS_GROUPS, SYNCS, DEPENDENCIES, STEPS, OPERATIONS, CLOCK_SAMPLES, WORKERS,
)  # fmt: skip


def without_damaged(run: Run) -> Run:
    """Return the run without damaged files and the ranks that depend on them; unchanged if all are intact.

    Returns:
        The run. Its manifest lacks those ranks, and has a warning for each rank or table left out.

    Raises:
        InputError: no rank is left.
    """
    damaged = [unreadable for table in TABLES.values() for unreadable in _damaged_parts(run, table)]
    if not damaged:
        return run
    lost = {rank_of(part) for table, part, _ in damaged if table in _RANK_TABLES} - {None}
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
    """Return one line for each rank, or table of a rank, left out; it names the first damaged file."""
    why: dict[str, list[str]] = {}
    for table, part, of_part in damaged:
        why.setdefault(_lost_part(table, part), []).append(of_part)
    return tuple(
        f"left out: {what}: {first}" + (f", and {counted(len(others), 'more file')}" if others else "")
        for what, (first, *others) in why.items()
    )


def _lost_part(table: Table, part: Path) -> str:
    """Return what the run lacks without a file: `rank 3`, or `table counters of rank 3`."""
    rank = rank_of(part)
    if rank is None:
        return f"a part of table {table.name}"
    return f"rank {rank}" if table in _RANK_TABLES else f"table {table.name} of rank {rank}"


def _damaged_parts(run: Run, table: Table) -> list[tuple[Table, Path, str]]:
    """Return (table, file, reason) for each file of a table that cannot be read."""
    parts = run.parts(table)
    if not parts:
        return []
    deep = sum(part.stat().st_size for part in parts) <= MAX_CHECKED_BYTES
    with suppress(InputError):
        run.check(table, parts, deep)
        return []
    return [(table, part, why) for part in parts if (why := _why_unreadable(run, table, part, deep))]


def _why_unreadable(run: Run, table: Table, part: Path, deep: bool) -> str:
    """Return why one file cannot be read; empty if it can."""
    try:
        run.check(table, [part], deep)
    except InputError as error:
        return str(error)
    return ""
