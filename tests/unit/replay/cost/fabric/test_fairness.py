"""Max-min fair rates, and ends of what shares links: worked out by hand, and by their definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.cost.fabric.connections import ends_of, max_min_rates
from dpro.replay.cost.fabric.flows import Load


def _load(flows: list[dict[int, float]]) -> Load:
    indptr = np.cumsum([0, *map(len, flows)]).astype(np.int64)
    links = np.array([link for flow in flows for link in flow], np.int64)
    return Load(indptr, links, np.array([share for flow in flows for share in flow.values()], np.float64))


def _rates(flows: list[dict[int, float]], capacity: list[float]) -> list[float]:
    return max_min_rates(_load(flows), np.array(capacity)).tolist()


def test_flows_on_one_link_share_it() -> None:
    assert _rates([{0: 1}, {0: 1}], [10]) == [5, 5]


def test_what_one_flow_cannot_use_the_others_do() -> None:
    """A long flow over a narrow link leaves the wide one to the others (Bertsekas and Gallager)."""
    assert _rates([{0: 1, 1: 1}, {0: 1}, {1: 1}], [4, 10]) == [2, 2, 8]


def test_a_ring_that_crosses_a_link_twice_takes_two_shares() -> None:
    assert _rates([{0: 2}, {0: 1}], [9]) == [3, 3]


def test_two_links_that_fill_at_once_stop_their_own_flows_only() -> None:
    assert _rates([{0: 1}, {1: 1}, {0: 1}, {1: 1}, {2: 1}], [4, 4, 10]) == [2, 2, 2, 2, 10]


def test_a_flow_over_no_link_is_not_held_back() -> None:
    assert _rates([{}, {0: 1}], [3]) == [float("inf"), 3]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_flow_is_held_back_by_a_full_link_where_none_is_faster(data: st.DataObject) -> None:
    """Which is what max-min fair means (section 6.5.2): each has a bottleneck link."""
    count = data.draw(st.integers(1, 6))
    capacity = data.draw(st.lists(st.floats(0.5, 100), min_size=count, max_size=count))
    flow = st.dictionaries(
        st.integers(0, count - 1), st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4
    )
    flows = data.draw(st.lists(flow, min_size=1, max_size=8))
    rates = np.array(_rates(flows, capacity))
    load = np.zeros(count)
    for each, rate in zip(flows, rates):
        for link, share in each.items():
            load[link] += rate * share
    assert (load <= np.array(capacity) * (1 + 1e-6)).all()
    for each, rate in zip(flows, rates):
        assert any(
            load[link] == pytest.approx(capacity[link], rel=1e-6)
            and rate >= max(other for theirs, other in zip(flows, rates) if link in theirs) * (1 - 1e-6)
            for link in each
        )


def test_what_ends_leaves_its_share_to_what_goes_on() -> None:
    """Ten a second: alone until 1, both at half rate until the first is done at 3, then the second alone."""
    load = _load([{0: 1}, {0: 1}])
    ends = ends_of(np.array([0.0, 1.0]), np.array([20.0, 20.0]), load, np.array([10.0]))
    assert ends.tolist() == pytest.approx([3.0, 4.0])


def test_what_meets_nothing_takes_its_bytes_over_its_link() -> None:
    load = _load([{0: 1}, {0: 1}, {1: 0.5}])
    ends = ends_of(np.array([5.0, 0.0, 1.0]), np.array([10.0, 10.0, 40.0]), load, np.array([10.0, 4.0]))
    assert ends.tolist() == pytest.approx([6.0, 1.0, 6.0])


@given(
    begins=st.lists(st.floats(0, 100), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_no_link_ever_carries_more_than_it_can(begins: list[float], data: st.DataObject) -> None:
    """All bytes of a link take at least as long as the link needs for them."""
    work = data.draw(st.lists(st.floats(0.1, 50), min_size=len(begins), max_size=len(begins)))
    ends = ends_of(np.array(begins), np.array(work), _load([{0: 1}] * len(begins)), np.array([2.0]))
    alone = np.array(begins) + np.array(work) / 2
    assert (ends >= alone * (1 - 1e-6)).all()
    assert ends.max() <= max(begins) + sum(work) / 2 + 1e-6
