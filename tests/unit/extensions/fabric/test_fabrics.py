"""Fabrics that are made by their size: as many cables, and as many paths, as theory says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.extensions.fabric.answer import topology_document
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree, rail_optimised
from dpro.topology.file import check


def test_a_k_ary_fat_tree_has_the_switches_of_its_inventors() -> None:
    """k = 4: 16 hosts, 8 leaves, 8 spines, 4 cores (Al-Fares et al., figure 3)."""
    found = topology_document(fat_tree(FabricSize(16, gpus=1, nics=1, ports=4)))
    assert [(tier.tier, tier.switches) for tier in found.tiers] == [("leaf", 8), ("spine", 8), ("core", 4)]
    assert [tier.oversubscription for tier in found.tiers] == [1.0, 1.0, None]
    assert (found.paths_min, found.paths_max) == (2, 4)  # within a pod, and between pods
    assert found.unlinked == found.unreachable == ""


def test_a_fabric_of_1024_gpus_has_two_tiers_without_oversubscription() -> None:
    found = topology_document(fat_tree(FabricSize(128)))
    assert (found.hosts, found.gpus, found.ports) == (128, 1024, 1024)
    assert [(tier.switches, tier.cables_down, tier.cables_up) for tier in found.tiers] == [
        (32, 1024, 1024),
        (16, 1024, 0),
    ]
    assert (found.paths_min, found.paths_max) == (64, 64)


def test_a_leaf_that_is_oversubscribed_passes_on_less() -> None:
    leaf, _ = topology_document(fat_tree(FabricSize(126, oversubscription=3))).tiers
    assert leaf.oversubscription == pytest.approx(3.0)


def test_rails_join_ports_of_one_number() -> None:
    made = rail_optimised(FabricSize(4, gpus=2, nics=2, ports=8))
    assert [(link.begin, link.end) for link in made.links] == [
        ("node[0-3]:nic0", "leaf0"),
        ("node[0-3]:nic1", "leaf1"),
        ("leaf[0-1]", "spine0"),
    ]


@given(
    hosts=st.integers(1, 30),
    nics=st.sampled_from([1, 2, 4]),
    ports=st.sampled_from([8, 12, 16]),
    ratio=st.sampled_from([1.0, 2.0, 3.0]),
    rails=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_made_fabric_joins_all_its_ports(
    hosts: int, nics: int, ports: int, ratio: float, rails: bool
) -> None:
    make = rail_optimised if rails else fat_tree
    made = make(FabricSize(hosts, gpus=nics, nics=nics, ports=ports, oversubscription=ratio))
    check(made)
    found = topology_document(made)
    assert found.unlinked == found.unreachable == ""
    assert found.ports == hosts * nics


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (FabricSize(2, nics=8, ports=8), "no room for a host"),
        (FabricSize(2, ports=64, oversubscription=1000), "leaves no port"),
        (FabricSize(1000, nics=1, ports=4), "three tiers"),
    ],
)
def test_a_fabric_that_cannot_be_built_is_refused(size: FabricSize, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fat_tree(size)
