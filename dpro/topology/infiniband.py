"""Switches, ports of hosts and cables of an InfiniBand fabric, from the output of `ibnetdiscover`.

In: its text, as printed without options. Out: a topology. A line of a port has the other end's description
in quotes and the width and speed of the link (`4xHDR`); a host's description is its name and its adapter
(`node001 mlx5_0`). Adapters of which several are described by the same words, as those that say their model
only, are hosts of their own, called by their ids. Ports of a host are numbered in the order of adapters'
names. Tiers follow from the distance to hosts. Old versions print no speeds: then one is given.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from dpro.errors import InputError, UsageError
from dpro.limits import read_small
from dpro.topology.file import PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile, check
from dpro.topology.hostlist import fold
from dpro.topology.slurm import TIERS

# 1e9 bits/s of a lane, as the link is sold (InfiniBand Trade Association's roadmap).
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
    """A topology from what `ibnetdiscover` printed.

    Args:
        gbit: of links that the text has no speed of, 1e9 bits/s; None where it has to have all.

    Raises:
        InputError: it is no such text, or a link has no speed.
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
                    f"{path}:{number}: no speed of the link that is known (as 4xHDR): --gbit gives one"
                )
            _add(cables, (here, int(port[1])), (port[2], int(port[3])), speed)
    if not cables:
        raise InputError(f"{path}: no link is in it: is it what `ibnetdiscover` prints?")
    unknown = next((end for pair in cables for end in pair if end not in described), None)
    if unknown:
        raise InputError(f"{path}: {unknown} is linked, and no part describes it: is the text whole?")
    topology = _topology(_with_own_names(described), cables, host)
    try:
        check(topology)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    return topology


def _with_own_names(described: dict[str, str]) -> dict[str, str]:
    """Descriptions, of adapters that share one with others their ids instead."""
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
    """Add a cable, which the text has once from each end; the slowest of several between two ends counts."""
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
        for number, (_, near, port) in enumerate(sorted(ports, key=_in_order)):
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
    for machine in sorted(adapters, key=_in_order):
        groups[len(adapters[machine]), speeds[machine]].append(machine)
    hosts = [
        HostEntry(
            fold(members), host.gpus, host.gpu_gbps, count, gbit, host.near if count == host.nics else []
        )
        for (count, gbit), members in groups.items()
    ]
    return TopologyFile(hosts=hosts, switches=_switches(names, cables), links=links)


def _in_order(text: object) -> list[object]:
    """A key that sorts numbers in names by their value."""
    return [int(part) if part.isdecimal() else part for part in _NUMBER.split(str(text))]


def _names(described: dict[str, str]) -> dict[str, str]:
    """Switches by what they are called in a few words; where two are called the same, by their ids."""
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
    """Switches by tier: how many cables lie between them and the nearest host, less one."""
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
            fold(sorted((names[end] for end, level in tiers.items() if level == height), key=_in_order)),
            _tier(height),
        )
        for height in range(tier)
        if any(level == height for level in tiers.values())
    ]
    return switches + ([SwitchEntry(fold(names[end] for end in apart), "apart")] if apart else [])


def _tier(number: int) -> str:
    return TIERS[number] if number < len(TIERS) else f"tier{number}"
