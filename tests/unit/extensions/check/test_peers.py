"""What is clearly slower than its peers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.extensions.check.search import peers_of, slower_than_peers


def test_a_figure_is_compared_with_the_median_of_the_others() -> None:
    assert slower_than_peers({"a": 10.0, "b": 10.0, "c": 5.0, "d": 9.9}) == {"c": pytest.approx(2.0)}
    assert slower_than_peers({"a": 10.0, "b": 9.0, "c": 9.5}) == {}
    assert slower_than_peers({"a": 10.0}) == {}


def test_of_two_the_slower_has_to_be_far_off() -> None:
    assert slower_than_peers({"a": 10.0, "b": 7.0}) == {}
    assert list(slower_than_peers({"a": 10.0, "b": 6.0})) == ["b"]


def test_what_varies_much_excuses_what_is_a_little_lower() -> None:
    steady, varying = peers_of([10.0, 10.0, 10.0, 10.1, 9.9]), peers_of([6.0, 8.0, 10.0, 12.0, 14.0])
    assert steady.times(8.0) == pytest.approx(1.25)
    assert varying.times(5.0) == 0


@settings(max_examples=20)
@given(st.lists(st.floats(9.5, 10.5), min_size=3, max_size=20), st.floats(0.1, 5.0), st.data())
def test_fewer_than_half_of_the_others_may_be_anything(usual: list[float], low: float, data) -> None:
    odd = data.draw(st.lists(st.floats(0.001, 1000.0), max_size=(len(usual) - 1) // 4))
    assert peers_of([*usual, *odd]).times(low / 2) > 1
