"""Lines through differences of two clocks, and times moved along them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.alignment.align import ClockLine, fit_bounded, fit_scattered, on_lines

US, MS, S = 1_000, 1_000_000, 1_000_000_000
TODAY = 1_700_000_000 * S

times_of_day = st.integers(TODAY, TODAY + 30 * 86_400 * S)
lines = st.builds(
    ClockLine, times_of_day, st.integers(-100 * S, 100 * S), st.integers(-500_000, 500_000), st.just(0)
)


def test_a_line_is_exact_to_the_nanosecond_days_from_its_reference():
    line = ClockLine(TODAY, 7, 50_000)  # 50 ppm: 4.32 s a day
    assert line.offset_at(np.array([TODAY, TODAY + 20_000, TODAY + 30 * 86_400 * S])).tolist() == [
        7,
        8,
        7 + 30 * 4_320_000_000,
    ]


@given(lines, st.lists(times_of_day, min_size=2, max_size=50))
def test_aligned_times_are_those_of_integers_without_bound_and_keep_their_order(line, times):
    aligned = line.aligned(np.array(sorted(times)))
    exact = [t - line.offset_ns - (t - line.reference_ns) * line.drift_ppb // S for t in sorted(times)]
    assert np.abs(aligned - np.array(exact)).max() <= 1  # whole seconds and the rest are rounded apart
    assert (np.diff(aligned) >= 0).all()


@given(
    st.lists(lines, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.none() | times_of_day), max_size=12),
)
def test_all_clocks_at_once_are_moved_as_without_rendezvous(some, rows):
    frame = pl.DataFrame(rows, schema={"clock": pl.Int32, "time": pl.Int64}, orient="row")
    moved = on_lines(frame, "clock", dict(enumerate(some)), ["time"])["time"].to_list()
    expected = [
        time if time is None or clock >= len(some) else int(some[clock].aligned(np.array([time]))[0])
        for clock, time in rows
    ]
    assert moved == expected


def test_a_level_clock_that_scatters_has_no_drift():
    noise = np.random.default_rng(1)
    for _ in range(200):
        times = TODAY + np.sort(noise.integers(0, 4 * S, int(noise.integers(3, 200))))
        line = fit_scattered(times, 5 * MS + noise.normal(0, 40 * US, times.size).astype(np.int64))
        assert line.drift_ppb == 0
        assert line.offset_ns == pytest.approx(5 * MS, abs=100 * US)


@pytest.mark.parametrize("drift_ppm", [-50, 50])
@pytest.mark.parametrize("num", [20, 500, 2000])
def test_drift_that_stands_out_from_the_scatter_is_found_with_wild_values_among_it(drift_ppm, num):
    noise = np.random.default_rng(2)
    times = TODAY + np.sort(noise.integers(0, 10 * S, num))
    differences = -3 * MS + drift_ppm * (times - TODAY) // 1_000_000 + noise.normal(0, 20 * US, num)
    differences[::7] += 400 * US
    line = fit_scattered(times, differences.astype(np.int64))
    assert line.drift_ppb == pytest.approx(drift_ppm * 1000, abs=12_000)
    error = line.offset_at(times) - (-3 * MS + drift_ppm * (times - TODAY) // 1_000_000)
    assert np.abs(error).max() < 60 * US
    assert 10 * US < line.uncertainty_ns < 100 * US


def test_drift_that_no_clock_has_is_not_taken_for_drift():
    times = TODAY + np.arange(100) * MS
    line = fit_scattered(times, np.arange(100) * US)  # 1,000 ppm
    assert (line.drift_ppb, line.offset_ns) == (0, 49_500)
    assert line.uncertainty_ns == pytest.approx(50 * US, rel=0.05)


def test_one_or_two_differences_show_no_more_than_themselves():
    assert fit_scattered(np.array([TODAY]), np.array([-500 * US])).uncertainty_ns == 500 * US
    assert fit_scattered(np.array([TODAY, TODAY]), np.array([0, 0])).drift_ppb == 0


def _comparisons(drift_ppm: float, bound: int = 4 * US, bursts: int = 4) -> tuple[np.ndarray, ...]:
    """Eight exchanges a minute, each wrong by up to its bound."""
    noise = np.random.default_rng(3)
    times = TODAY + np.repeat(np.arange(bursts) * 60 * S, 8) + np.tile(np.arange(8) * MS, bursts)
    bounds = np.full(times.size, bound) + noise.integers(0, bound // 4, times.size)
    true = 50 * MS + drift_ppm * (times - TODAY) / 1e6
    return times, (true + noise.uniform(-0.5, 0.5, times.size) * bounds).astype(np.int64), bounds


@pytest.mark.parametrize("drift_ppm", [-50, -0.5, 0.5, 50])
def test_comparisons_a_minute_apart_show_drift_of_less_than_a_millionth(drift_ppm):
    line = fit_bounded(*_comparisons(drift_ppm), period=(TODAY + 61 * S, TODAY + 63 * S))
    assert line.drift_ppb == pytest.approx(drift_ppm * 1000, abs=50)
    window = TODAY + np.array([61, 62, 63]) * S
    assert np.abs(line.offset_at(window) - 50 * MS - drift_ppm * (window - TODAY) / 1e6).max() <= 4 * US
    assert 2 * US < line.uncertainty_ns < 10 * US


def test_drift_within_the_bounds_is_not_reported():
    line = fit_bounded(*_comparisons(0.01), period=(TODAY, TODAY + S))
    assert line.drift_ppb == 0


def test_uncertainty_grows_with_the_distance_from_a_single_comparison():
    times, ahead, bounds = _comparisons(0, bursts=1)
    near, far = (fit_bounded(times, ahead, bounds, period=(TODAY, TODAY + s * S)) for s in (1, 100))
    assert near.uncertainty_ns == pytest.approx(100 * US, rel=0.1)  # a second at 100 ppm
    assert far.uncertainty_ns == pytest.approx(10 * MS, rel=0.1)


def test_comparisons_on_no_line_are_uncertain_by_how_far_they_are_off_it():
    times, ahead, bounds = _comparisons(0)
    ahead[16:] += 20 * MS  # the clock was set
    assert fit_bounded(times, ahead, bounds, period=(TODAY, TODAY + S)).uncertainty_ns > 4 * MS
