"""What a replay rests on: dependencies that the trace recorded, inferred ones, and times taken from it.

In: a graph and its replay. Out: counts and shares. How large the errors are that result is measured in
`dpro.replay.fidelity.accuracy`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.documents import DocumentPart
from dpro.replay.construction.lags import UNEXPLAINED_NS
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline


class Starts(DocumentPart, frozen=True):
    """What the starts of GPU work and of collectives rest on: four shares that add up to 1.

    Attributes:
        derived: a recorded dependency.
        inferred: an inferred dependency.
        fitted: the draining of the device.
        anchored: the trace alone.
    """

    derived: float
    inferred: float
    fitted: float
    anchored: float


class EdgeCounts(DocumentPart, frozen=True):
    """Dependencies of one kind.

    Attributes:
        kind: of dependency.
        recorded, inferred: how many there are of each.
    """

    kind: str
    recorded: int
    inferred: int


class StreamPairs(DocumentPart, frozen=True):
    """Pairs of streams of which one waits for the other.

    Attributes:
        recorded: by recorded events.
        inferred: by inferred ones.
    """

    recorded: int
    inferred: int


class Evidence(DocumentPart, frozen=True):
    """What the replay rests on.

    Attributes:
        starts: what sets the starts.
        edges: dependencies by kind.
        stream_pairs: streams that wait for each other.
    """

    starts: Starts
    edges: list[EdgeCounts]
    stream_pairs: StreamPairs


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


def in_shares(counts: StartCounts) -> Evidence:
    """What the starts rest on, as shares of all."""
    rows = zip(EdgeKind, counts.edges.tolist())
    edges = [EdgeCounts(kind.name.lower(), *numbers) for kind, numbers in rows if sum(numbers)]
    shares = counts.set_by / max(int(counts.set_by.sum()), 1)
    return Evidence(Starts(*map(float, shares)), edges, StreamPairs(*counts.streams.tolist()))


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
