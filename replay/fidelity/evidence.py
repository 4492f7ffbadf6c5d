"""What a replay rests on: dependencies that the trace recorded, inferred ones, and times taken from it.

In: a graph and its replay. Out: counts and shares. How large the errors are that result is measured in
`dpro.replay.fidelity.accuracy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.construction.lags import UNEXPLAINED_NS
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline


@dataclass(frozen=True)
class StartEvidence:
    """What the starts of work rest on.

    The four shares are of all starts of GPU work and of arrivals at collectives, and add up to 1.

    Attributes:
        edges: one row per `EdgeKind` in the graph: `kind`, and how many were `recorded` and `inferred`.
        streams_recorded: pairs of streams of which the trace records how the one waits for the other.
        streams_inferred: those of which it only suggests so.
        derived: set by a dependency that the trace recorded.
        inferred: set by one that it only suggests.
        fitted: tied to the draining of the device, by the time measured.
        anchored: taken from the trace, or delayed by a launch that was not recorded.
    """

    edges: pl.DataFrame
    streams_recorded: int
    streams_inferred: int
    derived: float
    inferred: float
    fitted: float
    anchored: float


class StartCounts(NamedTuple):
    """What the starts of work rest on, in numbers: those of several ranks add up.

    Attributes:
        edges: [EdgeKind, 2] dependencies that were recorded, and inferred ones.
        streams: [2] pairs of streams that wait for each other, likewise.
        set_by: [4] starts that are derived, inferred, fitted, anchored.
    """

    edges: Ints
    streams: Ints
    set_by: Ints


def in_shares(counts: StartCounts) -> StartEvidence:
    """What the starts rest on, as shares of all."""
    recorded, inferred = counts.edges.T
    names = [kind.name.lower() for kind in EdgeKind]
    rows = pl.DataFrame({"kind": names, "recorded": recorded, "inferred": inferred})
    rows = rows.filter(pl.col("recorded") + pl.col("inferred") > 0)
    shares = counts.set_by / max(int(counts.set_by.sum()), 1)
    return StartEvidence(rows, *counts.streams.tolist(), *map(float, shares))


def count_starts(timeline: Timeline) -> StartCounts:
    """Count what the starts in a replay of the unchanged graph, or of one rank of it, rest on."""
    graph = timeline.graph
    work = is_started(graph)
    anchored, fitted = _anchored(graph), _fitted(graph)
    bound = timeline.binding != NO_NODE
    inferred = np.zeros(graph.num_nodes, np.bool_)
    inferred[bound] = graph.edges.inferred[timeline.binding[bound]]
    kind = np.select([fitted, anchored, inferred], [2, 3, 1], 0)[work]
    edges = np.bincount(2 * graph.edges.kind + graph.edges.inferred, minlength=2 * len(EdgeKind))
    set_by = np.bincount(kind, minlength=4)
    return StartCounts(edges.reshape(-1, 2), np.array(_count_streams(graph), np.int64), set_by)


def is_started(graph: Graph) -> Bools:
    """[N] what is started rather than follows on a CPU thread: GPU work, and arrivals at collectives."""
    return np.isin(graph.nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE))


def taken_from_trace(graph: Graph) -> Bools:
    """[N] what starts as measured because it was measured: anchored, or after a delay as recorded."""
    nodes = graph.nodes
    recorded = nodes.duration == nodes.measured_end - nodes.measured_start
    taken = nodes.anchored.copy()
    taken[graph.edges.target[((nodes.kind == NodeKind.DELAY) & recorded)[graph.edges.source]]] = True
    return taken


def _anchored(graph: Graph) -> Bools:
    taken = graph.nodes.anchored.copy()
    late = (graph.nodes.kind == NodeKind.DELAY) & (graph.nodes.duration > UNEXPLAINED_NS)
    taken[graph.edges.target[late[graph.edges.source]]] = True
    return taken


def _fitted(graph: Graph) -> Bools:
    full = np.zeros(graph.num_nodes, np.bool_)
    full[graph.edges.target[graph.edges.kind == EdgeKind.CONTENTION]] = True
    return full & graph.nodes.anchored


def _count_streams(graph: Graph) -> tuple[int, int]:
    """Pairs of streams of which one waits for the other: by recorded events, and only by inferred ones."""
    edges = graph.edges
    events = edges.kind == EdgeKind.EVENT
    lanes = [graph.nodes.lane[nodes[events]].tolist() for nodes in (edges.source, edges.target)]
    inferred = edges.inferred[events].tolist()
    known = {pair for pair, guessed in zip(zip(*lanes), inferred) if not guessed}
    return len(known), len(set(zip(*lanes)) - known)
