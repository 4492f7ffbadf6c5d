"""A run whose tables are read once: edits ask the same tables for what nodes do not hold, one after another.

In: a graph. Out: the same graph of a run that keeps what was read of it, and what edits found out: for as
long as the given graph lives, so that the next prediction begins with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from dpro.replay.graph import Graph, once
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class KeptRun(Run):
    """A run that keeps the tables that were read of it.

    Attributes:
        kept: frames by table and columns.
    """

    kept: dict[tuple[str, tuple[str, ...] | None], pl.DataFrame] = field(
        default_factory=dict, repr=False, compare=False
    )

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """As `Run.table`, read once.

        Args:
            table: which table.
            columns: those to read, where not all are needed.

        Raises:
            InputError: a part cannot be read.
        """
        name = (table.name, None if columns is None else tuple(columns))
        if name not in self.kept:
            self.kept[name] = super().table(table, columns)
        return self.kept[name]


def with_kept_tables(graph: Graph) -> Graph:
    """The graph, of a run that keeps its tables; the same for each who asks, until a table is written again.

    Args:
        graph: of any run, or none.
    """
    run = graph.run
    if run is None or isinstance(run, KeptRun):
        return graph

    def begin() -> tuple[KeptRun, dict[Hashable, tuple[Sequence[object], Any]]]:
        return KeptRun(run.path, run.manifest, run.source), dict(graph.known)

    kept, known = once(graph, ("kept tables", _written(run)), (run,), begin)
    return dataclasses.replace(graph, run=kept, known=known)


def _written(run: Run) -> tuple[tuple[str, int], ...]:
    """When parts of each table were last added: parts are renamed into their folder when they are whole."""
    try:
        return tuple(sorted((each.name, each.stat().st_mtime_ns) for each in run.path.iterdir()))
    except OSError:  # what cannot be read says so where it is read
        return ()
