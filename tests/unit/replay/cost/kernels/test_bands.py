"""Intervals of operations and of sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.cost import HOLDS
from dpro.replay.cost.kernels.formula import COMMON, UNKNOWN, bands_of, sum_of


def test_bands_hold_the_share_of_what_was_missed_in_each_band():
    chance = np.random.default_rng(4)
    predicted = np.repeat([10.0, 50.0, 500.0], 4000)
    measured = predicted * np.exp(chance.normal(0, np.repeat([0.2, 0.1, 0.02], 4000)))
    low, high = bands_of(predicted, measured).interval(predicted)
    inside = (low <= measured) & (measured <= high)
    for band in np.split(inside, 3):
        assert band.mean() == pytest.approx(HOLDS, abs=0.01)
    assert ((high / low)[::4000][:-1] > (high / low)[::4000][1:]).all()


def test_a_few_misses_say_nothing():
    assert bands_of(np.ones(3), np.ones(3)).quantiles.tolist() == [list(UNKNOWN)] * 3


def test_the_bias_of_a_device_widens_both_ends():
    low, high = bands_of(np.ones(50), np.ones(50)).interval(np.array([200.0]), bias=np.log(2))
    assert (low[0], high[0]) == pytest.approx((100, 400))


@given(st.integers(1, 40))
def test_a_sum_is_missed_by_less_than_its_parts_and_by_more_than_if_they_were_independent(count):
    us = np.full(count, 100.0)
    total, low, high = sum_of(us, us * 0.9, us * 1.1)
    assert total == 100 * count
    expected = COMMON * 10 * count + (1 - COMMON) * 10 * np.sqrt(count)
    assert (total - low, high - total) == pytest.approx((expected, expected))
