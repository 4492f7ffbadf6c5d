"""Flows of communications between GPUs, and the load of each communication on the links of the fabric.

Takes the ranks and the operation of each communication, and the GPU of each rank; returns flows with their
share of the bytes, and after routing the load on links per byte. A ring passes all bytes from neighbour to
neighbour (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005); across hosts NCCL makes one ring per port, each
with its share of the bytes, between ports of equal number. Along trees each host exchanges half of the bytes
with its parent, in each of two trees. In an all-to-all each pair has a flow. Where the rings or trees of a
group were recorded, its flows follow them, with an equal part of the bytes along each, between the ports near
the two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.network import NO_LINK, Choice, Fabric, Routes, paths

PAIRWISE = ("all_to_all",)
MESSAGES = ("send", "recv")
TREE = "TREE"
Hop = tuple[int, int]  # two members of a group, by their number


class Channels(NamedTuple):
    """Recorded channels of a group, by member; members are in the order of their ranks.

    Attributes:
        rings: by channel, pairs of a member and the next one, to which it sends.
        trees: by channel, pairs of a member and its parent, in either order: both send.
    """

    rings: tuple[tuple[Hop, ...], ...] = ()
    trees: tuple[tuple[Hop, ...], ...] = ()


NOT_RECORDED = Channels()


@dataclass(frozen=True)
class Flows:
    """Flows of several communications.

    Attributes:
        of: [F] the communication of each flow.
        begin, end: [F] nodes: ports of two hosts, or GPUs of one.
        share: [F] of the bytes that the busiest rank of its communication sends.
        key: [F] identity of a flow for routers: flows of one connection have one key.
        count: number of communications.
    """

    of: Ints
    begin: Ints
    end: Ints
    share: Floats
    key: Ints
    count: int


@dataclass(frozen=True)
class Load:
    """Load of communications on links.

    Attributes:
        indptr: [C + 1] communication i loads `links[indptr[i]:indptr[i + 1]]`.
        links: links, each once per communication.
        share: bytes across each link, over those that the busiest rank sends.
    """

    indptr: Ints
    links: Ints
    share: Floats


def repeated(load: Load, rows: Ints) -> Load:
    """Return the load of each communication from the load of each kind.

    Args:
        rows: [C] the kind of each communication.
    """
    counts = np.diff(load.indptr)[rows]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows_of = np.arange(indptr[-1]) + np.repeat(load.indptr[rows] - indptr[:-1], counts)
    return Load(indptr, load.links[rows_of], load.share[rows_of])


def flows_of(
    fabric: Fabric,
    members: Sequence[Sequence[int]],
    ops: Sequence[str],
    algorithms: Sequence[str] = (),
    channels: Sequence[Channels] = (),
) -> Flows:
    """Return the flows of communications.

    Args:
        members: by communication, the GPU (its node) of each rank, in the order of ranks.
        algorithms: by communication, as recorded: all-reduces by TREE go along trees. Rings where not given.
        channels: by communication, as recorded, or `NOT_RECORDED`.

    Raises:
        Unanswerable: a GPU that sends to another host has no port.
    """
    host_of = {gpu: host for host, gpus in enumerate(fabric.gpus) for gpu in gpus}
    flows: list[tuple[int, int, int, float, int]] = []
    for number, (gpus, op) in enumerate(zip(members, ops)):
        algorithm = algorithms[number] if algorithms else ""
        recorded = channels[number] if channels else NOT_RECORDED
        made = _flows_of_one(fabric, list(gpus), host_of, op, algorithm, recorded)
        flows += [
            (number, begin, end, share, (begin * 1_000_003 + end) * 64 + salt % 64)
            for begin, end, share, salt in made
        ]
    columns = [np.array([flow[column] for flow in flows]) for column in range(5)]
    of, begin, end, key = (columns[column].astype(np.int64) for column in (0, 1, 2, 4))
    return Flows(of, begin, end, columns[3].astype(np.float64), key, len(ops))


def _flows_of_one(
    fabric: Fabric, gpus: list[int], host_of: dict[int, int], op: str, algorithm: str, recorded: Channels
) -> list[_Flow]:
    """Return the flows of one communication."""
    if op in PAIRWISE:
        share = 1.0 / max(len(gpus) - 1, 1)
        return [
            flow
            for one in gpus
            for other in gpus
            if one != other
            for flow in _between(fabric, one, other, host_of, share)
        ]
    if op in MESSAGES:
        return _between(fabric, gpus[0], gpus[-1], host_of, 1.0) if gpus[0] != gpus[-1] else []
    if op == "all_reduce" and algorithm == TREE:
        both_ways = tuple((*hops, *((up, down) for down, up in hops)) for hops in recorded.trees)
        if both_ways:
            return _along_channels(fabric, gpus, host_of, both_ways, _tree_share(len(gpus)))
        return _trees(fabric, gpus, host_of)
    return (
        _along_channels(fabric, gpus, host_of, recorded.rings)
        if recorded.rings
        else _ring(fabric, gpus, host_of)
    )


def _along_channels(
    fabric: Fabric,
    gpus: list[int],
    host_of: dict[int, int],
    channels: Sequence[tuple[Hop, ...]],
    whole: float = 1.0,
) -> list[_Flow]:
    """Split `whole` evenly over channels, along their hops; without hops within hosts, add chains there."""
    share = whole / len(channels)
    hops_of_channels: list[_Flow] = [
        (begin, end, part, channel)
        for channel, hops in enumerate(channels)
        for one, other in hops
        for begin, end, part, _ in _between(fabric, gpus[one], gpus[other], host_of, share)
    ]
    if any(host_of[gpus[one]] == host_of[gpus[other]] for hops in channels for one, other in hops):
        return hops_of_channels
    by_host = _by_host(gpus, host_of)
    return [
        *hops_of_channels,
        *((one, other, whole, 0) for of_host in by_host.values() for one, other in pairwise(of_host)),
    ]


def _by_host(gpus: list[int], host_of: dict[int, int]) -> dict[int, list[int]]:
    by_host: dict[int, list[int]] = {}
    for gpu in gpus:
        by_host.setdefault(host_of[gpu], []).append(gpu)
    return by_host


def _tree_share(size: int) -> float:
    """Return the bytes that a member sends one way along a tree, over those of the busiest in a ring."""
    return size / (2 * (size - 1)) if size > 1 else 0.0


def _port(fabric: Fabric, gpu: int) -> int:
    if gpu not in fabric.port:
        raise Unanswerable(f"{fabric.names[gpu]} has no port: its host has none in the topology")
    return fabric.port[gpu]


_Flow = tuple[int, int, float, int]


def _ring(fabric: Fabric, gpus: list[int], host_of: dict[int, int]) -> list[_Flow]:
    """Return flows along hosts in order; the host with the fewest ports in use limits the rings."""
    by_host = _by_host(gpus, host_of)
    flows: list[_Flow] = [
        (one, other, 1.0, 0) for of_host in by_host.values() for one, other in pairwise(of_host)
    ]
    if len(by_host) == 1:
        return [*flows, (gpus[-1], gpus[0], 1.0, 0)] if len(gpus) > 1 else []
    ports = [list(dict.fromkeys(_port(fabric, gpu) for gpu in of_host)) for of_host in by_host.values()]
    rings = min(map(len, ports))
    for number, of_host in enumerate(ports):
        after = ports[(number + 1) % len(ports)]
        flows += [(of_host[ring], after[ring], 1.0 / rings, ring) for ring in range(rings)]
    return flows


def _trees(fabric: Fabric, gpus: list[int], host_of: dict[int, int]) -> list[_Flow]:
    """Return flows of all bytes both ways along each host's chain, and of half along each tree of hosts."""
    by_host, whole = _by_host(gpus, host_of), _tree_share(len(gpus))
    flows: list[_Flow] = [
        flow
        for of_host in by_host.values()
        for one, other in pairwise(of_host)
        for flow in ((one, other, whole, 0), (other, one, whole, 0))
    ]
    if len(by_host) == 1:
        return flows
    ports = [list(dict.fromkeys(_port(fabric, gpu) for gpu in of_host)) for of_host in by_host.values()]
    rings = min(map(len, ports))
    for tree, parent_of in enumerate(parents(len(ports))):
        for host, parent in enumerate(parent_of):
            for ring in range(rings) if parent >= 0 else ():
                ends, salt = (ports[host][ring], ports[parent][ring]), (1 + tree) * rings + ring
                flows += [(*way, whole / 2 / rings, salt) for way in (ends, ends[::-1])]
    return flows


def parents(count: int) -> tuple[list[int], list[int]]:
    """Return the parent of each host in both of NCCL's reduction trees; -1 for the root.

    Each host is an inner node of one tree and a leaf of the other, so that each tree carries half of the
    bytes (Sanders, Speck and Träff, Parallel Computing 35, 2009; NCCL's `graph/trees.cc`).
    """
    first = [_parent(host, count) for host in range(count)]
    if count % 2 == 0:  # mirrored, so that leaves become inner nodes
        second = [-1 if up < 0 else count - 1 - up for up in first[::-1]]
    else:  # shifted by one
        second = [-1 if up < 0 else (up + 1) % count for up in (*first[-1:], *first[:-1])]
    return first, second


def _parent(host: int, count: int) -> int:
    """Return the parent in a binary tree whose leaves are the odd numbers: the lowest bit moves up by one."""
    if host == 0:
        return -1
    bit = host & -host
    up = (host ^ bit) | (bit << 1)
    return up if up < count else host ^ bit


def _between(fabric: Fabric, one: int, other: int, host_of: dict[int, int], share: float) -> list[_Flow]:
    if host_of[one] == host_of[other]:
        return [(one, other, share, 0)]
    return [(_port(fabric, one), _port(fabric, other), share, one)]


def loaded(flows: Flows, routes: Routes, choose: Choice) -> Load:
    """Return the load on links, each flow on one path.

    Raises:
        Unanswerable: no path leads from a port to another.
    """
    row, links = crossed(flows, routes, choose)
    return _summed(flows, routes.network, row, links, flows.share[row])


def crossed(flows: Flows, routes: Routes, choose: Choice) -> tuple[Ints, Ints]:
    """Return pairs of a flow that leaves its host and a link on its path, in hop order, as two arrays.

    Raises:
        Unanswerable: no path leads from a port to another.
    """
    across = np.flatnonzero(~inside(flows, routes.network))

    def of_flows(rows: Ints, here: Ints, number: Ints) -> Ints:
        return choose(across[rows], here, number)

    taken = paths(routes, flows.begin[across], flows.end[across], of_flows)
    row, hop = np.nonzero(taken != NO_LINK)
    return across[row], taken[row, hop]


def sprayed(flows: Flows, routes: Routes) -> Load:
    """Return the load on links, each flow spread evenly over all equally short paths.

    Raises:
        Unanswerable: no path leads from a port to another.
    """
    network = routes.network
    across = np.flatnonzero(~inside(flows, network))
    rows: list[Ints] = []
    links: list[Ints] = []
    shares: list[Floats] = []
    spread: dict[tuple[int, int], tuple[Ints, Floats]] = {}
    for flow in across.tolist():
        out, into = int(routes.out[flows.begin[flow]]), int(routes.into[flows.end[flow]])
        if NO_LINK in (out, into):
            port = flows.begin[flow] if out == NO_LINK else flows.end[flow]
            raise Unanswerable(f"{network.names[int(port)]} has no cable that works")
        between = (int(network.target[out]), int(network.source[into]))
        if between not in spread:
            spread[between] = _spread(routes, *between)
        on, share = spread[between]
        ends = [out] if network.target[out] == flows.end[flow] else [out, into]
        links.append(np.concatenate([ends, on]).astype(np.int64))
        shares.append(np.concatenate([np.ones(len(ends)), share]) * flows.share[flow])
        rows.append(np.full(links[-1].size, flow, np.int64))
    if not rows:
        none = np.zeros(0, np.int64)
        return _summed(flows, network, none, none, np.zeros(0))
    return _summed(flows, network, np.concatenate(rows), np.concatenate(links), np.concatenate(shares))


def _spread(routes: Routes, here: int, to: int) -> tuple[Ints, Floats]:
    """Return the links between two switches, and a flow's share on each if it splits evenly everywhere."""
    share_of: dict[int, float] = {}
    amounts = {here: 1.0}
    while amounts and to not in amounts:
        further: dict[int, float] = {}
        for switch, amount in amounts.items():
            group = routes.choices(switch, to)
            if not group.size:
                names = routes.network.names
                raise Unanswerable(f"no path leads from {names[here]} to {names[to]}")
            for link in group.tolist():
                share_of[link] = share_of.get(link, 0.0) + amount / group.size
                end = int(routes.network.target[link])
                further[end] = further.get(end, 0.0) + amount / group.size
        amounts = further
    return np.array(list(share_of), np.int64), np.array(list(share_of.values()), np.float64)


def inside(flows: Flows, fabric: Fabric) -> Bools:
    """Return [F] a mask of the flows with both ends on GPUs of one host."""
    gpus = np.zeros(fabric.num_nodes, np.bool_)
    gpus[[gpu for of_host in fabric.gpus for gpu in of_host]] = True
    inside: Bools = gpus[flows.begin] & gpus[flows.end]
    return inside


def _summed(flows: Flows, fabric: Fabric, row: Ints, links: Ints, share: Floats) -> Load:
    """Sum the shares of each communication on each link, adding flows within hosts."""
    within = np.flatnonzero(inside(flows, fabric))
    hubs = [
        fabric.links_from[ends][0]
        for flow in within.tolist()
        for one, other in [(int(flows.begin[flow]), int(flows.end[flow]))]
        for ends in ((one, fabric.hub[one]), (fabric.hub[other], other))
    ]
    row = np.concatenate([row, np.repeat(within, 2)])
    links = np.concatenate([links, np.array(hubs, np.int64)])
    share = np.concatenate([share, np.repeat(flows.share[within], 2)])
    count = fabric.source.size
    cell, cell_of = np.unique(flows.of[row] * count + links, return_inverse=True)
    indptr = np.searchsorted(cell, np.arange(flows.count + 1) * count)
    return Load(indptr.astype(np.int64), cell % count, np.bincount(cell_of, share, cell.size).astype(float))
