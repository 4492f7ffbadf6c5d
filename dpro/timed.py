"""The duration of steps, by device or by host: decided here for all modules.

Takes rows of table `steps`; adds `time_ns`, the step's duration (-1 where unknown), `by_device`, whether the
device timed the rank's steps, and `cycle`, the number of steps over which the duration is averaged.

Hosts enqueue work and run ahead of their device as far as the launch queue allows, so a host's step may be
the time of enqueueing alone. Where a rank's device timed enough steps, only those times count, and its other
steps have an unknown duration. `start_ns` and `duration_ns` remain the host's interval of the step. Does not
estimate steps that no device timed: `dpro.replay.steps` does.
"""

from __future__ import annotations

import polars as pl

MAX_AHEAD_SHARE = (
    0.8  # a host whose step takes less than this share of its device's does not wait for the device
)
MIN_TIMED = 5  # device-timed steps of a rank from which only device times count
MIN_TIMED_SHARE = 0.1  # and their least share of the rank's steps


def with_times(steps: pl.DataFrame) -> pl.DataFrame:
    """Add `time_ns`, `by_device` and `cycle`: by device if it timed enough of a rank's steps, else by host.

    Args:
        steps: rows of table `steps`; returned unchanged if they have `time_ns`.
    """
    if "time_ns" in steps.columns:
        return steps
    if "gpu_step_ns" not in steps.columns:
        steps = steps.with_columns(gpu_step_ns=pl.lit(-1, pl.Int64))
    timed = (pl.col("gpu_step_ns") > 0).sum().over("rank")
    enough = (timed >= MIN_TIMED) & (timed >= MIN_TIMED_SHARE * pl.len().over("rank"))
    return steps.with_columns(
        time_ns=pl.when(enough).then("gpu_step_ns").otherwise("duration_ns"),
        by_device=enough,
        cycle=pl.lit(1, pl.Int64),
    )


def hosts_ahead(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the ranks whose host enqueues most steps well ahead of its device, never waiting for it.

    Args:
        steps: rows of table `steps`, sorted by step; only device-timed, undisturbed steps count.

    Returns:
        `rank`, and `pace_ns`: median time in which the host enqueues a step.
    """
    steps = with_times(steps)
    timed = steps.filter(pl.col("by_device") & (pl.col("time_ns") > 0) & ~disturbed(steps))
    is_ahead = (pl.col("duration_ns") < MAX_AHEAD_SHARE * pl.col("time_ns")).mean() > 1 / 2
    hosts = timed.group_by("rank").agg(pace_ns=pl.col("duration_ns").median(), ahead=is_ahead)
    return hosts.filter("ahead").drop("ahead").sort("rank")


def all_hosts_ahead(steps: pl.DataFrame) -> pl.DataFrame:
    """Return `hosts_ahead` if it has all ranks of the job; otherwise no rows."""
    hosts = hosts_ahead(steps)
    return hosts if hosts.height == steps["rank"].n_unique() else hosts.clear()


def disturbed(steps: pl.DataFrame) -> pl.Expr:
    """Return an expression: whether recording a deep window slowed the step, in it or in the one before.

    Args:
        steps: the frame that the expression is for, sorted by step.
    """
    recorded = pl.max_horizontal([name for name in ("window", "beside") if name in steps.columns])
    return (recorded >= 0) | (recorded.shift(1, fill_value=-1).over("rank") >= 0)
