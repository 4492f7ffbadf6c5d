"""What communication puts on links: worked out by hand; and paths that are planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.extensions.fabric.planning import evenly_split, plan_paths
from dpro.replay.cost.fabric.flows import Flows, Load, flows_of, loaded, sprayed
from dpro.replay.cost.fabric.network import SWITCH, Fabric, Routes, fabric_of, hashed, routes_of
from dpro.topology.file import HostEntry, TopologyFile


def _made(hosts: int = 4, gpus: int = 2, ports: int = 8) -> tuple[Fabric, Routes]:
    fabric = fabric_of(fat_tree(FabricSize(hosts, gpus=gpus, nics=gpus, ports=ports)))
    return fabric, routes_of(fabric)


def _by_name(fabric: Fabric, load: Load, number: int = 0) -> dict[str, float]:
    at = slice(load.indptr[number], load.indptr[number + 1])
    names = map(fabric.link_name, load.links[at].tolist())
    return dict(zip(names, load.share[at].tolist()))


def test_a_ring_within_a_host_loads_each_gpus_link_once_each_way() -> None:
    fabric, routes = _made(hosts=1, gpus=3)
    flows = flows_of(fabric, [fabric.gpus[0]], ["all_reduce"])
    found = _by_name(fabric, loaded(flows, routes, hashed(flows.key)))
    assert found == {f"node0:gpu{at} > node0": 1.0 for at in range(3)} | {
        f"node0 > node0:gpu{at}": 1.0 for at in range(3)
    }


def test_hosts_have_a_ring_for_each_port_with_its_share() -> None:
    fabric, routes = _made(hosts=2, ports=16)  # both hosts on one leaf
    flows = flows_of(fabric, [[*fabric.gpus[0], *fabric.gpus[1]]], ["all_gather"])
    found = _by_name(fabric, loaded(flows, routes, hashed(flows.key)))
    assert {name: share for name, share in found.items() if "nic" in name} == {
        f"{name}": 0.5
        for host in (0, 1)
        for port in (0, 1)
        for name in (f"node{host}:nic{port} > leaf0", f"leaf0 > node{host}:nic{port}")
    }
    assert found["node0:gpu0 > node0"] == 1.0


def test_an_all_to_all_has_a_flow_for_each_pair() -> None:
    fabric, routes = _made(hosts=2, ports=16)
    flows = flows_of(fabric, [[*fabric.gpus[0], *fabric.gpus[1]]], ["all_to_all"])
    found = _by_name(fabric, loaded(flows, routes, hashed(flows.key)))
    assert found["node0:nic0 > leaf0"] == pytest.approx(2 / 3)  # to both GPUs of the other host
    assert found["node0:gpu0 > node0"] == pytest.approx(1 / 3)


def test_sprayed_flows_load_all_paths_evenly() -> None:
    fabric, routes = _made()
    flows = flows_of(fabric, [[fabric.gpus[0][0], fabric.gpus[2][0]]], ["send"])
    found = _by_name(fabric, sprayed(flows, routes))
    ups = {name: share for name, share in found.items() if name.startswith("leaf0")}
    assert len(ups) == 4
    assert set(ups.values()) == {0.25}
    assert found["node0:nic0 > leaf0"] == found["leaf1 > node2:nic0"] == 1.0


def test_a_gpu_without_a_port_is_named() -> None:
    fabric = fabric_of(TopologyFile(hosts=[HostEntry("a,b", gpus=1, nics=0)]))
    with pytest.raises(Unanswerable, match="a:gpu0 has no port"):
        flows_of(fabric, [[fabric.gpus[0][0], fabric.gpus[1][0]]], ["all_reduce"])


def _fullest(fabric: Fabric, load: Load) -> float:
    """The most that a link between switches carries, when all flows run."""
    carried = np.bincount(load.links, load.share, fabric.source.size)
    switch = fabric.kind == SWITCH
    return float(carried[switch[fabric.source] & switch[fabric.target]].max(initial=0))


def _pairs(fabric: Fabric, to: list[int]) -> Flows:
    """Each GPU sends one message to another."""
    gpus = [gpu for own in fabric.gpus for gpu in own]
    return flows_of(fabric, [[gpu, gpus[at]] for gpu, at in zip(gpus, to)], ["send"] * len(gpus))


@given(order=st.permutations(range(16)))
@settings(max_examples=60, deadline=None)
def test_planned_paths_of_a_permutation_meet_nowhere(order: list[int]) -> None:
    """As many spines as a leaf has hosts: one path for each flow reaches what spraying does (2407.00550)."""
    fabric, routes = _made(hosts=16, gpus=1)
    flows = _pairs(fabric, order)
    plan = plan_paths(flows, routes, fabric.gbps)
    assert _fullest(fabric, loaded(flows, routes, plan.choice())) <= 1.0
    assert _fullest(fabric, sprayed(flows, routes)) <= 1.0


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_planned_paths_are_as_good_as_spraying_but_for_rounding(data: st.DataObject) -> None:
    fabric, routes = _made(hosts=8, gpus=2)
    to = data.draw(st.lists(st.integers(0, 15), min_size=16, max_size=16))
    flows = _pairs(fabric, to)
    plan = plan_paths(flows, routes, fabric.gbps)
    ideal = _fullest(fabric, sprayed(flows, routes))
    assert _fullest(fabric, loaded(flows, routes, plan.choice())) <= np.ceil(ideal - 1e-9)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_flows_that_are_split_load_every_cable_as_spraying_does(data: st.DataObject) -> None:
    """Any equal flows between any ports, two of each host: no rounding is left (arXiv 2407.00550)."""
    fabric, routes = _made(hosts=8, gpus=2)
    flows = _pairs(fabric, data.draw(st.lists(st.integers(0, 15), min_size=16, max_size=16)))
    split, choose = evenly_split(flows, routes)
    loads = loaded(split, routes, choose), sprayed(flows, routes)
    one, other = (np.bincount(load.links, load.share, fabric.source.size) for load in loads)
    assert one == pytest.approx(other, abs=1e-9)
    assert np.bincount(split.of, split.share, 16) == pytest.approx(np.bincount(flows.of, flows.share, 16))


def test_no_more_flows_are_split_than_needed_and_into_no_more_parts() -> None:
    """Six flows over eight paths: of each four parts, three on a path. Eight flows stay whole."""
    fabric = fabric_of(fat_tree(FabricSize(8, gpus=2, nics=2, ports=16)))  # two leaves, eight ports up
    routes = routes_of(fabric)
    assert routes.choices(fabric.node_of["leaf0"], fabric.node_of["leaf1"]).size == 8
    gpus = [gpu for own in fabric.gpus for gpu in own]
    flows = flows_of(fabric, [[gpus[at], gpus[at + 8]] for at in range(6)], ["send"] * 6)
    split, _ = evenly_split(flows, routes)
    assert np.bincount(split.of).tolist() == [4] * 6
    whole = flows_of(fabric, [[gpus[at], gpus[at + 8]] for at in range(8)], ["send"] * 8)
    assert evenly_split(whole, routes)[0].of.size == 8


def test_a_plan_around_a_failed_cable_uses_all_that_are_left() -> None:
    """Eight flows over the seven cables that are left of eight, to two spines: one has two, six have one."""
    fabric = fabric_of(fat_tree(FabricSize(8, gpus=2, nics=2, ports=16)))
    up = fabric.links_from[fabric.node_of["leaf0"], fabric.node_of["spine0"]]
    routes = routes_of(fabric, np.array(up[:1]))
    gpus = [gpu for own in fabric.gpus for gpu in own]
    flows = flows_of(fabric, [[gpus[at], gpus[at + 8]] for at in range(8)], ["send"] * 8)
    load = loaded(flows, routes, plan_paths(flows, routes, fabric.gbps).choice())
    carried = np.bincount(load.links, load.share, fabric.source.size)
    ups = [link for link in range(carried.size) if fabric.link_name(link).startswith("leaf0 > spine")]
    assert sorted(carried[ups].tolist()) == [0, 1, 1, 1, 1, 1, 1, 2]


def test_planned_paths_avoid_most_of_what_hashes_collide_in_three_tiers() -> None:
    fabric = fabric_of(fat_tree(FabricSize(16, gpus=1, nics=1, ports=4)))
    routes = routes_of(fabric)
    flows = _pairs(fabric, [(at + 8) % 16 for at in range(16)])
    plan = plan_paths(flows, routes, fabric.gbps)
    chosen = _fullest(fabric, loaded(flows, routes, plan.choice()))
    by_hash = [_fullest(fabric, loaded(flows, routes, hashed(flows.key, seed))) for seed in range(20)]
    assert chosen <= 2 < np.mean(by_hash)
