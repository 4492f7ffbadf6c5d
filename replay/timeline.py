"""Replay a graph: when everything runs, how long each step takes, and the path that decides it.

In: a `Graph`. Out: a `Timeline` and frames made from it. It compares with the trace but judges nothing:
that is the business of `dpro.replay.accuracy`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.engine import NO_NODE, longest_path, longest_path_batch
from dpro.replay.graph import Graph, NodeKind

Ints = NDArray[np.int64]
BEFORE_STEPS, AFTER_STEPS = -1, -2


@dataclass(frozen=True)
class Timeline:
    """When each node runs.

    Attributes:
        graph: what was replayed.
        start, end: [N] ns since the graph's origin.
        binding: [N] the edge that set each start, -1 where the node's own earliest time did.
    """

    graph: Graph
    start: Ints
    end: Ints
    binding: Ints


def replay(graph: Graph) -> Timeline:
    """Start every node as soon as its predecessors allow: the longest path over the graph."""
    nodes, edges = graph.nodes, graph.edges
    start, binding = longest_path(nodes.duration, nodes.earliest, graph.indptr, edges.source, edges.lag)
    return Timeline(graph, start, start + nodes.duration, binding)


def replay_durations(graph: Graph, durations: Ints) -> Ints:
    """[N, S] end of each node when the graph is replayed with each column of `durations` [N, S]."""
    starts = longest_path_batch(
        durations, graph.nodes.earliest, graph.indptr, graph.edges.source, graph.edges.lag
    )
    return starts + durations


def step_ends(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """When each step of the job ended: with the last of its work on any rank.

    Args:
        graph: the graph.
        start, end: [N] ns of each node: replayed, or as measured.

    Returns:
        One row per window and step: `window`, `step`, `finish_ns`, and `begin_ns`: when the window's first
        step began, which is the end of the work before it or, without any, the window's beginning.
    """
    nodes = graph.nodes
    real = (nodes.kind != NodeKind.RENDEZVOUS) & (nodes.step != AFTER_STEPS)
    frame = pl.DataFrame(
        {"window": nodes.window[real], "step": nodes.step[real], "start": start[real], "end": end[real]}
    )
    ends = (
        frame.group_by("window", "step")
        .agg(pl.col("end").max(), pl.col("start").min())
        .sort("window", "step")
    )
    before = pl.col("end").filter(pl.col("step") == BEFORE_STEPS).max().over("window")
    return (
        ends.with_columns(
            finish_ns=pl.col("end").cum_max().over("window"),
            begin_ns=pl.coalesce(before, pl.col("start").min().over("window")),
        )
        .filter(pl.col("step") >= 0)
        .select("window", "step", "finish_ns", "begin_ns")
    )


def durations_of(ends: pl.DataFrame) -> pl.DataFrame:
    """How long each step lasted: from the end of the one before it. `window`, `step`, `duration_ns`."""
    previous = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    return ends.sort("window", "step").select("window", "step", duration_ns=pl.col("finish_ns") - previous)


def step_times(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """How long each step of the job took: `step_ends`, `durations_of`."""
    return durations_of(step_ends(graph, start, end))


def changed_step_times(baseline: pl.DataFrame, graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """`step_times` of a changed graph, counted from where the unchanged one's windows began.

    What a change saves before the first step is not lost to that step: so work that takes less time never
    makes the steps longer in sum.

    Args:
        baseline: `step_ends` of the unchanged graph.
        graph: the changed graph.
        start, end: [N] ns of its nodes.
    """
    begins = baseline.select("window", "step", "begin_ns")
    return durations_of(step_ends(graph, start, end).drop("begin_ns").join(begins, on=["window", "step"]))


def measured_step_times(graph: Graph) -> pl.DataFrame:
    """`step_times` as the trace has them."""
    return step_times(graph, graph.nodes.measured_start, graph.nodes.measured_end)


def critical_nodes(timeline: Timeline, window: int) -> Ints:
    """The chain of nodes that decides when a window ends, first to last.

    Each starts exactly when the one before it has ended and the edge's lag has passed, so their durations
    and lags and the first one's earliest time add up to the window's end.
    """
    in_window = timeline.graph.nodes.window == window
    node = int(np.argmax(np.where(in_window, timeline.end, -1)))
    path = [node]
    while timeline.binding[node] != NO_NODE:
        node = int(timeline.graph.edges.source[timeline.binding[node]])
        path.append(node)
    return np.array(path[::-1], np.int64)


def critical_path(timeline: Timeline) -> pl.DataFrame:
    """What the critical paths of all windows consist of, largest first.

    Returns:
        `rank`, `name`, `kind`, `duration_ns`: time on the path, with the lags that lead to it.
    """
    graph = timeline.graph
    paths = [critical_nodes(timeline, int(window)) for window in np.unique(graph.nodes.window)]
    frames = []
    for path in paths:
        edge = timeline.binding[path]
        lag = np.where(
            edge != NO_NODE, graph.edges.lag[np.maximum(edge, 0)] if graph.edges.lag.size else 0, 0
        )
        frames.append(
            pl.DataFrame(
                {
                    "rank": graph.nodes.rank[path],
                    "name": [graph.names[name] for name in graph.nodes.name[path]],
                    "kind": [NodeKind(kind).name.lower() for kind in graph.nodes.kind[path]],
                    "duration_ns": graph.nodes.duration[path] + lag,
                }
            )
        )
    return (
        pl.concat(frames)
        .group_by("rank", "name", "kind")
        .agg(pl.col("duration_ns").sum())
        .filter(pl.col("duration_ns") != 0)
        .sort(["duration_ns", "rank", "name", "kind"], descending=[True, False, False, False])
    )
