"""The result of an importer: the tables of one rank, and facts about their source."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from dpro.schema import TABLES
from dpro.table import SchemaError, Table, typed


@dataclass(frozen=True)
class RankTrace:
    """One rank's share of a run, as read from one source.

    Attributes:
        rank: global rank; -1 where the source does not state it.
        world_size: number of ranks of the job; -1 where the source does not state it.
        represents: ranks of the job that this one was recorded for, itself included.
        frames: rows by table name, with columns of `dpro.schema` in their types (missing ones are filled when
            written).
        host: host name; empty where unknown.
        gpus: GPU models.
        versions: library versions by name.
        skipped: number of rows left out, by reason.
        warnings: one line each, for the user.
    """

    rank: int
    world_size: int
    frames: dict[str, pl.DataFrame]
    host: str = ""
    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    represents: int = 1

    def __post_init__(self) -> None:
        """Cast the frames to their declared types.

        Raises:
            SchemaError: a table or column is not declared, or a value does not fit its type.
        """
        unknown = self.frames.keys() - TABLES.keys()
        if unknown:
            raise SchemaError(f"there is no table {', '.join(sorted(unknown))}")
        frames = {
            name: typed(TABLES[name], _in_range(TABLES[name], frame)) for name, frame in self.frames.items()
        }
        object.__setattr__(self, "frames", frames)


def of_rank(frame: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Return the frame with `rank` set in all rows."""
    return frame.with_columns(rank=pl.lit(rank, dtype=pl.Int32))


def _in_range(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """Replace numbers that are too large for their column by its default, since no such number is valid."""
    wider = [
        name
        for name, dtype in frame.schema.items()
        if dtype == pl.Int64 and name in table.columns and table.columns[name].dtype == pl.Int32
    ]
    if not wider:
        return frame
    return frame.with_columns(
        pl.when(pl.col(name).is_null())
        .then(None)
        .otherwise(pl.col(name).cast(pl.Int32, strict=False).fill_null(table.columns[name].default))
        .alias(name)
        for name in wider
    )
