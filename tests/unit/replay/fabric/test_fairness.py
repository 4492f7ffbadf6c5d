"""Max-min fair rates: worked out by hand, and by their definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.fabric.fairness import max_min_rates


def _rates(flows: list[list[int]], capacity: list[float]) -> list[float]:
    indptr = np.cumsum([0, *map(len, flows)]).astype(np.int64)
    links = np.array([link for flow in flows for link in flow], np.int64)
    return max_min_rates((indptr, links), np.array(capacity)).tolist()


def test_flows_on_one_link_share_it() -> None:
    assert _rates([[0], [0]], [10]) == [5, 5]


def test_what_one_flow_cannot_use_the_others_do() -> None:
    """Bertsekas and Gallager's example: a long flow over a narrow link leaves the wide one to the others."""
    assert _rates([[0, 1], [0], [1]], [4, 10]) == [2, 2, 8]


def test_a_flow_that_crosses_a_link_twice_takes_two_shares() -> None:
    assert _rates([[0, 0], [0]], [9]) == [3, 3]


def test_two_links_that_fill_at_once_stop_their_own_flows_only() -> None:
    assert _rates([[0], [1], [0], [1], [2]], [4, 4, 10]) == [2, 2, 2, 2, 10]


def test_a_flow_over_no_link_is_not_held_back() -> None:
    assert _rates([[], [0]], [3]) == [float("inf"), 3]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_flow_is_held_back_by_a_full_link_where_none_is_faster(data: st.DataObject) -> None:
    """Which is what max-min fair means (section 6.5.2): a bottleneck link of each flow."""
    count = data.draw(st.integers(1, 6))
    capacity = data.draw(st.lists(st.floats(0.5, 100), min_size=count, max_size=count))
    flow = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True)
    flows = data.draw(st.lists(flow, min_size=1, max_size=8))
    rates = np.array(_rates(flows, capacity))
    load = np.zeros(count)
    for links, rate in zip(flows, rates):
        load[links] += rate
    assert (load <= np.array(capacity) * (1 + 1e-6)).all()
    for links, rate in zip(flows, rates):
        assert any(
            load[link] == pytest.approx(capacity[link], rel=1e-6)
            and rate >= max(other for theirs, other in zip(flows, rates) if link in theirs) * (1 - 1e-6)
            for link in links
        )
