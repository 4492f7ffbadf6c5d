"""The plan of a run: a path for each of its connections, and the rules by which switches follow it.

Takes the graph of a run with a topology, and what to avoid; returns entries of `paths.json`, and rules. NCCL
offers no choice of the UDP source port or flow label of a queue pair, and all channels of a communicator have
one traffic class, so switches can distinguish connections by addresses only: with rules, connections between
two ports share a path. Switches are not configured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as changed

from dpro.arrays import Floats, Ints
from dpro.detect.network.wires import PORT, SWITCHES, components_of
from dpro.errors import UsageError
from dpro.extensions.fabric.planning import plan_connection_paths
from dpro.replay.cost.fabric.connections import path_entries
from dpro.replay.cost.fabric.network import Fabric, Routes, routes_of
from dpro.replay.cost.fabric.placement import placed
from dpro.replay.graph import Graph
from dpro.topology.kept import PathEntry


class PathRule(NamedTuple):
    """Where a switch sends packets between two ports.

    Attributes:
        begin, end: the ports, such as `node0:nic0`.
        next: a neighbour of the switch, such as `spine1`; `spine1 #1` over the second of several cables.
    """

    switch: str
    begin: str
    end: str
    next: str


class RunPlan(NamedTuple):
    """A plan, as files have it.

    Attributes:
        entries: a path for each connection.
        rules: one for each switch on a path that has other ways to the same port; none if not asked for.
    """

    entries: list[PathEntry]
    rules: list[PathRule]


def plan_of(
    graph: Graph, probes: Sequence[PathEntry] = (), avoid: Sequence[str] = (), *, with_rules: bool = False
) -> RunPlan:
    """Plan a path for each connection of a run, with a source port for each path that a probe took.

    Args:
        probes: observed paths of source ports; each port is assigned to one connection.
        avoid: as for `avoided`.
        with_rules: whether switches follow rules by addresses.

    Raises:
        Unanswerable: the run has no topology, its ranks are on one host, or no path is left.
        UsageError: the fabric lacks a part to avoid.
    """
    placement = placed(graph)
    failed, gbps = avoided(placement.fabric, avoid)
    routes = routes_of(placement.fabric, failed) if failed.size else placement.routes
    flows = placement.flows
    together = replace(flows, key=np.zeros_like(flows.key)) if with_rules else flows
    choose = plan_connection_paths(together, routes, gbps)
    entries = path_entries(flows, routes, choose)
    rules = _rules(entries, placement.routes) if with_rules else []
    return RunPlan(_with_ports(entries, probes), rules)


def avoided(fabric: Fabric, avoid: Sequence[str]) -> tuple[Ints, Floats]:
    """Return the links that carry nothing any more, and [L] what each link carries, 1e9 bytes/s.

    Args:
        avoid: cables (`leaf0 - spine1`), links (`leaf0 > spine1`) and switches, as findings name them, each
            with the share of its rate that is left: `leaf0 - spine1=0.5`, or none.

    Raises:
        UsageError: the fabric has no such part, it is a port, or the share is not from 0 to 1.
    """
    parts = {part.name: part for part in components_of(fabric)}
    gbps = fabric.gbps.copy()
    for text in avoid:
        name, given, left = (word.strip() for word in text.partition("="))
        part = parts.get(name)
        try:
            share = float(left) if given else 0.0
        except ValueError:
            share = -1.0
        if part is None:
            says = "the topology has no such cable, link or switch: leaf0 - spine1, leaf0 > spine1 or spine1"
            raise UsageError(f"--avoid {name}: {says}")
        if part.kind == PORT:
            raise UsageError(f"--avoid {name}: a port has no other way; take its host out of the job")
        if not 0 <= share < 1:
            raise UsageError(f"--avoid {text}: the share of its rate that is left is from 0 to below 1")
        links = list(part.links)
        if part.kind == SWITCHES:
            node = fabric.node_of[name]
            links = np.flatnonzero((fabric.source == node) | (fabric.target == node)).tolist()
        gbps[links] *= share
    return np.flatnonzero((gbps == 0) & (fabric.gbps > 0)), gbps


def _with_ports(entries: Sequence[PathEntry], probes: Sequence[PathEntry]) -> list[PathEntry]:
    ports: dict[tuple[str, str, tuple[str, ...]], list[int]] = defaultdict(list)
    for probe in reversed(probes):
        if probe.source_port is not None:
            ports[probe.begin, probe.end, tuple(probe.links)].append(probe.source_port)
    planned = []
    for entry in entries:
        free = ports[entry.begin, entry.end, tuple(entry.links)]
        planned.append(changed(entry, source_port=free.pop() if free else None))
    return planned


def _rules(entries: Sequence[PathEntry], routes: Routes) -> list[PathRule]:
    """Return the rules of paths, for switches that would choose among several links themselves.

    Args:
        routes: as switches know them, which avoid nothing.
    """
    network, rules = routes.network, set[PathRule]()
    for entry in entries:
        leaf = int(network.source[routes.into[network.node_of[entry.end]]])
        for name in entry.links:
            switch, _, out = name.partition(" > ")
            if routes.choices(network.node_of[switch], leaf).size > 1:
                rules.add(PathRule(switch, entry.begin, entry.end, out))
    return sorted(rules)


def as_text(rules: Sequence[PathRule]) -> str:
    """Return rules as lines of four columns with tabs between them, below a comment."""
    about = "# SWITCH, FROM, TO, NEXT: at SWITCH, packets from port FROM to port TO leave to NEXT.\n"
    return about + "".join("\t".join(rule) + "\n" for rule in rules)
