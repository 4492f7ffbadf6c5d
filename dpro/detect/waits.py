"""Waits in collectives: how long each member waits for the last one to arrive.

In: a graph, and when its nodes start (as measured, or replayed). Out: a frame. Whether the last one is the
cause is not known here: it may itself have waited elsewhere.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import Graph, NodeKind


def waits(graph: Graph, start: NDArray[np.int64]) -> pl.DataFrame:
    """A row per member of each collective of several ranks in a step.

    Args:
        graph: the graph.
        start: [N] ns at which nodes start.

    Returns:
        `instance` (of the collective), `rank`, `step`, `last` (the rank that arrives last), `wait_ns`.
    """
    nodes = graph.nodes
    arrive = np.flatnonzero((nodes.kind == NodeKind.ARRIVE) & (nodes.step >= 0))
    frame = pl.DataFrame(
        {
            "instance": nodes.collective[arrive],
            "rank": nodes.rank[arrive],
            "step": nodes.step[arrive],
            "time": start[arrive],
        }
    )
    return (
        frame.filter(pl.len().over("instance") > 1)
        .with_columns(
            last=pl.col("rank").sort_by("time", "rank").last().over("instance"),
            wait_ns=pl.col("time").max().over("instance") - pl.col("time"),
        )
        .select("instance", "rank", "step", "last", "wait_ns")
    )
