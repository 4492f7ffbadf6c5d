"""What ranks must know of each other before any of them can be built: collectives and clocks.

In: a run. Out: a `MatchedRun`, of which each rank needs its own part. Of spans only a few columns are read,
one part of the run at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.alignment.align import Alignment, align
from dpro.replay.alignment.match import Matching, match_collectives
from dpro.replay.construction.graph_builder import asked_after, places_of, wait_and_transfer, with_messages
from dpro.replay.graph import MeshPosition, Message
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, COUNTERS, DEPENDENCIES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Run

MapTasks = Callable[[Callable[..., Any], Iterable[Any]], Iterable[Any]]  # `map`, or that of an executor
LANE_COLUMNS = ("span_id", "rank", "window", "device", "stream")
TABLES_OF_RANKS = (
    SPANS,
    SYNCS,
    STEPS,
    DEPENDENCIES,
    COLLECTIVES,
    COUNTERS,
)  # tables of which a rank has rows of its own


@dataclass(frozen=True)
class MatchedRank:
    """What a rank has to know before it is built.

    Attributes:
        rank: which.
        windows: deep windows that it has spans of.
        alignment: its clock.
        moved: its rows of `MatchedRun.moved`.
        parts: files of the run that hold its rows, by table.
    """

    rank: int
    windows: tuple[int, ...]
    alignment: Alignment
    moved: pl.DataFrame
    parts: Mapping[str, tuple[Path, ...]]


@dataclass(frozen=True)
class MatchedRun:
    """What all ranks have in common.

    Attributes:
        windows: of each rank, those that it has spans of.
        matching: collectives and their instances.
        alignment: the clocks.
        moved: collectives on the aligned clock, with what each member waited for and moved, by rank.
        messages: what `moved.message` numbers.
        places: of ranks, where the run says.
        parts: files of the run by rank and table.
    """

    windows: Mapping[int, tuple[int, ...]]
    matching: Matching
    alignment: Alignment
    moved: pl.DataFrame
    messages: tuple[Message, ...]
    places: Mapping[int, MeshPosition]
    parts: Mapping[int, Mapping[str, tuple[Path, ...]]]

    @property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(self.windows)

    def of(self, rank: int) -> MatchedRank:
        """What one rank needs."""
        windows, clocks = self.windows[rank], self.alignment.clocks
        of_rank = {(rank, window): clocks[rank, window] for window in windows if (rank, window) in clocks}
        low, high = np.searchsorted(self.moved["rank"].to_numpy(), (rank, rank + 1)).tolist()
        return MatchedRank(
            rank, windows, Alignment(of_rank), self.moved.slice(low, high - low), self.parts.get(rank, {})
        )


def match_run(run: Run, map_tasks: MapTasks = map) -> MatchedRun:
    """Match the collectives of all ranks, and align their clocks.

    Args:
        map_tasks: has the parts of the spans read: `map`, or that of an executor.

    Raises:
        Unanswerable: the run has no spans, or its ranks are pretended.
    """
    if run.manifest.is_pretended:
        raise Unanswerable("ranks that were pretended ran one after the other: their graph is built at once")
    collectives, workers = run.table(COLLECTIVES), run.table(WORKERS)
    wanted = collectives.select("rank", "span_id").unique()
    of_rank = wanted.partition_by("rank", as_dict=True)
    named = [(part, _rank_of(part)) for part in run.parts(SPANS)]
    tasks = [(part, wanted if rank is None else of_rank.get((rank,), wanted.clear())) for part, rank in named]
    if not tasks:
        raise Unanswerable("the run holds no spans to replay")
    where_parts, lanes = zip(*map_tasks(partial(_read_part, run), tasks))
    where = pl.concat(where_parts).unique().sort("rank", "window").rows()
    matching = match_collectives(collectives, pl.concat(lanes))
    alignment = align(matching.rows, where, workers, run.table(CLOCK_SAMPLES))
    moved, messages = with_messages(wait_and_transfer(alignment.aligned(asked_after(matching.rows))))
    windows: dict[int, tuple[int, ...]] = {}
    for rank, window in where:
        windows[rank] = (*windows.get(rank, ()), window)
    moved = moved.sort("rank", maintain_order=True)
    return MatchedRun(
        windows, matching, alignment, moved, messages, places_of(workers), parts_of(run, windows)
    )


def _read_part(run: Run, task: tuple[Path, pl.DataFrame]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Which windows of which ranks a part of the spans is of, and the lanes of those that are wanted."""
    part = run.read(SPANS, [task[0]], LANE_COLUMNS)
    lanes = part.join(task[1], on=["rank", "span_id"], how="semi", maintain_order="left")
    return part.select("rank", "window").unique(), lanes


def _rank_of(part: Path) -> int | None:
    """The rank that a file is named after."""
    match = re.match(r"rank(\d{5,})", part.name)
    return int(match[1]) if match else None


def parts_of(run: Run, ranks: Iterable[int]) -> dict[int, dict[str, tuple[Path, ...]]]:
    """Files that hold rows of each rank, by table: those that are named after it, and those after none."""
    by_rank: dict[int, dict[str, tuple[Path, ...]]] = {rank: {} for rank in ranks}
    for table in TABLES_OF_RANKS:
        named: dict[int, list[Path]] = {}
        others: list[Path] = []
        for part in run.parts(table):
            number = _rank_of(part)
            (others if number is None else named.setdefault(number, [])).append(part)
        for rank, by_table in by_rank.items():
            by_table[table.name] = (*named.get(rank, ()), *others)
    return by_rank
