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
from dpro.replay.kept import tables_written
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class KeptRun(Run):
    """A run that keeps the tables that were read of it.

    Attributes:
        whole: tables that were read as a whole, by name.
        columns: of tables of which some columns were read, all of these, by name.
    """

    whole: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    columns: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """As `Run.table`, each column read once.

        Args:
            columns: those to read, where not all are needed.

        Raises:
            InputError: a part cannot be read.
        """
        if columns is None:
            if table.name not in self.whole:
                self.whole[table.name] = super().table(table)
            return self.whole[table.name]
        columns_read = self.columns.get(table.name)
        missing = [name for name in columns if columns_read is None or name not in columns_read.columns]
        if missing or columns_read is None:
            read = super().table(table, missing).select(missing)
            if columns_read is not None and read.height == columns_read.height:
                read = columns_read.hstack(read)
            elif columns_read is not None:  # a part was added meanwhile
                read = super().table(table, columns)
            self.columns[table.name] = columns_read = read
        return columns_read.select(columns)


def with_kept_tables(graph: Graph) -> Graph:
    """The graph, of a run that keeps its tables: the same one until a table is written again."""
    run = graph.run
    if run is None or isinstance(run, KeptRun):
        return graph

    def begin() -> tuple[KeptRun, dict[Hashable, tuple[Sequence[object], Any]]]:
        of_run = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        return KeptRun(**of_run), dict(graph.facts)

    kept, facts = once(graph, ("kept tables", tables_written(run)), (run,), begin)
    return dataclasses.replace(graph, run=kept, facts=facts)
