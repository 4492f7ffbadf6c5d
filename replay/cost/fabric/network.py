"""A topology as arrays: nodes, directed links, and the shortest paths over them.

Takes the content of `topology.toml`, and failed links; returns `Fabric`, and `Routes`: the distance of each
switch from each destination, which yields the links that lead closer (a router's equal-cost group). A cable
is two links, and parallel cables are separate links, since a flow takes one of them. GPUs of a host meet at
its hub (NVLink switch, or PCI); a GPU sends to other hosts through its nearest port, and the path between the
two is not modelled. At each switch a flow takes one link of the group (equal-cost multipath: RFC 2992), which
the caller chooses: by a hash, a plan, or evenly over all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.engine import compiled
from dpro.topology.file import PORT, TopologyFile, cables
from dpro.topology.hostlist import expand
from dpro.words import whole_number

GPU, HUB, NIC, SWITCH = 0, 1, 2, 3
GBIT_PER_GBPS = 8.0


@dataclass(frozen=True)
class Fabric:
    """Nodes and links of a fabric.

    Attributes:
        names: of the nodes: `node1:gpu0`, `node1:nic0`, `node1`, `leaf0`.
        kind: [N] GPU, HUB (of a host's GPUs), NIC (a port of a host) or SWITCH.
        tiers: by the number of a switch, its tier.
        hosts: names of hosts, in the order of the file.
        gpus: by host, the nodes of its GPUs.
        port: by the node of a GPU, the node of its port; a GPU may have none.
        hub: by the node of a GPU, the hub of its host; the only GPU of a host has none.
        source, target: [L] nodes of each link.
        gbps: [L] 1e9 bytes/s.
    """

    names: tuple[str, ...]
    kind: Ints
    tiers: dict[int, str]
    hosts: tuple[str, ...]
    gpus: tuple[tuple[int, ...], ...]
    port: dict[int, int]
    hub: dict[int, int]
    source: Ints
    target: Ints
    gbps: Floats

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    @cached_property
    def node_of(self) -> dict[str, int]:
        """Nodes by their names."""
        return {name: node for node, name in enumerate(self.names)}

    @cached_property
    def links_from(self) -> dict[tuple[int, int], list[int]]:
        """Links by their source and target nodes, in the order of the file."""
        links: dict[tuple[int, int], list[int]] = defaultdict(list)
        for link, ends in enumerate(zip(self.source.tolist(), self.target.tolist())):
            links[ends].append(link)
        return dict(links)

    def link_name(self, link: int) -> str:
        """Return the readable name of a link: `leaf0 > spine3`, with its number among parallel cables."""
        begin, end = int(self.source[link]), int(self.target[link])
        beside = self.links_from[begin, end]
        number = f" #{beside.index(link)}" if len(beside) > 1 else ""
        return f"{self.names[begin]} > {self.names[end]}{number}"

    def link_named(self, name: str) -> int | None:
        """Return the link of a name from `link_name`; None without such a link."""
        ends, _, number = name.partition(" #")
        begin, _, end = ends.partition(" > ")
        if begin not in self.node_of or end not in self.node_of:
            return None
        beside = self.links_from.get((self.node_of[begin], self.node_of[end]), [])
        number_beside = max(whole_number(number), 0)
        return beside[number_beside] if number_beside < len(beside) else None


def between_switches(fabric: Fabric) -> Bools:
    """Return [L] a mask of the links between two switches."""
    switch = fabric.kind == SWITCH
    between: Bools = switch[fabric.source] & switch[fabric.target]
    return between


def fabric_of(topology: TopologyFile) -> Fabric:
    """Build the arrays of a validated topology."""
    names: list[str] = []
    kind: list[int] = []

    def add(name: str, of: int) -> int:
        names.append(name)
        kind.append(of)
        return len(names) - 1

    tiers: dict[int, str] = {}
    ends: dict[str, int] = {}
    hosts: list[str] = []
    gpus: list[tuple[int, ...]] = []
    port: dict[int, int] = {}
    hubs: dict[int, int] = {}
    links: list[tuple[int, int, float]] = []  # both directions are added below
    for entry in topology.hosts:
        for host in expand(entry.names):
            host_gpus = tuple(add(f"{host}{PORT}gpu{number}", GPU) for number in range(entry.gpus))
            ports = [add(f"{host}{PORT}nic{number}", NIC) for number in range(entry.nics)]
            ends |= {names[node]: node for node in ports}
            hosts.append(host)
            gpus.append(host_gpus)
            if entry.gpus > 1:
                hub = add(host, HUB)
                hubs |= dict.fromkeys(host_gpus, hub)
                links += [(gpu, hub, entry.gpu_gbps) for gpu in host_gpus]
            if ports:
                near = entry.near or [number * entry.nics // entry.gpus for number in range(entry.gpus)]
                port |= {gpu: ports[number] for gpu, number in zip(host_gpus, near)}
    for switches in topology.switches:
        for name in expand(switches.names):
            ends[name] = add(name, SWITCH)
            tiers[ends[name]] = switches.tier
    for cable in cables(topology):
        links += [(ends[cable.begin], ends[cable.end], cable.gbit / GBIT_PER_GBPS)] * cable.number
    begin, end = (np.array([link[number] for link in links], np.int64) for number in (0, 1))
    gbps = np.array([link[2] for link in links], np.float64)
    return Fabric(
        tuple(names),
        np.array(kind, np.int64),
        tiers,
        tuple(hosts),
        tuple(gpus),
        port,
        hubs,
        np.concatenate([begin, end]),
        np.concatenate([end, begin]),
        np.concatenate([gbps, gbps]),
    )


# Shortest paths.

NO_LINK = -1
MAX_HOPS = 16
Hops = np.ndarray[tuple[int, int], np.dtype[np.int16]]
# (flow [F], switch [F], number of links to choose from [F]) -> [F] which of them.
Choice = Callable[[Ints, Ints, Ints], Ints]


@dataclass(frozen=True)
class Routes:
    """Next hops between switches, and the cable of each port.

    Attributes:
        network: the fabric.
        place: [N] number of a switch among switches, -1 of other nodes.
        out, into: [N] the link from a port to its switch, and back; -1 of other nodes and failed links.
        column: [N] column of `far`, of switches with ports: only those are destinations; -1 of others.
        far: [S, D] links between a switch and a destination, -1 where no path leads there.
        indptr: [S + 1] links to other switches from switch s are `links[indptr[s] : indptr[s + 1]]`.
        links: working links between switches, by source switch, then in the order of the file.
    """

    network: Fabric
    place: Ints
    out: Ints
    into: Ints
    column: Ints
    far: Hops
    indptr: Ints
    links: Ints

    def choices(self, here: int, to: int) -> Ints:
        """Return the links of the equal-cost group at a switch towards another, which has ports."""
        row, column = int(self.place[here]), int(self.column[to])
        leaving: Ints = self.links[self.indptr[row] : self.indptr[row + 1]]
        nearer = self.far[self.place[self.network.target[leaving]], column]
        nearest: Ints = leaving[(nearer >= 0) & (nearer == self.far[row, column] - 1)]
        return nearest


def routes_of(network: Fabric, failed: Ints | None = None) -> Routes:
    """Compute the next hops of all shortest paths.

    Args:
        failed: links that do not work; a failed cable is two of them.
    """
    alive = np.ones(network.source.size, np.bool_)
    if failed is not None:
        alive[failed] = False
    is_switch = network.kind == SWITCH
    place = np.where(is_switch, np.cumsum(is_switch) - 1, -1)
    count = int(is_switch.sum())
    used = np.flatnonzero(alive & between_switches(network))
    used = used[np.argsort(place[network.source[used]], kind="stable")]
    begin, end = place[network.source[used]], place[network.target[used]]
    leaves = np.unique(network.target[(network.kind[network.source] == NIC) & is_switch[network.target]])
    column = np.full(network.num_nodes, -1, np.int64)
    column[leaves] = np.arange(leaves.size)
    out = np.full(network.num_nodes, NO_LINK, np.int64)
    into = np.full(network.num_nodes, NO_LINK, np.int64)
    cables = np.flatnonzero(alive & (network.kind[network.source] == NIC))
    out[network.source[cables]] = cables
    cables = np.flatnonzero(alive & (network.kind[network.target] == NIC))
    into[network.target[cables]] = cables
    far = _hops(begin, end, count, place[leaves])
    indptr = np.searchsorted(begin, np.arange(count + 1)).astype(np.int64)
    return Routes(network, place, out, into, column, far, indptr, used)


def _hops(begin: Ints, end: Ints, count: int, to: Ints) -> Hops:
    """Return [S, D] links on a shortest path from each switch to each destination, -1 where none leads there.

    Args:
        to: [D] destinations.
    """
    from scipy.sparse import csr_matrix  # here, since every command that knows the edits loads this module

    joined = csr_matrix((np.ones(begin.size, np.float32), (begin, end)), shape=(count, count))
    far = np.full((count, to.size), -1, np.int16)
    far[to, np.arange(to.size)] = 0
    edge = far == 0
    hops = 0
    while edge.any():  # breadth first, for all destinations at once
        hops += 1
        edge = (joined @ edge.astype(np.float32) > 0) & (far < 0)
        far[edge] = hops
    return far


@compiled
def _group_sizes(
    here: Any, column: Any, place: Any, target: Any, far: Any, indptr: Any, links: Any, number: Any
) -> None:
    for flow in range(here.size):
        start, end = place[here[flow]], column[flow]
        for cable in range(indptr[start], indptr[start + 1]):
            nearer = far[place[target[links[cable]]], end]
            if nearer >= 0 and nearer == far[start, end] - 1:
                number[flow] += 1


@compiled
def _members(
    here: Any,
    column: Any,
    place: Any,
    target: Any,
    far: Any,
    indptr: Any,
    links: Any,
    chosen: Any,
    link_of_flow: Any,
) -> None:
    # Each flow takes the link with number `chosen` in its equal-cost group.
    for flow in range(here.size):
        start, end = place[here[flow]], column[flow]
        left = chosen[flow]
        for cable in range(indptr[start], indptr[start + 1]):
            nearer = far[place[target[links[cable]]], end]
            if nearer >= 0 and nearer == far[start, end] - 1:
                if left == 0:
                    link_of_flow[flow] = links[cable]
                    break
                left -= 1


def paths(routes: Routes, begin: Ints, end: Ints, choose: Choice) -> Ints:
    """Return [F, H] links of each flow from port to port; -1 after the last.

    Args:
        begin, end: [F] nodes of ports.

    Raises:
        Unanswerable: no path leads from a port to another; the message names both.
    """
    network = routes.network
    names = network.names
    tables = (routes.place, network.target, routes.far, routes.indptr, routes.links)
    first, last = routes.out[begin], routes.into[end]
    for link, ports in ((first, begin), (last, end)):
        if (link == NO_LINK).any():
            raise Unanswerable(f"{names[ports[np.argmin(link)]]} has no cable that works")
    here, to = network.target[first], network.source[last]
    direct = here == end  # two hosts without a switch
    columns = [first]
    for _ in range(MAX_HOPS):
        going = np.flatnonzero((here != to) & ~direct)
        if not going.size:
            break
        number, link = np.zeros(going.size, np.int64), np.full(going.size, NO_LINK)
        column_of = routes.column[to[going]]
        _group_sizes(here[going], column_of, *tables, number)
        if (number == 0).any():
            lost = going[np.argmin(number)]
            raise Unanswerable(f"no path leads from {names[begin[lost]]} to {names[end[lost]]}")
        _members(here[going], column_of, *tables, choose(going, here[going], number), link)
        column = np.full(begin.size, NO_LINK, np.int64)
        column[going] = link
        columns.append(column)
        here = here.copy()
        here[going] = network.target[link]
    taken = np.stack([*columns, np.where(direct, NO_LINK, last)], axis=1)
    behind: Ints = np.take_along_axis(taken, np.argsort(taken == NO_LINK, axis=1, kind="stable"), axis=1)
    return behind


def hashed(keys: Ints, seed: int = 0) -> Choice:
    """Return a choice by a hash of the identity of a flow, different at each switch, as routers make it.

    The hash mixes key, switch and seed (splitmix64: Steele, Lea and Flood, OOPSLA 2014); a real router's hash
    is not known, so a prediction uses many seeds.

    Args:
        keys: [F] identity of each flow, in place of its ports and addresses.
    """

    def choose(flows: Ints, switches: Ints, number: Ints) -> Ints:
        with np.errstate(over="ignore"):
            mixed = keys[flows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= _mixed(switches.astype(np.uint64) + np.uint64(seed % 2**32) * np.uint64(0x1000193))
            mixed = _mixed(mixed)
        return (mixed % number.astype(np.uint64)).astype(np.int64)

    return choose


def _mixed(value: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
