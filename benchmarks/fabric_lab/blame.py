"""Faults injected into a lab, and the components that dpro blames for slow or lossy messages.

In: a lab and a seed. Out: for each fault what was named. Messages between all hosts of different leaves are
sent over two connections each, some at a time, by whatever paths the kernel hashes them to. A message shows a
fault where it is slower than max-min fairness predicts, or where TCP had to send much of it again. Fairness
also predicts which messages a slow component slows down: one that shares its links is slow already.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from benchmarks.fabric_lab.cases import PAYLOAD
from benchmarks.fabric_lab.connections import LabConnection, SentMessage, connections, moved_at_once
from benchmarks.fabric_lab.lab import CableEnd, Lab, taken
from benchmarks.fabric_lab.traffic import Flow
from dpro.arrays import Floats
from dpro.detect.network.wires import (
    CABLE,
    DIRECTION,
    PORT,
    SWITCHES,
    FabricPart,
    blame_shown,
    components_of,
    crossing_of,
    votes,
    votes_of_losses,
)
from dpro.replay.cost.fabric.connections import max_min_rates
from dpro.replay.cost.fabric.flows import Load
from dpro.replay.cost.fabric.network import Fabric, fabric_of

FAULTS = ("slow cable", "lossy cable", "slow port", "lossy port", "slow switch")
NONE = "none"
LOSS = 0.01  # of packets
CUT = (0.25, 0.5)  # range of the share of a cable's rate that a fault leaves
SLOW = 0.75  # of the fair rate of a message, below which it is slow
PER_PAIR = 2  # connections
TIMES = 2  # that each message is sent, since what is slow once is noise
MESSAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class NamedFault:
    """A fault and what was named.

    Attributes:
        kind: one of `FAULTS`, or `NONE`.
        fault: the component at fault; empty without a fault.
        named: sets of named components; those of a set cannot be distinguished.
        indistinct: components that are crossed by the same messages as the one at fault.
    """

    kind: str
    fault: str
    named: tuple[frozenset[str], ...]
    indistinct: frozenset[str]

    @property
    def right(self) -> bool:
        """Whether the component was named at the level that can be distinguished, and no other."""
        if not self.fault:
            return not self.named
        return len(self.named) == 1 and self.fault in self.named[0] and self.named[0] <= self.indistinct


@dataclass(frozen=True)
class LabTraffic:
    """Messages of a lab.

    Attributes:
        made: the lab.
        components: of its fabric.
        rounds: by round, the flows that send at once, as indices into the other fields.
        open: connection of each flow.
        links: [F, L] whether a flow crosses a link.
        expected: [F] bytes per second, by max-min fairness.
        slowed: [F, C] share of the rates in `CUT` at which a component slows a flow down.
    """

    made: Lab
    components: list[FabricPart]
    rounds: tuple[tuple[int, ...], ...]
    open: list[LabConnection]
    links: csr_matrix
    expected: Floats
    slowed: Floats


@contextmanager
def traffic(made: Lab, draw: random.Random) -> Iterator[LabTraffic]:
    """Connect all hosts of different leaves, and find the path of each connection.

    Args:
        made: the lab, healthy.
        draw: source ports.
    """
    flows: list[Flow] = []
    rounds = []
    for pairs in _rounds(made) * PER_PAIR:
        rounds.append(tuple(range(len(flows), len(flows) + len(pairs))))
        for begin, end in pairs:  # each flow gets its own queue
            port = 40_000 + 256 * draw.randrange(80) + len(flows) % 256
            flows.append(Flow(begin, end, port, 6000 + len(flows)))
    fabric = fabric_of(made.topology())
    nodes = [[fabric.node_of[name] for name in _path(made, flow)] for flow in flows]
    links = _links_of(fabric, nodes)
    components = components_of(fabric)
    expected = _rates(links, rounds, fabric.gbps)
    slowed = np.zeros((len(flows), len(components)))
    for at, part in enumerate(components):
        for left in CUT:
            gbps = fabric.gbps.copy()
            gbps[list(part.links)] *= left
            slowed[:, at] += (_rates(links, rounds, gbps) < SLOW * expected) / len(CUT)
    with connections(made, flows) as found:
        yield LabTraffic(made, components, tuple(rounds), found, links, expected, slowed)


def _links_of(fabric: Fabric, paths: Sequence[Sequence[int]]) -> csr_matrix:
    """Return [P, L] probability that traffic on a path crosses a link; parallel cables share it.

    Args:
        paths: nodes of each path, each cabled to the next.
    """
    hops = [
        (row, link, 1.0 / len(links))
        for row, nodes in enumerate(paths)
        for links in (fabric.links_from[ends] for ends in pairwise(nodes))
        for link in links
    ]
    rows, links, share = (np.array([hop[at] for hop in hops]) for at in range(3))
    return csr_matrix((share, (rows, links)), shape=(len(paths), fabric.source.size))


def _rates(links: csr_matrix, rounds: Sequence[Sequence[int]], gbps: Floats) -> Floats:
    """Return [F] bytes per second, by max-min fairness of the flows of each round."""
    rates = np.zeros(links.shape[0])
    for each in rounds:
        own = links[list(each)]
        load = Load(own.indptr.astype(np.int64), own.indices.astype(np.int64), own.data)
        rates[list(each)] = PAYLOAD * 1e9 * max_min_rates(load, gbps)
    return rates


def of_cases(made: Lab, draw: random.Random, cases: int) -> Iterator[NamedFault]:
    """Yield faults of all kinds in turn, with a healthy case after each round of kinds.

    Args:
        made: the lab.
        draw: source of all random choices.
        cases: faults.
    """
    with traffic(made, draw) as sent:
        sent_all(sent)  # the first messages lose segments, until each connection knows its rate
        for number in range(cases):
            yield of_fault(sent, FAULTS[number % len(FAULTS)], draw)
            if number % len(FAULTS) == len(FAULTS) - 1:
                yield of_fault(sent, NONE, draw)


def judged(rows: Sequence[NamedFault]) -> dict[str, dict[str, Any]]:
    """Compute the checks: share of right cases, by kind, bar, and whether it holds.

    Args:
        rows: of faults, and of healthy cases.
    """
    found: dict[str, dict[str, Any]] = {}
    for check, bar, mine in (
        ("blame", 95.0, [row for row in rows if row.fault]),
        ("blame, healthy", 100.0, [row for row in rows if not row.fault]),
    ):
        right = 100 * sum(row.right for row in mine) / len(mine) if mine else None
        found[check] = {
            "n": len(mine),
            "right_pct": None if right is None else round(right, 1),
            "by_kind": {
                kind: [sum(row.right for row in mine if row.kind == kind), len(own)]
                for kind in (*FAULTS, NONE)
                if (own := [row for row in mine if row.kind == kind])
            },
            "bar": f"right >= {bar:g}%",
            "holds": None if right is None else right >= bar,
        }
    return found


def _rounds(made: Lab) -> list[list[tuple[int, int]]]:
    """Return pairs of hosts of different leaves by round; no host sends or receives twice in a round."""
    left = [pair for pair in permutations(range(made.hosts), 2) if len(set(map(made.leaf_of, pair))) > 1]
    rounds = []
    while left:
        chosen: list[tuple[int, int]] = []
        for pair in left:
            if all(pair[side] != other[side] for other in chosen for side in (0, 1)):
                chosen.append(pair)
        left = [pair for pair in left if pair not in chosen]
        rounds.append(chosen)
    return rounds


def _path(made: Lab, flow: Flow) -> tuple[str, ...]:
    leaves = (f"l{made.leaf_of(flow.begin)}", f"l{made.leaf_of(flow.end)}")
    return f"h{flow.begin}:nic0", leaves[0], taken(made, *flow), leaves[1], f"h{flow.end}:nic0"


def of_fault(sent: LabTraffic, kind: str, draw: random.Random) -> NamedFault:
    """Inject a fault, send all messages, and return what is named.

    Args:
        sent: connections.
        kind: one of `FAULTS`, or `NONE`.
        draw: which component, and how slow.
    """
    sent.made.heal()
    fault = _inject(sent.made, kind, draw)
    messages = sent_all(sent)
    sent.made.heal()
    named = _named(sent, messages)
    same = _crossed_equally(sent, fault) if fault else frozenset[str]()
    return NamedFault(kind, fault, tuple(named), same)


def sent_all(sent: LabTraffic) -> list[SentMessage]:
    """Send messages over each connection, round by round; return the fastest time and the segments of all."""
    found: dict[int, list[SentMessage]] = {}
    for each in sent.rounds * TIMES:
        for at, message in zip(each, moved_at_once([sent.open[at] for at in each], MESSAGE_BYTES)):
            found.setdefault(at, []).append(message)
    columns = [list(zip(*found[at])) for at in range(len(sent.open))]
    return [SentMessage(min(seconds), sum(sent), sum(again)) for seconds, sent, again in columns]


def _inject(made: Lab, kind: str, draw: random.Random) -> str:
    """Inject a fault and return the component at fault, in the words of its kind; "" for `NONE`."""
    leaf, spine, host = draw.randrange(made.leaves), draw.randrange(made.spines), draw.randrange(made.hosts)
    left = draw.uniform(*CUT)
    if kind == "slow cable":
        for end in made.cable_ends(leaf, spine):
            made.limit(end, round(left * made.spine_mbit))
        return f"{CABLE} l{leaf} - s{spine}"
    if kind == "slow port":
        for end in made.port_ends(host):
            made.limit(end, round(left * made.host_mbit))
        return f"{PORT} h{host}:nic0"
    if kind == "lossy cable":
        into = draw.randrange(2)
        made.lose(made.cable_ends(leaf, spine)[into], LOSS)
        return f"{DIRECTION} " + (f"l{leaf} > s{spine}", f"s{spine} > l{leaf}")[1 - into]
    if kind == "lossy port":
        into = draw.randrange(2)
        made.lose(made.port_ends(host)[into], LOSS)
        ends = f"h{host}:nic0", f"l{made.leaf_of(host)}"
        return f"{DIRECTION} {ends[1 - into]} > {ends[into]}"
    if kind == "slow switch":
        name, cables = _cables_of_switch(made, draw.choice([f"l{leaf}", f"s{spine}"]))
        for end in cables:
            made.limit(end, round(left * made.spine_mbit))
        return f"{SWITCHES} {name}"
    return ""


def _cables_of_switch(made: Lab, name: str) -> tuple[str, list[CableEnd]]:
    number = int(name[1:])
    if name[0] == "s":
        ends = [end for leaf in range(made.leaves) for end in made.cable_ends(leaf, number)]
    else:
        ends = [end for spine in range(made.spines) for end in made.cable_ends(number, spine)]
        own = [host for host in range(made.hosts) if made.leaf_of(host) == number]
        ends += [end for host in own for end in made.port_ends(host)]
    return name, ends


def _named(sent: LabTraffic, messages: Sequence[SentMessage]) -> set[frozenset[str]]:
    """Return the components blamed for low rates, and for segments that were sent again."""
    rates = np.array([MESSAGE_BYTES / each.seconds for each in messages])
    segments = np.array([(each.segments, each.retransmitted) for each in messages])
    slow = blame_shown(sent.components, sent.slowed, votes(rates < SLOW * sent.expected))
    crossing = crossing_of(sent.components, sent.links)
    lossy = blame_shown(sent.components, crossing, votes_of_losses(segments[:, 0], segments[:, 1]))
    return {frozenset(part.words for part in each.suspects) for each in (*slow, *lossy)}


def _crossed_equally(sent: LabTraffic, fault: str) -> frozenset[str]:
    """Return the components that exactly the same messages cross as a component, including it."""
    dense = sent.links.toarray()
    crossed = {each.words: tuple(dense[:, list(each.links)].sum(axis=1)) for each in sent.components}
    return frozenset(name for name, column in crossed.items() if column == crossed[fault])
