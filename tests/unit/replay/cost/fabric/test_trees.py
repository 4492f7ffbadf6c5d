"""The trees of an all-reduce: worked out by hand, and each host inside of one of them at most."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.replay.cost.fabric.flows import flows_of, loaded, parents
from dpro.replay.cost.fabric.network import fabric_of, hashed, routes_of


def test_four_hosts_have_two_trees_of_which_one_mirrors_the_other() -> None:
    """0 over 2 over 1 and 3; and 3 over 1 over 2 and 0."""
    assert parents(4) == ([-1, 2, 0, 2], [1, 3, 1, -1])


def test_of_an_odd_number_the_second_tree_is_shifted_by_one() -> None:
    """0 over 2 over 1; and 1 over 0 over 2."""
    assert parents(3) == ([-1, 2, 0], [1, -1, 0])


@given(st.integers(1, 300))
def test_each_host_reaches_the_root_and_has_children_in_one_tree_at_most(count: int) -> None:
    inside = Counter[int]()
    for tree in parents(count):
        children = Counter(up for up in tree if up >= 0)
        assert tree.count(-1) == 1
        assert max(children.values(), default=0) <= 2
        inside.update(children.keys())
        for host in range(count):
            at, steps = host, 0
            while tree[at] >= 0:
                at, steps = tree[at], steps + 1
            assert steps <= count.bit_length()
    assert count < 3 or max(inside.values()) == 1 or count % 2


def test_each_cable_of_a_tree_carries_half_of_the_bytes_each_way() -> None:
    """Four hosts of one GPU: the busiest of a ring sends 3 / 2 of the payload, of which a half is a third."""
    fabric = fabric_of(fat_tree(FabricSize(4, gpus=1, nics=1, ports=16)))
    members = [[own[0] for own in fabric.gpus]]
    flows = flows_of(fabric, members, ["all_reduce"], ["TREE"])
    assert flows.share == pytest.approx([1 / 3] * 12)  # three edges of two trees, each way
    load = loaded(flows, routes_of(fabric), hashed(flows.key))
    sent = dict(zip(map(fabric.link_name, load.links.tolist()), load.share.tolist()))
    # Host 2 sends to its parent and two children in the first tree, and to its parent in the second.
    assert sent["node2:nic0 > leaf0"] == pytest.approx(4 / 3)
    assert sent["node0:nic0 > leaf0"] == pytest.approx(2 / 3)


def test_within_a_host_all_bytes_go_along_a_chain_and_back() -> None:
    fabric = fabric_of(fat_tree(FabricSize(1, gpus=3, nics=1, ports=8)))
    flows = flows_of(fabric, [fabric.gpus[0]], ["all_reduce"], ["TREE"])
    ends = sorted(zip(flows.begin.tolist(), flows.end.tolist()))
    one, two, three = fabric.gpus[0]
    assert ends == [(one, two), (two, one), (two, three), (three, two)]
    assert np.allclose(flows.share, 3 / 4)


def test_two_ports_of_a_host_have_half_of_each_tree() -> None:
    fabric = fabric_of(fat_tree(FabricSize(2, gpus=2, nics=2, ports=16)))
    gpus = [gpu for own in fabric.gpus for gpu in own]
    flows = flows_of(fabric, [gpus], ["all_reduce"], ["TREE"])
    across = [
        (fabric.names[begin], fabric.names[end], share)
        for begin, end, share in zip(flows.begin.tolist(), flows.end.tolist(), flows.share.tolist())
        if "nic" in fabric.names[begin]
    ]
    assert len(across) == 8  # an edge of two trees, two ports, each way
    assert [share for *_, share in across] == pytest.approx([1 / 6] * 8)
