"""What a run loads on its fabric, which connections meet where, what that costs, and paths that avoid it.

In: an `Analysis` whose run keeps a topology. Out: a `TrafficDocument`, and a plan as entries of `paths.json`.
Which connections meet is said where their paths are known; else a hash decides them that is not known, and
what that costs on average is all that is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace as changed

from dpro.analysis.analysis import Analysis
from dpro.arrays import Floats
from dpro.documents import DocumentPart
from dpro.replay.cost.fabric.connections import (
    Connections,
    Meeting,
    Usage,
    connections_of,
    known_paths,
    path_entries,
    quantile,
    usage,
)
from dpro.replay.cost.fabric.flows import MESSAGES, NOT_RECORDED, PAIRWISE, Load, repeated, sprayed
from dpro.replay.cost.fabric.network import NIC, between_switches
from dpro.replay.cost.fabric.placement import Placed, placed
from dpro.replay.cost.fabric.planning import planned_connections
from dpro.replay.graph import Graph
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.edits.fabric.paths import PlannedPaths
from dpro.replay.whatif.graph_ops.shared_fabric import (
    Cables,
    met_between_switches,
    recorded,
    with_fabric,
)
from dpro.replay.whatif.predict import predict
from dpro.topology.kept import PathEntry
from dpro.units import ms

NAMED = 8  # links that are listed
UNLIMITED = 1e6  # times the capacity of a cable that is no limit


class CableDocument(DocumentPart, frozen=True):
    """What crosses a link.

    Attributes:
        link: its name.
        bytes_per_step: that cross it.
        load: share of what it could carry in a step.
        load_while_busy: the same of the time in which anything crosses it.
    """

    link: str
    bytes_per_step: float
    load: float
    load_while_busy: float


class ConnectionDocument(DocumentPart, frozen=True):
    """A connection.

    Attributes:
        source, target: its ports.
        connection: its number among those between these ports.
    """

    source: str
    target: str
    connection: int


class CollisionDocument(DocumentPart, frozen=True):
    """Connections that meet on a link between switches.

    Attributes:
        link: its name.
        connections: those that cross it while another one does.
        together_ms: for how long two or more do, per step.
        cost_ms: by how much a step is longer than with a link like it for each of them, while no other one
            between switches is a limit.
    """

    link: str
    connections: list[ConnectionDocument]
    together_ms: float
    cost_ms: float


class TrafficDocument(DocumentPart, frozen=True, kw_only=True):
    """What a run loads on its fabric.

    Attributes:
        connections: that leave their hosts.
        unknown: of these, whose paths are not known: a hash decides them.
        groups: of ranks that exchange something by collectives.
        groups_recorded: of these, whose rings or trees are those that were recorded; of the others one ring
            for each port is assumed, or NCCL's two trees of hosts for an all-reduce recorded as by TREE.
        channels_from: where rings and trees were recorded, in words; empty where none were.
        step_ms: the mean step, replayed.
        saved_ms: what planned paths would save of it; low and high are its interval.
        saved_low_ms, saved_high_ms: likewise.
        busiest: links between hosts and switches with the most load, the fullest first.
        collisions: of known paths, the costliest first.
    """

    connections: int
    unknown: int
    groups: int
    groups_recorded: int
    channels_from: str
    step_ms: float
    saved_ms: float
    saved_low_ms: float
    saved_high_ms: float
    busiest: list[CableDocument]
    collisions: list[CollisionDocument]


def traffic_document(analysis: Analysis) -> TrafficDocument:
    """What a run loads on its fabric.

    Raises:
        Unanswerable: the run has no topology, or its ranks are on one host.
    """
    graph = analysis.outline.graph
    at = placed(graph)
    unknown = known_paths(at.flows, at.routes, at.known).missing
    across = at.fabric.kind[connections_of(at.flows).flows.begin] == NIC
    plan = predict(graph, analysis.baseline, [PlannedPaths()], analysis.trust)
    base = analysis.baseline_ns
    return TrafficDocument(
        connections=int(across.sum()),
        unknown=int(unknown.size),
        **_groups(at),
        step_ms=ms(base),
        saved_ms=ms(base - plan.predicted_ns),
        saved_low_ms=ms(plan.gain_low_ns),
        saved_high_ms=ms(plan.gain_high_ns),
        busiest=_busiest(at, usage_of(graph, at, load_now(at)), _steps(analysis), base),
        collisions=[] if unknown.size else _collisions(analysis, at),
    )


def _groups(at: Placed) -> dict[str, Any]:
    """How many groups exchange something, and whose rings or trees were recorded."""
    members, ops, _, channels = at.found.kinds
    rows = [
        (each, known != NOT_RECORDED)
        for each, op, known in zip(members, ops, channels)
        if op not in (*MESSAGES, *PAIRWISE)
    ]
    recorded_ones = {each for each, known in rows if known}
    return {
        "groups": len({each for each, _ in rows}),
        "groups_recorded": len(recorded_ones),
        "channels_from": at.found.channels_from if recorded_ones else "",
    }


def load_now(at: Placed) -> Load:
    """What each kind of communication loads: on known paths, else as the mean of all equally short ones."""
    unknown = known_paths(at.flows, at.routes, at.known).missing.size
    return sprayed(at.flows, at.routes) if unknown else quantile(at.now, 0.5)


def usage_of(graph: Graph, at: Placed, load: Load) -> Usage:
    """[L] how much links carry."""
    return usage(repeated(load, at.found.kind), *recorded(graph, at.found), at.fabric.source.size)


def _steps(analysis: Analysis) -> int:
    return int(analysis.baseline.height)


def _busiest(at: Placed, used: Usage, steps: int, step_ns: float) -> list[CableDocument]:
    ports = at.fabric.kind == NIC
    counts = between_switches(at.fabric) | ports[at.fabric.source] | ports[at.fabric.target]
    load = np.where(counts, used.sent / at.fabric.gbps / (steps * step_ns), 0.0)
    while_busy = used.sent / at.fabric.gbps / np.maximum(used.busy, 1.0)
    return [
        CableDocument(
            link=at.fabric.link_name(link),
            bytes_per_step=float(used.sent[link]) / steps,
            load=float(load[link]),
            load_while_busy=float(while_busy[link]),
        )
        for link in np.argsort(-load, kind="stable")[:NAMED].tolist()
        if load[link] > 0
    ]


def _collisions(analysis: Analysis, at: Placed) -> list[CollisionDocument]:
    graph, fabric = analysis.outline.graph, at.fabric
    named = connections_of(at.flows)
    met = met_between_switches(graph, at)[:NAMED]
    steps = _steps(analysis)
    costs = [_cost(analysis, at, meeting) for meeting in met]
    found = [
        CollisionDocument(
            link=fabric.link_name(meeting.link),
            connections=[_connection(at, named, each) for each in meeting.connections],
            together_ms=ms(meeting.together / steps),
            cost_ms=ms(cost),
        )
        for meeting, cost in zip(met, costs)
    ]
    return sorted(found, key=lambda each: -each.cost_ms)


def _connection(at: Placed, named: Connections, each: int) -> ConnectionDocument:
    names, flows = at.fabric.names, named.flows
    return ConnectionDocument(names[flows.begin[each]], names[flows.end[each]], int(named.number[each]))


def _cost(analysis: Analysis, at: Placed, meeting: Meeting) -> float:
    """What it costs of a mean step, ns, that connections meet on a link and nowhere else between switches."""
    gbps = at.fabric.gbps
    shared = np.where(between_switches(at.fabric), gbps * UNLIMITED, gbps)
    shared[meeting.link] = gbps[meeting.link]
    apart = shared.copy()
    apart[meeting.link] *= len(meeting.connections)
    return max(_step_with(analysis, at, shared) - _step_with(analysis, at, apart), 0.0)


def _step_with(analysis: Analysis, at: Placed, gbps: Floats) -> float:
    graph, load = analysis.outline.graph, quantile(at.now, 0.5)
    best = Cables(sprayed(at.flows, at.routes), at.fabric.gbps)
    other = with_fabric(graph, at.found, best, Cables(load, at.fabric.gbps), Cables(load, gbps))
    timeline = replay(other)
    return float(changed_durations(analysis.baseline, other, timeline.end).mean())


def plan_of(graph: Graph, probes: Sequence[PathEntry] = ()) -> list[PathEntry]:
    """Planned paths of the connections of a run, with the source ports by which probes took them.

    Args:
        probes: paths that source ports lead to; each is given to one connection.

    Raises:
        Unanswerable: the run has no topology, or its ranks are on one host.
    """
    at = placed(graph)
    choose = planned_connections(at.flows, at.routes, at.fabric.gbps)
    ports: dict[tuple[str, str, tuple[str, ...]], list[int]] = defaultdict(list)
    for probe in reversed(probes):
        if probe.source_port is not None:
            ports[probe.begin, probe.end, tuple(probe.links)].append(probe.source_port)
    found = []
    for entry in path_entries(at.flows, at.routes, choose):
        free = ports[entry.begin, entry.end, tuple(entry.links)]
        found.append(changed(entry, source_port=free.pop() if free else None))
    return found
