"""Switches and hosts from Slurm's `topology.conf` (plugin `topology/tree`).

In: the file. Out: a topology of switches in tiers, with one port per host. The file knows no speeds (its
`LinkSpeed` is a weight) and no number of cables: both are given. Blocks (`topology/block`) say which hosts
share fast links, not how they are cabled, and are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from dpro.errors import InputError, UsageError
from dpro.limits import read_small
from dpro.topology.file import PORT, HostEntry, LinkEntry, SwitchEntry, TopologyFile, check
from dpro.topology.hostlist import expand, fold

TIERS = ("leaf", "spine", "core")
_PAIR = re.compile(r"\b(\w+)\s*=\s*(\S+)")


def read_slurm(path: Path, gbit: float, host: HostEntry) -> TopologyFile:
    """A topology from `topology.conf`.

    Args:
        gbit: of each cable, 1e9 bits/s, which the file does not say.
        host: what each host is; `names` is not used. All its ports go to the host's switch.

    Raises:
        InputError: a line is none of the plugin's, or names what no line describes.
    """
    switches: dict[str, tuple[list[str], list[str]]] = {}
    for number, line in _lines(path):
        pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
        if "blockname" in pairs:
            raise InputError(f"{path}:{number}: blocks say nothing of cables: a tree of switches is needed")
        if "switchname" not in pairs:
            raise InputError(f"{path}:{number}: begins with no SwitchName: {line[:60]!r}")
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
                raise InputError(f"{path}: {switch!r}, below switch {name!r}, is described by no line")
    if not any(hosts for hosts, _ in switches.values()):
        raise InputError(f"{path}: no switch has hosts (Nodes=…)")
    return _topology(path, switches, gbit, host)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines that say something, with their numbers; a backslash joins a line with the next."""
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


def _topology(
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
    """By switch, how many switches lie between it and the hosts below it, at most."""
    tiers: dict[str, int] = {}
    try:
        for name in TopologicalSorter({name: lower for name, (_, lower) in switches.items()}).static_order():
            tiers[name] = 1 + max((tiers[below] for below in switches[name][1]), default=-1)
    except CycleError as error:
        raise InputError(f"{path}: switch {error.args[1][0]!r} is below itself") from error
    return tiers
