"""Selection of the deep windows of a recording that stay, where its user limited their number.

Reads a run whose ranks are converted and removes the rows of all other windows. Their steps stay, marked as
beside a window, since recording disturbed them. All ranks keep the same windows.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.schema import COLLECTIVES, COUNTERS, DEPENDENCIES, SPANS, STEPS, SYNCS
from dpro.store import part_files, write_part
from dpro.table import Table
from dpro.timed import with_times

SLOW, LATEST = "slow", "latest"


def keep_windows(run: Path, most: int, which: str) -> None:
    """Drop the rows of windows so that at most `most` windows stay.

    Args:
        which: `slow` keeps those with the slowest steps of any rank, `latest` the last ones.

    Raises:
        OSError: a table cannot be written.
    """
    steps = {part: pl.read_parquet(part) for part in part_files(run, STEPS)}
    if not steps:
        return
    windows = _by_preference(pl.concat(steps.values(), how="diagonal"), which)
    dropped = windows[most:]
    if not dropped:
        return
    kept = ~pl.col("window").is_in(dropped)
    for part in part_files(run, COUNTERS, "*-window"):
        of_part = run / SPANS.name / part.name  # these spans give the extents of the windows
        _rewrite(COUNTERS, part, _within(pl.read_parquet(of_part).filter(kept)) if of_part.exists() else kept)
    for table in (COLLECTIVES, SYNCS, DEPENDENCIES, SPANS):
        for part in part_files(run, table, "*-window"):
            _rewrite(table, part, kept)
    for part, rows in steps.items():
        beside = pl.when(kept).then("beside").otherwise(pl.max_horizontal("window", "beside"))
        changed = rows.with_columns(window=pl.when(kept).then("window").otherwise(-1), beside=beside)
        write_part(run, STEPS, part.stem, changed)


def _by_preference(steps: pl.DataFrame, which: str) -> list[int]:
    """Return the windows, those to keep first."""
    of_windows = (
        with_times(steps).filter(pl.col("window") >= 0).group_by("window").agg(pl.col("time_ns").max())
    )
    order, descending = (["time_ns", "window"], [True, False]) if which == SLOW else (["window"], [True])
    return of_windows.sort(order, descending=descending)["window"].to_list()


def _within(spans: pl.DataFrame) -> pl.Expr:
    """Match the samples that fall into one of the windows of `spans`."""
    extents = spans.group_by("window").agg(
        pl.col("start_ns").min(), end_ns=(pl.col("start_ns") + pl.col("duration_ns").clip(0)).max()
    )
    times = [pl.col("time_ns").is_between(start, end) for _, start, end in extents.iter_rows()]
    return pl.any_horizontal(times) if times else pl.lit(False)


def _rewrite(table: Table, part: Path, kept: pl.Expr) -> None:
    rows = pl.read_parquet(part)
    left = rows.filter(kept)
    if left.is_empty():
        part.unlink()
    elif left.height < rows.height:
        write_part(part.parents[1], table, part.stem, left)
