"""One span of the timeline: what it is, how long it took, and what it waited for.

In: a replayed graph and a node. Out: its facts as names and values, for the pointer and for a click.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from dpro.dashboards.links import Link
from dpro.dashboards.page import facts
from dpro.dashboards.segments import Tracks
from dpro.export.slices import PATHS
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
_LONGEST = 400  # characters of a name in facts
_DIGITS = 18  # of the number of a node


def chosen_node(link: Link, graph: Graph) -> int:
    """The node that a link names, -1 for none."""
    text = link.own.get("node", "")
    known = text.isdecimal() and len(text) <= _DIGITS and int(text) < graph.num_nodes
    return int(text) if known else -1


def cause_of(timeline: Timeline, node: int) -> tuple[int, EdgeKind | None]:
    """The work whose end let a node start in the replay, and how; -1 where nothing did.

    Moments that last no time, as the meeting of a collective's members, are looked through: behind them is
    what the last member did before it came.
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


def fact_info(timeline: Timeline, node: int) -> list[tuple[str, str]]:
    """What is known of a node, as names and values."""
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
    """Of either part of a collective's member its arrival and its transfer; -1 and the node, of others."""
    nodes = graph.nodes
    if nodes.kind[node] not in (NodeKind.ARRIVE, NodeKind.TRANSFER):
        return -1, node
    same = np.flatnonzero((nodes.collective == nodes.collective[node]) & (nodes.rank == nodes.rank[node]))
    parts = {int(nodes.kind[each]): int(each) for each in same}
    return parts.get(NodeKind.ARRIVE, -1), parts.get(NodeKind.TRANSFER, node)


def at(
    timeline: Timeline,
    tracks: Tracks,
    shown: Sequence[int],
    height: Sequence[float],
    *,
    x: float,
    y: float,
    near: float,
) -> dict[str, Any] | None:
    """What is at a place of the figure; None where nothing is.

    Args:
        timeline: the replay.
        tracks: all tracks.
        shown: which of them the rows are.
        height: of the rows.
        x: ms.
        y: of the figure.
        near: ms, how far off the pointer may be.
    """
    if not shown:
        return None
    row = int(np.argmin(np.abs(np.array(height) - y)))
    if abs(height[row] - y) > 0.6:
        return None
    track = shown[row]
    time, reach = round(x * NS_PER_MS), max(round(near * NS_PER_MS), 1)
    found = tracks.at(track, time, reach)
    if found < 0:
        return None
    crowd = tracks.seen(track, time - reach, time + reach)
    told = fact_info(timeline, int(tracks.node[found]))
    if crowd.stop - crowd.start > 3:
        told.append(("here", f"{crowd.stop - crowd.start} spans; zoom in to tell them apart"))
    if tracks.critical[found] and tracks.tracks["group"][track] not in PATHS.values():
        told.append(("critical", "on the critical path"))
    return {"node": int(tracks.node[found]), "facts": told}


def flow(
    timeline: Timeline, tracks: Tracks, shown: Sequence[int], height: Sequence[float], node: int
) -> tuple[list[float], list[float]]:
    """x (ms) and y of the end of what a node waited for, and of its own start; empty unless both show."""
    cause = cause_of(timeline, node)[0] if node >= 0 else -1
    ends = []
    for what, edge in ((cause, tracks.end), (node, tracks.start)):
        place = np.flatnonzero(tracks.node == what)
        track = np.searchsorted(tracks.first, place, "right") - 1
        on_path = tracks.tracks["group"].is_in(list(PATHS.values())).to_numpy()
        rows = [
            (shown.index(t), p)
            for t, p in zip(track.tolist(), place.tolist())
            if t in shown and not on_path[t]
        ]
        if what < 0 or not rows:
            return [], []
        row, slice_ = min(rows)
        ends.append((edge[slice_] / NS_PER_MS, height[row]))
    return [x for x, _ in ends], [y for _, y in ends]


def facts_panel(timeline: Timeline, node: int, link: Link) -> Component:
    """The facts of a clicked span, and a link to what it waited for."""
    graph, nodes = timeline.graph, timeline.graph.nodes
    cause, why = cause_of(timeline, _member(graph, node)[1])
    rows: list[tuple[str, Any]] = [*fact_info(timeline, node)]
    if cause >= 0 and why is not None:
        name = graph.names[nodes.name[cause]][:_LONGEST]
        where = f"rank {nodes.rank[cause]}, {format_duration(int(nodes.duration[cause]))}"
        to_cause = dcc.Link(name, href=link.with_own(node=str(cause)))
        rows.append(("waited for", html.Span([to_cause, f" ({where}): {_WHY[why]}"])))
    return facts(rows)
