"""Whether the ranks of a job end their steps equally fast.

In: the steps of a run. Out: a warning where one rank ends many more than another in the same time. Ranks
count without talking, each from its own optimizers: one that has an optimizer more may count otherwise.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.schema import STEPS
from dpro.store import part_files

MUCH = 1.5  # times as many steps, and
SLACK = 2  # more, at the two ends of the time that is compared


def disagreement(run: Path) -> list[str]:
    """At most one warning.

    Args:
        run: a folder with the parts of table `steps`.
    """
    parts = part_files(run, STEPS)
    if not parts:
        return []
    steps = pl.concat([pl.read_parquet(part, columns=["rank", "start_ns", "duration_ns"]) for part in parts])
    steps = steps.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    alive = steps.group_by("rank").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    shared = (pl.col("start_ns") >= alive["start_ns"].max()) & (pl.col("end_ns") <= alive["end_ns"].min())
    counts = steps.group_by("rank").agg(shared.sum().cast(pl.Int64).alias("count")).sort("count", "rank")
    if counts.is_empty():
        return []
    (fewer_rank, fewer), (more_rank, more) = counts.row(0), counts.row(-1)
    if more <= MUCH * fewer + SLACK:
        return []
    return [
        f"rank {more_rank} ended {more} steps in a time in which rank {fewer_rank} ended {fewer}: if they "
        "train together, they count differently; name the step with --step"
    ]
