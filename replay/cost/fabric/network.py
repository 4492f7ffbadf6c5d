"""A topology as arrays: nodes, and links of one direction each.

In: what `topology.toml` describes. Out: `Fabric`. A cable is two links, and cables side by side are links of
their own, since a flow takes one of them. GPUs of a host meet at its hub (NVLink switch, or PCI); a GPU
sends to other hosts through the port that it is near to, and what lies between the two is not modelled.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpro.arrays import Bools, Floats, Ints
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
        port: by the node of a GPU, the node of the port that it sends through; a GPU may have none.
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
        """Links by the nodes that they lead from and to, in the order of the file."""
        links: dict[tuple[int, int], list[int]] = defaultdict(list)
        for link, ends in enumerate(zip(self.source.tolist(), self.target.tolist())):
            links[ends].append(link)
        return dict(links)

    def link_name(self, link: int) -> str:
        """A link as people write it: `leaf0 > spine3`, with its number where cables are side by side."""
        begin, end = int(self.source[link]), int(self.target[link])
        beside = self.links_from[begin, end]
        number = f" #{beside.index(link)}" if len(beside) > 1 else ""
        return f"{self.names[begin]} > {self.names[end]}{number}"

    def link_named(self, name: str) -> int | None:
        """The link that `link_name` calls so; None where there is none."""
        ends, _, number = name.partition(" #")
        begin, _, end = ends.partition(" > ")
        if begin not in self.node_of or end not in self.node_of:
            return None
        beside = self.links_from.get((self.node_of[begin], self.node_of[end]), [])
        number_beside = max(whole_number(number), 0)
        return beside[number_beside] if number_beside < len(beside) else None


def between_switches(fabric: Fabric) -> Bools:
    """[L] whether a link joins two switches."""
    switch = fabric.kind == SWITCH
    between: Bools = switch[fabric.source] & switch[fabric.target]
    return between


def fabric_of(topology: TopologyFile) -> Fabric:
    """The arrays of a topology that was checked."""
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
