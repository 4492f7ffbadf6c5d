"""How long a step took, by its device or its host: the one place where that is decided.

In: rows of table `steps`. Out: the same with `time_ns`, what the step took (-1 where that is not known),
`by_device`, whether its device timed it, and `cycle`, over how many steps the time is a mean.

Hosts enqueue work, and run ahead of their device as far as the launch queue reaches: a host's step may be the
time of enqueueing alone. So where a rank's device timed its steps these times count, and its other steps,
which only the host timed, are of no known duration. `start_ns` and `duration_ns` stay what they are: when the
host was in the step. Where no device timed any step, `dpro.replay.steps` does what can be done.
"""

from __future__ import annotations

import polars as pl

AHEAD = 0.8  # of what its device takes of a step: a host that takes less does not wait for it there
MIN_TIMED = 5  # steps of a rank that its device timed, and their share, for these alone to count
SHARE = 0.1


def with_times(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps with how long each took, by its device where that timed steps of the rank, else by its host.

    Args:
        steps: rows of that table; returned as they are where the times have been added.
    """
    if "time_ns" in steps.columns:
        return steps
    if "gpu_step_ns" not in steps.columns:
        steps = steps.with_columns(gpu_step_ns=pl.lit(-1, pl.Int64))
    timed = (pl.col("gpu_step_ns") > 0).sum().over("rank")
    enough = (timed >= MIN_TIMED) & (timed >= SHARE * pl.len().over("rank"))
    return steps.with_columns(
        time_ns=pl.when(enough).then("gpu_step_ns").otherwise("duration_ns"),
        by_device=enough,
        cycle=pl.lit(1, pl.Int64),
    )


def hosts_ahead(steps: pl.DataFrame) -> pl.DataFrame:
    """Hosts that are done with most steps long before their device is: nothing in these waits for it.

    Args:
        steps: rows of that table, sorted by step; those count that a device timed and no window slowed down.

    Returns:
        `rank`, and `pace_ns`: how long the host takes to enqueue a step, the median.
    """
    steps = with_times(steps)
    timed = steps.filter(pl.col("by_device") & (pl.col("time_ns") > 0) & ~disturbed(steps))
    is_ahead = (pl.col("duration_ns") < AHEAD * pl.col("time_ns")).mean() > 1 / 2
    hosts = timed.group_by("rank").agg(pace_ns=pl.col("duration_ns").median(), ahead=is_ahead)
    return hosts.filter("ahead").drop("ahead").sort("rank")


def all_hosts_ahead(steps: pl.DataFrame) -> pl.DataFrame:
    """`hosts_ahead` of a job in which all hosts are; no rows of any other."""
    hosts = hosts_ahead(steps)
    return hosts if hosts.height == steps["rank"].n_unique() else hosts.clear()


def disturbed(steps: pl.DataFrame) -> pl.Expr:
    """Whether a deep window was being recorded in a step or the one before, which slows it down.

    Args:
        steps: what it will be asked of, sorted by step.
    """
    recorded = pl.max_horizontal([name for name in ("window", "beside") if name in steps.columns])
    return (recorded >= 0) | (recorded.shift(1, fill_value=-1).over("rank") >= 0)
