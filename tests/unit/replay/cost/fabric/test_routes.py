"""Paths of flows through small fabrics."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import shortest_path

from dpro.errors import Unanswerable
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.replay.cost.fabric.network import Fabric, fabric_of, hashed, paths, routes_of
from dpro.topology.file import HostEntry, LinkEntry, TopologyFile

SIZE = FabricSize(4, gpus=2, nics=2, ports=8, gbit=80)  # two leaves, two hosts each


def _network() -> Fabric:
    return fabric_of(fat_tree(SIZE))


def _names(network: Fabric, path: np.ndarray) -> list[str]:  # type: ignore[type-arg]
    return [network.link_name(int(link)) for link in path if link >= 0]


def test_a_cable_is_a_link_each_way_of_its_speed() -> None:
    network = _network()
    up = network.links_from[network.node_of["node0:nic0"], network.node_of["leaf0"]]
    down = network.links_from[network.node_of["leaf0"], network.node_of["node0:nic0"]]
    assert [network.gbps[link] for link in (*up, *down)] == [10.0, 10.0]  # 80 Gbit/s


def test_gpus_send_through_the_port_that_they_are_near_to() -> None:
    host = HostEntry("a", gpus=4, nics=2)
    even = fabric_of(TopologyFile(hosts=[host]))
    assert [even.names[even.port[gpu]] for gpu in even.gpus[0]] == ["a:nic0", "a:nic0", "a:nic1", "a:nic1"]
    given = fabric_of(TopologyFile(hosts=[HostEntry("a", gpus=2, nics=2, near=[1, 0])]))
    assert [given.names[given.port[gpu]] for gpu in given.gpus[0]] == ["a:nic1", "a:nic0"]


def test_flows_within_a_leaf_turn_there_and_others_take_a_spine() -> None:
    network = _network()
    begin = np.array([network.node_of["node0:nic0"]] * 2)
    end = np.array([network.node_of["node1:nic0"], network.node_of["node2:nic1"]])
    near, far = paths(routes_of(network), begin, end, hashed(np.arange(2)))
    assert _names(network, near) == ["node0:nic0 > leaf0", "leaf0 > node1:nic0"]
    up, down = _names(network, far)[1:-1]
    assert up.startswith("leaf0 > spine")
    assert down.startswith("spine")
    assert _names(network, far)[-1] == "leaf1 > node2:nic1"


def test_hashes_spread_flows_over_all_cables_of_a_group() -> None:
    network = _network()
    flows = np.arange(4000)
    begin, end = (np.full(flows.size, network.node_of[name]) for name in ("node0:nic0", "node2:nic0"))
    chosen = paths(routes_of(network), begin, end, hashed(flows, seed=3))
    used, times = np.unique(chosen[:, 1], return_counts=True)
    assert used.size == 4
    assert times.min() > 0.9 * flows.size / 4
    again = paths(routes_of(network), begin, end, hashed(flows, seed=3))
    assert (again == chosen).all()
    other = paths(routes_of(network), begin, end, hashed(flows, seed=4))
    assert (other[:, 1] != chosen[:, 1]).mean() > 0.6


def test_a_failed_cable_is_avoided_and_a_last_one_is_missed() -> None:
    network = _network()
    begin, end = (np.full(64, network.node_of[name]) for name in ("node0:nic0", "node2:nic0"))
    failed = np.array(network.links_from[network.node_of["leaf0"], network.node_of["spine0"]][:1])
    chosen = paths(routes_of(network, failed), begin, end, hashed(np.arange(64)))
    assert not np.isin(chosen, failed).any()
    cut = np.array(network.links_from[network.node_of["leaf1"], network.node_of["node2:nic0"]])
    with pytest.raises(Unanswerable, match="node2:nic0 has no cable"):
        paths(routes_of(network, cut), begin, end, hashed(np.arange(64)))
    ups = np.flatnonzero(
        (network.source == network.node_of["leaf0"])
        & np.isin(network.target, [at for at, name in enumerate(network.names) if name.startswith("spine")])
    )
    with pytest.raises(Unanswerable, match="no path leads from node0:nic0 to node2:nic0"):
        paths(routes_of(network, ups), begin, end, hashed(np.arange(64)))


def test_two_hosts_may_be_joined_without_a_switch() -> None:
    host = HostEntry("a,b", gpus=1, nics=1)
    network = fabric_of(TopologyFile(hosts=[host], links=[LinkEntry("a:nic0", "b:nic0")]))
    ends = (np.array([network.node_of[f"{name}:nic0"]]) for name in "ab")
    (path,) = paths(routes_of(network), *ends, hashed(np.arange(1)))
    assert _names(network, path) == ["a:nic0 > b:nic0"]


@pytest.mark.parametrize("size", [SIZE, FabricSize(14, 1, 1, ports=4), FabricSize(9, 2, 2, ports=6)])
def test_groups_are_the_first_links_of_all_shortest_paths(size: FabricSize) -> None:
    """Against distances by Floyd and Warshall; with and without a link that failed."""
    network = fabric_of(fat_tree(size))
    switches = [node for node in range(network.num_nodes) if node in network.tiers]
    for failed in ([], list(np.flatnonzero(network.source == switches[0])[-1:])):
        links = [
            (link, begin, end)
            for link, (begin, end) in enumerate(zip(network.source.tolist(), network.target.tolist()))
            if begin in network.tiers and end in network.tiers and link not in failed
        ]
        joined = np.zeros((network.num_nodes, network.num_nodes))
        for _, begin, end in links:
            joined[begin, end] = 1
        far = shortest_path(csr_matrix(joined), method="FW")
        routes = routes_of(network, np.array(failed, np.int64))
        leaves = [node for node in switches if network.tiers[node] == "leaf"]
        for here, to in product(switches, leaves):
            group = [
                link for link, begin, end in links if begin == here and far[end, to] == far[here, to] - 1
            ]
            assert routes.choices(here, to).tolist() == group
