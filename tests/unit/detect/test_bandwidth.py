"""Transfers that became slower than they were, told by when, where and for whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpro.detect.bandwidth import change_of, find_slower_transfers
from dpro.detect.network import transfers_of
from dpro.replay.graph import Graph, NodeKind
from tests.unit.detect.jobs import MS, Work, alike, graph_of, noisy

STEPS, SINCE = 40, 25
WITHIN, ACROSS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
HOSTS = ["a", "a", "b", "b"]


def job(**changes: object) -> Work:
    """Four ranks on two hosts: a round of pairs within hosts, then one between them."""
    work = alike(4, STEPS, 2)
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
    assert find_slower_transfers(healthy) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_transfers_is_no_change(seed, tmp_path: Path):
    graph = graph_of(tmp_path, noisy(job(transfer_sigma=0.2, transfer_seed=seed), seed, 0.05))
    assert find_slower_transfers(graph) == []


def test_all_that_goes_between_hosts_became_slower(healthy):
    (finding,) = find_slower_transfers(slowed(healthy, ACROSS, 2.0))
    assert (finding.class_, finding.component_kind) == ("slow.fabric", "network")
    assert finding.component_id == "between hosts"
    assert finding.evidence[0].startswith(f"since step {SINCE} transfers between hosts take ")
    assert finding.cost_ns == pytest.approx(10 * MS, rel=0.15)
    assert finding.ranks == (0, 1, 2, 3)
    assert any(line.startswith("transfers within hosts take 1.0") for line in finding.evidence)


def test_transfers_within_one_host_of_two_became_slower(healthy):
    (finding,) = find_slower_transfers(slowed(healthy, [(0, 1)], 3.0))
    assert finding.component_kind == "one of"
    assert finding.component_id == "rank 0, rank 1, link 0 - 1"
    assert finding.ranks == (0, 1)


def test_change_that_costs_nothing_and_spell_that_is_over_are_not_said(healthy):
    assert find_slower_transfers(slowed(healthy, ACROSS, 1.05)) == []
    spell = slowed(slowed(healthy, ACROSS, 2.0, since=10), ACROSS, 0.5, since=24)
    assert find_slower_transfers(spell) == []


def test_change_is_told_apart_from_waiting_and_dated(healthy):
    change = change_of(transfers_of(slowed(healthy, ACROSS, 1.5)), between=True)
    assert change is not None
    assert change.since == SINCE
    assert change.times == pytest.approx(1.5, rel=0.05)
    assert change_of(transfers_of(slowed(healthy, ACROSS, 1.5)), between=False) is None


def test_few_steps_show_no_change(tmp_path):
    work = replace(
        job(), **{name: getattr(job(), name)[:, :12] for name in ("data", "gap", "compute", "tail")}
    )
    graph = graph_of(tmp_path, work)
    assert find_slower_transfers(slowed(graph, ACROSS, 3.0, since=6)) == []
