"""The mean step and its parts, which add up to it: of the job, of each rank, or of each step.

In: the split of steps, as `breakdown.step_breakdown` gives it. Out: frames of float ns.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

# Column -> what it is called. They add up to `duration_ns`, and are shown in this order.
PARTS: Mapping[str, str] = {
    "compute_ns": "compute",
    "exposed_transfer_ns": "transfer",
    "exposed_wait_ns": "waiting for others",
    "unsplit_comm_ns": "communication, wait not known",
    "host_bound_ns": "host bound",
    "idle_ns": "idle",
}


def mean_steps(breakdown: pl.DataFrame, by: str | None = None) -> pl.DataFrame:
    """Average the parts of steps.

    Args:
        breakdown: as from `step_breakdown`.
        by: `rank` or `step`; None for one row over all.

    Returns:
        `by`, `steps` (rows that were averaged), `duration_ns`, the columns of `PARTS`, and
        `overlapped_comm_ns` (a part of compute), Float64. Exposed communication of steps that are not split
        into wait and transfer is in `unsplit_comm_ns`.
    """
    wait, transfer = pl.col("exposed_wait_ns"), pl.col("exposed_transfer_ns")
    unsplit = pl.when(wait.is_null()).then("exposed_comm_ns").otherwise(0)
    known = breakdown.with_columns(unsplit_comm_ns=unsplit).with_columns(
        wait.fill_null(0), transfer.fill_null(0)
    )
    names = ["duration_ns", *PARTS, "overlapped_comm_ns"]
    means = [pl.len().cast(pl.Int64).alias("steps"), *(pl.col(name).mean() for name in names)]
    if by is None:
        return known.select(means) if known.height else known.select(means).clear()
    return known.group_by(by).agg(means).sort(by)


def shown_parts(means: pl.DataFrame) -> dict[str, str]:
    """Return the parts that are shown: all but communication that is not split, where there is none of it."""
    unsplit = bool((means["unsplit_comm_ns"] > 0).any())
    return {name: title for name, title in PARTS.items() if unsplit or name != "unsplit_comm_ns"}
