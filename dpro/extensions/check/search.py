"""Search for hosts and links that are slow or broken, by exchanges in rounds.

Takes a transport, which does exchanges and all-reduces and returns their bandwidth; returns the hosts and
links at fault, and all figures. Every pair exchanges once, in log2(N) rounds (`rounds_of`). Failed exchanges
are tried again at once with other hosts, so that a dead host is left out of later rounds. Slow ones are
judged after all rounds, and tried twice more, the best try counting: hosts whose exchanges are nearly all
slow are at fault, else the single link is. So a fault is found in log2(N) + 3 rounds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from dpro.arrays import MAD_TO_SIGMA

# Schedule of exchanges: each pair once, in rounds of ever larger groups.

Pair = tuple[int, int]


class Round(NamedTuple):
    """Exchanges that take place together.

    Attributes:
        steps: pairs of each step; no host is in two pairs of a step.
        groups: hosts of each group, all of which exchange within it, in this or earlier rounds.
    """

    steps: list[list[Pair]]
    groups: list[list[int]]


def rounds_of(num_hosts: int) -> list[Round]:
    """Return the rounds, the smallest groups first."""
    levels: list[list[range]] = []
    level = [range(num_hosts)]
    while any(len(group) > 1 for group in level):
        levels.append(level)
        level = [half for group in level for half in _halves(group)]
    return [_round_of_pairs(groups) for groups in reversed(levels)]


def _halves(group: range) -> list[range]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if len(half)]


def _round_of_pairs(groups: list[range]) -> Round:
    split = [_halves(group) for group in groups if len(group) > 1]
    num_steps = max(len(left) for left, _ in split)
    steps = [
        [
            (host, right[(place + step) % len(left)])
            for left, right in split
            if step < len(left)
            for place, host in enumerate(left)
            if (place + step) % len(left) < len(right)
        ]
        for step in range(num_steps)
    ]
    return Round(steps, [[*group] for group in groups if len(group) > 1])


FITS = 0.9  # share of a host's exchanges that are slow if it is at fault
AGAIN = 2  # hosts with which a suspected host exchanges again
TRIES = 2  # number of further tries
MIN_GROUP = 3  # hosts; an all-reduce of two is an exchange


class Exchanged(NamedTuple):
    """Result of an exchange.

    Attributes:
        gbps: one way, 1e9 bytes/s, of the slowest device; 0 if it failed.
        device: the slowest.
        error: why it failed; empty if it did not.
    """

    gbps: float
    device: int = 0
    error: str = ""


class Reduced(NamedTuple):
    """Result of an all-reduce.

    Attributes:
        gbps: bus bandwidth of the slowest device, 1e9 bytes/s; 0 if it failed.
        error: why it failed; empty if it did not.
    """

    hosts: tuple[int, ...]
    gbps: float
    num_bytes: int = 0
    error: str = ""


class Fault(NamedTuple):
    """Why a host or a link is at fault.

    Attributes:
        times: how many times as fast others are; 0 if it failed.
        error: how it failed; empty if it is slow.
    """

    times: float = 0.0
    error: str = ""


class Transport(Protocol):
    """Transport of data between hosts."""

    def exchange(self, steps: Sequence[Sequence[Pair]]) -> Mapping[Pair, Exchanged]:
        """Exchange, step by step; the pairs of a step exchange at the same time."""

    def all_reduce(self, groups: Sequence[Sequence[int]]) -> list[Reduced]:
        """Reduce over groups of hosts at the same time; no host is in two groups."""


@dataclass
class NetworkChecked:
    """Results of the exchanges.

    Attributes:
        exchanged: by pair, from the first try.
        reduced: all-reduces, the smallest groups first.
        hosts, links: at fault, and why.
        unsure: links with an end that may be at fault instead, since no other host can test it.
        passing: pairs that were slow once and not again.
    """

    exchanged: dict[Pair, Exchanged] = field(default_factory=dict)
    reduced: list[Reduced] = field(default_factory=list)
    hosts: dict[int, Fault] = field(default_factory=dict)
    links: dict[Pair, Fault] = field(default_factory=dict)
    unsure: set[Pair] = field(default_factory=set)
    passing: list[Pair] = field(default_factory=list)
    num_rounds: int = 0

    def moved(self, without: Iterable[int] = ()) -> dict[Pair, float]:
        """Return the bandwidth of exchanges that succeeded, 1e9 bytes/s, except those of some hosts."""
        out = set(without)
        return {
            pair: exchanged.gbps
            for pair, exchanged in self.exchanged.items()
            if not exchanged.error and not out & {*pair}
        }  # fmt: skip


def search_network(transport: Transport, hosts: Sequence[int]) -> NetworkChecked:
    """Do all rounds, and find hosts and links at fault."""
    seen = NetworkChecked()
    for steps, groups in rounds_of(len(hosts)):
        pairs = [[_pair(hosts[one], hosts[other]) for one, other in step] for step in steps]
        left = [[pair for pair in step if not {*pair} & seen.hosts.keys()] for step in pairs]
        round_ = _round(transport, seen, left)
        seen.exchanged.update(round_)
        failed = [pair for pair, exchanged in round_.items() if exchanged.error]
        if failed:
            _try_others(transport, seen, failed, hosts)
        members = (_able_to_reduce([hosts[number] for number in group], seen) for group in groups)
        whole = [group for group in members if len(group) >= MIN_GROUP]
        seen.reduced += transport.all_reduce(whole) if whole else []
    _judge(transport, seen)
    return seen


def _round(
    transport: Transport, seen: NetworkChecked, steps: Sequence[Sequence[Pair]]
) -> Mapping[Pair, Exchanged]:
    steps = [step for step in steps if step]
    if not steps:
        return {}
    seen.num_rounds += 1
    return transport.exchange(steps)


def _able_to_reduce(group: Sequence[int], seen: NetworkChecked) -> list[int]:
    """Return the members of a group that can reduce; empty if a link between two of them is broken."""
    members = [host for host in group if host not in seen.hosts]
    return [] if any({*pair} <= {*members} for pair in seen.links) else members


def _try_others(
    transport: Transport, seen: NetworkChecked, failed: Sequence[Pair], hosts: Sequence[int]
) -> None:
    """Let both ends of failed pairs exchange with others: who fails again is at fault, else the link."""
    suspects = sorted({host for pair in failed for host in pair})
    apart = {*failed}
    used = Counter(suspects)  # hosts that are not suspects come first, each for another suspect
    pairs: dict[int, Pair] = {}
    for suspect in suspects:
        others = [
            host for host in hosts if host not in (suspect, *seen.hosts) and _pair(suspect, host) not in apart
        ]
        if others:
            partner = min(others, key=used.__getitem__)
            used[partner] += 1
            pairs[suspect] = _pair(suspect, partner)
    again = _round(transport, seen, disjoint_steps(pairs.values()))
    for suspect, pair in pairs.items():
        if again[pair].error:
            seen.hosts[suspect] = Fault(error=again[pair].error)
    for suspect in set(suspects) - pairs.keys():  # it has failed with all hosts
        errors = [exchanged.error for pair, exchanged in seen.exchanged.items() if suspect in pair]
        if len(errors) > 1 and all(errors):
            seen.hosts[suspect] = Fault(error=errors[0])
    for pair in failed:
        if not {*pair} & seen.hosts.keys():
            seen.links[pair] = Fault(error=seen.exchanged[pair].error)
            if not {*pair} & pairs.keys():
                seen.unsure.add(pair)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


def disjoint_steps(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Return steps of disjoint pairs, each pair in the first step with room for it."""
    steps: list[list[Pair]] = []
    for pair in dict.fromkeys(pairs):
        room = next((step for step in steps if not any({*pair} & {*other} for other in step)), None)
        if room is None:
            steps.append([pair])
        else:
            room.append(pair)
    return steps


def _judge(transport: Transport, seen: NetworkChecked) -> None:
    """Find slow hosts and links, and keep those that are slow again."""
    hosts: dict[int, float] = {}
    usable = seen.moved()
    while slow := {host: times for host in _hosts_in(usable) if (times := _times_of_host(usable, host))}:
        worst = max(slow, key=slow.__getitem__)
        hosts[worst] = slow[worst]
        usable = seen.moved(without=hosts)
    links = slower_than_peers(usable)
    healthy = {pair: figure for pair, figure in usable.items() if pair not in links}
    if not hosts and not links:
        return
    tried = {host: [_pair(host, other) for other in _hosts_in(healthy)[:AGAIN]] for host in hosts}
    pairs = [*links, *chain.from_iterable(tried.values())]
    steps = disjoint_steps(pairs)
    tries = [_round(transport, seen, steps) for _ in range(TRIES)]
    again = {pair: max(exchanged[pair].gbps for exchanged in tries) for pair in pairs}
    peers = peers_of(healthy.values())
    for host, with_others in tried.items():
        if all(peers.times(again[pair]) for pair in with_others):
            seen.hosts[host] = Fault(hosts[host])
        else:
            seen.passing += with_others[:1]
    for pair, times in links.items():
        if peers.times(again[pair]):
            seen.links[pair] = Fault(times)
        else:
            seen.passing.append(pair)


def _hosts_in(pairs: Iterable[Pair]) -> list[int]:
    return sorted({host for pair in pairs for host in pair})


def _times_of_host(usable: Mapping[Pair, float], host: int) -> float:
    """Return how many times as fast others' exchanges are if nearly all of a host's are slow; else 0."""
    figures = [figure for pair, figure in usable.items() if host in pair]
    others = [figure for pair, figure in usable.items() if host not in pair]
    if not others:
        return 0.0
    peers = peers_of(others)
    slow = sum(bool(peers.times(figure)) for figure in figures)
    return peers.median / statistics.median(figures) if slow >= FITS * len(figures) else 0.0


# Compares a figure of each host with that of the others, where more is better. The reference is the median of
# all others, and the threshold follows from their median absolute deviation, with a floor: up to half of the
# others may have any value.

MIN_SLOW = 1.15  # least factor by which the others are faster
MIN_SLOW_OF_TWO = 1.5  # if there is only one other
DEVIATIONS = 5.0
MIN_DEVIATION = 0.02  # of a logarithm: floor of the deviation
_SMALLEST = 1e-12

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PeerFigures:
    """Figures of the other hosts.

    Attributes:
        limit: factor below the median from which on a figure is slow.
    """

    median: float
    limit: float

    def times(self, figure: float) -> float:
        """Return how many times as fast the others typically are if a figure is clearly lower; else 0."""
        behind = self.median / max(figure, _SMALLEST)
        return behind if behind >= self.limit else 0.0


def peers_of(figures: Collection[float], least: float = MIN_SLOW) -> PeerFigures:
    """Return the median of some figures, and the limit of a slow one.

    Args:
        figures: at least one.
        least: least factor of a slow figure.
    """
    logs = np.log(np.maximum(np.fromiter(figures, float), _SMALLEST))
    middle = float(np.median(logs))
    spread = float(np.median(np.abs(logs - middle))) * MAD_TO_SIGMA
    least = least if logs.size > 1 else max(least, MIN_SLOW_OF_TWO)
    far = max(math.log(least), DEVIATIONS * max(spread, MIN_DEVIATION))
    return PeerFigures(math.exp(middle), math.exp(far) * (1 - 1e-9))


def slower_than_peers(figures: Mapping[Key, float]) -> dict[Key, float]:
    """Return how many times as fast the others typically are, for each clearly slower figure."""
    slower = {}
    values = list(figures.values())
    for place, (key, figure) in enumerate(figures.items()):
        others = values[:place] + values[place + 1 :]
        times = peers_of(others).times(figure) if others else 0.0
        if times:
            slower[key] = times
    return slower
