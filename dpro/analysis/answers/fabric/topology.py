"""What a fabric has: hosts, switches by tier, cables, and how many ways lead from leaf to leaf.

In: a topology, perhaps the hosts of a run. Out: a `TopologyDocument`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro.analysis.answers.fabric.traffic import TrafficDocument
from dpro.arrays import Ints
from dpro.documents import Document, DocumentPart
from dpro.errors import needs_extra
from dpro.topology.file import TopologyFile
from dpro.topology.hostlist import fold

with needs_extra("replay"):
    from dpro.replay.cost.fabric.network import NIC, SWITCH, Fabric, Routes, fabric_of, routes_of
    from dpro.replay.cost.fabric.placement import host_named

MAX_LEAVES = 64  # pairs of these are counted


class TierDocument(DocumentPart, frozen=True):
    """Switches of one tier.

    Attributes:
        tier: its name.
        switches: how many.
        cables_down, cables_up: towards hosts, and away from them.
        gbit_down, gbit_up: what these carry together, 1e9 bits/s, each way.
        oversubscription: the first of these over the second; None at the top.
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
        hosts: how many.
        gpus, ports: of all hosts.
        tiers: of switches, from the hosts up.
        paths_min, paths_max: equally short paths from leaf to leaf, cables side by side counted apart; None
            with one leaf.
        unreachable: leaves that have no path to all others.
        unlinked: ports without a cable, as a list of names.
        missing_hosts: hosts of the run that the topology lacks.
        traffic: what a run loads on it; null where a file was asked about.
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
    """What a topology has."""
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
        tiers=[_tier(network, far, at) for at in range(int(far.max(initial=-1)) + 1)],
        paths_min=int(between.min()) if between.size else None,
        paths_max=int(between.max()) if between.size else None,
        unreachable=fold(network.names[leaf] for leaf, row in zip(leaves, counts) if (row == 0).any()),
        unlinked=fold(
            network.names[port] for port in np.flatnonzero(network.kind == NIC) if int(port) not in linked
        ),
        missing_hosts=[host for host in hosts if host_named(network, host) is None],
    )


def distance_from_hosts(network: Fabric) -> Ints:
    """[N] switches between a switch and the nearest port; -1 of other nodes and of switches apart."""
    far = np.full(network.num_nodes, -1, np.int64)
    is_switch = network.kind == SWITCH
    edge = np.unique(network.target[network.kind[network.source] == NIC])
    edge = edge[is_switch[edge]]
    at = 0
    while edge.size:
        far[edge] = at
        beside = np.unique(network.target[np.isin(network.source, edge)])
        edge = beside[is_switch[beside] & (far[beside] < 0)]
        at += 1
    return far


def _tier(network: Fabric, far: Ints, at: int) -> TierDocument:
    begin, end = network.source, network.target
    mine = far[begin] == at
    up = mine & (far[end] == at + 1)
    down = mine & ((far[end] == at - 1) if at else (network.kind[end] == NIC))
    gbit_down, gbit_up = (8 * float(network.gbps[links].sum()) for links in (down, up))
    names = {network.tiers[int(node)] for node in np.flatnonzero(far == at)}
    return TierDocument(
        tier=", ".join(sorted(names)),
        switches=int((far == at).sum()),
        cables_down=int(down.sum()),
        cables_up=int(up.sum()),
        gbit_down=gbit_down,
        gbit_up=gbit_up,
        oversubscription=gbit_down / gbit_up if gbit_up else None,
    )


def _count_paths(routes: Routes, leaf: int, leaves: Ints) -> list[int]:
    """How many shortest paths lead from a leaf to each of others."""
    found = []
    for to in leaves.tolist():
        ways = {leaf: 1}
        while ways and to not in ways:
            further: dict[int, int] = {}
            for here, count in ways.items():
                for link in routes.choices(here, to).tolist():
                    end = int(routes.network.target[link])
                    further[end] = further.get(end, 0) + count
            ways = further
        found.append(ways.get(to, 0))
    return found
