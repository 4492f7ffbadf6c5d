"""Format, reader, checker and writer of `topology.toml`.

Takes a file, or entries made by a generator or an importer; returns a `TopologyFile` with consistent names.
Each entry covers a list of names (`hostlist`), so a fabric of a thousand hosts needs a dozen entries. Nodes,
links and paths are not computed here, but in `dpro.replay.cost.fabric`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpro.errors import InputError, UsageError, first_line
from dpro.folders import written_whole
from dpro.limits import MAX_NESTING, read_small
from dpro.topology.hostlist import MAX_TEXT, expand

FILE = "topology.toml"  # in a run
VERSION = 1
ALL, EACH = "all", "each"
MAX_CABLES = 4_000_000
MAX_PARTS = 1_000_000  # of hosts, GPUs and ports together, and of switches
PORT = ":"  # between a host and its port: node001:nic0


class HostEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hosts of one kind.

    Attributes:
        names: list of their names.
        gpus: GPUs of each host.
        gpu_gbps: bandwidth of a GPU to the others of its host, 1e9 bytes/s, each way.
        nics: network ports of each host, called nic0, nic1, …
        nic_gbit: bandwidth of a port, 1e9 bits/s, each way.
        near: port that each GPU sends through, by GPU; if empty, ports are assigned evenly, in order.
    """

    names: str
    gpus: int = 8
    gpu_gbps: float = 450.0
    nics: int = 8
    nic_gbit: float = 400.0
    near: list[int] = []


class SwitchEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Switches of one tier.

    Attributes:
        names: list of their names.
        tier: leaf, spine, core, or any other name.
    """

    names: str
    tier: str = "leaf"


class LinkEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"begin": "from", "end": "to"}
):
    """Cables between two lists of ends.

    Attributes:
        begin, end: lists of switches, or of ports of hosts such as node[001-128]:nic0. In the file: from, to.
        gbit: bandwidth of a cable, 1e9 bits/s, each way.
        count: cables between each pair of ends.
        connect: all (each end of one list with each of the other) or each (the first with the first, …).
    """

    begin: str
    end: str
    gbit: float = 400.0
    count: int = 1
    connect: str = ALL


class TopologyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fabric, by its entries.

    Attributes:
        version: version of the format.
        hosts, switches, links: the entries.
    """

    version: int = VERSION
    hosts: list[HostEntry] = []
    switches: list[SwitchEntry] = []
    links: list[LinkEntry] = []


class Cable(NamedTuple):
    """The cables between two ends.

    Attributes:
        begin, end: names of switches, or of ports.
        gbit: bandwidth of each cable, 1e9 bits/s, each way.
        number: number of cables.
    """

    begin: str
    end: str
    gbit: float
    number: int


def read(path: Path) -> TopologyFile:
    """Read and check a topology.

    Raises:
        InputError: the file cannot be read, or an entry is invalid; the message names the entry.
    """
    try:
        content = read_small(path)
        # Parsing a key such as `a.b.c` takes time quadratic in its parts. Names in lists may have many dots.
        for number, line in enumerate(content.splitlines(), 1):
            *keys, rest = line.split(b"=")
            keys = [re.split(rb"[,{]", key)[-1] for key in keys] + [rest] * line.lstrip().startswith(b"[")
            if any(key.count(b".") > MAX_NESTING for key in keys):
                raise InputError(f"{path}: line {number}: a key of more than {MAX_NESTING} parts")
        topology = msgspec.toml.decode(content, type=TopologyFile)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text: a topology is a TOML file") from error
    except (msgspec.DecodeError, ValueError) as error:
        said = first_line(error).replace(" - at `$.", ", at `").replace("...", "")  # at `links[3].gbit`
        raise InputError(f"{path}: {said}") from error
    except RecursionError as error:
        raise InputError(f"{path}: is nested too deep") from error
    try:
        check(topology)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    return topology


def check(topology: TopologyFile) -> None:
    """Check that the entries are valid and consistent.

    Raises:
        UsageError: they are not; the message names the entry.
    """
    if topology.version != VERSION:
        raise UsageError(f"version {topology.version} is not known: this is version {VERSION}")
    if not topology.hosts:
        raise UsageError("describes no host: [[hosts]] is missing")
    ports = _checked_hosts(topology)
    switches = _checked_switches(topology)
    hosts_and_switches = sorted(switches & {port.partition(PORT)[0] for port in ports})
    if hosts_and_switches:
        raise UsageError(f"{hosts_and_switches[0]!r} is a host and a switch")
    cables, used = 0, Counter[str]()
    for number, entry in enumerate(topology.links):
        with_place = f"links[{number}]"
        if not 0 < entry.gbit < inf or entry.count < 1:
            raise UsageError(f"{with_place}: gbit and count must be greater than 0")
        ends = _pairs(entry, with_place)
        for name in {name for pair in ends for name in pair}:
            if name not in switches and name not in ports:
                raise UsageError(f"{with_place}: {_unknown(name, switches, ports)}")
        cables += len(ends) * entry.count
        if cables > MAX_CABLES:
            raise UsageError(f"{with_place}: more than {MAX_CABLES:,} cables")
        for pair in ends:
            if pair[0] == pair[1]:
                raise UsageError(f"{with_place}: {pair[0]!r} is linked to itself")
            used.update(name for name in pair if name in ports)
            if pair[0] in ports and pair[1] in ports and topology.switches:
                raise UsageError(f"{with_place}: {pair[0]!r} and {pair[1]!r} are both ports of hosts")
    twice = next((name for name, times in used.items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"port {twice!r} is linked {used[twice]} times: a port has one cable")


def _unknown(name: str, switches: set[str], ports: set[str]) -> str:
    host, colon, _ = name.partition(PORT)
    if colon:
        of_host = sorted(port for port in ports if port.startswith(f"{host}{PORT}"))
        return f"no port {name!r}" + (f": {host} has {of_host[0]} to {of_host[-1]}" if of_host else "")
    if any(port.startswith(f"{host}{PORT}") for port in ports):
        return f"{name!r} is a host: name its port, as {name}{PORT}nic0"
    some = ", ".join(sorted(switches)[:3])
    return f"no switch {name!r}" + (f": there are {some} …" if some else "; there are none")


def _checked_hosts(topology: TopologyFile) -> set[str]:
    """Check the hosts, and return the names of all ports."""
    ports: set[str] = set()
    seen: set[str] = set()
    parts = characters = 0
    for number, entry in enumerate(topology.hosts):
        place = f"hosts[{number}]"
        if entry.gpus < 0 or entry.nics < 0 or not (0 < entry.gpu_gbps < inf and 0 < entry.nic_gbit < inf):
            raise UsageError(f"{place}: counts must not be negative, and speeds must be greater than 0")
        if entry.near and len(entry.near) != entry.gpus:
            raise UsageError(f"{place}: near names {len(entry.near)} ports, and there are {entry.gpus} GPUs")
        if any(not 0 <= port < entry.nics for port in entry.near):
            raise UsageError(f"{place}: near names ports from 0 to {entry.nics - 1}")
        names = _names(entry.names, place)
        parts += len(names) * (1 + entry.gpus + entry.nics)
        characters += sum(map(len, names)) * (1 + entry.nics)
        if parts > MAX_PARTS or characters > MAX_TEXT:
            raise UsageError(f"{place}: more than {MAX_PARTS:,} hosts, GPUs and ports, or too long names")
        for name in names:
            if name in seen:
                raise UsageError(f"{place}: host {name!r} is described twice")
            if PORT in name:
                raise UsageError(f"{place}: {name!r}: names of hosts have no {PORT!r}")
            seen.add(name)
            ports.update(f"{name}{PORT}nic{port}" for port in range(entry.nics))
    return ports


def _checked_switches(topology: TopologyFile) -> set[str]:
    seen: set[str] = set()
    characters = 0
    for number, entry in enumerate(topology.switches):
        names = _names(entry.names, f"switches[{number}]")
        characters += sum(map(len, names))
        if len(seen) + len(names) > MAX_PARTS or characters > MAX_TEXT:
            raise UsageError(f"switches[{number}]: more than {MAX_PARTS:,} switches, or too long names")
        for name in names:
            if name in seen:
                raise UsageError(f"switches[{number}]: switch {name!r} is described twice")
            seen.add(name)
    return seen


def _names(text: str, place: str) -> list[str]:
    try:
        names = expand(text)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    if not names:
        raise UsageError(f"{place}: names is empty")
    return names


def _pairs(entry: LinkEntry, place: str) -> list[tuple[str, str]]:
    begins, ends = _names(entry.begin, place), _names(entry.end, place)
    if entry.connect == ALL:
        if len(begins) * len(ends) > MAX_CABLES:
            raise UsageError(f"{place}: {len(begins) * len(ends):,} pairs of ends")
        return list(product(begins, ends))
    if entry.connect != EACH:
        raise UsageError(f"{place}: connect is {ALL} or {EACH}, not {entry.connect!r}")
    if len(begins) != len(ends):
        raise UsageError(f"{place}: {len(begins)} ends are linked each to one of {len(ends)}")
    return list(zip(begins, ends))


def cables(topology: TopologyFile) -> Iterator[Cable]:
    """Yield the cables between each pair of ends of a checked topology."""
    for number, entry in enumerate(topology.links):
        for begin, end in _pairs(entry, f"links[{number}]"):
            yield Cable(begin, end, entry.gbit, entry.count)


def as_toml(topology: TopologyFile) -> str:
    """Return a topology as the text of `topology.toml`."""
    parts = [f"version = {topology.version}\n"]
    for table in ("hosts", "switches", "links"):
        for entry in getattr(topology, table):
            values: dict[str, Any] = msgspec.to_builtins(entry)
            lines = "".join(
                f"{name} = {json.dumps(value)}\n" for name, value in values.items() if value != []
            )
            parts.append(f"\n[[{table}]]\n{lines}")
    return "".join(parts)


def write(topology: TopologyFile, path: Path) -> None:
    """Check a topology and write it to a file atomically.

    Raises:
        UsageError: entries are invalid or inconsistent.
        InputError: the file cannot be written.
    """
    check(topology)
    try:
        with written_whole(path.parent, path.name) as file:
            file.write(as_toml(topology).encode())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
