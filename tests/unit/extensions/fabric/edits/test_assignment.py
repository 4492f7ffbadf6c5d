"""Which host has the work of which: neighbours come near each other, and nothing moves without a gain."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.extensions.fabric.edits import best_order, distances, exchanged, hosts_of, moved
from dpro.extensions.fabric.fabrics import FabricSize, fat_tree
from dpro.replay.cost.fabric.flows import flows_of
from dpro.replay.cost.fabric.network import fabric_of, routes_of

FABRIC = fabric_of(fat_tree(FabricSize(4, gpus=2, nics=1, ports=4, gbit=80)))  # two hosts on each leaf
ROUTES = routes_of(FABRIC)


def _ring(order: list[int]) -> np.ndarray:
    """What hosts exchange that reduce 10 bytes in a ring, all of which each passes on."""
    gpus = [gpu for host in order for gpu in FABRIC.gpus[host]]
    return exchanged(FABRIC, flows_of(FABRIC, [gpus], ["all_reduce"]), np.array([10.0]), order)


def test_hosts_of_a_ring_send_to_the_next_one_and_nothing_to_themselves() -> None:
    assert _ring([0, 2, 1, 3]).tolist() == [[0, 10, 0, 0], [0, 0, 10, 0], [0, 0, 0, 10], [10, 0, 0, 0]]


def test_hosts_of_one_leaf_are_no_distance_apart_and_others_two_cables() -> None:
    """A cable of 10 GB/s takes 0.1 ns for a byte."""
    assert distances(ROUTES, [0, 1, 2]).round(9).tolist() == [[0, 0, 0.2], [0, 0, 0.2], [0.2, 0.2, 0]]


def test_a_ring_that_crosses_four_times_is_put_where_it_crosses_twice() -> None:
    order = [0, 2, 1, 3]
    traffic, far = _ring(order), distances(ROUTES, order)
    place = best_order(traffic, far)
    assert (traffic * far).sum() == 8.0
    assert (traffic * far[np.ix_(place, place)]).sum() == 4.0


def test_ranks_of_a_ring_in_order_stay_where_they_are() -> None:
    assert best_order(_ring([0, 1, 2, 3]), distances(ROUTES, [0, 1, 2, 3])).tolist() == [0, 1, 2, 3]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_no_order_that_is_found_is_worse_than_the_one_there_is(data: st.DataObject) -> None:
    amounts = st.lists(st.integers(0, 9), min_size=25, max_size=25)
    traffic, far = (np.array(data.draw(amounts), float).reshape(5, 5) for _ in range(2))
    place = best_order(traffic, far)
    assert sorted(place.tolist()) == list(range(5))
    assert (traffic * far[np.ix_(place, place)]).sum() <= (traffic * far).sum() + 1e-9


def test_gpus_keep_their_number_on_the_host_that_gets_their_work() -> None:
    members = [[FABRIC.gpus[0][1], FABRIC.gpus[2][0]]]
    assert hosts_of(FABRIC, members[0]) == [0, 2]
    assert moved(FABRIC, members, {0: 2, 2: 0}) == [[FABRIC.gpus[2][1], FABRIC.gpus[0][0]]]
