"""Which host computes the work of which: fewer bytes over fewer and faster cables.

In: flows of a run and the bytes of each. Out: an order of its hosts. How much each two hosts exchange, times
how far apart they are put, is least for the assignment looked for: the quadratic assignment problem
(Koopmans and Beckmann 1957), which is solved by its relaxation (Vogelstein et al., PLoS ONE 10, 2015) and
then by exchanging pairs while that helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.replay.fabric.flows import Flows
from dpro.replay.fabric.network import Fabric, between_switches
from dpro.replay.fabric.routes import NO_LINK, Routes, paths

MAX_EXCHANGED = 200  # hosts of which all pairs are tried
_Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def exchanged(fabric: Fabric, flows: Flows, sent: Floats, hosts: Sequence[int]) -> _Matrix:
    """[H, H] bytes that each host sends to each other.

    Args:
        sent: [C] bytes that the busiest rank of each sends.
        hosts: of the run, by their number in the fabric.
    """
    place = np.full(fabric.num_nodes, -1)
    for at, host in enumerate(hosts):
        for gpu in fabric.gpus[host]:
            place[gpu] = at
            if gpu in fabric.port:
                place[fabric.port[gpu]] = at
    begin, end = place[flows.begin], place[flows.end]
    found = np.zeros((len(hosts), len(hosts)))
    np.add.at(found, (begin, end), np.where(begin != end, flows.share * sent[flows.of], 0.0))
    return found


def distances(routes: Routes, hosts: Sequence[int]) -> _Matrix:
    """[H, H] what a byte takes on links between switches on a shortest path between hosts, ns."""
    fabric = routes.network
    ports = np.array([_ports(fabric, host)[0] for host in hosts])
    one, other = (each.ravel() for each in np.meshgrid(ports, ports, indexing="ij"))
    apart = np.flatnonzero(one != other)
    first = paths(routes, one[apart], other[apart], lambda flows, *_: np.zeros(flows.size, np.int64))
    takes = np.where(between_switches(fabric), 1 / fabric.gbps, 0.0)
    found = np.zeros(one.size)
    found[apart] = np.where(first == NO_LINK, 0.0, takes[first]).sum(axis=1)
    return found.reshape(ports.size, ports.size)


def _ports(fabric: Fabric, host: int) -> list[int]:
    return [fabric.port[gpu] for gpu in fabric.gpus[host] if gpu in fabric.port]


def best_order(traffic: _Matrix, far: _Matrix) -> Ints:
    """[H] the place of each host's work: the order as it is where no other one is better.

    Args:
        traffic: [H, H] bytes from host to host.
        far: [H, H] distances of places.
    """
    from scipy.optimize import quadratic_assignment  # only here: it takes as long to load as all the rest

    same = np.arange(len(traffic))
    if len(traffic) < 2:
        return same
    draws = {"rng": np.random.default_rng(0)}
    found = quadratic_assignment(traffic, far, method="faq", options=draws).col_ind
    if len(traffic) <= MAX_EXCHANGED:
        guess = np.stack([same, found], axis=1)
        begin = draws | {"partial_guess": guess}
        found = quadratic_assignment(traffic, far, method="2opt", options=begin).col_ind
    before, after = ((traffic * far[np.ix_(order, order)]).sum() for order in (same, found))
    order: Ints = found.astype(np.int64) if after < before * (1 - 1e-9) else same
    return order


def hosts_of(fabric: Fabric, gpus: Sequence[int]) -> list[int]:
    """The hosts of GPUs, each once, in the order in which they come."""
    host_of = {gpu: host for host, own in enumerate(fabric.gpus) for gpu in own}
    return list(dict.fromkeys(host_of[gpu] for gpu in gpus))


def moved(fabric: Fabric, members: Sequence[Sequence[int]], to: dict[int, int]) -> list[list[int]]:
    """The GPUs of communications once hosts have changed places; a GPU keeps its number in its host."""
    place = {
        gpu: fabric.gpus[to[host]][at]
        for host, own in enumerate(fabric.gpus)
        if host in to
        for at, gpu in enumerate(own)
        if at < len(fabric.gpus[to[host]])
    }
    return [[place[gpu] for gpu in gpus] for gpus in members]
