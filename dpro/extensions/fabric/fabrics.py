"""Generates common fabrics of a given size: fat trees and rail-optimised fabrics.

Takes the number of hosts and of ports per switch; returns a topology. A leaf has as many ports down as up, or
`oversubscription` times as many. If each leaf can have a cable to each spine, the tree has two tiers;
otherwise cores join pods of leaves and spines (k-ary fat tree: Al-Fares, Loukissas and Vahdat, SIGCOMM 2008).
In a rail-optimised fabric port r of each host goes to a leaf of rail r, so GPUs of one number are one switch
apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from dpro.errors import UsageError
from dpro.topology.file import ALL, PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile


@dataclass(frozen=True)
class FabricSize:
    """The size and speeds of a fabric.

    Attributes:
        hosts, gpus, nics: number of hosts, and of GPUs and network ports per host.
        ports: per switch, all of one speed.
        gbit: speed of a cable, 1e9 bits/s.
        gpu_gbps: bandwidth of a GPU within its host, 1e9 bytes/s.
        oversubscription: capacity of a leaf towards hosts over that towards spines.
    """

    hosts: int
    gpus: int = 8
    nics: int = 8
    ports: int = 64
    gbit: float = 400.0
    gpu_gbps: float = 450.0
    oversubscription: float = 1.0

    def down(self) -> int:
        """Return the number of ports of a leaf towards hosts.

        Raises:
            UsageError: no port is left towards spines.
        """
        ratio = self.oversubscription
        down = ceil(self.ports * ratio / (1 + ratio)) if 0 < ratio < inf else self.ports
        if down >= self.ports:
            raise UsageError(f"oversubscription {self.oversubscription:g} leaves no port of {self.ports}")
        return down


def fat_tree(size: FabricSize) -> TopologyFile:
    """Return a fat tree in which all ports of a host go to one leaf.

    Raises:
        UsageError: switches with this number of ports cannot join that many hosts.
    """
    of_leaf = size.down() // size.nics
    if not of_leaf:
        raise UsageError(f"a leaf with {size.down()} ports down has no room for a host with {size.nics}")
    leaves = ceil(size.hosts / of_leaf)
    links = []
    for leaf in range(leaves):
        first, last = leaf * of_leaf, min((leaf + 1) * of_leaf, size.hosts) - 1
        ports = f"{_range('node', first, last)}{PORT}{_range('nic', 0, size.nics - 1)}"
        links.append(LinkEntry(ports, f"leaf{leaf}", size.gbit))
    return _with_upper_tiers(size, leaves, links)


def rail_optimised(size: FabricSize) -> TopologyFile:
    """Return a rail-optimised fabric: leaf r of a unit of hosts has port r of each of them.

    Raises:
        UsageError: switches with this number of ports cannot join that many hosts.
    """
    of_unit = size.down()
    units = ceil(size.hosts / of_unit)
    links = []
    for unit in range(units):
        first, last = unit * of_unit, min((unit + 1) * of_unit, size.hosts) - 1
        hosts = _range("node", first, last)
        links += [
            LinkEntry(f"{hosts}{PORT}nic{rail}", f"leaf{unit * size.nics + rail}", size.gbit)
            for rail in range(size.nics)
        ]
    return _with_upper_tiers(size, units * size.nics, links)


def _range(prefix: str, first: int, last: int) -> str:
    return f"{prefix}{first}" if first == last else f"{prefix}[{first}-{last}]"


def _with_upper_tiers(size: FabricSize, leaves: int, links: list[LinkEntry]) -> TopologyFile:
    """Return the fabric of hosts and leaves, with the spines and cores that join the leaves."""
    hosts = [HostEntry(_range("node", 0, size.hosts - 1), size.gpus, size.gpu_gbps, size.nics, size.gbit)]
    switches = [SwitchEntry(_range("leaf", 0, leaves - 1), "leaf")]
    up = size.ports - size.down()
    if leaves == 1:
        return TopologyFile(hosts=hosts, switches=switches, links=links)
    if leaves <= size.ports:
        fewest = ceil(leaves * up / size.ports)
        spines = next(count for count in range(fewest, up + 1) if up % count == 0)
        switches.append(SwitchEntry(_range("spine", 0, spines - 1), "spine"))
        links.append(
            LinkEntry(_range("leaf", 0, leaves - 1), _range("spine", 0, spines - 1), size.gbit, up // spines)
        )
        return TopologyFile(hosts=hosts, switches=switches, links=links)
    return _three_tiers(size, leaves, hosts, switches, links)


def _three_tiers(
    size: FabricSize, leaves: int, hosts: list[HostEntry], switches: list[SwitchEntry], links: list[LinkEntry]
) -> TopologyFile:
    """Join leaves in pods with spines; core g * half + i joins spine g of each pod."""
    half, up = size.ports // 2, size.ports - size.down()
    pods = ceil(leaves / half)
    if pods > size.ports:
        most = size.ports * half
        raise UsageError(
            f"{leaves:,} leaves: three tiers of {size.ports}-port switches join at most {most:,}"
        )
    switches += [
        SwitchEntry(_range("spine", 0, pods * up - 1), "spine"),
        SwitchEntry(_range("core", 0, up * half - 1), "core"),
    ]
    for pod in range(pods):
        of_pod = _range("leaf", pod * half, min((pod + 1) * half, leaves) - 1)
        links.append(LinkEntry(of_pod, _range("spine", pod * up, (pod + 1) * up - 1), size.gbit, connect=ALL))
    for group in range(up):
        spines = ",".join(f"spine{pod * up + group}" for pod in range(pods))
        links.append(LinkEntry(spines, _range("core", group * half, (group + 1) * half - 1), size.gbit))
    return TopologyFile(hosts=hosts, switches=switches, links=links)
