"""What is always recorded, moved onto one clock: no deep window is needed for it, only comparisons of clocks.

In: tables of a run, or their latest rows. Out: the same with the times of the reference clock, without ranks
whose clock nothing connects to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dpro.replay.align import Alignment, align
from dpro.units import NS_PER_S

STEP_COUNTERS = "step_"  # begins the names of counters that are about one step


@dataclass(frozen=True)
class Always:
    """Rows of what is always recorded.

    Attributes:
        collectives, steps, counters, workers, clock_samples: rows of these tables.
    """

    collectives: pl.DataFrame
    steps: pl.DataFrame
    counters: pl.DataFrame
    workers: pl.DataFrame
    clock_samples: pl.DataFrame


def on_one_clock(rows: Always) -> tuple[Always, list[int]]:
    """Move calls, steps and their counters onto the clock of the lowest rank.

    Returns:
        The rows, and the ranks that had to be left out: their clocks were never compared.
    """
    if rows.steps.is_empty() or _is_one(rows.workers):
        return rows, []
    clocks = _clocks(rows)
    apart = sorted(rank for (rank, _), clock in clocks.clocks.items() if clock.line.uncertainty_ns < 0)
    here = ~pl.col("rank").is_in(apart)
    collectives, steps = rows.collectives.filter(here), rows.steps.filter(here)
    counters = rows.counters.filter(here & pl.col("counter").str.starts_with(STEP_COUNTERS))
    moved = Always(
        _moved(collectives, "enqueued_ns", clocks),
        _moved(steps, "start_ns", clocks),
        _moved(counters, "time_ns", clocks),
        rows.workers.filter(here),
        rows.clock_samples,
    )
    return moved, apart


def _is_one(workers: pl.DataFrame) -> bool:
    return workers["clock"].n_unique() <= 1 and not (workers["clock"] == "").any()


def _clocks(rows: Always) -> Alignment:
    """The clocks by their comparisons: calls have no ends that clocks could be told by."""
    ranks = sorted({*rows.steps["rank"], *rows.collectives["rank"]})
    # Seen by one clock alone, these say no more than what times it is about.
    moments = rows.steps.select(start_ns=pl.concat_list(pl.col("start_ns").min(), pl.col("start_ns").max()))
    extent = (
        moments.head(1)
        .explode("start_ns", empty_as_null=True)
        .with_columns(
            rank=pl.lit(ranks[0], pl.Int32),
            window=pl.lit(0, pl.Int32),
            instance=pl.int_range(pl.len()),
            op=pl.lit(""),
            duration_ns=pl.lit(0, pl.Int64),
            members=pl.lit(2),
        )
    )
    return align(extent, [(rank, 0) for rank in ranks], rows.workers, rows.clock_samples)


def _moved(frame: pl.DataFrame, column: str, clocks: Alignment) -> pl.DataFrame:
    """A table with its times on the reference clock; all ranks at once, by the arithmetic of `Line.ahead`."""
    lines = [(rank, clock.line) for (rank, _), clock in clocks.clocks.items()]
    known = pl.DataFrame(
        [(rank, line.reference_ns, line.offset_ns, line.drift_ppb) for rank, line in lines],
        schema={"rank": pl.Int32, "reference_": pl.Int64, "offset_": pl.Int64, "drift_": pl.Int64},
        orient="row",
    )
    since = pl.col(column) - pl.col("reference_")
    seconds, rest = since // NS_PER_S, since % NS_PER_S
    ahead = pl.col("offset_") + seconds * pl.col("drift_") + rest * pl.col("drift_") // NS_PER_S
    joined = frame.join(known, on="rank", how="left", maintain_order="left")
    moved = joined.with_columns((pl.col(column) - ahead).fill_null(pl.col(column)).alias(column))
    return moved.drop("reference_", "offset_", "drift_")
