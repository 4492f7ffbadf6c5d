"""Slices for viewers of timelines: measured, replayed, critical path, findings, in one frame.

Takes a replayed graph and findings; returns one row per slice, on one aligned clock. Slices of a track never
overlap: concurrent slices of a lane, such as collectives of several groups, are spread over several tracks.
The critical path is that of the replay. It is drawn twice, at the measured and at the replayed times of its
spans, so that each row agrees with the lanes of its side.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.detect.findings import Finding
from dpro.detect.words import cost_verb
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import Timeline, critical_nodes, slack_of, step_ends
from dpro.selection import ALL, Selection
from dpro.timelines.lanes import lane_names
from dpro.units import format_duration

MEASURED, REPLAYED, CRITICAL, FINDINGS = "measured", "replayed", "critical path", "findings"
CRITICAL_REPLAYED = f"{CRITICAL} ({REPLAYED})"
PATHS = {MEASURED: CRITICAL, REPLAYED: CRITICAL_REPLAYED}  # group of the critical path, by side
FIRST = {FINDINGS: -3, CRITICAL: -2, CRITICAL_REPLAYED: -1}  # order of the groups above the ranks
WAIT = "wait"
AS_MEASURED = "when they were measured to begin"

Offset = tuple[int, int]  # smallest and largest replayed minus measured start, in ns


def slices(timeline: Timeline, findings: Sequence[Finding] = (), selection: Selection = ALL) -> pl.DataFrame:
    """Return the slices of a replayed graph: measured, replayed, critical path, findings.

    Args:
        selection: steps and ranks to draw; findings that name only other ranks are left out.

    Returns:
        `group` (measured or replayed timeline of a rank, the critical path of all ranks on either side, or
        findings), `track` (within the group: a lane, numbered if it needs several tracks), `rank`, `lane`,
        `name`, `kind` (of node, or wait), `step`, `start_ns` and `end_ns` (on the aligned clock), `node` (-1
        for a finding), `critical`, `waited_for` (node whose end determined the start in the replay, -1 for
        none), `slack_ns` (delay that would cost no time), `later_ns` (replayed minus measured start). Sorted
        by group, track and start; groups and tracks in the order in which a viewer should show them.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    lanes = pl.Series(lane_names(graph), dtype=pl.String)
    critical = np.unique(
        np.concatenate([critical_nodes(timeline, int(window)) for window in np.unique(nodes.window)])
        if graph.num_nodes
        else np.empty(0, np.int64)
    )
    on_path = np.zeros(graph.num_nodes, bool)
    on_path[critical] = True
    drawn = ~np.isin(nodes.kind, (NodeKind.ARRIVE, NodeKind.RENDEZVOUS))
    before = np.full(graph.num_nodes, -1, np.int64)
    bound = timeline.binding != NO_NODE
    before[bound] = graph.edges.source[timeline.binding[bound]]
    times = {
        MEASURED: (nodes.measured_start, nodes.measured_end),
        REPLAYED: (timeline.start, timeline.end),
    }
    rank = pl.format("rank {} ", pl.col("rank"))
    frames = []
    for side, (start, end) in times.items():
        rows = [_rows(graph, lanes, np.flatnonzero(drawn), start, end, on_path, before)]
        rows.append(_waits(graph, lanes, start))
        frames.append(pl.concat(rows).with_columns(group=rank + side, track=pl.col("lane")))
        path = _rows(graph, lanes, critical[drawn[critical]], start, end, on_path, before)
        frames.append(path.with_columns(group=pl.lit(PATHS[side]), track=pl.lit(CRITICAL)))
    lasting = selection.keep(pl.concat(frames).filter(pl.col("end_ns") > pl.col("start_ns")))
    node = lasting["node"].to_numpy()
    later_ns = timeline.start - nodes.measured_start
    facts = {"slack_ns": pl.Series(slack_of(timeline)[node]), "later_ns": pl.Series(later_ns[node])}
    shown = [
        finding for finding in findings if not finding.ranks or any(map(selection.has_rank, finding.ranks))
    ]
    steps = replace(selection, ranks=())
    marks = [steps.keep(_marks(timeline, finding, lasting.schema)) for finding in shown]
    return _on_tracks(pl.concat([lasting.with_columns(**facts), *marks]), lanes)


def path_offsets(timeline: Timeline, path: Ints, recorded: Timeline | None) -> tuple[Offset, Offset | None]:
    """Return how far the replay begins spans of the critical path from where they were measured, in ns.

    Args:
        path: [N] nodes on the path.
        recorded: the replay of the graph as recorded, with the same nodes; None where nothing was taken out.

    Returns:
        Smallest and largest replayed minus measured start; and those of the graph as recorded, None unless
        these are nearer.
    """
    offset = _offset_of(timeline, path)
    if recorded is None or not path.size:
        return offset, None
    kept = _offset_of(recorded, path)
    return offset, (kept if max(-kept[0], kept[1]) < max(-offset[0], offset[1]) / 2 else None)


def _offset_of(timeline: Timeline, path: Ints) -> Offset:
    later_ns = (timeline.start - timeline.graph.nodes.measured_start)[path]
    return (int(later_ns.min()), int(later_ns.max())) if later_ns.size else (0, 0)


def path_in(rows: pl.DataFrame) -> Ints:
    """Return the nodes on the critical path in a frame of `slices`."""
    nodes: Ints = rows.filter(pl.col("group") == CRITICAL)["node"].to_numpy()
    return nodes


def path_note(offset: Offset, recorded: Offset | None = None) -> str:
    """Return a sentence on the distance between the two rows of the critical path.

    Args:
        offset, recorded: values of `path_offsets`.
    """
    if offset == (0, 0):
        return "The replay begins every span of the critical path when it was measured to begin."
    distance = _distance_in_words(*offset)
    if recorded is None:
        return f"The replay begins spans of the critical path {distance} than measured."
    return (
        "The replay leaves out what recording cost, which adds up over a window, and so begins spans of the "
        f"critical path {distance} than measured; with that cost, {_distance_in_words(*recorded)}."
    )


def _distance_in_words(sooner_ns: int, later_ns: int) -> str:
    sides = ((min(sooner_ns, 0), "sooner"), (max(later_ns, 0), "later"))
    return " and ".join(f"up to {format_duration(abs(ns))} {side}" for ns, side in sides if ns) or AS_MEASURED


def step_extents(graph: Graph, start: Ints, end: Ints) -> pl.DataFrame:
    """Return `window`, `step`, `begin_ns`, `end_ns` of each step, which begins where the one before it ends.

    Args:
        start, end: [N] ns of each node: replayed, or as measured.
    """
    begin = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    return step_ends(graph, start, end).select("window", "step", begin_ns=begin, end_ns="finish_ns")


def _marks(timeline: Timeline, finding: Finding, schema: pl.Schema) -> pl.DataFrame:
    """Return one slice per step, on a track of the finding."""
    graph = timeline.graph
    extents = step_extents(graph, graph.nodes.measured_start, graph.nodes.measured_end)
    facts = {
        "rank": finding.ranks[0] if finding.ranks else -1,
        "name": f"{finding.title} {cost_verb(finding)} {format_duration(finding.cost_ns)} per step",
        **dict.fromkeys(("lane", "track"), finding.title),
        **dict.fromkeys(("kind", "group"), FINDINGS),
        **dict.fromkeys(("node", "waited_for"), -1),
        "critical": False,
    }
    columns = [pl.lit(value, schema[name]).alias(name) for name, value in facts.items()]
    times = {"start_ns": pl.col("begin_ns") + graph.origin_ns, "end_ns": pl.col("end_ns") + graph.origin_ns}
    rows = extents.with_columns(**times).with_columns(*columns, pl.col("step").cast(schema["step"]))
    nothing = pl.lit(0, pl.Int64)
    return rows.select(*schema.names()).with_columns(slack_ns=nothing, later_ns=nothing)


def _rows(
    graph: Graph, lanes: pl.Series, chosen: Ints, start: Ints, end: Ints, critical: Bools, waited_for: Ints
) -> pl.DataFrame:
    nodes = graph.nodes
    names = pl.Series(graph.names, dtype=pl.String)
    kinds = pl.Series([kind.name.lower() for kind in NodeKind])
    return pl.DataFrame(
        {
            "rank": nodes.rank[chosen],
            "lane": lanes.gather(nodes.lane[chosen]),
            "name": names.gather(nodes.name[chosen]),
            "kind": kinds.gather(nodes.kind[chosen]),
            "step": nodes.step[chosen],
            "start_ns": start[chosen] + graph.origin_ns,
            "end_ns": end[chosen] + graph.origin_ns,
            "node": chosen,
            "critical": critical[chosen],
            "waited_for": waited_for[chosen],
        }
    )


def _waits(graph: Graph, lanes: pl.Series, start: Ints) -> pl.DataFrame:
    """Return slices of waiting: from a member's arrival at a collective to the begin of its transfer."""
    nodes = graph.nodes
    arrivals, transfers = (
        pl.DataFrame({"collective": nodes.collective[of_kind], "rank": nodes.rank[of_kind], "node": of_kind})
        for of_kind in (np.flatnonzero(nodes.kind == kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    )
    pairs = arrivals.join(transfers, on=["collective", "rank"], suffix="_after").sort("node")
    first, last = pairs["node"].to_numpy(), pairs["node_after"].to_numpy()
    nothing, never = np.full(graph.num_nodes, -1, np.int64), np.zeros(graph.num_nodes, bool)
    until = nothing.copy()
    until[first] = start[last]
    rows = _rows(graph, lanes, first, start, until, never, nothing)
    lane = lanes.gather(nodes.lane[last])
    return rows.with_columns(kind=pl.lit(WAIT), name=pl.lit("wait: ") + pl.col("name"), lane=lane)


def _on_tracks(rows: pl.DataFrame, lanes: pl.Series) -> pl.DataFrame:
    """Assign tracks so that slices of one do not overlap, and sort all slices."""
    keys = ["group", "track"]
    rows = rows.sort(*keys, "start_ns", "end_ns", "node")
    clash = pl.col("start_ns") < pl.col("end_ns").cum_max().shift(1).over(keys)
    crowded = rows.select(clash.fill_null(False).any().over(keys)).to_series()
    number = np.zeros(rows.height, np.int64)
    places = rows.with_row_index("row").filter(crowded)
    for _, lane in places.group_by(keys, maintain_order=True):
        number[lane["row"].to_numpy()] = _tracks(lane["start_ns"].to_list(), lane["end_ns"].to_list())
    order = {lane: place for place, lane in enumerate(dict.fromkeys(lanes))}
    numbered = pl.format("{} #{}", "track", pl.col("number") + 1)
    return (
        rows.with_columns(
            number=pl.Series(number),
            group_order=pl.col("group").replace_strict(FIRST, default=pl.col("rank")),
            lane_order=pl.col("track").replace_strict(order, default=-1, return_dtype=pl.Int64),
        )
        .sort("group_order", "group", "lane_order", "number", "start_ns", "end_ns", "node")
        .with_columns(track=pl.when(pl.col("number") > 0).then(numbered).otherwise("track"))
        .drop("number", "group_order", "lane_order")
    )


def _tracks(starts: list[int], ends: list[int]) -> list[int]:
    """Return the lowest free track at the start of each slice.

    Args:
        starts, ends: times of the slices, in order of their starts.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    taken = []
    for start, end in zip(starts, ends):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, track))
        taken.append(track)
    return taken
