"""Changes of level, in noise that has none and in noise that has one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.detect.significance import SHORTEST, change_points

MIN_CHANGE = 0.03
Noise = Callable[[np.random.Generator, int], np.ndarray]


def normal(sigma: float) -> Noise:
    return lambda random, count: np.exp(random.normal(0, sigma, count))


def heavy_tailed(random: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(0.05 * random.standard_t(2, count))


def checkpointing(random: np.random.Generator, count: int) -> np.ndarray:
    values = normal(0.05)(random, count)
    values[::100] *= 8
    values[50::500] *= 3
    return values


def wandering(random: np.random.Generator, count: int) -> np.ndarray:
    """Neighbours correlate by 0.9, as on a machine that others use, too."""
    values = random.normal(0, 0.05 * np.sqrt(1 - 0.81), count)
    for at in range(1, count):
        values[at] += 0.9 * values[at - 1]
    return np.exp(values)


@pytest.mark.parametrize(
    "noise", [normal(0.01), normal(0.05), normal(0.1), heavy_tailed, checkpointing, wandering]
)
def test_no_change_is_found_in_ten_thousand_steps_of_noise(noise):
    for seed in range(10):
        assert change_points(noise(np.random.default_rng(seed), 10_000), MIN_CHANGE) == []


@pytest.mark.parametrize(
    ("count", "at", "times"), [(60, 30, 1.2), (1000, 900, 1.06), (10_000, 9900, 1.06), (2000, 50, 1.08)]
)
def test_change_is_found_where_it_is(count, at, times):
    for seed in range(10):
        values = normal(0.05)(np.random.default_rng(seed), count)
        values[at:] *= times
        (found,) = change_points(values, MIN_CHANGE)
        assert abs(found - at) <= 25


def test_several_changes_are_found_in_order():
    values = normal(0.02)(np.random.default_rng(0), 900)
    values[300:600] *= 1.3
    values[600:] *= 1.1
    first, second = change_points(values, MIN_CHANGE)
    assert abs(first - 300) <= 2
    assert abs(second - 600) <= 2


def test_a_change_before_a_larger_one_is_found_too():
    values = normal(0.02)(np.random.default_rng(0), 900)
    values[200:] *= 1.1
    values[600:] *= 1.5
    first, second = change_points(values, MIN_CHANGE)
    assert abs(first - 200) <= 2
    assert abs(second - 600) <= 2


def test_a_change_is_found_by_chance_no_more_often_than_asked_for():
    found = [
        change_points(normal(0.05)(np.random.default_rng(seed), 300), least=0.0, chance=0.05)
        for seed in range(100)
    ]
    assert sum(map(bool, found)) <= 11  # of 5 expected at most, by less than 1% (binomial)


def test_change_that_is_too_small_to_matter_is_none():
    values = normal(0.001)(np.random.default_rng(0), 1000)
    values[500:] *= 1.02
    assert change_points(values, MIN_CHANGE) == []


@given(st.lists(st.floats(0.001, 1e9), max_size=80))
def test_levels_are_never_shorter_than_the_shortest(values):
    cuts = change_points(np.array(values, np.float64), MIN_CHANGE)
    levels = np.diff([0, *cuts, len(values)])
    assert not cuts or levels.min() >= SHORTEST


@given(st.integers(1, 200), st.floats(0.001, 1e9))
def test_constant_series_has_no_change(count, value):
    assert change_points(np.full(count, value), MIN_CHANGE) == []
