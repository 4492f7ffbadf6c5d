"""Connections: flows of the same ports, one after the other, which routers send one way; and their paths.

In: flows of communications, and paths as a file names them. Out: connections, a choice that follows known
paths, and the paths that a choice makes, by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.fabric.flows import Flows, crossed, inside
from dpro.replay.fabric.network import SWITCH, between_switches
from dpro.replay.fabric.routes import NO_LINK, Choice, Routes
from dpro.topology.paths import PathEntry


@dataclass(frozen=True)
class Connections:
    """Connections of flows.

    Attributes:
        of: [F] the connection of each flow.
        flows: one flow for each connection, which stands for it.
        number: [K] of each among those between its ports.
    """

    of: Ints
    flows: Flows
    number: Ints


def connections_of(flows: Flows) -> Connections:
    """The connections of flows, ordered by their ports."""
    ends = np.stack([flows.begin, flows.end, flows.key])
    rows, first, of = np.unique(ends, axis=1, return_index=True, return_inverse=True)
    columns = {name: getattr(flows, name)[first] for name in ("begin", "end", "share", "key")}
    count = first.size
    new = np.ones(count, np.bool_)
    new[1:] = (np.diff(rows[:2], axis=1) != 0).any(axis=0)
    at = np.arange(count)
    number = at - np.maximum.accumulate(np.where(new, at, 0)) if count else at
    return Connections(of.ravel(), Flows(of=at, count=count, **columns), number)


@dataclass(frozen=True)
class KnownPaths:
    """Paths of connections that no hash decides.

    Attributes:
        of: [F] the connection of each flow.
        steps: by connection and switch, the place of its link in the group of links that lead on.
        missing: [K] connections that leave their hosts on a path that is not known.
    """

    of: Ints
    steps: dict[tuple[int, int], int]
    missing: Ints

    def choice(self, otherwise: Choice) -> Choice:
        """What `routes.paths` asks.

        Args:
            otherwise: the choice of connections whose path is not known.
        """
        if not self.steps:
            return otherwise

        def choose(rows: Ints, here: Ints, number: Ints) -> Ints:
            ends = zip(self.of[rows].tolist(), here.tolist())
            at = np.array([self.steps.get(pair, -1) for pair in ends], np.int64)
            return np.where(at >= 0, at, otherwise(rows, here, number))

        return choose


def known_paths(flows: Flows, routes: Routes, entries: Sequence[PathEntry]) -> KnownPaths:
    """The known paths of connections.

    Args:
        entries: known paths; those of connections that there are none of do not matter.

    Raises:
        Unanswerable: a path names a link that the fabric lacks, or that is on no shortest path to its end.
    """
    found, names = connections_of(flows), routes.network.names
    known = {(entry.begin, entry.end, entry.connection): entry for entry in entries}
    steps: dict[tuple[int, int], int] = {}
    missing = []
    ends = zip(found.flows.begin.tolist(), found.flows.end.tolist(), found.number.tolist())
    within = inside(found.flows, routes.network)
    for each, (begin, end, number) in enumerate(ends):
        entry = known.get((names[begin], names[end], number))
        if entry is not None:
            steps |= {(each, switch): at for switch, at in _places(routes, end, entry).items()}
        elif not within[each]:
            missing.append(each)
    return KnownPaths(found.of, steps, np.array(missing, np.int64))


def _places(routes: Routes, end: int, entry: PathEntry) -> dict[int, int]:
    """By switch on a path, the place of its link in the group of links that lead on."""
    network = routes.network
    found: dict[int, int] = {}
    if routes.into[end] == NO_LINK:
        return found
    to = int(network.source[routes.into[end]])
    for name in entry.links:
        link = network.link_named(name)
        if link is None:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: the topology has no link {name!r}")
        switch = int(network.source[link])
        group = routes.choices(switch, to).tolist() if network.kind[switch] == SWITCH else []
        if link not in group:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: {name!r} is on no shortest path")
        found[switch] = group.index(link)
    return found


def path_entries(flows: Flows, routes: Routes, choose: Choice) -> list[PathEntry]:
    """The path of each connection that leaves its host."""
    found, network = connections_of(flows), routes.network
    first = np.unique(found.of, return_index=True)[1]
    row, links = crossed(found.flows, routes, lambda rows, here, number: choose(first[rows], here, number))
    between = between_switches(network)[links]
    names: dict[int, list[str]] = {int(each): [] for each in row}
    for each, link in zip(row[between].tolist(), links[between].tolist()):
        names[each].append(network.link_name(link))
    begin, end = found.flows.begin, found.flows.end
    return [
        PathEntry(network.names[begin[each]], network.names[end[each]], ways, int(found.number[each]))
        for each, ways in names.items()
    ]
