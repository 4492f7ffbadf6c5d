"""Parts of the network between which all is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.network.traffic import traffic_of
from dpro.detect.network.transfers import find_blocks, find_slow_network
from tests.unit.detect.jobs import MS, equal_work, graph_of

SIX = dict(enumerate("abcdef"))
LEAVES = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1}


def pairs(times: Callable[[int, int], float]) -> pl.DataFrame:
    """Five all-reduces of each pair of six ranks, each a host of its own."""
    rows = [
        {"op": "all_reduce", "bytes": 1 << 20, "num_ranks": 2, "num_hosts": 2, "members": f"{a},{b}"}
        | {"step": step, "transfer_ns": 1e6 * times(a, b) * (1 + 0.01 * ((a * 7 + b * 3 + step) % 5))}
        for a, b in combinations(range(6), 2)
        for step in range(5)
    ]
    return pl.DataFrame(rows)


def crosses(a: int, b: int) -> bool:
    return LEAVES[SIX[a]] != LEAVES[SIX[b]]


def test_hosts_between_which_all_is_slow_are_two_parts():
    (block,) = find_blocks(pairs(lambda a, b: 2.0 if crosses(a, b) else 1.0), SIX)
    assert block.parts == (("a", "b", "c"), ("d", "e", "f"))
    assert block.slow.height == 9
    assert block.slow["excess"].exp().to_list() == pytest.approx([2.0] * 9, rel=0.05)


def test_three_parts_are_found_too():
    (block,) = find_blocks(pairs(lambda a, b: 2.0 if a // 2 != b // 2 else 1.0), SIX)
    assert block.parts == (("a", "b"), ("c", "d"), ("e", "f"))


@pytest.mark.parametrize(
    "times",
    [
        lambda a, b: 1.0,
        lambda a, b: 1.3 if crosses(a, b) else 1.0,  # as may be between switches
        lambda a, b: 2.0 if crosses(a, b) and (a, b) != (0, 5) else 1.0,  # one way through is fast
        lambda a, b: 2.0 if crosses(a, b) or (a, b) == (0, 1) else 1.0 + 0.7 * (a == 2),
        lambda a, b: 2.0 if 3 in (a, b) else 1.0,  # one host's own fault
        lambda a, b: 1.2 ** (a + b),  # no levels at all
    ],
)
def test_what_is_not_slow_between_parts_alone_is_no_block(times):
    assert find_blocks(pairs(times), SIX) == []


def test_one_host_and_the_rest_are_no_parts():
    assert find_blocks(pairs(lambda a, b: 2.0 if a == 0 else 1.0), SIX) == []


def test_what_crosses_the_parts_is_reported_with_its_cost_where_the_job_waits_for_it(tmp_path):
    rounds = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    slow = dict.fromkeys([(0, 2), (1, 3), (0, 3), (1, 2)], 2.0)
    job = replace(equal_work(4, 6, 3), groups=rounds, transfer=10.0, transfer_sigma=0.02)
    work = replace(job, hosts=["a", "b", "c", "d"], links=slow)
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path / "slow", work))))
    assert (finding.class_, finding.component_kind, finding.component_id) == (
        "slow.fabric",
        "hosts",
        "a, b | c, d",
    )
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.1)
    assert finding.confidence <= 0.5
    healthy = replace(work, links={})
    assert find_slow_network(traffic_of(Baseline(graph_of(tmp_path / "healthy", healthy)))) == []
