"""What an importer hands over: one rank's tables and what is known about where they came from."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from dpro.schema import TABLES, SchemaError, typed


@dataclass(frozen=True)
class RankTrace:
    """One rank's share of a run, as read from one source.

    Attributes:
        rank: global rank, -1 where the source does not tell.
        world_size: number of ranks of the job, -1 where the source does not tell.
        frames: rows by table name, with columns of `dpro.schema` in their types (missing ones are filled when
            written).
        host: host name, empty where unknown.
        gpus: GPU models of the host.
        versions: library versions by name.
        skipped: rows that were not taken, by reason.
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

    def __post_init__(self) -> None:
        """Hold the frames to their declarations.

        Raises:
            SchemaError: a table or column that is not declared, or a value that does not fit its type.
        """
        unknown = self.frames.keys() - TABLES.keys()
        if unknown:
            raise SchemaError(f"there is no table {', '.join(sorted(unknown))}")
        frames = {name: typed(TABLES[name], frame) for name, frame in self.frames.items()}
        object.__setattr__(self, "frames", frames)
