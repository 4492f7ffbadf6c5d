"""Costs of algorithms, against their rounds counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.cost.curves import LinkCost
from dpro.replay.cost.transfers import FLAT, Cost, LinkModel, cost, link_of, time_ns, two_level_ns

ranks = st.integers(2, 300)


def _rounds(op: str, algorithm: str, num_ranks: int) -> list[float]:
    """The share of the payload that passes a link in each round."""
    if algorithm == "ring":
        once = [1 / num_ranks] * (num_ranks - 1)
    else:  # of a power of two: halves, quarters, …
        once = [1 / 2**level for level in range(1, num_ranks.bit_length())]
    return once * (2 if op == "all_reduce" else 1)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), ranks)
def test_a_ring_takes_a_round_for_each_other_rank(op, num_ranks):
    rounds = _rounds(op, "ring", num_ranks)
    assert cost(op, "ring", num_ranks).messages == len(rounds)
    assert cost(op, "ring", num_ranks).share == pytest.approx(sum(rounds))


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(1, 12))
def test_halving_takes_a_round_for_each_power_of_two(op, power):
    rounds = _rounds(op, "halving", 2**power)
    assert cost(op, "halving", 2**power).messages == len(rounds)
    assert cost(op, "halving", 2**power).share == pytest.approx(sum(rounds))


@given(ranks)
def test_tree_has_the_fewest_messages_and_no_less_to_move(num_ranks):
    ring, tree, halving = (cost("all_reduce", name, num_ranks) for name in FLAT)
    assert tree.messages == halving.messages <= ring.messages
    assert ring.share == halving.share <= tree.share == 2


@given(st.sampled_from(["ring", "halving"]), ranks)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(algorithm, num_ranks):
    parts = [cost(op, algorithm, num_ranks) for op in ("reduce_scatter", "all_gather")]
    whole = cost("all_reduce", algorithm, num_ranks)
    assert whole == Cost(sum(p.messages for p in parts), sum(p.share for p in parts))


def test_of_what_there_is_no_formula_is_said():
    for op, algorithm in (("broadcast", "ring"), ("all_gather", "tree"), ("all_reduce", "star")):
        with pytest.raises(Unanswerable, match=f"no formula for {op}"):
            cost(op, algorithm, 4)
    with pytest.raises(Unanswerable, match="no formula for all_to_all"):
        two_level_ns("all_to_all", 2, 2, LinkModel(1, 1), LinkModel(1, 1), np.ones(1))


@given(st.sampled_from(FLAT), ranks, st.floats(0, 1e6), st.floats(1e-6, 10))
def test_the_link_of_a_line_gives_the_line_back(algorithm, num_ranks, latency, per_byte):
    line = LinkCost(latency, per_byte, 0, 0, 9, 0, False)
    spent = cost("all_reduce", algorithm, num_ranks)
    sizes = np.array([1.0, 1e3, 1e9])
    assert time_ns(spent, link_of(line, spent, sizes), sizes) == pytest.approx(line.time_ns(sizes))


@given(st.integers(2, 40), st.integers(2, 16))
def test_on_two_levels_the_port_of_a_host_moves_what_one_rank_for_all_of_it_would(hosts, per_host):
    size, outside = np.array([1e6]), LinkModel(1000.0, 2.0)
    free = two_level_ns("all_reduce", hosts, per_host, outside, LinkModel(0, 0), size)
    assert free == pytest.approx(time_ns(cost("all_reduce", "ring", hosts), outside, size))
    flat = time_ns(cost("all_reduce", "ring", hosts * per_host), outside, size)
    assert free < flat


def test_four_ranks_on_two_hosts_by_hand():
    # Within: two rounds of half of 1000 bytes. Between: two rounds in which the port moves half.
    taken = two_level_ns("all_reduce", 2, 2, LinkModel(10, 4), LinkModel(1, 0.5), np.array([1000.0]))
    assert taken == pytest.approx([2 * (1 + 0.5 * 500) + 2 * (10 + 4 * 500)])
