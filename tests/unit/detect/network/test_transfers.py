"""Slow links and ports, distinguished by which groups are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.baseline import Baseline
from dpro.detect.findings import NETWORK
from dpro.detect.network.traffic import traffic_of, transfers_of
from dpro.detect.network.transfers import CROWDED, blame, compare_groups, find_slow_network
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity import accuracy
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import replay
from dpro.store import open_run
from tests.unit.detect.jobs import MS, Work, equal_work, graph_of, noisy, write_job

FOUR = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))  # all pairs of four ranks, in three rounds


def pairs(num_steps: int = 6, **changes: object) -> Work:
    """Four ranks that talk pair by pair, each a host of its own."""
    work = equal_work(4, num_steps, num_collectives=3)
    hosts = ["a", "b", "c", "d"]
    usual = {"groups": FOUR, "transfer": 10.0, "transfer_sigma": 0.03, "hosts": hosts}
    return replace(work, **(usual | changes))


def named(tmp_path, work: Work) -> list[tuple[str, str, str]]:
    found = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, work))))
    return [(finding.class_, finding.component_kind, finding.component_id) for finding in found]


def test_healthy_network_is_left_alone(tmp_path):
    assert named(tmp_path, noisy(pairs(), 0, 0.05)) == []


@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_noise_of_transfers_blames_nothing(tmp_path, sigma):
    for seed in range(10):
        work = noisy(pairs(num_steps=4, transfer_sigma=sigma, transfer_seed=seed), seed, 0.05)
        assert named(tmp_path / str(seed), work) == []


def test_one_slow_pair_of_many_is_a_slow_link(tmp_path):
    assert named(tmp_path, pairs(links={(1, 2): 2.0})) == [("slow.link", "link", "1 - 2")]


def test_rank_whose_pairs_are_all_slow_has_a_slow_port(tmp_path):
    slow = {pair: 2.0 for pair in combinations(range(4), 2) if 3 in pair}
    assert named(tmp_path, pairs(links=slow)) == [("slow.nic", "rank", "3")]


def test_two_faults_are_two_findings(tmp_path):
    rounds = [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 2), (1, 3), (4, 6), (5, 7)],
        [(0, 3), (1, 2), (4, 7), (5, 6)],
    ]
    work = replace(equal_work(8, 6, 3), groups=rounds, transfer=10.0, transfer_sigma=0.02)
    work = replace(work, links={(1, 2): 3.0, (4, 6): 2.0})
    assert sorted(named(tmp_path, work)) == [("slow.link", "link", "1 - 2"), ("slow.link", "link", "4 - 6")]


def test_cost_is_what_the_steps_would_save(tmp_path):
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, pairs(links={(1, 2): 3.0})))))
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.1)
    assert finding.ranks == (1, 2)
    observed = {one.kind: one.values for one in finding.observations}
    slow = observed["slow-transfer"]
    assert (slow["ranks"], slow["typical_ns"]) == ([1, 2], pytest.approx(10 * MS, rel=0.05))
    assert slow["transfer_ns"] == pytest.approx(30 * MS, rel=0.05)
    assert finding.confidence > 0.9


def test_transfers_are_compared_where_the_replay_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "WORST_ANCHORED", -1.0)
    slow, healthy = pairs(links={(1, 2): 3.0}), pairs()
    analysis = Analysis(open_run(write_job(tmp_path / "slow", slow)))
    assert not analysis.trust.answerable
    found, why = analysis.verdict
    (finding,) = (one for one in found if one.component_kind == "link")
    assert (finding.class_, finding.component_id) == ("slow.link", "1 - 2")
    assert any("at most: the replay does not fit" in one.text for one in finding.observations)
    assert finding.cost_ns == pytest.approx(20 * MS, rel=0.1)
    assert any("were taken from the trace" in reason for reason in why)
    found, _ = Analysis(open_run(write_job(tmp_path / "healthy", healthy))).verdict
    assert [one for one in found if one.class_ in NETWORK] == []


def test_transfers_are_not_compared_where_clocks_contradict_each_other(tmp_path, monkeypatch):
    run = open_run(write_job(tmp_path, pairs(links={(1, 2): 3.0})))
    built = build_graph(run)
    unclear = replace(built, alignment=replace(built.alignment, conflicts=("clocks differ",)))
    trust = assess(unclear, replay(built.graph), run.manifest)
    assert (trust.answerable, trust.comparable) == (False, False)
    monkeypatch.setattr(Analysis, "trust", trust)
    assert [one for one in Analysis(run).verdict[0] if one.class_ in NETWORK] == []


@pytest.mark.parametrize(("hosts", "said"), [(["a", "b", "c", "d"], True), (["a"] * 4, False)])
def test_a_slow_link_between_hosts_may_be_one_where_other_flows_meet(tmp_path, hosts, said):
    work = pairs(links={(1, 2): 2.0}, hosts=hosts)
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, work))))
    assert finding.component_kind == "link"
    assert (CROWDED in finding.observations) == said


def test_a_slow_port_is_not_what_meeting_flows_look_like(tmp_path):
    slow = {pair: 2.0 for pair in combinations(range(4), 2) if 3 in pair}
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, pairs(links=slow)))))
    assert CROWDED not in finding.observations


def test_rings_that_share_no_rank_do_not_show_which_of_their_parts_is_slow(tmp_path):
    rings = [[(0, 1), (2, 3), (4, 5), (6, 7)]] * 2
    work = replace(equal_work(8, 6), groups=rings, transfer=10.0, transfer_sigma=0.02, links={(4, 5): 2.0})
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, work))))
    assert finding.component_kind == "one of"
    assert finding.component_id == "rank 4, rank 5, link 4 - 5"
    assert finding.confidence < 0.5
    assert "no recorded group has one of these without the others" in finding.evidence


def two_groups(**changes: object) -> Work:
    """Four ranks in two groups of two, which are all of their kind."""
    work = replace(equal_work(4, 6), groups=[[(0, 1), (2, 3)]] * 2, transfer=10.0, transfer_sigma=0.03)
    return replace(work, **changes)


def test_slower_of_two_groups_is_one_of_three_things_and_doubtful(tmp_path):
    (finding,) = find_slow_network(traffic_of(Baseline(graph_of(tmp_path, two_groups(links={(0, 1): 3.0})))))
    assert finding.component_id == "rank 0, rank 1, link 0 - 1"
    assert finding.confidence <= 0.5 / 3
    assert any("two groups of a kind do not show" in line for line in finding.evidence)


def test_two_groups_that_differ_little_or_at_no_cost_say_nothing(tmp_path):
    assert named(tmp_path / "little", two_groups(links={(0, 1): 1.3})) == []
    assert named(tmp_path / "free", two_groups(transfer=0.1, links={(0, 1): 3.0})) == []


def test_groups_across_hosts_are_not_compared_with_groups_within(tmp_path):
    crossing = dict.fromkeys([(0, 2), (1, 3), (0, 3), (1, 2)], 5.0)
    assert named(tmp_path, pairs(hosts=["a", "a", "b", "b"], links=crossing)) == []


def test_slow_transfer_that_lasts_a_moment_is_none(tmp_path):
    graph = graph_of(tmp_path, pairs(num_steps=10))
    transfers = transfers_of(graph)
    spoiled = pl.when((pl.col("members") == "1,2") & (pl.col("step") == 4)).then(9).otherwise(1)
    assert not compare_groups(transfers.with_columns(pl.col("transfer_ns") * spoiled))["slow"].any()


def table(op: str, rows: Sequence[tuple[str, bool]]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema={"members": pl.String, "slow": pl.Boolean}, orient="row")
    return frame.with_columns(op=pl.lit(op))


def suspects(groups: pl.DataFrame, hosts: dict[int, str]) -> list[list[tuple[str, str]]]:
    return [[(suspect.kind, suspect.id) for suspect in each] for each, _ in blame(groups, hosts)]


def test_messages_distinguish_a_slow_sender_from_a_slow_receiver():
    every = [(a, b) for a in range(4) for b in range(4) if a != b]
    apart = dict(enumerate("abcd"))
    sender = table("message", [(f"{a},{b}", a == 2) for a, b in every])
    receiver = table("message", [(f"{a},{b}", b == 2) for a, b in every])
    one_way = table("message", [(f"{a},{b}", (a, b) == (1, 2)) for a, b in every])
    assert suspects(sender, apart) == [[("sender", "rank 2")]]
    assert suspects(receiver, apart) == [[("receiver", "rank 2")]]
    assert suspects(one_way, apart) == [[("link", "1 -> 2")]]


def test_host_whose_ranks_all_talk_slowly_to_others_is_named():
    hosts = {rank: "ab"[rank // 4] + str(rank // 2) for rank in range(8)}
    every = list(combinations(range(8), 2))
    groups = table(
        "all_reduce", [(f"{a},{b}", hosts[a] != hosts[b] and "b2" in (hosts[a], hosts[b])) for a, b in every]
    )
    assert suspects(groups, hosts) == [[("host", "b2")]]
    between = table("all_reduce", [(f"{a},{b}", {hosts[a], hosts[b]} == {"a0", "b2"}) for a, b in every])
    assert suspects(between, hosts) == [[("hosts", "a0 - b2")]]


def test_way_out_of_the_host_is_distinguished_from_the_rank_itself():
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    every = list(combinations(range(4), 2))
    groups = table("all_reduce", [(f"{a},{b}", 0 in (a, b) and hosts[a] != hosts[b]) for a, b in every])
    assert suspects(groups, hosts) == [[("nic", "rank 0")]]
    everywhere = table("all_reduce", [(f"{a},{b}", 0 in (a, b)) for a, b in every])
    assert suspects(everywhere, hosts) == [[("rank", "0")]]


def test_every_slow_group_is_explained():
    groups = table(
        "all_reduce",
        [
            ("0,1,2,3", True),
            ("4,5,6,7", False),
            ("0,4", False),
            ("1,5", False),
            ("2,6", False),
            ("3,7", False),
        ],
    )
    assert suspects(groups, {}) == [[("group", "0,1,2,3")]]


def test_a_link_that_slow_rings_of_several_groups_share_is_named():
    # Rings 0-1-2, 1-2-3-4 and 3-4-5 have links of their own; 1 - 2 is in both that are slow.
    slow = {"0,1,2", "1,2,3,4"}
    every = ["0,1,2", "1,2,3,4", "3,4,5", "1,4", "2,5", "0,3"]
    groups = table("all_reduce", [(members, members in slow) for members in every])
    assert suspects(groups, {}) == [[("link", "1 - 2")]]


def test_links_of_a_slow_ring_that_fast_rings_have_too_are_cleared():
    # Of ring 0-1-2-3 the links 0 - 1 and 1 - 2 are in fast ones, and all its ranks.
    groups = table("all_reduce", [("0,1,2,3", True), ("0,1,2,4", False), ("3,5", False), ("4,5,6", False)])
    assert suspects(groups, {}) == [[("link", "2 - 3"), ("link", "0 - 3")]]


def test_a_pairwise_operation_has_no_ring():
    groups = table("all_to_all", [("0,1,2,3", True), ("0,4,5,6", False), ("1,2,3,7", False)])
    assert suspects(groups, {}) == [[("group", "0,1,2,3")]]
