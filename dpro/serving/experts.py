"""How long ranks wait for each other where they exchange tokens with experts.

In: collectives of windows. Out: ms per iteration and rank that exchanges took beyond the shortest one of the
same place in the order of the ranks' exchanges, and which rank was waited for most: the one whose own
exchange is the shortest.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dpro.units import NS_PER_MS

EXCHANGES = ("dispatch", "combine", "all_to_all")


@dataclass(frozen=True)
class ExpertWaits:
    """What waiting in exchanges takes.

    Attributes:
        wait_ms: per iteration, mean over ranks.
        total_ms: the exchanges, per iteration, waiting included.
        rank: the rank that was waited for most often.
        share: of exchanges in which it was the last.
    """

    wait_ms: float
    total_ms: float
    rank: int
    share: float


def expert_waits(collectives: pl.DataFrame, num_iterations: int) -> ExpertWaits | None:
    """Waiting in exchanges; None without any, or where ranks recorded different numbers of them.

    Args:
        collectives: rows of `collectives`.
    """
    timed = collectives.filter(pl.col("op").is_in(EXCHANGES) & (pl.col("duration_ns") >= 0)).sort(
        "rank", "start_ns"
    )
    if timed.is_empty() or not num_iterations:
        return None
    counts = timed.group_by("rank", "window", "op").len()
    same = counts.group_by("window", "op").agg(pl.col("len").n_unique(), ranks=pl.len())
    num_ranks = timed["rank"].n_unique()
    if num_ranks < 2 or same.filter((pl.col("len") > 1) | (pl.col("ranks") < num_ranks)).height:
        return None
    placed = timed.with_columns(place=pl.int_range(pl.len()).over("rank", "window", "op"))
    key = ["window", "op", "place"]
    least = placed.with_columns(least=pl.col("duration_ns").min().over(key))
    wait = (least["duration_ns"] - least["least"]).sum()
    last = least.filter(pl.col("duration_ns") == pl.col("least")).unique(
        key, keep="first", maintain_order=True
    )
    often = last.group_by("rank").len().sort("len", "rank", descending=[True, False])
    return ExpertWaits(
        float(wait) / NS_PER_MS / num_iterations,
        float(timed["duration_ns"].sum()) / NS_PER_MS / num_iterations,
        int(often["rank"][0]),
        float(often["len"][0]) / last.height,
    )
