"""Several flight recorder dumps of one rank: which of them count.

In: their tables. Out: the places of those that count, and a line on the others. A dump holds all that its
recorder still knew, so a later dump supersedes an earlier one, unless the groups of the earlier one are not
in the later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from dpro.schema import COLLECTIVES, PROCESS_GROUPS

Tables = Mapping[str, pl.DataFrame]


def newest(dumps: Sequence[Tables]) -> list[int]:
    """Places of the dumps of one rank that count, newest first.

    Args:
        dumps: `collectives` and `process_groups` of each; newer is what holds a later call or, where the last
            call is the same, was saved later.
    """
    order = sorted(range(len(dumps)), key=lambda at: (*_age(dumps[at]), -at), reverse=True)
    kept: list[int] = []
    known: set[str] = set()
    for at in order:
        own = _groups(dumps[at])
        if not kept or (own and not own & known):
            kept.append(at)
            known |= own
    return kept


def in_words(rank: int, kept: Sequence[str], left: Sequence[str]) -> str:
    """One line on superseded dumps."""
    return f"rank {rank}: {', '.join(kept)} counts, which is newer than {', '.join(left)}"


def _age(dump: Tables) -> tuple[int, int]:
    return _latest(dump, COLLECTIVES.name, "enqueued_ns"), _latest(dump, PROCESS_GROUPS.name, "saved_ns")


def _latest(dump: Tables, table: str, column: str) -> int:
    rows = dump.get(table)
    latest = rows[column].max() if rows is not None and column in rows.columns else None
    return int(latest) if isinstance(latest, int) else -1


def _groups(dump: Tables) -> set[str]:
    """Groups in which the rank called something, or that the dump lists."""
    tables = [dump[table.name] for table in (COLLECTIVES, PROCESS_GROUPS) if table.name in dump]
    return {group for rows in tables for group in rows["group"].unique().to_list() if group}
