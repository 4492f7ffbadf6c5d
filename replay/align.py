"""How far each rank's clock is from the reference rank's, from collectives that both were in.

In: matched collectives. Out: one offset per rank with its uncertainty. All members of a collective end
together, so the median difference of the ends is the clock offset; its spread is the end skew. Ranks of
one host share a clock and need none. Recorded times are never rewritten: offsets are kept beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

# The skew of the ends of one collective is tens of microseconds: below this an offset cannot be told from it.
LEAST_OFFSET_NS = 50_000
ENOUGH_COLLECTIVES = 3  # fewer cannot show how much their ends differ


@dataclass(frozen=True)
class Offset:
    """One rank's clock against the reference.

    Attributes:
        offset_ns: what to subtract from the rank's times.
        uncertainty_ns: interquartile range of the differences it was taken from; 0 on the same host, -1
            where nothing tells.
        source: what told it.
    """

    offset_ns: int
    uncertainty_ns: int
    source: str


def clock_offsets(matched: pl.DataFrame, hosts: Mapping[int, str]) -> dict[int, Offset]:
    """The clock offset of every rank against the lowest one.

    Args:
        matched: rows of `dpro.replay.match.Matching`.
        hosts: host of each rank, empty where unknown.

    Returns:
        An offset per rank of `hosts`. A rank that shares no collective with the reference is compared
        through others; one that shares none with any keeps 0 with uncertainty -1.
    """
    ends = matched.filter(pl.col("members") > 1).select(
        "rank", "instance", end=pl.col("start_ns") + pl.col("duration_ns")
    )
    ranks = sorted(hosts)
    offsets: dict[int, Offset] = {}
    for root in ranks:
        if root not in offsets:
            offsets[root] = Offset(0, 0 if not offsets else -1, "reference" if not offsets else "nothing")
            _spread_from(root, ranks, ends, hosts, offsets)
    return offsets


def _spread_from(
    root: int, ranks: list[int], ends: pl.DataFrame, hosts: Mapping[int, str], offsets: dict[int, Offset]
) -> None:
    """Add the ranks that can be reached from `root`, nearest first."""
    queue = [root]
    for known in queue:
        base = offsets[known]
        for rank in ranks:
            if rank in offsets:
                continue
            step = _compare(known, rank, ends, hosts)
            if step is None:
                continue
            uncertainty = -1 if base.uncertainty_ns < 0 else base.uncertainty_ns + step.uncertainty_ns
            offsets[rank] = Offset(base.offset_ns + step.offset_ns, uncertainty, step.source)
            queue.append(rank)


def _compare(known: int, rank: int, ends: pl.DataFrame, hosts: Mapping[int, str]) -> Offset | None:
    if hosts[known] and hosts[known] == hosts[rank]:
        return Offset(0, 0, "same host")
    shared = ends.filter(pl.col("rank") == known).join(ends.filter(pl.col("rank") == rank), on="instance")
    if shared.height == 0:
        return None
    difference = (shared["end_right"] - shared["end"]).to_numpy()
    low, middle, high = np.percentile(difference, (25, 50, 75))
    if difference.size < ENOUGH_COLLECTIVES:
        return Offset(0, round(abs(middle) + high - low), "too few collectives in common")
    uncertainty = round(high - low)
    if abs(middle) <= max(uncertainty, LEAST_OFFSET_NS):
        return Offset(0, max(uncertainty, round(abs(middle))), "collective ends: clocks agree")
    return Offset(round(middle), uncertainty, "collective ends")
