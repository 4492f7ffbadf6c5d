"""The pace of hosts: the time each needs per step if it never waits for a device or other ranks.

Takes a graph, as recorded or changed; returns one row per rank, window and step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, is_one_of
from dpro.replay.timeline import replay

SCHEMA = {"rank": pl.Int64, "window": pl.Int64, "pace_ns": pl.Float64, "later": pl.Boolean}


def host_paces(graph: Graph) -> pl.DataFrame:
    """Replay the hosts alone, and measure the time each needs for a step.

    Returns:
        `rank`, `window`, `pace_ns` (of one step) and `later` (whether after the window's first step, so that
        the beginning is known), a row per step; no rows where hosts launch no work on devices.
    """
    nodes = graph.nodes
    if not is_one_of(nodes.kind, GPU_KINDS).any() or not (graph.edges.kind == EdgeKind.LAUNCH).any():
        return pl.DataFrame(schema=SCHEMA)
    on_device = is_one_of(nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER, NodeKind.RENDEZVOUS))
    alone = dataclasses.replace(
        graph.without_edges(graph.edges.kind == EdgeKind.RENDEZVOUS),
        nodes=dataclasses.replace(
            nodes,
            duration=np.where(on_device, 0, nodes.duration),
            earliest=np.where(on_device, 0, nodes.earliest),
        ),
    )
    timeline = replay(alone)
    on_host = is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0)
    extents = (
        pl.DataFrame({name: getattr(nodes, name)[on_host] for name in ("rank", "window", "step")})
        .with_columns(start=pl.Series(timeline.start[on_host]), end=pl.Series(timeline.end[on_host]))
        .group_by("rank", "window", "step")
        .agg(pl.col("start").min(), pl.col("end").max())
        .sort("rank", "window", "step")
    )
    between = pl.col("end") - pl.col("end").shift(1).over("rank", "window")
    first = pl.col("step") == pl.col("step").min().over("rank", "window")
    return extents.with_columns(
        pace_ns=pl.coalesce(between, pl.col("end") - pl.col("start")).cast(pl.Float64), later=~first
    ).select("rank", "window", "pace_ns", "later")


def slowest_pace(graph: Graph) -> float:
    """Return the ns per step that the slowest host of a graph needs if it never waits; 0 without devices."""
    paces = host_paces(graph)
    counted = paces.filter("later") if paces["later"].any() else paces
    of_ranks = counted.group_by("rank").agg(pl.col("pace_ns").median())
    return float(of_ranks["pace_ns"].max() or 0.0)  # type: ignore[arg-type]
