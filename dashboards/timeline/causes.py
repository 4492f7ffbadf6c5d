"""The facts of a node of the replay, its binding dependency, and the nodes that waited for it.

In: a replayed graph and a node. Out: facts as names and values, and nodes with the kind of edge between.
"""

from __future__ import annotations

import numpy as np

from dpro.replay.engine import NO_NODE
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline
from dpro.units import NS_PER_MS, format_bytes, format_duration

_WHY = {
    EdgeKind.THREAD: "before it on its thread",
    EdgeKind.HANDOVER: "handed over by another thread",
    EdgeKind.LAUNCH: "launched by",
    EdgeKind.STREAM: "before it on its stream",
    EdgeKind.EVENT: "an event on another stream",
    EdgeKind.SYNC: "the CPU waits for it",
    EdgeKind.RENDEZVOUS: "the last member to come",
    EdgeKind.CONTENTION: "the device was full",
}
_WHY_OUT = {
    EdgeKind.THREAD: "came after it on its thread",
    EdgeKind.HANDOVER: "was handed over by it",
    EdgeKind.LAUNCH: "was launched by it",
    EdgeKind.STREAM: "came after it on its stream",
    EdgeKind.EVENT: "waited for its event",
    EdgeKind.SYNC: "waited on the CPU for it",
    EdgeKind.RENDEZVOUS: "waited for it to arrive",
    EdgeKind.CONTENTION: "waited for room on the device",
}
_LONGEST = 400  # characters of a name in facts


def cause_of(timeline: Timeline, node: int) -> tuple[int, EdgeKind | None]:
    """Find the work whose end let a node start in the replay, and the kind of edge; -1 where there is none.

    Nodes without duration, such as the rendezvous of a collective, are skipped: the cause is then the work
    of the last member before it arrived.
    """
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    why: EdgeKind | None = None
    while timeline.binding[node] != NO_NODE:
        edge = int(timeline.binding[node])
        kind = EdgeKind(int(edges.kind[edge]))
        why = kind if why is None or kind == EdgeKind.RENDEZVOUS else why
        node = int(edges.source[edge])
        if nodes.kind[node] not in (NodeKind.ARRIVE, NodeKind.RENDEZVOUS) and nodes.duration[node] > 0:
            return node, why
    return -1, None


def waiters_of(timeline: Timeline, node: int, most: int) -> list[tuple[int, EdgeKind]]:
    """Find the work that a node delayed in the replay, and the kind of edge; skip nodes without duration."""
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    found: list[tuple[int, EdgeKind]] = []
    ahead = [(node, EdgeKind.THREAD)]
    while ahead and len(found) < most:
        source, before = ahead.pop(0)
        for edge in np.flatnonzero(edges.source == source).tolist():
            target, kind = int(edges.target[edge]), EdgeKind(int(edges.kind[edge]))
            if timeline.binding[target] != edge:
                continue
            kind = EdgeKind.RENDEZVOUS if before == EdgeKind.RENDEZVOUS else kind
            instant = nodes.kind[target] in (NodeKind.ARRIVE, NodeKind.RENDEZVOUS)
            (ahead if instant else found).append((target, kind))
    return found[:most]


def why_in_words(kind: EdgeKind, out: bool) -> str:
    """Describe an edge from the side of its source (`out`) or of its target.

    Args:
        out: whether it is seen from its source.
    """
    return (_WHY_OUT if out else _WHY)[kind]


def fact_info(timeline: Timeline, node: int) -> list[tuple[str, str]]:
    """List the facts of a node as names and values."""
    graph, nodes = timeline.graph, timeline.graph.nodes
    arrive, node = _member(graph, node)
    kind = NodeKind(int(nodes.kind[node]))
    measured = int(nodes.measured_end[node] - nodes.measured_start[node])
    rows = [
        ("name", graph.names[nodes.name[node]][:_LONGEST]),
        ("kind", kind.name.lower()),
        (
            "where",
            f"rank {nodes.rank[node]}, {graph.lanes[nodes.lane[node]][1]}" if nodes.lane[node] >= 0 else "",
        ),
        ("within", graph.names[nodes.around[node]][:_LONGEST] if nodes.around[node] >= 0 else ""),
        ("step", str(nodes.step[node]) if nodes.step[node] >= 0 else ""),
        ("starts", f"{_ms(nodes.measured_start[node])} (replayed {_ms(timeline.start[node])})"),
        ("takes", f"{format_duration(measured)} (replayed {format_duration(int(nodes.duration[node]))})"),
    ]
    if arrive >= 0:
        waited = int(nodes.measured_start[node] - nodes.measured_start[arrive])
        rows += [("waited", f"{format_duration(waited)} for the other members, before that")]
    if nodes.message[node] >= 0:
        message = graph.messages[nodes.message[node]]
        rows += [("collective", f"{message.op} of {message.num_ranks} ranks, {message.dtype}".rstrip(", "))]
        rows += [("group", message.group)]
    if nodes.bytes[node] >= 0:
        rows += [("bytes", format_bytes(int(nodes.bytes[node])))]
        if kind == NodeKind.TRANSFER and measured > 0:
            rows += [("speed", f"{nodes.bytes[node] / measured:.3g} GB/s of payload")]
    if nodes.anchored[node]:
        rows += [("start", "taken from the trace: nothing in it explains it")]
    return [(name, value) for name, value in rows if value]


def _ms(ns: np.int64) -> str:
    return f"{ns / NS_PER_MS:.4f} ms"


def _member(graph: Graph, node: int) -> tuple[int, int]:
    """Return the arrival and the transfer of a collective's member; -1 and the node itself for others."""
    nodes = graph.nodes
    if nodes.kind[node] not in (NodeKind.ARRIVE, NodeKind.TRANSFER):
        return -1, node
    same = np.flatnonzero((nodes.collective == nodes.collective[node]) & (nodes.rank == nodes.rank[node]))
    parts = {int(nodes.kind[each]): int(each) for each in same}
    return parts.get(NodeKind.ARRIVE, -1), parts.get(NodeKind.TRANSFER, node)
