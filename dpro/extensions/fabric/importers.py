"""Reads fabrics described by other tools: `ibnetdiscover`, Slurm's `topology.conf`, NCCL's XML of a host.

Returns a topology of switches in tiers, hosts and cables; from NCCL's XML the inside of a host.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from math import isfinite, nan
from pathlib import Path
from xml.etree import ElementTree

from dpro.errors import InputError, UsageError
from dpro.limits import MAX_NESTING, read_small
from dpro.topology.file import PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile, check
from dpro.topology.hostlist import expand, fold

# Nominal speed of a lane, 1e9 bits/s (InfiniBand Trade Association's roadmap).
LANE_GBIT = {
    "SDR": 2.5,
    "DDR": 5,
    "QDR": 10,
    "FDR10": 10,
    "FDR": 14,
    "EDR": 25,
    "HDR": 50,
    "NDR": 100,
    "XDR": 200,
}
_NODE = re.compile(r'^(Switch|Ca|Rt)\s+\d+\s+"([SHR]-[0-9a-f]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(
    r'^\[(\d{1,9})\](?:\[ext \d+\])?(?:\([0-9a-f]+\))?\s+"([SHR]-[0-9a-f]+)"'
    r"\[(\d{1,9})\]"
)
_SPEED = re.compile(r"\b(\d{1,3})x([A-Z]+\d*)$")
_NUMBER = re.compile(r"(\d{1,18})")


def read_ibnetdiscover(path: Path, host: HostEntry, gbit: float | None = None) -> TopologyFile:
    """Read a topology from the output of `ibnetdiscover` without options.

    A line of a port has the other end's description in quotes and the width and speed of the link (`4xHDR`);
    a host's description is its name and its adapter (`node001 mlx5_0`). Adapters that share a description,
    such as one with their model only, become separate hosts named by their ids. Ports of a host are numbered
    in the order of adapters' names. Tiers follow from the distance to hosts. Old versions print no speeds, so
    one must be given.

    Args:
        gbit: speed of links without one in the text, 1e9 bits/s; None if all must have one.

    Raises:
        InputError: the text is not such output, or a link has no speed.
    """
    lines = read_small(path).decode(errors="replace").splitlines()
    described: dict[str, str] = {}
    cables: dict[tuple[str, str], tuple[float, set[tuple[int, int]]]] = {}
    here = ""
    for number, line in enumerate(lines, 1):
        node, port = _NODE.match(line), _PORT.match(line)
        if node:
            here = node[2]
            described[here] = node[3].strip()
        elif port and here:
            width = _SPEED.search(line.rstrip())
            speed = int(width[1]) * LANE_GBIT[width[2]] if width and width[2] in LANE_GBIT else gbit
            if speed is None:
                raise InputError(
                    f"{path}:{number}: no known speed of the link (such as 4xHDR): give one with --gbit"
                )
            _add(cables, (here, int(port[1])), (port[2], int(port[3])), speed)
    if not cables:
        raise InputError(f"{path}: no link found: is it the output of `ibnetdiscover`?")
    unknown = next((end for pair in cables for end in pair if end not in described), None)
    if unknown:
        raise InputError(f"{path}: {unknown} is linked but not described: is the file complete?")
    topology = _topology(_with_own_names(described), cables, host)
    try:
        check(topology)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    return topology


def _with_own_names(described: dict[str, str]) -> dict[str, str]:
    """Return the descriptions, replaced by the id for adapters that share one."""
    times = Counter(text for node, text in described.items() if node.startswith("H-"))
    return {
        node: node if node.startswith("H-") and times[text] > 1 else text for node, text in described.items()
    }


def _add(
    cables: dict[tuple[str, str], tuple[float, set[tuple[int, int]]]],
    begin: tuple[str, int],
    end: tuple[str, int],
    gbit: float,
) -> None:
    """Add a cable, which the text lists from each end; parallel cables get the speed of the slowest."""
    first, second = sorted((begin, end))
    slowest, numbers = cables.get((first[0], second[0]), (gbit, set()))
    numbers.add((first[1], second[1]))
    cables[first[0], second[0]] = (min(slowest, gbit), numbers)


def _topology(
    described: dict[str, str],
    cables: dict[tuple[str, str], tuple[float, set[tuple[int, int]]]],
    host: HostEntry,
) -> TopologyFile:
    names = _names(described)
    adapters: dict[str, list[tuple[str, str, int]]] = defaultdict(list)  # by host: adapter, its id, its port
    speeds: dict[str, float] = {}
    for (first, second), (gbit, numbers) in cables.items():
        for near, far, side in ((first, second, 0), (second, first, 1)):
            if near.startswith("H-") and far.startswith("S-"):
                machine, _, adapter = described[near].partition(" ")
                adapters[machine] += [(adapter, near, pair[side]) for pair in numbers]
                speeds[machine] = min(gbit, speeds.get(machine, gbit))
    port_of = {}
    for machine, ports in adapters.items():
        for number, (_, near, port) in enumerate(sorted(ports, key=_natural_key)):
            port_of[near, port] = f"{machine}{PORT}nic{number}"
    links = []
    for (first, second), (gbit, numbers) in sorted(cables.items()):
        if first.startswith("S-") and second.startswith("S-"):
            links.append(LinkEntry(names[first], names[second], gbit, len(numbers)))
            continue
        side = 0 if first.startswith("H-") else 1
        near, far = ((first, second), (second, first))[side]
        links += [
            LinkEntry(port_of[near, pair[side]], names[far], gbit)
            for pair in sorted(numbers)
            if (near, pair[side]) in port_of
        ]
    groups = defaultdict(list)
    for machine in sorted(adapters, key=_natural_key):
        groups[len(adapters[machine]), speeds[machine]].append(machine)
    hosts = [
        HostEntry(
            fold(members), host.gpus, host.gpu_gbps, count, gbit, host.near if count == host.nics else []
        )
        for (count, gbit), members in groups.items()
    ]
    return TopologyFile(hosts=hosts, switches=_switches(names, cables), links=links)


def _natural_key(text: object) -> list[object]:
    """Return a key that sorts numbers in names by value."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(str(text))]


def _names(described: dict[str, str]) -> dict[str, str]:
    """Return short names of switches from their descriptions; ids where two would have the same name."""
    short = {
        node: re.sub(r"[\s\[\],:#\"]+", "-", text.rpartition(";")[2].partition(":")[0].strip()) or node
        for node, text in described.items()
        if node.startswith("S-")
    }
    times = Counter(short.values())
    return {node: name if times[name] == 1 else node for node, name in short.items()}


def _switches(
    names: dict[str, str], cables: dict[tuple[str, str], tuple[float, set[tuple[int, int]]]]
) -> list[SwitchEntry]:
    """Group switches into tiers: the number of cables to the nearest host, less one."""
    beside = defaultdict(set)
    for first, second in cables:
        beside[first].add(second)
        beside[second].add(first)
    tiers: dict[str, int] = {}
    edge = {other for end, others in beside.items() if end.startswith("H-") for other in others}
    tier = 0
    while edge:
        tiers |= {end: tier for end in edge if end in names and end not in tiers}
        edge = {other for end in edge for other in beside[end] if other in names and other not in tiers}
        tier += 1
    apart = [end for end in names if end not in tiers]
    switches = [
        SwitchEntry(
            fold(sorted((names[end] for end, level in tiers.items() if level == height), key=_natural_key)),
            _tier(height),
        )
        for height in range(tier)
        if any(level == height for level in tiers.values())
    ]
    return switches + ([SwitchEntry(fold(names[end] for end in apart), "apart")] if apart else [])


def _tier(number: int) -> str:
    return TIERS[number] if number < len(TIERS) else f"tier{number}"


TIERS = ("leaf", "spine", "core")
_PAIR = re.compile(r"\b(\w+)\s*=\s*(\S+)")


def read_slurm(path: Path, gbit: float, host: HostEntry) -> TopologyFile:
    """Read a topology from Slurm's `topology.conf` (plugin `topology/tree`), with one port per host.

    The file has no speeds (its `LinkSpeed` is a weight) and no number of cables: both are given. Blocks
    (`topology/block`) list hosts that share fast links, not how they are cabled, and are refused.

    Args:
        gbit: speed of each cable, 1e9 bits/s.
        host: template of each host; `names` is ignored. All its ports go to the host's switch.

    Raises:
        InputError: a line is not in the plugin's format, or names a switch that no line describes.
    """
    switches: dict[str, tuple[list[str], list[str]]] = {}
    for number, line in _lines(path):
        pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
        if "blockname" in pairs:
            raise InputError(f"{path}:{number}: blocks do not describe cables: a tree of switches is needed")
        if "switchname" not in pairs:
            raise InputError(f"{path}:{number}: does not begin with SwitchName: {line[:60]!r}")
        try:
            below = [expand(pairs.get(key, "")) for key in ("nodes", "switches")]
        except UsageError as error:
            raise InputError(f"{path}:{number}: {error}") from error
        if pairs["switchname"] in switches:
            raise InputError(f"{path}:{number}: switch {pairs['switchname']!r} is described twice")
        switches[pairs["switchname"]] = (below[0], below[1])
    for name, (_, lower) in switches.items():
        for switch in lower:
            if switch not in switches:
                raise InputError(f"{path}: {switch!r}, below switch {name!r}, is not described by any line")
    if not any(hosts for hosts, _ in switches.values()):
        raise InputError(f"{path}: no switch has hosts (Nodes=…)")
    return _of_tree(path, switches, gbit, host)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return non-empty lines with their numbers; a backslash joins a line with the next."""
    text = read_small(path).decode(errors="replace")
    lines: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.partition("#")[0].strip()
        joined = plain.removesuffix("\\").strip()
        if continued and lines:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} {joined}")
        elif joined:
            lines.append((number, joined))
        continued = plain.endswith("\\")
    return lines


def _of_tree(
    path: Path, switches: dict[str, tuple[list[str], list[str]]], gbit: float, host: HostEntry
) -> TopologyFile:
    by_tier: dict[int, list[str]] = defaultdict(list)
    for name, tier in _tiers(path, switches).items():
        by_tier[tier].append(name)
    names = [host for hosts, _ in switches.values() for host in hosts]
    entry = HostEntry(fold(names), host.gpus, host.gpu_gbps, host.nics, host.nic_gbit, host.near)
    ports = f"nic[0-{host.nics - 1}]"
    links = [
        LinkEntry(",".join(f"{host_name}{PORT}{ports}" for host_name in hosts), name, gbit)
        for name, (hosts, _) in switches.items()
        if hosts
    ]
    links += [LinkEntry(fold(lower), name, gbit) for name, (_, lower) in switches.items() if lower]
    topology = TopologyFile(
        hosts=[entry],
        switches=[
            SwitchEntry(fold(of_tier), TIERS[tier] if tier < len(TIERS) else f"tier{tier}")
            for tier, of_tier in sorted(by_tier.items())
        ],
        links=links,
    )
    try:
        check(topology)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    return topology


def _tiers(path: Path, switches: dict[str, tuple[list[str], list[str]]]) -> dict[str, int]:
    """Map each switch to the largest number of switches between it and the hosts below it."""
    tiers: dict[str, int] = {}
    try:
        for name in TopologicalSorter({name: lower for name, (_, lower) in switches.items()}).static_order():
            tiers[name] = 1 + max((tiers[below] for below in switches[name][1]), default=-1)
    except CycleError as error:
        raise InputError(f"{path}: switch {error.args[1][0]!r} is below itself") from error
    return tiers


# Bandwidth of one NVLink, 1e9 bytes/s each way, by compute capability (NVIDIA's data sheets; NCCL's
# `graph/topo.h` has the payload bandwidth).
NVLINK_GBPS = {60: 20.0, 70: 25.0, 80: 25.0, 86: 14.0, 90: 25.0, 100: 50.0, 103: 50.0, 120: 50.0}
# Bandwidth of one link between AMD's GPUs, by the number of their architecture (AMD's data sheets).
XGMI_GBPS = {0x906: 46.0, 0x908: 46.0, 0x90A: 50.0, 0x942: 64.0, 0x950: 76.8}
PCIE_LANE_GBPS = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.97, 32.0: 3.94, 64.0: 7.56}
MAX_BYTES = 4 << 20  # of the file; that of a host of 16 GPUs has 20,000
MAX_DEVICES = 1024
USUAL_GBPS = 25.0  # of a PCI link whose speed the file lacks
_Place = tuple[int, ...]  # of an element: its index and those of its ancestors among their siblings


def read_inside(path: Path, names: str) -> HostEntry:
    """Read the inside of a host from the XML that NCCL writes to the file in `NCCL_TOPO_DUMP_FILE`.

    It has the number of GPUs and network ports, their speeds, and the port nearest to each GPU: the one with
    which it shares the most of the PCI tree (NCCL's own rule, `graph/paths.cc`). Links between GPUs count
    where the file has them; traffic through a host's processors is not modelled.

    Args:
        names: names of the hosts of this kind.

    Raises:
        InputError: the file is not a topology of NCCL's, or has no GPU.
    """
    try:
        root = ElementTree.fromstring(read_small(path, MAX_BYTES))
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # no XML, or an unknown encoding
        raise InputError(f"{path}: no XML: {error}") from error
    if root.tag != "system":
        raise InputError(f"{path}: begins with <{root.tag}>, but a topology of NCCL's begins with <system>")
    hosts = [cpu.get("host_hash") for cpu in root.findall("cpu")]
    for cpu, host in zip(root.findall("cpu"), hosts):
        if host != hosts[0]:
            root.remove(cpu)
    gpus: list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]] = []
    ports: list[tuple[_Place, ElementTree.Element]] = []
    for place, element, parent in _walk(path, root):
        if element.tag == "gpu":
            gpus.append((place, element, parent))
        elif element.tag == "net":
            ports.append((place, element))
    if not gpus:
        raise InputError(f"{path}: names no GPU")
    if max(len(gpus), len(ports)) > MAX_DEVICES:
        raise InputError(f"{path}: has more than {MAX_DEVICES:,} GPUs or ports, which no host has")
    gpus.sort(key=lambda gpu: _number(path, gpu[1], "dev", 0))
    ports.sort(key=lambda port: _number(path, port[1], "dev", 0))
    gbit = min((_number(path, port, "speed", 0) / 1e3 for _, port in ports), default=0.0)
    return HostEntry(
        names,
        len(gpus),
        min(_gpu_gbps(path, gpu, parent) for _, gpu, parent in gpus),
        len(ports),
        gbit or HostEntry("").nic_gbit,
        _nearest_ports([place for place, *_ in gpus], [place for place, _ in ports]),
    )


def _walk(
    path: Path, root: ElementTree.Element
) -> list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]]:
    """Return all elements with their places and parents.

    Raises:
        InputError: they are nested deeper than the devices of any host.
    """
    elements = []
    left: list[tuple[_Place, ElementTree.Element, ElementTree.Element | None]] = [((), root, None)]
    while left:
        place, element, parent = left.pop()
        if len(place) > MAX_NESTING:
            raise InputError(f"{path}: is nested more than {MAX_NESTING} deep, unlike any host's devices")
        elements.append((place, element, parent))
        left += [((*place, number), child, element) for number, child in enumerate(element)]
    return elements


def _number(path: Path, element: ElementTree.Element, name: str, usual: float) -> float:
    text = element.get(name)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise InputError(f"{path}: <{element.tag} {name}={text!r}>: not a number")
    return value


def _gpu_gbps(path: Path, gpu: ElementTree.Element, pci: ElementTree.Element | None) -> float:
    """Return the bandwidth from a GPU to others: over NVLink or AMD's links, else over PCI."""
    between = sum(_number(path, link, "count", 1) for link in gpu.iter("xgmi") if link.get("target"))
    if between:
        model = (gpu.get("gcn") or "").removeprefix("gfx").partition(":")[0]
        # The last digit is hexadecimal: gfx90a is newer than gfx908, and older than gfx942.
        number = int(model, 16) if re.fullmatch(r"[0-9a-f]{1,9}", model) else max(XGMI_GBPS)
        return (
            between * XGMI_GBPS[max((version for version in XGMI_GBPS if version <= number), default=0x906)]
        )
    links = sum(_number(path, link, "count", 1) for link in gpu.iter("nvlink"))
    capability = int(_number(path, gpu, "sm", 90))
    if links:
        at_most = max((version for version in NVLINK_GBPS if version <= capability), default=70)
        return links * NVLINK_GBPS[at_most]
    if pci is None:
        return USUAL_GBPS
    speed = (pci.get("link_speed") or "").split(" ")[0]
    width = _number(path, pci, "link_width", 16)
    lane = PCIE_LANE_GBPS.get(float(speed)) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", speed) else None
    return lane * width if lane and width else USUAL_GBPS


def _nearest_ports(gpus: list[_Place], ports: list[_Place]) -> list[int]:
    """Return the nearest port of each GPU; among equally near ones the first with the fewest GPUs."""
    if not ports:
        return []
    taken = [0] * len(ports)
    nearest = []
    for gpu in gpus:
        shared = [_num_shared_ancestors(gpu, port) for port in ports]
        best = min(range(len(ports)), key=lambda port: (-shared[port], taken[port], port))
        taken[best] += 1
        nearest.append(best)
    return nearest


def _num_shared_ancestors(one: _Place, other: _Place) -> int:
    """Return the number of ancestors that two places have in common."""
    return next(
        (depth for depth, (ancestor, its) in enumerate(zip(one, other)) if ancestor != its),
        min(len(one), len(other)),
    )
