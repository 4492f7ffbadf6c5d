"""Summarises a fabric and the traffic of a run on it: switches, paths between leaves, colliding connections.

Takes a topology, with the hosts of a run if there is one, or an `Analysis` whose run has a topology. Returns
a `TopologyDocument` and a `TrafficDocument`. Collisions are listed only where all paths are known; otherwise
an unknown hash decides them, and only their mean cost is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpro.analysis.analysis import Analysis
from dpro.analysis.predictions import predict_edits
from dpro.arrays import Floats, Ints
from dpro.documents import Document, DocumentPart
from dpro.errors import needs_extra
from dpro.extensions.fabric.edits import PlannedPaths
from dpro.replay.cost.fabric.connections import (
    Connections,
    Meeting,
    Usage,
    connections_of,
    known_paths,
    quantile,
    usage,
)
from dpro.replay.cost.fabric.flows import MESSAGES, NOT_RECORDED, PAIRWISE, Load, repeated, sprayed
from dpro.replay.cost.fabric.network import NIC, between_switches
from dpro.replay.cost.fabric.placement import Placed, placed
from dpro.replay.graph import Graph
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.graph_ops.shared_fabric import (
    Cables,
    met_between_switches,
    recorded,
    with_fabric,
)
from dpro.topology.file import TopologyFile
from dpro.topology.hostlist import fold
from dpro.units import ms

with needs_extra("replay"):
    from dpro.replay.cost.fabric.network import NIC, SWITCH, Fabric, Routes, fabric_of, routes_of
    from dpro.replay.cost.fabric.placement import host_named

MAX_LEAVES = 64  # between which paths are counted


class TierDocument(DocumentPart, frozen=True):
    """Switches of one tier.

    Attributes:
        tier: its name.
        switches: their number.
        cables_down, cables_up: cables towards hosts, and away from them.
        gbit_down, gbit_up: total capacity of these cables, 1e9 bits/s, each way.
        oversubscription: `gbit_down` over `gbit_up`; None at the top.
    """

    tier: str
    switches: int
    cables_down: int
    cables_up: int
    gbit_down: float
    gbit_up: float
    oversubscription: float | None


class TopologyDocument(Document, frozen=True, kw_only=True):
    """A fabric.

    Attributes:
        hosts: number of hosts.
        gpus, ports: of all hosts.
        tiers: tiers of switches, from the hosts up.
        paths_min, paths_max: number of equally short paths from leaf to leaf, parallel cables counted
            separately; None with one leaf.
        unreachable: leaves without a path to all others.
        unlinked: ports without a cable, as a list of names.
        missing_hosts: hosts of the run that the topology lacks.
        traffic: traffic of the run on the fabric; null for a file.
    """

    hosts: int
    gpus: int
    ports: int
    tiers: list[TierDocument]
    paths_min: int | None
    paths_max: int | None
    unreachable: str
    unlinked: str
    missing_hosts: list[str]
    traffic: TrafficDocument | None = None


def topology_document(topology: TopologyFile, hosts: Sequence[str] = ()) -> TopologyDocument:
    """Summarise a topology.

    Args:
        hosts: hosts of the run, to find those that the topology lacks.
    """
    network = fabric_of(topology)
    routes = routes_of(network)
    far = distance_from_hosts(network)
    leaves = np.flatnonzero(far == 0)[:MAX_LEAVES]
    counts = np.array([_count_paths(routes, int(leaf), leaves) for leaf in leaves]).reshape(
        leaves.size, leaves.size
    )
    between = counts[~np.eye(leaves.size, dtype=bool)]
    linked = set(network.source.tolist())
    return TopologyDocument(
        hosts=len(network.hosts),
        gpus=sum(map(len, network.gpus)),
        ports=int((network.kind == NIC).sum()),
        tiers=[_tier(network, far, tier) for tier in range(int(far.max(initial=-1)) + 1)],
        paths_min=int(between.min()) if between.size else None,
        paths_max=int(between.max()) if between.size else None,
        unreachable=fold(network.names[leaf] for leaf, row in zip(leaves, counts) if (row == 0).any()),
        unlinked=fold(
            network.names[port] for port in np.flatnonzero(network.kind == NIC) if int(port) not in linked
        ),
        missing_hosts=[host for host in hosts if host_named(network, host) is None],
    )


def distance_from_hosts(network: Fabric) -> Ints:
    """Return [N] switches between a switch and the nearest port; -1 of other and unreachable nodes."""
    far = np.full(network.num_nodes, -1, np.int64)
    is_switch = network.kind == SWITCH
    edge = np.unique(network.target[network.kind[network.source] == NIC])
    edge = edge[is_switch[edge]]
    tier = 0
    while edge.size:
        far[edge] = tier
        beside = np.unique(network.target[np.isin(network.source, edge)])
        edge = beside[is_switch[beside] & (far[beside] < 0)]
        tier += 1
    return far


def _tier(network: Fabric, far: Ints, tier: int) -> TierDocument:
    begin, end = network.source, network.target
    from_tier = far[begin] == tier
    up = from_tier & (far[end] == tier + 1)
    down = from_tier & ((far[end] == tier - 1) if tier else (network.kind[end] == NIC))
    gbit_down, gbit_up = (8 * float(network.gbps[links].sum()) for links in (down, up))
    names = {network.tiers[int(node)] for node in np.flatnonzero(far == tier)}
    return TierDocument(
        tier=", ".join(sorted(names)),
        switches=int((far == tier).sum()),
        cables_down=int(down.sum()),
        cables_up=int(up.sum()),
        gbit_down=gbit_down,
        gbit_up=gbit_up,
        oversubscription=gbit_down / gbit_up if gbit_up else None,
    )


def _count_paths(routes: Routes, leaf: int, leaves: Ints) -> list[int]:
    """Return the number of shortest paths from a leaf to each of `leaves`; 0 where there is none."""
    counts = []
    for to in leaves.tolist():
        ways = {leaf: 1}
        while ways and to not in ways:
            further: dict[int, int] = {}
            for here, count in ways.items():
                for link in routes.choices(here, to).tolist():
                    end = int(routes.network.target[link])
                    further[end] = further.get(end, 0) + count
            ways = further
        counts.append(ways.get(to, 0))
    return counts


# The traffic of a run on its fabric, its collisions and their cost, and paths that avoid them.

NAMED = 8  # links that are listed
UNLIMITED = 1e6  # factor on the capacity of a cable that makes it no limit


class CableDocument(DocumentPart, frozen=True):
    """Traffic on a link.

    Attributes:
        link: its name.
        bytes_per_step: bytes that cross it per step.
        load: share of its capacity that is used, over the step.
        load_while_busy: share of its capacity that is used, over the time in which anything crosses it.
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
        connections: connections that cross it at the same time as another one.
        together_ms: time per step in which two or more do.
        cost_ms: how much longer a step is than with such a link for each of them, while no other link between
            switches is a limit.
    """

    link: str
    connections: list[ConnectionDocument]
    together_ms: float
    cost_ms: float


class TrafficDocument(DocumentPart, frozen=True, kw_only=True):
    """Traffic of a run on its fabric.

    Attributes:
        connections: connections that leave their hosts.
        unknown: number of these whose paths are unknown, since a hash decides them.
        groups: groups of ranks that communicate by collectives.
        groups_recorded: groups of these whose rings or trees were recorded; for the others one ring per port
            is assumed, or NCCL's two trees of hosts for an all-reduce that was recorded with algorithm TREE.
        channels_from: source of the recorded rings and trees, in words; empty where none were recorded.
        step_ms: the mean step, replayed.
        saved_ms: what planned paths would save per step.
        saved_low_ms, saved_high_ms: interval of `saved_ms`.
        busiest: links between hosts and switches with the highest load, highest first.
        collisions: collisions on known paths, costliest first.
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
    """Summarise the traffic of a run on its fabric.

    Raises:
        Unanswerable: the run has no topology, or its ranks are on one host.
    """
    graph = analysis.outline.predictive
    placement = placed(graph)
    unknown = known_paths(placement.flows, placement.routes, placement.path_entries).missing
    across = placement.fabric.kind[connections_of(placement.flows).flows.begin] == NIC
    plan = predict_edits(analysis, [PlannedPaths()])
    base = analysis.baseline_ns
    return TrafficDocument(
        connections=int(across.sum()),
        unknown=int(unknown.size),
        **_groups(placement),
        step_ms=ms(base),
        saved_ms=ms(base - plan.predicted_ns),
        saved_low_ms=ms(plan.gain_low_ns),
        saved_high_ms=ms(plan.gain_high_ns),
        busiest=_busiest(placement, usage_of(graph, placement, load_now(placement)), _steps(analysis), base),
        collisions=[] if unknown.size else _collisions(analysis, placement),
    )


def _groups(placement: Placed) -> dict[str, Any]:
    """Count the groups that communicate by collectives, and those whose rings or trees were recorded."""
    members, ops, _, channels = placement.communications.kinds
    rows = [
        (group, channels_of_group != NOT_RECORDED)
        for group, op, channels_of_group in zip(members, ops, channels)
        if op not in (*MESSAGES, *PAIRWISE)
    ]
    recorded_ones = {group for group, is_recorded in rows if is_recorded}
    return {
        "groups": len({group for group, _ in rows}),
        "groups_recorded": len(recorded_ones),
        "channels_from": placement.communications.channels_from if recorded_ones else "",
    }


def load_now(placement: Placed) -> Load:
    """Return the load of each kind of communication on known paths, else averaged over all shortest ones."""
    unknown = known_paths(placement.flows, placement.routes, placement.path_entries).missing.size
    return sprayed(placement.flows, placement.routes) if unknown else quantile(placement.now, 0.5)


def usage_of(graph: Graph, placement: Placed, load: Load) -> Usage:
    """Return [L] the usage of each link."""
    flows = placement.communications
    return usage(repeated(load, flows.kind), *recorded(graph, flows), placement.fabric.source.size)


def _steps(analysis: Analysis) -> int:
    return int(analysis.baseline.height)


def _busiest(placement: Placed, used: Usage, steps: int, step_ns: float) -> list[CableDocument]:
    fabric = placement.fabric
    ports = fabric.kind == NIC
    counts = between_switches(fabric) | ports[fabric.source] | ports[fabric.target]
    load = np.where(counts, used.sent / fabric.gbps / (steps * step_ns), 0.0)
    while_busy = used.sent / fabric.gbps / np.maximum(used.busy, 1.0)
    return [
        CableDocument(
            link=fabric.link_name(link),
            bytes_per_step=float(used.sent[link]) / steps,
            load=float(load[link]),
            load_while_busy=float(while_busy[link]),
        )
        for link in np.argsort(-load, kind="stable")[:NAMED].tolist()
        if load[link] > 0
    ]


def _collisions(analysis: Analysis, placement: Placed) -> list[CollisionDocument]:
    graph, fabric = analysis.outline.predictive, placement.fabric
    named = connections_of(placement.flows)
    met = met_between_switches(graph, placement)[:NAMED]
    steps = _steps(analysis)
    costs = [_cost(analysis, placement, meeting) for meeting in met]
    collisions = [
        CollisionDocument(
            link=fabric.link_name(meeting.link),
            connections=[_connection(placement, named, connection) for connection in meeting.connections],
            together_ms=ms(meeting.together / steps),
            cost_ms=ms(cost),
        )
        for meeting, cost in zip(met, costs)
    ]
    return sorted(collisions, key=lambda collision: -collision.cost_ms)


def _connection(placement: Placed, named: Connections, connection: int) -> ConnectionDocument:
    names, flows = placement.fabric.names, named.flows
    begin, end = names[flows.begin[connection]], names[flows.end[connection]]
    return ConnectionDocument(begin, end, int(named.number[connection]))


def _cost(analysis: Analysis, placement: Placed, meeting: Meeting) -> float:
    """Return the cost of a meeting, ns of a mean step, while no other link between switches limits."""
    gbps = placement.fabric.gbps
    shared = np.where(between_switches(placement.fabric), gbps * UNLIMITED, gbps)
    shared[meeting.link] = gbps[meeting.link]
    apart = shared.copy()
    apart[meeting.link] *= len(meeting.connections)
    return max(_step_with(analysis, placement, shared) - _step_with(analysis, placement, apart), 0.0)


def _step_with(analysis: Analysis, placement: Placed, gbps: Floats) -> float:
    graph, load = analysis.outline.predictive, quantile(placement.now, 0.5)
    best = Cables(sprayed(placement.flows, placement.routes), placement.fabric.gbps)
    other = with_fabric(
        graph, placement.communications, best, Cables(load, placement.fabric.gbps), Cables(load, gbps)
    )
    timeline = replay(other)
    return float(changed_durations(analysis.baseline, other, timeline.end).mean())
