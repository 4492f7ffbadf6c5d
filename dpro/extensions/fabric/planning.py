"""Plans paths: each flow takes one path, such that no link carries more than necessary.

Takes flows that run at the same time, and next hops; returns a choice for `routes.paths`. Between leaves that
all have one cable to each spine (or the same number to each), equal flows are edges between sending and
receiving leaves, and a path is a colour: edges at a leaf get different colours. As many colours suffice as
the busiest leaf has flows (König 1916; alternating chains: Kempe 1879), so no up- or downlink carries more
than the busiest leaf's flows over its links, rounded up: except for the rounding, this equals spraying all
packets over all paths. In other fabrics flows are placed greedily, the largest first, where they meet least.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.connections import connections_of
from dpro.replay.cost.fabric.flows import Flows, inside
from dpro.replay.cost.fabric.network import NO_LINK, Choice, Routes

PART = 48  # bits of a key above this one number the parts of a flow
MAX_TRIED = 256  # paths of a flow that are compared


class _Ways(NamedTuple):
    """Shortest paths between two switches, all with the same number of hops.

    Attributes:
        switches: [W][H] switch at which each hop begins.
        links: [W, H, P] parallel cables of each hop, one of which is used; `NO_LINK` pads.
        places: [W, H, P] their positions in the equal-cost group.
    """

    switches: list[list[int]]
    links: np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
    places: np.ndarray[tuple[int, int, int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Plan:
    """A path for each flow.

    Attributes:
        places: for each flow, the position of its link in the equal-cost group, by switch.
    """

    places: tuple[dict[int, int], ...]

    def choice(self) -> Choice:
        """Return the plan as a function for `routes.paths`."""

        def choose(flows: Ints, here: Ints, number: Ints) -> Ints:
            places = [
                self.places[flow].get(switch, 0) % count
                for flow, switch, count in zip(flows.tolist(), here.tolist(), number.tolist())
            ]
            return np.array(places, np.int64)

        return choose


def plan_paths(flows: Flows, routes: Routes, capacity: Floats) -> Plan:
    """Plan paths for flows that may all run at the same time."""
    leaves = _leaves(flows, routes)
    crossing = [flow for flow, (begin, end) in enumerate(leaves) if begin != end]
    equal = crossing and np.ptp(flows.share[crossing]) < 1e-9
    if equal and _is_two_tiers(routes, {leaves[flow] for flow in crossing}, capacity):
        return _colour_paths(routes, leaves, crossing)
    return _place_greedily(flows, routes, leaves, crossing, capacity)


def plan_connection_paths(flows: Flows, routes: Routes, capacity: Floats) -> Choice:
    """Plan a path for each connection; communications of the same ranks share it, one after the other."""
    connections = connections_of(flows)
    choose = plan_paths(connections.flows, routes, capacity).choice()
    return lambda rows, here, number: choose(connections.of[rows], here, number)


def evenly_split(flows: Flows, routes: Routes) -> tuple[Flows, Choice]:
    """Split as few flows as possible, so that cables carry what spraying packets would give them.

    All but the last k mod m of k equal flows between two leaves with m paths take the paths in turn; the
    others are split into m / gcd(m, k mod m) parts each, which take the paths in turn, too (Ethereal: Addanki
    et al., arXiv 2407.00550). The split is less even where paths between leaves cross more than one switch,
    or unequal cables.
    """
    connections = connections_of(flows)
    leaves = _leaves(connections.flows, routes)
    groups: dict[tuple[tuple[int, int], float], list[int]] = {}
    for number, pair in enumerate(leaves):
        groups.setdefault((pair, float(connections.flows.share[number])), []).append(number)
    parts = np.ones(connections.number.size, np.int64)
    first = np.zeros(connections.number.size, np.int64)  # the path of the first part of each
    for (pair, _), members in groups.items():
        if pair[0] == pair[1]:
            continue
        num_paths = routes.choices(*pair).size
        rest = len(members) % num_paths
        of_rest = num_paths // gcd(num_paths, rest)
        for turn, number in enumerate(members):
            left = len(members) - turn
            parts[number] = of_rest if left <= rest else 1
            first[number] = (rest - left) * of_rest if left <= rest else turn
    counts = parts[connections.of]
    row = np.repeat(np.arange(flows.of.size), counts)
    part = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = {name: getattr(flows, name)[row] for name in ("of", "begin", "end")}
    split = Flows(
        **columns, share=(flows.share / counts)[row], key=flows.key[row] + (part << PART), count=flows.count
    )
    path = (first[connections.of])[row] + part
    plan = Plan(
        tuple(
            _path_of_colour(routes, leaves[connection], way)
            for connection, way in zip(connections.of[row].tolist(), path.tolist())
        )
    )
    return split, plan.choice()


def _leaves(flows: Flows, routes: Routes) -> list[tuple[int, int]]:
    """Return the leaves at which each flow begins and ends; twice -1 within a host."""
    network = routes.network
    return [
        (-1, -1)
        if within
        else (int(network.target[routes.out[begin]]), int(network.source[routes.into[end]]))
        for within, begin, end in zip(inside(flows, network), flows.begin, flows.end)
    ]


def _is_two_tiers(routes: Routes, pairs: set[tuple[int, int]], capacity: Floats) -> bool:
    """Return whether all paths cross one spine, with the same spines and cables for all pairs of leaves."""
    target = routes.network.target
    seen: set[tuple[int, ...]] = set()
    for one, other in pairs:
        up = routes.choices(one, other)
        middle = target[up]
        seen.add(tuple(middle.tolist()))
        links = [up, *(routes.choices(switch, other) for switch in set(middle.tolist()))]
        if len({*capacity[np.concatenate(links)].tolist()}) != 1:  # colours are worth the same, or no path
            return False
        for switch in set(middle.tolist()):
            down = routes.choices(switch, other)
            if (target[down] != other).any() or down.size != np.count_nonzero(middle == switch):
                return False
    return len(seen) == 1


def _colour_paths(routes: Routes, leaves: list[tuple[int, int]], crossing: list[int]) -> Plan:
    """Colour the edges of the bipartite graph of leaves, and fold the colours onto the cables of a leaf."""
    degree: dict[tuple[int, int], int] = {}
    for flow in crossing:
        for side, leaf in enumerate(leaves[flow]):
            degree[side, leaf] = degree.get((side, leaf), 0) + 1
    colours = max(degree.values())
    edge_of: dict[tuple[int, int, int], int] = {}  # by side, leaf and colour
    colour_of: dict[int, int] = {}

    def free(side: int, leaf: int) -> int:
        return next(colour for colour in range(colours) if (side, leaf, colour) not in edge_of)

    def paint(edge: int, colour: int) -> None:
        colour_of[edge] = colour
        for side, leaf in enumerate(leaves[edge]):
            edge_of[side, leaf, colour] = edge

    for edge in crossing:
        begin, end = leaves[edge]
        ours, its = free(0, begin), free(1, end)
        if ours != its:
            # Swapping both colours along the chain from the receiving leaf frees `ours` there.
            chain, side, leaf, colour = [], 1, end, ours
            while (side, leaf, colour) in edge_of:
                other = edge_of[side, leaf, colour]
                chain.append(other)
                side = 1 - side
                leaf = leaves[other][side]
                colour = its if colour == ours else ours
            for other in chain:
                for end_side, place in enumerate(leaves[other]):
                    edge_of.pop((end_side, place, colour_of[other]), None)
            for other in chain:
                paint(other, its if colour_of[other] == ours else ours)
        paint(edge, ours)
    return Plan(
        tuple(_path_of_colour(routes, leaves[flow], colour_of.get(flow, 0)) for flow in range(len(leaves)))
    )


def _path_of_colour(routes: Routes, pair: tuple[int, int], colour: int) -> dict[int, int]:
    """Return the path of a colour: up the cable of that number, down by its position among parallel ones."""
    if pair[0] == pair[1]:
        return {}
    group = routes.choices(*pair)
    up = colour % group.size
    middle = routes.network.target[group]
    beside = int(np.count_nonzero(middle[:up] == middle[up]))
    return {pair[0]: up, int(middle[up]): beside}


def _place_greedily(
    flows: Flows, routes: Routes, leaves: list[tuple[int, int]], crossing: list[int], capacity: Floats
) -> Plan:
    """Place each flow, the largest first, where the fullest link of its path is least full."""
    load, room = np.zeros(capacity.size + 1), np.append(capacity, 1.0)
    load[-1] = np.inf  # of NO_LINK, so that it is never chosen
    places: list[dict[int, int]] = [{} for _ in leaves]
    ways: dict[tuple[int, int], _Ways] = {}
    for flow_number in sorted(crossing, key=lambda flow: -flows.share[flow]):
        if leaves[flow_number] not in ways:
            ways[leaves[flow_number]] = _shortest_paths(routes, *leaves[flow_number])
        tried = ways[leaves[flow_number]]
        full = (load[tried.links] + flows.share[flow_number]) / room[tried.links]
        beside = full.argmin(axis=2)
        of_way = full.min(axis=2).max(axis=1)
        best = int(np.argmax(of_way <= of_way.min() * (1 + 1e-12)))
        for hop, cable in enumerate(beside[best].tolist()):
            places[flow_number][tried.switches[best][hop]] = int(tried.places[best, hop, cable])
            load[tried.links[best, hop, cable]] += flows.share[flow_number]
    return Plan(tuple(places))


def _shortest_paths(routes: Routes, here: int, to: int) -> _Ways:
    """Return at most `MAX_TRIED` shortest paths between two switches that differ in the switches they cross.

    Raises:
        Unanswerable: no path joins the switches.
    """
    target = routes.network.target
    ways: list[list[tuple[int, list[int], list[int]]]] = []
    left: list[tuple[int, list[tuple[int, list[int], list[int]]]]] = [(here, [])]
    while left and len(ways) < MAX_TRIED:
        switch, way = left.pop()
        if switch == to:
            ways.append(way)
            continue
        group = routes.choices(switch, to).tolist()
        for after in dict.fromkeys(int(target[link]) for link in group):
            beside = [place for place, link in enumerate(group) if target[link] == after]
            left.append((after, [*way, (switch, [group[place] for place in beside], beside)]))
    if not ways:
        names = routes.network.names
        raise Unanswerable(f"no path leads from {names[here]} to {names[to]}")
    most = max(len(links) for way in ways for _, links, _ in way)
    links, places = np.full((2, len(ways), len(ways[0]), most), NO_LINK)
    for number, way in enumerate(ways):
        for hop, (_, cables, numbers) in enumerate(way):
            links[number, hop, : len(cables)], places[number, hop, : len(cables)] = cables, numbers
    return _Ways([[switch for switch, *_ in way] for way in ways], links, places)
