"""What the deep windows of a recording cost, from the times of its steps.

In: the steps of one rank. Out: a window's cost: the recorder's own time before its first and after its last
step, by how much its steps, and those in which it was recorded besides, took longer than others, and by how
much the step after them did, in which this rank waits for those that still save theirs. How long steps take
is by the device where that timed them; the time of the recorder itself is by the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from dpro.timed import with_times


def window_costs(steps: pl.DataFrame) -> dict[str, float]:
    """How many windows there were, the median cost of one, and the share of the time of all.

    Args:
        steps: rows of `steps` of one rank.

    Returns:
        `count`, `cost_ms`, `share`; nothing where no window can be compared with other steps.
    """
    ordered = (
        with_times(steps)
        .sort("step")
        .with_columns(
            own_ns=pl.col("start_ns") - pl.col("start_ns").shift() - pl.col("duration_ns").shift(),
            recorded=pl.max_horizontal("window", "beside"),
        )
        .with_columns(after=pl.col("recorded").shift(fill_value=-1))
    )
    disturbed = pl.max_horizontal("recorded", "after")
    known = pl.col("time_ns") > 0
    plain_ns = ordered.filter(known & (disturbed < 0))["time_ns"].median()
    if not isinstance(plain_ns, float | int):
        return {}
    slower_ns = pl.col("time_ns").filter(known).sum() - known.sum() * plain_ns
    costs = (
        ordered.filter(disturbed >= 0)
        .group_by(number=disturbed)
        .agg(cost_ns=pl.col("own_ns").clip(0).sum() + pl.max_horizontal(slower_ns, pl.lit(0.0)))
    )["cost_ns"]
    if costs.is_empty():
        return {}
    ends = ordered["start_ns"] + ordered["duration_ns"]
    total_ns = int(ends[-1]) - int(ordered["start_ns"][0])
    return {
        "count": costs.len(),
        "cost_ms": float(str(costs.median())) / 1e6,
        "share": float(costs.sum()) / total_ns,
    }


def worst(costs: Iterable[dict[str, float]]) -> dict[str, float]:
    """The costs on the rank that they slowed most."""
    return max(costs, key=lambda cost: cost.get("share", -1.0), default={})
