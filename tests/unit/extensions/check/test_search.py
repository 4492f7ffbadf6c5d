"""Which host or link is at fault, with a network whose rates are made up."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.extensions.check.search import Exchanged, Pair, Reduced, rounds_of, search_network

GBPS = 10.0
# Seconds, rather more than what was measured: connecting two hosts, an exchange, connecting a group.
CONNECT_S, EXCHANGE_S, GROUP_S, TIMEOUT_S = 0.5, 0.3, 3.0, 10.0


@dataclass
class MadeUpNetwork:
    """Hosts and links with a rate, 0 for those that do not answer, and a clock."""

    hosts: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)
    noise: float = 0.02
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    elapsed_s: float = 0.0

    def rate(self, pair: Pair) -> float:
        ways = [self.hosts.get(host, GBPS) for host in pair] + [self.links.get(pair, GBPS)]
        return min(ways) * math.exp(self.draw.gauss(0, self.noise))

    def exchange(self, steps: Sequence[Sequence[Pair]]) -> Mapping[Pair, Exchanged]:
        found = {}
        for step in steps:
            assert len({host for pair in step for host in pair}) == 2 * len(step)
            rates = {pair: self.rate(pair) for pair in step}
            found |= {
                pair: Exchanged(rate) if rate else Exchanged(0.0, error="TimeoutError: no answer")
                for pair, rate in rates.items()
            }
            self.elapsed_s += CONNECT_S + (EXCHANGE_S if all(rates.values()) else TIMEOUT_S)
        return found

    def all_reduce(self, groups: Sequence[Sequence[int]]) -> list[Reduced]:
        assert sum(map(len, groups)) == len({host for group in groups for host in group})
        self.elapsed_s += GROUP_S
        return [
            Reduced(tuple(group), min(self.rate(pair) for pair in combinations(group, 2))) for group in groups
        ]


@settings(max_examples=20)
@given(st.integers(2, 130))
def test_each_pair_exchanges_once_in_as_many_rounds_as_halvings(num_hosts: int) -> None:
    rounds = rounds_of(num_hosts)
    pairs = [tuple(sorted(pair)) for each in rounds for step in each.steps for pair in step]
    assert sorted(pairs) == list(combinations(range(num_hosts), 2))
    assert len(rounds) == math.ceil(math.log2(num_hosts))
    for each in rounds:
        for step in each.steps:
            assert len({host for pair in step for host in pair}) == 2 * len(step)
    assert rounds[-1].groups == [[*range(num_hosts)]]


def test_the_rounds_of_four_hosts() -> None:
    first, second = rounds_of(4)
    assert first.steps == [[(0, 1), (2, 3)]]
    assert second.steps == [[(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    assert (first.groups, second.groups) == ([[0, 1], [2, 3]], [[0, 1, 2, 3]])


@settings(max_examples=12)
@given(st.integers(3, 64), st.data())
def test_any_single_slow_or_silent_host_is_found_in_rounds_of_the_logarithm(num_hosts: int, data) -> None:
    bad = data.draw(st.integers(0, num_hosts - 1))
    rate = data.draw(st.sampled_from([0.0, 1.0, 5.0]))
    network = MadeUpNetwork(hosts={bad: rate}, draw=random.Random(data.draw(st.integers(0, 99))))
    seen = search_network(network, range(num_hosts))
    assert (list(seen.hosts), list(seen.links)) == ([bad], [])
    assert bool(seen.hosts[bad].error) == (rate == 0)
    assert seen.num_rounds <= math.ceil(math.log2(num_hosts)) + 3


@settings(max_examples=12)
@given(st.integers(3, 64), st.data())
def test_any_single_slow_or_broken_link_is_found_and_neither_of_its_ends(num_hosts: int, data) -> None:
    bad = data.draw(st.sampled_from(list(combinations(range(num_hosts), 2))))
    rate = data.draw(st.sampled_from([0.0, 1.0, 5.0]))
    network = MadeUpNetwork(links={bad: rate}, draw=random.Random(data.draw(st.integers(0, 99))))
    seen = search_network(network, range(num_hosts))
    assert (list(seen.hosts), list(seen.links)) == ([], [bad])
    assert bad not in seen.unsure
    assert seen.num_rounds <= math.ceil(math.log2(num_hosts)) + 3


@settings(max_examples=12)
@given(st.integers(2, 64), st.integers(0, 999))
def test_nothing_is_found_where_nothing_is_wrong(num_hosts: int, seed: int) -> None:
    seen = search_network(MadeUpNetwork(draw=random.Random(seed)), range(num_hosts))
    assert (seen.hosts, seen.links) == ({}, {})


def test_of_two_hosts_that_do_not_reach_each_other_either_may_be_at_fault() -> None:
    seen = search_network(MadeUpNetwork(links={(0, 1): 0.0}), range(2))
    assert seen.unsure == {(0, 1)}
    assert seen.hosts == {}


def test_two_slow_hosts_and_a_silent_one_are_found_together() -> None:
    seen = search_network(MadeUpNetwork(hosts={3: 5.0, 10: 2.0, 12: 0.0}), range(16))
    assert sorted(seen.hosts) == [3, 10, 12]
    assert seen.links == {}


def test_what_is_slow_once_and_not_again_is_no_fault() -> None:
    network = MadeUpNetwork()
    once = {(2, 5): 1.0}
    usual = network.rate
    network.rate = lambda pair: once.pop(pair, None) or usual(pair)
    seen = search_network(network, range(8))
    assert (seen.hosts, seen.links, seen.passing) == ({}, {}, [(2, 5)])


@pytest.mark.parametrize("network", [
    MadeUpNetwork(), MadeUpNetwork(hosts={17: 5.0}), MadeUpNetwork(hosts={17: 0.0}),
    MadeUpNetwork(links={(3, 60): 0.0}), MadeUpNetwork(links={(3, 60): 5.0}),
])  # fmt: skip
def test_64_hosts_take_less_than_90_seconds_of_the_two_minutes(network: MadeUpNetwork) -> None:
    search_network(network, range(64))
    assert network.elapsed_s < 90  # by the clock of the network that is made up


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [3, 4, 5, 7, 8, 13, 64])
def test_every_host_and_every_link_of_a_cluster_is_found(num_hosts: int) -> None:
    most = math.ceil(math.log2(num_hosts)) + 3
    for bad in range(0, num_hosts, max(1, num_hosts // 13)):
        for rate in (0.0, 5.0):
            seen = search_network(MadeUpNetwork(hosts={bad: rate}), range(num_hosts))
            assert (list(seen.hosts), list(seen.links)) == ([bad], [])
            assert seen.num_rounds <= most
    pairs = list(combinations(range(num_hosts), 2))
    for bad in pairs[:: max(1, len(pairs) // 20)]:
        for rate in (0.0, 5.0):
            seen = search_network(MadeUpNetwork(links={bad: rate}), range(num_hosts))
            assert (list(seen.hosts), list(seen.links)) == ([], [bad])
            assert seen.num_rounds <= most
