"""The facts of one span, the spans it waited for and those that waited for it, with their places.

In: a span of the measured lanes, or a node of the replay, and the replay where it is ready. Out: facts as
names and values, and arrows to other spans with the reason for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from dpro.dashboards.timeline.lanes import KINDS, PHASES, UNKNOWN, RankLanes
from dpro.dashboards.timeline.measured import MeasuredLanes, wait_ns
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline
from dpro.schema import SPANS
from dpro.units import NS_PER_MS, format_bytes, format_duration
from dpro.words import shortened

LONGEST = 400  # characters of a name
MAX_ARROWS = 12
_KINDS = {"cpu": "operator", "wait": "collective", "transfer": "collective", "host": "range"}
_STACK = 24  # enclosing spans that are named
_COLUMNS = (
    "span_id", "rank", "kind", "correlation", "sequence_number", "forward_thread", "bytes", "shapes",
    "stream",
)  # fmt: skip


def span_info(
    measured: MeasuredLanes, rank: int, item: int, timeline: Timeline | None = None
) -> dict[str, Any]:
    """Collect the facts and arrows of a measured span.

    Args:
        timeline: the replay, where it is ready.

    Returns:
        `place` (as from `place_of`), `facts` (names and values), `stack` (names around it, innermost first)
        and `arrows`: `place` of the other end, `out` (whether they lead from this span) and `why`.
    """
    lanes = measured.ranks[rank]
    ident = int(lanes.ident[item])
    rows = measured.run.read(SPANS, measured.clocks.parts[rank], _COLUMNS).filter(pl.col("rank") == rank)
    (row,) = rows.filter(pl.col("span_id") == ident).head(1).to_dicts()
    launch = _launch(rows, row)
    caller = lanes.find(launch) if launch >= 0 else item
    stack = [] if caller < 0 else [*([caller] if launch >= 0 else []), *lanes.around(caller)][:_STACK]
    arrows = [*_recorded(measured, rows, row, launch), *_met(measured, rank, ident)]
    if timeline is not None:
        arrows += _replayed(measured, timeline, rank, ident)
    facts = [
        *_facts(measured, lanes, item),
        *_sizes(rows, row, lanes, stack),
        *_collective(measured, rank, ident),
    ]
    return {
        "place": place_of(measured, rank, item),
        "facts": [[name, value] for name, value in facts if value],
        "stack": [_name(measured, lanes, outer) for outer in stack],
        "arrows": _distinct(arrows),
    }


def place_of(measured: MeasuredLanes, rank: int, item: int) -> dict[str, Any]:
    """Return where a span is drawn: `rank`, `item`, `id`, `row`, `start` and `end` (ns), `name`."""
    lanes = measured.ranks[rank]
    same = np.flatnonzero(lanes.ident == lanes.ident[item])
    return {
        "rank": rank,
        "item": item,
        "id": int(lanes.ident[item]),
        "row": lanes.row_of(item),
        "start": int(lanes.all.start[same].min()),
        "end": int(lanes.all.end[same].max()),
        "name": _name(measured, lanes, item),
    }


def _name(measured: MeasuredLanes, lanes: RankLanes, item: int) -> str:
    return shortened(measured.names.texts[lanes.name[item]], LONGEST)


def _facts(measured: MeasuredLanes, lanes: RankLanes, item: int) -> Iterable[tuple[str, str]]:
    """Yield the facts that the lanes hold."""
    place = place_of(measured, lanes.rank, item)
    start, end = place["start"], place["end"]
    steps = measured.clocks.steps
    step = steps.filter((pl.col("begin_ms") <= start / NS_PER_MS) & (pl.col("end_ms") > start / NS_PER_MS))
    row = place["row"]
    first = int(lanes.all.first[row])
    before = int(np.searchsorted(lanes.all.start[first : int(lanes.all.first[row + 1])], start, "left")) - 1
    lane = lanes.lanes[lanes.lane_of(row)]
    kind = KINDS[int(lanes.all.kind[item])]
    yield "name", place["name"]
    yield "kind", _KINDS.get(kind, kind)
    yield "where", f"rank {lanes.rank}, {lane.label}"
    yield "step", str(step["step"][-1]) if step.height else ""
    yield "phase", PHASES[lanes.phase[item]] if lanes.phase[item] != UNKNOWN else ""
    yield "micro-batch", str(lanes.micro_batch[item]) if lanes.micro_batch[item] >= 0 else ""
    yield "starts", f"{start / NS_PER_MS:.4f} ms"
    yield "takes", format_duration(end - start)
    if lane.gpu and before >= 0:
        idle = start - int(lanes.all.end[first + before])
        yield "idle before", format_duration(idle) if idle > 0 else ""


def _sizes(
    rows: pl.DataFrame, row: dict[str, Any], lanes: RankLanes, stack: Sequence[int]
) -> Iterable[tuple[str, str]]:
    if row["bytes"] >= 0:
        yield "bytes", format_bytes(row["bytes"])
    shapes = row["shapes"]
    if not shapes and row["stream"] >= 0 and stack:
        around = pl.DataFrame({"span_id": lanes.ident[list(stack)].astype(np.int64)})
        recorded = around.join(rows, on="span_id", how="left", maintain_order="left")["shapes"]
        shapes = next((text for text in recorded.to_list() if text), "")
    yield "shapes", shortened(shapes, LONGEST)


def _launch(rows: pl.DataFrame, row: dict[str, Any]) -> int:
    """Return the call that launched GPU work, -1 for other spans."""
    if row["stream"] < 0 or row["correlation"] < 0:
        return -1
    calls = rows.filter((pl.col("correlation") == row["correlation"]) & (pl.col("stream") < 0))["span_id"]
    return int(calls[0]) if calls.len() else -1


def _recorded(
    measured: MeasuredLanes, rows: pl.DataFrame, row: dict[str, Any], launch: int
) -> Iterable[dict[str, Any]]:
    """Yield arrows between launches and their GPU work, and between forward and backward operators."""
    rank, is_another = row["rank"], pl.col("span_id") != row["span_id"]
    if launch >= 0:
        yield from _arrow(measured, rank, launch, False, "launched it")
    elif row["kind"] == "runtime" and row["correlation"] >= 0:
        work = rows.filter((pl.col("correlation") == row["correlation"]) & (pl.col("stream") >= 0))
        for other in work["span_id"].head(MAX_ARROWS).to_list():
            yield from _arrow(measured, rank, other, True, "is launched by it")
    if row["sequence_number"] >= 0 and row["kind"] == "cpu_op":
        same = rows.filter(
            (pl.col("sequence_number") == row["sequence_number"]) & is_another & (pl.col("kind") == "cpu_op")
        )
        backward = row["forward_thread"] > 0
        other = same.filter((pl.col("forward_thread") > 0) != backward)["span_id"].head(1).to_list()
        for partner in other:
            why = "is its forward operator" if backward else "is its backward operator"
            yield from _arrow(measured, rank, partner, not backward, why)


def _members(measured: MeasuredLanes, rank: int, ident: int) -> list[dict[str, Any]]:
    """Return all members of the collective that a span is a part of, itself first."""
    rows = measured.clocks.members
    asked = rows.filter((pl.col("rank") == rank) & (pl.col("span_id") == ident)).head(1)
    same = rows.filter(pl.col("instance").is_in(asked["instance"].implode())) if asked.height else asked
    return sorted(same.to_dicts(), key=lambda member: (member["rank"] != rank, member["start_ns"]))


def _collective(measured: MeasuredLanes, rank: int, ident: int) -> Iterable[tuple[str, str]]:
    members = _members(measured, rank, ident)
    if not members:
        return
    asked = members[0]
    size, waited = max(asked["bytes_in"], asked["bytes_out"]), wait_ns(asked)
    moving = asked["duration_ns"] - waited
    yield "collective", f"{asked['op']} of {asked['members']} recorded ranks {asked['dtype']}".rstrip()
    yield "group", asked["key"]
    yield "payload", format_bytes(size) if size >= 0 else ""
    speed = f", {size / moving:.3g} GB/s" if size > 0 and moving > 0 else ""
    yield "transfer", f"{format_duration(moving)}{speed}"
    if asked["members"] > 1:
        last = max(members, key=lambda member: member["start_ns"])
        whose = "came last" if last is asked else f"for rank {last['rank']}, which came last"
        yield "waited", whose if last is asked else f"{format_duration(waited)} {whose}"


def _met(measured: MeasuredLanes, rank: int, ident: int) -> Iterable[dict[str, Any]]:
    """Yield an arrow from the member that came last, or from this one to those that waited for it."""
    members = _members(measured, rank, ident)
    if len(members) < 2:
        return
    last = max(members, key=lambda member: member["start_ns"])
    if last is members[0]:
        for other in sorted(members[1:], key=lambda member: member["start_ns"])[:MAX_ARROWS]:
            waited = f"waited {format_duration(wait_ns(other))} for it"
            yield from _arrow(measured, other["rank"], other["span_id"], True, waited)
    else:
        yield from _arrow(measured, last["rank"], last["span_id"], False, "came last to the collective")


def _replayed(measured: MeasuredLanes, timeline: Timeline, rank: int, ident: int) -> Iterable[dict[str, Any]]:
    """Yield arrows of the dependencies in the replay."""
    nodes = timeline.graph.nodes
    parts = np.flatnonzero((nodes.rank == rank) & (nodes.span == ident))
    if not parts.size:
        return
    parts = parts[np.argsort(nodes.measured_start[parts], kind="stable")]
    cause, why = cause_of(timeline, int(parts[0]))
    ends = [(cause, why, False)] if why is not None else []
    ends += [(node, kind, True) for node, kind in waiters_of(timeline, int(parts[-1]), MAX_ARROWS)]
    for node, kind, out in ends:
        if node >= 0 and nodes.span[node] >= 0 and (nodes.rank[node], nodes.span[node]) != (rank, ident):
            words = why_in_words(kind, out)
            yield from _arrow(measured, int(nodes.rank[node]), int(nodes.span[node]), out, words)


def _arrow(measured: MeasuredLanes, rank: int, ident: int, out: bool, why: str) -> Iterable[dict[str, Any]]:
    lanes = measured.ranks.get(rank)
    item = -1 if lanes is None else lanes.find(ident)
    if item >= 0:
        yield {"place": place_of(measured, rank, item), "out": out, "why": why}


def _distinct(arrows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one arrow per other end and direction."""
    kept: dict[Any, dict[str, Any]] = {}
    for arrow in arrows:
        kept.setdefault((arrow["place"]["rank"], arrow["place"]["id"], arrow["out"]), arrow)
    return list(kept.values())


# The facts of a node of the replay, its binding dependency, and the nodes that waited for it.

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
    waiters: list[tuple[int, EdgeKind]] = []
    ahead = [(node, EdgeKind.THREAD)]
    while ahead and len(waiters) < most:
        source, before = ahead.pop(0)
        for edge in np.flatnonzero(edges.source == source).tolist():
            target, kind = int(edges.target[edge]), EdgeKind(int(edges.kind[edge]))
            if timeline.binding[target] != edge:
                continue
            kind = EdgeKind.RENDEZVOUS if before == EdgeKind.RENDEZVOUS else kind
            instant = nodes.kind[target] in (NodeKind.ARRIVE, NodeKind.RENDEZVOUS)
            (ahead if instant else waiters).append((target, kind))
    return waiters[:most]


def why_in_words(kind: EdgeKind, out: bool) -> str:
    """Describe an edge from the side of its source (`out`) or of its target."""
    return (_WHY_OUT if out else _WHY)[kind]


def fact_info(timeline: Timeline, node: int) -> list[tuple[str, str]]:
    """List the facts of a node as names and values."""
    graph, nodes = timeline.graph, timeline.graph.nodes
    arrive, node = _member(graph, node)
    kind = NodeKind(int(nodes.kind[node]))
    measured = int(nodes.measured_end[node] - nodes.measured_start[node])
    rows = [
        ("name", graph.names[nodes.name[node]][:LONGEST]),
        ("kind", kind.name.lower()),
        (
            "where",
            f"rank {nodes.rank[node]}, {graph.lanes[nodes.lane[node]][1]}" if nodes.lane[node] >= 0 else "",
        ),
        ("within", graph.names[nodes.around[node]][:LONGEST] if nodes.around[node] >= 0 else ""),
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
    parts = {int(nodes.kind[other]): int(other) for other in same}
    return parts.get(NodeKind.ARRIVE, -1), parts.get(NodeKind.TRANSFER, node)
