"""Whether the ranks of a job end their steps alike.

In: the steps of a run. Out: a warning where one rank's steps are much longer than another's. Ranks count
without talking, each from its own optimizers: one that has an optimizer more may count otherwise.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.schema import STEPS

MUCH = 1.5  # times as long: whoever trains together takes as long for a step, on the mean
FEWEST_STEPS = 8


def disagreement(run: Path) -> list[str]:
    """At most one warning.

    Args:
        run: a folder with the parts of table `steps`.
    """
    parts = sorted((run / STEPS.name).glob("*.parquet"))
    if not parts:
        return []
    steps = pl.concat([pl.read_parquet(part, columns=["rank", "duration_ns"]) for part in parts])
    means = steps.group_by("rank").agg(pl.len(), pl.col("duration_ns").mean()).sort("duration_ns", "rank")
    if means.height < 2 or means["len"].max() < FEWEST_STEPS:  # type: ignore[operator]
        return []
    shortest, longest = means.row(0, named=True), means.row(-1, named=True)
    ratio = longest["duration_ns"] / max(shortest["duration_ns"], 1)
    if ratio < MUCH:
        return []
    return [
        f"a step of rank {longest['rank']} takes {ratio:.1f} times as long as one of rank "
        f"{shortest['rank']}: if they train together, they count steps differently; name the step with --step"
    ]
