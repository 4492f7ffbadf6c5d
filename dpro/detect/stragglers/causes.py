"""Why a rank takes longer, from the host's counters: waiting for data, garbage collection, no free core.

In: how much more of each counter a rank has than its peers. Out: the cause that explains it, if one does.
What counters are of is the business of `dpro.collectors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl

from dpro.units import format_duration

CPU = "step_training_thread_cpu_ns"
EXPLAINED = 0.4  # share of the excess that a counter must show to be its cause


class HostCause(NamedTuple):
    """Why a host takes longer.

    Attributes:
        cause: in a word.
        evidence: a line.
    """

    cause: str
    evidence: str


HOST_CAUSES = {
    "step_data_wait_ns": ("the input pipeline", "waits for its data"),
    "step_run_queue_ns": ("CPU contention", "is ready to run and has no core"),
    "step_gc_ns": ("garbage collection", "collects garbage"),
}


def host_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """The counter that explains the most, if it explains enough.

    Args:
        more: ns per step that the rank has more than its peers, by counter.
        longer_ns: by how much it takes longer per step.
    """
    known = {name: value for name, value in more.items() if name in HOST_CAUSES}
    largest = max(known, key=lambda name: known[name], default="")
    if not largest or known[largest] < EXPLAINED * longer_ns:
        return None
    cause, does = HOST_CAUSES[largest]
    return HostCause(cause, f"it {does} {format_duration(known[largest])} longer per step than they")


def idle_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """That a host waits, where its training thread was not computing; None where it was, or that is unknown.

    Args:
        more: as of `host_cause`, which must have found none.
        longer_ns: by how much it takes longer per step.
    """
    if CPU not in more or more[CPU] >= EXPLAINED * longer_ns:
        return None
    return HostCause(
        "host code that waits",
        "it neither computes in that time, nor waits for its data, a core or garbage: something in the "
        "host's code sleeps or waits (a lock, a disk, the network)",
    )


def counted_more(rows: pl.DataFrame, rank: int) -> dict[str, float]:
    """How much more of each counter a rank has per step than its peers, ns.

    Args:
        rows: `rank`, `counter`, `value` per step, of the rank and its peers.
        rank: which.
    """
    per_rank = rows.group_by("counter", "rank").agg(pl.col("value").median())
    mine = pl.col("rank") == rank
    both = per_rank.group_by("counter").agg(
        own=pl.col("value").filter(mine).first(), theirs=pl.col("value").filter(~mine).median()
    )
    more = both.drop_nulls("own").select("counter", pl.col("own") - pl.col("theirs").fill_null(0.0))
    return dict(more.iter_rows())
