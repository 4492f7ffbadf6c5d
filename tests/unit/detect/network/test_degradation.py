"""Transfers that became slower than they were: when, where and for which ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.network.degradation import change_of, find_slower_transfers
from dpro.detect.network.traffic import recorded_transfers, traffic_of, transfers_of
from dpro.replay.graph import Graph, NodeKind
from tests.unit.detect.jobs import MS, Work, equal_work, graph_of, noisy

STEPS, SINCE = 40, 25
WITHIN, ACROSS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
HOSTS = ["a", "a", "b", "b"]


def job(**changes: object) -> Work:
    """Four ranks on two hosts: a round of pairs within hosts, then one between them."""
    work = equal_work(4, STEPS, 2)
    usual = {"groups": [WITHIN, ACROSS], "hosts": HOSTS, "transfer": 10.0, "transfer_sigma": 0.03}
    return replace(work, **(usual | changes))


def slowed(graph: Graph, groups: list[tuple[int, int]], times: float, since: int = SINCE) -> Graph:
    """The graph with the transfers of some groups longer since a step."""
    chosen = transfers_of(graph).filter(
        (transfers_of(graph)["step"] >= since)
        & transfers_of(graph)["members"].is_in([f"{a},{b}" for a, b in groups])
    )
    nodes = graph.nodes
    mine = (nodes.kind == NodeKind.TRANSFER) & np.isin(nodes.collective, chosen["instance"].to_numpy())
    return graph.with_durations(
        np.where(mine, np.rint(nodes.duration * times), nodes.duration).astype(np.int64)
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Graph:
    return graph_of(tmp_path_factory.mktemp("healthy"), noisy(job(), 0, 0.02))


def test_steady_network_is_left_alone(healthy):
    assert find_slower_transfers(traffic_of(Baseline(healthy))) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_transfers_is_no_change(seed, tmp_path: Path):
    graph = graph_of(tmp_path, noisy(job(transfer_sigma=0.2, transfer_seed=seed), seed, 0.05))
    assert find_slower_transfers(traffic_of(Baseline(graph))) == []


def test_all_that_goes_between_hosts_became_slower(healthy):
    (finding,) = find_slower_transfers(traffic_of(Baseline(slowed(healthy, ACROSS, 2.0))))
    assert (finding.class_, finding.component_kind) == ("slow.fabric", "network")
    assert finding.component_id == "between hosts"
    assert finding.evidence[0].startswith(f"since step {SINCE} transfers between hosts take ")
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["slower-since"]["times"] == pytest.approx(2, rel=0.1)
    assert finding.cost_ns == pytest.approx(10 * MS, rel=0.15)
    assert finding.ranks == (0, 1, 2, 3)
    assert any(line.startswith("transfers within hosts take 1.0") for line in finding.evidence)


def test_transfers_within_one_host_of_two_became_slower(healthy):
    (finding,) = find_slower_transfers(traffic_of(Baseline(slowed(healthy, [(0, 1)], 3.0))))
    assert finding.component_kind == "one of"
    assert finding.component_id == "rank 0, rank 1, link 0 - 1"
    assert finding.ranks == (0, 1)


def test_change_that_costs_nothing_and_spell_that_is_over_are_not_said(healthy):
    assert find_slower_transfers(traffic_of(Baseline(slowed(healthy, ACROSS, 1.05)))) == []
    spell = slowed(slowed(healthy, ACROSS, 2.0, since=10), ACROSS, 0.5, since=24)
    assert find_slower_transfers(traffic_of(Baseline(spell))) == []


def test_change_is_distinguished_from_waiting_and_dated(healthy):
    change = change_of(recorded_transfers(slowed(healthy, ACROSS, 1.5)), between=True)
    assert change is not None
    assert change.since == SINCE
    assert change.times == pytest.approx(1.5, rel=0.05)
    assert change_of(recorded_transfers(slowed(healthy, ACROSS, 1.5)), between=False) is None


def test_few_steps_show_no_change(tmp_path):
    work = replace(
        job(), **{name: getattr(job(), name)[:, :12] for name in ("data", "gap", "compute", "tail")}
    )
    graph = graph_of(tmp_path, work)
    assert find_slower_transfers(traffic_of(Baseline(slowed(graph, ACROSS, 3.0, since=9)))) == []


def in_windows(graph: Graph) -> pl.DataFrame:
    """The transfers of two steps in each six: what deep windows leave of a job."""
    return recorded_transfers(graph).filter(pl.col("step") % 6 < 2)


def test_few_steps_in_windows_show_a_change_by_their_many_transfers(healthy):
    change = change_of(in_windows(slowed(healthy, ACROSS, 1.5, since=18)), between=True)
    assert change is not None
    assert (change.since, change.times) == (18, pytest.approx(1.5, rel=0.1))
    assert change_of(in_windows(healthy), between=True) is None
    assert change_of(in_windows(slowed(healthy, ACROSS, 1.5, since=36)), between=True) is None  # two steps


def test_what_befalls_all_transfers_of_a_step_counts_as_one(healthy):
    transfers = in_windows(healthy)
    once = pl.when(pl.col("step").is_in([30, 31])).then(3).otherwise(1)  # the last window but one
    assert change_of(transfers.with_columns(pl.col("transfer_ns") * once), between=True) is None


def test_one_group_of_many_that_became_slower_is_found_by_itself():
    pairs = [f"{rank},{rank + 1}" for rank in range(0, 40, 2)]
    noise = np.random.default_rng(0).lognormal(0, 0.05, (20, 40))
    noise[7, 25:] *= 1.6
    rows = [
        {"instance": 40 * at + step, "op": "all_reduce", "bytes": 1, "num_ranks": 2, "num_hosts": 1,
         "members": pair, "step": step, "transfer_ns": 1e6 * noise[at, step], "whole": True}
        for at, pair in enumerate(pairs) for step in range(40)
    ]  # fmt: skip
    change = change_of(pl.DataFrame(rows), between=False)
    assert change is not None
    assert change.groups.filter("slow")["members"].to_list() == [pairs[7]]
    assert abs(change.since - 25) <= 1


def test_group_with_a_member_that_left_no_record_is_doubted():
    noise = np.random.default_rng(1).lognormal(0, 0.03, 60)
    noise[30:] *= 2
    rows = [
        {"instance": step, "op": "all_reduce", "bytes": 1, "num_ranks": 2, "num_hosts": 1, "members": "0,1",
         "step": step, "transfer_ns": 1e6 * noise[step], "whole": False} for step in range(60)
    ]  # fmt: skip
    change = change_of(pl.DataFrame(rows), between=False)
    assert change is not None
    assert not change.groups.filter("slow")["whole"].any()
