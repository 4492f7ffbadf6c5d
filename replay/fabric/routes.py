"""Which links a flow takes: the next hops of shortest paths, and the choice among them.

In: a network, and what has failed. Out: `Routes`: for each switch and destination the links that lead
closer to it, which routers call an equal-cost group. A flow takes one of them at each switch (equal-cost
multipath: RFC 2992), by a choice that the caller makes: a hash, a plan, or evenly over all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import shortest_path

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.fabric.network import NIC, SWITCH, Fabric

NO_LINK = -1
MAX_HOPS = 16
# (flow [F], switch [F], number of links to choose from [F]) -> [F] which of them.
Choice = Callable[[Ints, Ints, Ints], Ints]


@dataclass(frozen=True)
class Routes:
    """Next hops between switches, and the cable of each port.

    Attributes:
        network: of which.
        alive: [L] whether a link works.
        place: [N] number of a switch among switches, -1 of other nodes.
        out, into: [N] the link of a port to its switch, and from it; -1 of other nodes and where it failed.
        indptr: [S * S + 1] the links towards switch d at switch s are `links[indptr[s * S + d]:…]`.
        links: links, in the order of the file.
    """

    network: Fabric
    alive: Bools
    place: Ints
    out: Ints
    into: Ints
    indptr: Ints
    links: Ints

    @property
    def num_switches(self) -> int:
        """Number of switches."""
        return int(self.place.max(initial=-1)) + 1

    def choices(self, here: int, to: int) -> Ints:
        """The links of the equal-cost group at a switch towards another.

        Args:
            here: a switch.
            to: a switch.
        """
        row = int(self.place[here]) * self.num_switches + int(self.place[to])
        found: Ints = self.links[self.indptr[row] : self.indptr[row + 1]]
        return found


def routes_of(network: Fabric, failed: Ints | None = None) -> Routes:
    """Next hops of all shortest paths.

    Args:
        network: the fabric.
        failed: links that do not work; a cable that fails is two of them.
    """
    alive = np.ones(network.source.size, np.bool_)
    if failed is not None:
        alive[failed] = False
    is_switch = network.kind == SWITCH
    place = np.where(is_switch, np.cumsum(is_switch) - 1, -1)
    count = int(is_switch.sum())
    used = np.flatnonzero(alive & is_switch[network.source] & is_switch[network.target])
    begin, end = place[network.source[used]], place[network.target[used]]
    beside = csr_matrix((np.ones(used.size), (begin, end)), shape=(count, count))
    far = shortest_path(beside, unweighted=True) if count else np.zeros((0, 0))
    # A link leads closer to a destination where its end is one hop nearer than its beginning.
    at, to = np.nonzero(np.isfinite(far[begin]) & (far[end] == far[begin] - 1))
    row = begin[at] * count + to
    order = np.lexsort((used[at], row))
    indptr = np.zeros(count * count + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=count * count), out=indptr[1:])
    cables = np.flatnonzero(alive & (network.kind[network.source] == NIC))
    out = np.full(network.num_nodes, NO_LINK, np.int64)
    into = np.full(network.num_nodes, NO_LINK, np.int64)
    out[network.source[cables]] = cables
    cables = np.flatnonzero(alive & (network.kind[network.target] == NIC))
    into[network.target[cables]] = cables
    return Routes(network, alive, place, out, into, indptr, used[at][order])


def paths(routes: Routes, begin: Ints, end: Ints, choose: Choice) -> Ints:
    """[F, H] links that each flow takes from port to port; -1 behind the last.

    Args:
        routes: next hops.
        begin, end: [F] nodes of ports.
        choose: which link of those at a switch each flow takes.

    Raises:
        Unanswerable: no path leads from a port to another; they are named.
    """
    network, count = routes.network, routes.num_switches
    names = network.names
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
        row = routes.place[here[going]] * count + routes.place[to[going]]
        number = routes.indptr[row + 1] - routes.indptr[row]
        if (number == 0).any():
            lost = going[np.argmin(number)]
            raise Unanswerable(f"no path leads from {names[begin[lost]]} to {names[end[lost]]}")
        link = routes.links[routes.indptr[row] + choose(going, here[going], number)]
        column = np.full(begin.size, NO_LINK, np.int64)
        column[going] = link
        columns.append(column)
        here = here.copy()
        here[going] = network.target[link]
    found = np.stack([*columns, np.where(direct, NO_LINK, last)], axis=1)
    behind: Ints = np.take_along_axis(found, np.argsort(found == NO_LINK, axis=1, kind="stable"), axis=1)
    return behind


def hashed(keys: Ints, seed: int = 0) -> Choice:
    """A choice by a hash of what identifies a flow, another at each switch: what routers do.

    The hash mixes key, switch and seed (splitmix64: Steele, Lea and Flood, OOPSLA 2014); that of a real
    router is not known, so a prediction is over many seeds.

    Args:
        keys: [F] what identifies each flow, as its ports and addresses do.
        seed: of the hash.
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
