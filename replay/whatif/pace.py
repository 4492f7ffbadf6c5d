"""How fast the hosts of a job go by themselves: no step is shorter for long.

In: a graph. Out: ns per step. In a window of few steps, a host that began it ahead of its device hides that.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, is_of
from dpro.replay.timeline import replay


def pace_of_hosts(graph: Graph) -> float:
    """Ns per step that the slowest host needs which waits for no device and no rank; 0 without devices."""
    nodes = graph.nodes
    if not is_of(nodes.kind, GPU_KINDS).any() or not (graph.edges.kind == EdgeKind.LAUNCH).any():
        return 0.0
    on_device = is_of(nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER, NodeKind.RENDEZVOUS))
    alone = dataclasses.replace(
        graph.without_edges(graph.edges.kind == EdgeKind.RENDEZVOUS),
        nodes=dataclasses.replace(
            nodes,
            duration=np.where(on_device, 0, nodes.duration),
            earliest=np.where(on_device, 0, nodes.earliest),
        ),
    )
    timeline = replay(alone)
    on_host = is_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0)
    extents = (
        pl.DataFrame(
            {"rank": nodes.rank[on_host], "window": nodes.window[on_host], "step": nodes.step[on_host]}
        )
        .with_columns(start=pl.Series(timeline.start[on_host]), end=pl.Series(timeline.end[on_host]))
        .group_by("rank", "window", "step")
        .agg(pl.col("start").min(), pl.col("end").max())
        .sort("rank", "window", "step")
    )
    between = pl.col("end") - pl.col("end").shift(1).over("rank", "window")
    paces = extents.with_columns(pace=pl.coalesce(between, pl.col("end") - pl.col("start")))
    first = pl.col("step") == pl.col("step").min().over("rank", "window")
    later = paces.filter(~first)
    of_ranks = (later if later.height else paces).group_by("rank").agg(pl.col("pace").median())
    return float(of_ranks["pace"].max() or 0.0)  # type: ignore[arg-type]
