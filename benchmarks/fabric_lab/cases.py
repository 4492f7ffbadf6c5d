"""Cases drawn from a seed: dpro's predictions, and the lab's measurements.

In: a lab and a seed. Out: rows of predicted and measured rates or seconds. Paths are those that the kernel
reports; everything else is from `dpro.replay.cost.fabric`: next hops, planned paths, max-min fair rates. The
overhead of TCP follows from how it works: headers, and acknowledgements on the way back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fabric_lab.job import StepWork, job
from benchmarks.fabric_lab.lab import MTU, Lab, taken
from benchmarks.fabric_lab.traffic import Flow, goodput
from dpro.arrays import Floats
from dpro.extensions.fabric.planning import plan_paths
from dpro.replay.cost.fabric.connections import max_min_rates
from dpro.replay.cost.fabric.flows import Flows, Load, flows_of, loaded
from dpro.replay.cost.fabric.network import NO_LINK, Choice, Fabric, Routes, fabric_of, paths, routes_of

HEADERS = 66  # bytes: TCP with timestamps, IP, Ethernet; the whole of an acknowledgement
PAYLOAD = (MTU - HEADERS + 14) / (MTU + 14)  # of the bytes that a cable carries
CONDITIONS = ("hash", "planned", "half rate", "link down")
FAULTS = ("half rate", "link down")
FIRST_PORT, TRIED = 40_000, 400
MEASURED_S = 4.0
FULL = 0.97  # of a cable, by data; acknowledgements take the rest
SETTLED = 4  # rounds; each changes rates by a hundredth of the change of the round before


@dataclass(frozen=True)
class Compared:
    """A predicted and a measured figure.

    Attributes:
        what: flows, all-reduce or step.
        condition: one of `CONDITIONS`.
        predicted, measured: bytes per second, or seconds.
        both_ways: whether some cable is full in both directions.
    """

    what: str
    condition: str
    predicted: float
    measured: float
    both_ways: bool

    @property
    def error_pct(self) -> float:
        """Error of the prediction relative to the measurement, without sign."""
        return 100 * abs(self.predicted / self.measured - 1)


def under(made: Lab, condition: str, draw: random.Random) -> None:
    """Bring the lab into a condition.

    Args:
        made: the lab.
        condition: one of `CONDITIONS`.
        draw: which cable.
    """
    made.heal()
    leaf, spine = draw.randrange(made.leaves), draw.randrange(made.spines)
    if condition == "half rate":
        made.slow(leaf, spine, made.spine_mbit // 2)
    elif condition == "link down":
        made.fail(leaf, spine)


def of_flows(made: Lab, condition: str, draw: random.Random) -> list[Compared]:
    """Compare the rates of several flows at once between hosts of different leaves.

    Args:
        made: the lab.
        condition: one of `CONDITIONS`.
        draw: hosts and ports.
    """
    under(made, condition, draw)
    pairs = _pairs(made, draw)
    fabric = fabric_of(made.topology())
    routes = routes_of(fabric)
    found = flows_of(
        fabric, [[fabric.gpus[each][0] for each in pair] for pair in pairs], ["send"] * len(pairs)
    )
    if condition == "planned":
        ports = _planned_ports(made, pairs, found, routes)
    else:  # each flow gets its own queue
        ports = [FIRST_PORT + 256 * draw.randrange(50) + number for number in range(len(pairs))]
    flows = [Flow(*pair, port, 6000 + number) for number, (pair, port) in enumerate(zip(pairs, ports))]
    load = loaded(found, routes, _as_taken(made, flows, fabric, routes))
    rates = PAYLOAD * 1e9 * rates_beside_acknowledgements(load, fabric.gbps, made.batch)
    measured = goodput(made, flows, MEASURED_S)
    both = _both_ways(fabric, load, rates / PAYLOAD / 1e9)
    return [
        Compared("flows", condition, float(rate), real, both) for rate, real in zip(rates.tolist(), measured)
    ]


def of_job(made: Lab, condition: str, draw: random.Random, work: StepWork, steps: int) -> Compared:
    """Compare the median step of a job with a rank on each host, or its all-reduce if it does nothing else.

    Args:
        made: the lab.
        condition: one of `CONDITIONS` but planned.
        draw: which cable.
        work: what a step does.
        steps: how many.
    """
    under(made, condition, draw)
    with job(made, work, steps) as running:
        fabric = fabric_of(made.topology())
        routes = routes_of(fabric)
        pairs = [[fabric.gpus[flow.begin][0], fabric.gpus[flow.end][0]] for flow in running.ring]
        each = loaded(
            flows_of(fabric, pairs, ["send"] * len(pairs)),
            routes,
            _as_taken(made, running.ring, fabric, routes),
        )
        ring = _together(each)
        rate = float(rates_beside_acknowledgements(ring, fabric.gbps, made.batch)[0])
        sent = 2 * (made.hosts - 1) / made.hosts * work.num_bytes
        predicted = work.compute_ms / 1e3 + work.reductions * sent / (rate * PAYLOAD * 1e9)
        measured = running.seconds()
        both = _both_ways(fabric, ring, np.array([rate]))
    return Compared("step" if work.compute_ms else "all-reduce", condition, predicted, measured, both)


def rates_beside_acknowledgements(load: Load, capacity: Floats, batch: int) -> Floats:
    """Compute [C] max-min fair rates on links that also carry acknowledgements of the opposite traffic.

    Acknowledgements are few and have their own queue, so they take what they need before other traffic. They
    return on the path of their data, since the hash of addresses and ports is symmetric.

    Args:
        load: of data on links.
        capacity: [L] of each link.
        batch: segments per acknowledgement.
    """
    flow = np.repeat(np.arange(load.indptr.size - 1), np.diff(load.indptr))
    half = capacity.size // 2
    back = (load.links + half) % capacity.size  # the opposite direction of a cable
    each = load.share * HEADERS / (batch * (MTU + 14))
    rates = max_min_rates(load, capacity)
    for _ in range(SETTLED):
        taken_up = np.bincount(back, each * rates[flow], capacity.size)
        rates = max_min_rates(load, capacity - taken_up)
    return rates


def _pairs(made: Lab, draw: random.Random) -> list[tuple[int, int]]:
    """Draw hosts that send to hosts of another leaf; a host sends at most twice."""
    hosts = list(range(made.hosts)) * 2
    draw.shuffle(hosts)
    found = []
    for begin in hosts[: draw.randint(2, made.hosts + 1)]:
        others = [host for host in range(made.hosts) if made.leaf_of(host) != made.leaf_of(begin)]
        found.append((begin, draw.choice(others)))
    return found


def _planned_ports(made: Lab, pairs: Sequence[tuple[int, int]], found: Flows, routes: Routes) -> list[int]:
    """Find source ports by which the kernel takes the planned paths, each with its own queue."""
    network = routes.network
    plan = plan_paths(found, routes, network.gbps)
    way = paths(routes, found.begin, found.end, plan.choice())
    ports = []
    for number, (begin, end) in enumerate(pairs):
        spine = next(
            network.names[network.target[link]]
            for link in way[number].tolist()
            if link != NO_LINK and network.names[network.target[link]].startswith("s")
        )
        tried = range(FIRST_PORT + number, FIRST_PORT + number + 256 * TRIED, 256)
        ports.append(next(port for port in tried if taken(made, begin, end, port, 6000 + number) == spine))
    return ports


def _as_taken(made: Lab, flows: Sequence[Flow], fabric: Fabric, routes: Routes) -> Choice:
    """Return the choice that the kernel makes at each leaf."""
    spines = [taken(made, *flow) for flow in flows]

    def choose(rows: np.ndarray, here: np.ndarray, number: np.ndarray) -> np.ndarray:
        picked = []
        for row, switch, count in zip(rows.tolist(), here.tolist(), number.tolist()):
            flow = flows[row]
            group = routes.choices(switch, fabric.node_of[f"l{made.leaf_of(flow.end)}"])
            names = [fabric.names[fabric.target[link]] for link in group.tolist()]
            picked.append(names.index(spines[row]) if count > 1 else 0)
        return np.array(picked, np.int64)

    return choose


def _together(load: Load) -> Load:
    """Merge all communications into one, since a ring is as fast as its slowest flow."""
    links, at = np.unique(load.links, return_inverse=True)
    return Load(np.array([0, links.size]), links, np.bincount(at, load.share).astype(float))


def _both_ways(fabric: Fabric, load: Load, rates: np.ndarray) -> bool:
    """Return whether some cable is full in both directions."""
    carried = np.bincount(load.links, load.share * np.repeat(rates, np.diff(load.indptr)), fabric.source.size)
    full = carried >= FULL * fabric.gbps
    half = full.size // 2  # the second half of the links are the opposite directions of the first
    return bool((full[:half] & full[half:]).any())
