"""A run as one of its ranks sees it: of tables that every rank has rows of, its own alone.

In: a run, and a rank of it. Out: a run that edits of the rank's graph read. Tables of the job, such as
which hosts there are, are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpro.replay.sharded.agreed import OF_RANKS, OfRank
from dpro.replay.whatif.graph_ops.kept_tables import KeptRun
from dpro.store import Run
from dpro.table import Table


@dataclass(frozen=True)
class RankTables(KeptRun):
    """The tables of one rank, each read once.

    Attributes:
        own: the rank, with the files that hold its rows.
    """

    own: OfRank | None = None

    def table(self, table: Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """As `Run.table`, with the rank's rows alone of tables that every rank has rows of.

        Args:
            columns: those to read, where not all are needed.

        Raises:
            InputError: a part cannot be read.
        """
        if self.own is None or table not in OF_RANKS:
            return super().table(table, columns)
        wanted = table.columns if columns is None else columns
        read = super().table(table, None if columns is None else list(dict.fromkeys([*columns, "rank"])))
        return read.filter(pl.col("rank") == self.own.rank).select(list(wanted))

    def parts(self, table: Table) -> list[Path]:
        """The files that hold the rank's rows of a table."""
        return super().parts(table) if self.own is None else list(self.own.parts.get(table.name, ()))


def tables_of(run: Run, own: OfRank) -> RankTables:
    """A run as one of its ranks sees it."""
    return RankTables(run.path, run.manifest, run.source, own=own)
