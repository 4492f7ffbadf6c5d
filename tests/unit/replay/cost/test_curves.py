"""Times between measured sizes: hand-computed curves, and what any curve does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from dpro.replay.cost.curves import fit_curve, fit_line, growth, left_out, medians, monotone, scale

MEASURED = st.dictionaries(st.integers(0, 30), st.floats(1e2, 1e9), min_size=3, max_size=20)


def test_a_straight_line_is_followed_between_and_beyond_its_sizes():
    sizes = np.array([1e3, 1e5, 1e6])
    curve = fit_curve(sizes, 1000 + 2 * sizes)
    assert curve.time_ns(np.array([1e2, 1e4, 5e5, 3e6])) == pytest.approx(
        [1200, 21_000, 1_001_000, 6_001_000], rel=1e-3
    )


def test_a_dip_at_a_change_of_protocol_is_kept():
    sizes = 2.0 ** np.arange(10, 20)
    times = np.where(sizes < 2**15, 4 * sizes, 2 * sizes)
    curve = fit_curve(sizes, times)
    assert curve.time_ns(2.0**14) == pytest.approx(4 * 2**14)
    assert curve.time_ns(2.0**15) == pytest.approx(2 * 2**15)  # as long as half the bytes took
    assert curve.time_ns(1.5 * 2**14) == pytest.approx(2 * 2**15)


@given(st.dictionaries(st.integers(0, 30), st.integers(-4, 4), min_size=2, max_size=9), st.integers(0, 999))
def test_the_monotone_cubic_is_that_of_scipy_to_the_last_bit(points, seed):
    x = np.array(sorted(points), np.float64)
    y = np.array([points[int(each)] for each in x]) / 7
    at = np.append(x, np.random.default_rng(seed).uniform(-2, 32, 20))
    assert (monotone(x, y)(at) == PchipInterpolator(x, y)(at)).all()


def test_the_median_of_a_size_counts_and_rare_sizes_do_not():
    sizes, times = medians(np.array([8, 8, 8, 9.0]), np.array([1, 2, 90, 4.0]), enough=2)
    assert (sizes.tolist(), times.tolist()) == ([8], [2])


def test_few_sizes_leave_a_line():
    curve = fit_curve(np.array([1e6]), np.array([4e6]))
    assert curve.bandwidth_only
    assert curve.time_ns(np.array([1e6, 2e6])) == pytest.approx([4e6, 8e6])


@given(MEASURED)
def test_a_curve_goes_through_what_was_measured(measured):
    sizes = 2.0 ** np.array(sorted(measured))
    times = np.array([measured[at] for at in sorted(measured)])
    assert fit_curve(sizes, times).time_ns(sizes) == pytest.approx(times, rel=1e-9)


@given(MEASURED, st.floats(0, 1))
def test_between_two_sizes_a_curve_stays_within_their_times(measured, share):
    powers = np.array(sorted(measured), np.float64)
    times = np.array([measured[at] for at in sorted(measured)])
    between = 2 ** (powers[:-1] + share * np.diff(powers))
    predicted = fit_curve(2**powers, times).time_ns(between)
    assert (predicted >= np.minimum(times[:-1], times[1:]) * (1 - 1e-9)).all()
    assert (predicted <= np.maximum(times[:-1], times[1:]) * (1 + 1e-9)).all()


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1, 1e9)), min_size=3, max_size=30), st.randoms())
def test_the_order_of_measurements_changes_nothing(rows, random):
    mixed = rows.copy()
    random.shuffle(mixed)
    one, other = (medians(*np.array(each, np.float64).T) for each in (rows, mixed))
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])


def test_what_is_far_from_any_size_may_be_further_off():
    sizes = 2.0 ** np.arange(10, 20, 2)
    times = 100 + sizes * np.array([1, 1.3, 1, 1.3, 1])
    rate = growth(sizes, left_out(sizes, times, fit_curve(sizes, times).line_ns(sizes)))
    near, middle, beyond = scale(sizes, rate, np.array([2.0**12, 2.0**13, 2.0**21]))
    assert near < middle < beyond


def test_only_parts_of_a_line_that_are_larger_than_their_errors_are_clear():
    sizes = np.repeat([1e3, 1e5, 1e7], 20)
    exact = fit_line(sizes, 20e3 + sizes)  # 20 us, then 1 GB/s
    assert (exact.clear_latency_ns, exact.clear_gbps) == (pytest.approx(20e3), pytest.approx(1.0))
    assert exact.is_line
    single = fit_line(np.full(20, 1e6), np.full(20, 2e6))
    assert (single.clear_latency_ns, single.clear_gbps, single.is_line) == (None, pytest.approx(0.5), False)
    two_sizes, wide = np.repeat([4e6, 9e6], 2), np.array([4e6, 14e6, 5e6, 13e6])
    unclear = fit_line(two_sizes, wide)
    assert (unclear.clear_latency_ns, unclear.clear_gbps, unclear.is_line) == (None, None, False)
