"""Pairs of ranks that take longer than others, and which end of them adds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import polars as pl
import pytest

from dpro.detect.network.traffic import host_of, transfers_of
from dpro.detect.network.transfers import SCHEMA, both_ways, delay_matrix, host_matrix
from tests.unit.detect.jobs import MS, equal_work, graph_of

Times = Callable[[int, int], float]


def transfers(
    pairs: Iterable[tuple[int, int]],
    times: Times,
    op: str = "message",
    hosts: dict[int, str] | None = None,
    base_ns: float = 1000.0,
    size: int = 1 << 20,
) -> pl.DataFrame:
    """Five transfers of each pair; the typical one takes `base_ns` times the factor of the pair."""
    hosts = hosts or {}
    rows = [
        {
            "op": op,
            "bytes": size,
            "num_ranks": 2,
            "num_hosts": len({hosts.get(rank, "") for rank in pair}),
            "members": ",".join(map(str, pair)),
            "step": step,
            "transfer_ns": base_ns * times(*pair) * (1 + 0.001 * (step - 2)),
        }
        for pair in pairs
        for step in range(5)
    ]
    return pl.DataFrame(rows)


def column(matrix: pl.DataFrame, name: str) -> dict[tuple[int, int], float]:
    return {(a, b): value for a, b, value in matrix.select("source", "target", name).iter_rows()}


def test_pairs_that_take_equally_long_take_what_is_expected():
    matrix = delay_matrix(transfers(permutations(range(4), 2), lambda a, b: 1.0), {})
    assert matrix.schema == pl.Schema(SCHEMA)
    assert matrix.height == 12
    assert matrix["count"].to_list() == [5] * 12
    assert matrix["bytes"].to_list() == [5 << 20] * 12
    for name in ("ratio", "sender", "receiver", "link"):
        assert matrix[name].to_list() == pytest.approx([1.0] * 12)
    assert matrix["expected_ns"].to_list() == pytest.approx([1000.0] * 12)


def test_slow_sender_is_a_row_and_slow_receiver_a_column():
    slow = transfers(permutations(range(5), 2), lambda a, b: (3 if a == 1 else 1) * (2 if b == 4 else 1))
    matrix = delay_matrix(slow, {})
    ratio, sender, receiver, link = (column(matrix, n) for n in ("ratio", "sender", "receiver", "link"))
    assert ratio[1, 4] == pytest.approx(6)
    assert ratio[1, 0] == pytest.approx(3)
    assert ratio[0, 4] == pytest.approx(2)
    assert ratio[0, 2] == pytest.approx(1)
    assert [sender[1, 0], sender[0, 1]] == pytest.approx([3, 1])
    assert [receiver[0, 4], receiver[0, 1]] == pytest.approx([2, 1])
    assert list(link.values()) == pytest.approx([1] * 20)


def test_slow_link_is_a_cell_in_one_direction():
    slow = transfers(permutations(range(4), 2), lambda a, b: 4.0 if (a, b) == (2, 1) else 1.0)
    matrix = delay_matrix(slow, {})
    link = column(matrix, "link")
    assert link.pop((2, 1)) == pytest.approx(4)
    assert list(link.values()) == pytest.approx([1] * 11)
    assert matrix["sender"].to_list() == pytest.approx([1] * 12)


def test_rank_that_is_in_half_of_all_pairs_is_still_the_slow_one():
    slow = transfers(combinations(range(4), 2), lambda a, b: 2.0 if b == 3 else 1.0, op="all_reduce")
    matrix = delay_matrix(slow, {})
    assert matrix["expected_ns"].to_list() == pytest.approx([1000] * 6)
    receiver = column(matrix, "receiver")
    assert [receiver[0, 3], receiver[0, 1]] == pytest.approx([2, 1])
    assert matrix["link"].to_list() == pytest.approx([1] * 6)


def test_ring_does_not_separate_sender_receiver_and_link():
    ring = [(rank, (rank + 1) % 6) for rank in range(6)]
    matrix = delay_matrix(transfers(ring, lambda a, b: 3.0 if a == 2 else 1.0), {})
    ratio = column(matrix, "ratio")
    assert ratio[2, 3] == pytest.approx(3)
    assert matrix["sender"].null_count() == matrix["receiver"].null_count() == 6
    assert matrix["link"].to_list() == pytest.approx(matrix["ratio"].to_list())


def test_pairs_within_and_between_hosts_are_expected_to_differ():
    hosts = dict(enumerate("aaabbb"))
    moved = transfers(
        permutations(range(6), 2), lambda a, b: 1.0 if hosts[a] == hosts[b] else 8.0, hosts=hosts
    )
    matrix = delay_matrix(moved, hosts)
    assert matrix["ratio"].to_list() == pytest.approx([1.0] * 30)
    expected = column(matrix, "expected_ns")
    assert [expected[0, 1], expected[0, 3]] == pytest.approx([1000, 8000])


def test_sizes_are_compared_each_with_its_kind_and_reported_together():
    pairs = list(permutations(range(4), 2))
    small = transfers(pairs, lambda a, b: 2.0 if a == 0 else 1.0)
    large = transfers(pairs, lambda a, b: 2.0 if a == 0 else 1.0, base_ns=9000.0, size=9 << 20)
    matrix = delay_matrix(pl.concat([small, large]), {})
    ratio, taken = column(matrix, "ratio"), column(matrix, "transfer_ns")
    assert [ratio[0, 1], ratio[1, 0]] == pytest.approx([2, 1])
    assert [taken[0, 1], taken[1, 0]] == pytest.approx([10000, 5000])
    assert matrix.filter(source=0, target=1)["bytes"].item() == 5 * (10 << 20)


def test_nothing_is_expected_of_a_kind_that_only_two_pairs_have():
    matrix = delay_matrix(transfers([(0, 1), (2, 3)], lambda a, b: 1.0 + a), {})
    assert matrix["transfer_ns"].to_list() == pytest.approx([1000, 3000])
    for name in ("expected_ns", "ratio", "sender", "receiver", "link"):
        assert matrix[name].null_count() == 2


def test_sort_that_has_too_few_of_its_like_changes_no_ratio():
    pairs = list(permutations(range(4), 2))
    usual = transfers(pairs, lambda a, b: 2.0 if a == 0 else 1.0)
    odd = transfers([(0, 1)], lambda a, b: 100.0, size=7)
    matrix = delay_matrix(pl.concat([usual, odd]), {})
    assert matrix.height == 12
    assert column(matrix, "ratio")[0, 1] == pytest.approx(2)
    assert column(matrix, "count")[0, 1] == 10


def test_effects_are_found_in_noise_with_pairs_missing():
    generator = np.random.default_rng(3)
    pairs = [pair for pair in permutations(range(16), 2) if generator.random() < 0.5]
    noise = {pair: generator.lognormal(0, 0.05) for pair in pairs}
    slow = transfers(
        pairs, lambda a, b: noise[a, b] * (1.5 if a == 5 else 1) * (2 if (a, b) == pairs[0] else 1)
    )
    matrix = delay_matrix(slow, {})
    sender = matrix.unique("source").sort("source")["sender"].to_list()
    assert sender[5] == pytest.approx(1.5, rel=0.06)
    assert max(sender[:5] + sender[6:]) < 1.06
    assert column(matrix, "link")[pairs[0]] == pytest.approx(2, rel=0.2)


def test_hosts_are_given_by_the_median_of_their_pairs():
    hosts = dict(enumerate("aabbcc"))
    moved = transfers(
        combinations(range(6), 2),
        lambda a, b: 3.0 if {hosts[a], hosts[b]} == {"a", "c"} else 1.0,
        op="all_reduce",
        hosts=hosts,
    )
    between = host_matrix(delay_matrix(moved, hosts))
    ratio = {
        (a, b): value for a, b, value in between.select("source_host", "target_host", "ratio").iter_rows()
    }
    assert ratio["a", "c"] == ratio["c", "a"] == pytest.approx(3)
    assert ratio["a", "b"] == ratio["b", "a"] == pytest.approx(1)
    assert between.filter(source_host="a", target_host="b")["num_pairs"].item() == 4


def test_square_has_pairs_without_direction_twice_and_messages_once():
    shared = transfers([(0, 1), (0, 2), (1, 2)], lambda a, b: 1.0, op="all_reduce")
    sent = transfers([(0, 1), (1, 2), (2, 0)], lambda a, b: 1.0)
    square = both_ways(delay_matrix(pl.concat([shared, sent]), {}))
    assert square.filter(~pl.col("directed")).height == 6
    assert square.filter("directed").height == 3


def test_nothing_moved_is_no_row():
    empty = transfers([(0, 1)], lambda a, b: 1.0).clear()
    matrix = delay_matrix(empty, {})
    assert matrix.is_empty()
    assert matrix.schema == pl.Schema(SCHEMA)
    assert host_matrix(matrix).is_empty()


def test_job_with_a_slow_link_shows_it_in_its_matrix(tmp_path):
    rounds = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    changes = {"groups": rounds, "transfer": 10.0, "links": {(1, 2): 2.0}, "hosts": ["a", "b", "c", "d"]}
    graph = graph_of(tmp_path, replace(equal_work(4, 6, 3), **changes))
    matrix = delay_matrix(transfers_of(graph), host_of(graph))
    taken, ratio = column(matrix, "transfer_ns"), column(matrix, "ratio")
    assert taken[1, 2] == pytest.approx(20 * MS, rel=0.01)
    assert ratio.pop((1, 2)) == pytest.approx(2, rel=0.01)
    assert list(ratio.values()) == pytest.approx([1] * 5, rel=0.01)
    assert matrix["source_host"].to_list() == ["a", "a", "a", "b", "b", "c"]
