"""How long steps take: which are pauses, the typical step, and the mean step with pauses."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.steps import longest_deep_ns, step_series
from dpro.schema import STEPS, conform


def steps(durations, windows=(), rank=0):
    lasted = np.round(durations).astype(np.int64)
    begins = np.concatenate([[0], lasted.cumsum()[:-1]])
    window = np.where(np.isin(np.arange(lasted.size), windows), 0, -1)
    rows = {"step": np.arange(lasted.size), "window": window, "start_ns": begins, "duration_ns": lasted}
    return conform(STEPS, pl.DataFrame(rows).with_columns(rank=pl.lit(rank)))


def with_pauses(size, at, longer, usual=1000.0):
    times = np.full(size, usual)
    times[at] += longer
    return times


def test_typical_step_is_without_pauses_and_mean_step_with_them():
    series = step_series(steps(with_pauses(50, range(4, 50, 10), 5000)))
    assert series.steps[series.paused].tolist() == [4, 14, 24, 34, 44]
    assert (series.typical_ns, series.mean_ns) == (1000, 1500)
    assert series.lost_share == pytest.approx(1 / 3)


def test_step_of_the_job_is_the_median_of_its_ranks():
    series = step_series(
        pl.concat([steps([100, 200], rank=0), steps([110, 900], rank=1), steps([300, 210], rank=2)])
    )
    assert series.times.tolist() == [110, 210]


def test_steps_in_deep_windows_and_after_them_are_left_out_unless_there_are_no_others():
    times = with_pauses(40, [20, 21, 22], 9000)
    assert not step_series(steps(times, windows=(20, 21))).paused.any()
    everywhere = step_series(steps(times, windows=range(40)))
    assert everywhere.recorded
    assert everywhere.steps.size == 40


def test_lasting_change_a_slow_spell_and_every_second_step_are_no_pauses():
    lasting, spell = np.repeat([1000.0, 2000.0], 40), np.repeat([1000.0, 2000.0, 1000.0], [30, 8, 30])
    every_second = np.tile([1000.0, 2000.0], 40)
    for times in (lasting, spell, every_second):
        assert not step_series(steps(times)).paused.any()


def test_pauses_before_and_after_a_lasting_change_are_found():
    times = np.repeat([1000.0, 3000.0], 40)
    times[[10, 20, 30]] += 1500  # shorter than steps are later
    times[[50, 60, 70]] += 1500
    assert step_series(steps(times)).steps[step_series(steps(times)).paused].tolist() == [
        10,
        20,
        30,
        50,
        60,
        70,
    ]


def test_a_deep_step_was_delayed_if_it_is_far_longer_than_nearly_all_others():
    times = np.tile([30.0, 40.0], 20)
    assert longest_deep_ns(steps(times, windows=(4, 5))) == pytest.approx(60)
    assert longest_deep_ns(steps(times[:12], windows=(4, 5))) is None  # too few others
    assert longest_deep_ns(steps(times, windows=range(40))) is None


def test_no_steps_have_no_pace():
    assert step_series(STEPS.empty()) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=80))
def test_nothing_is_lost_but_to_pauses_and_no_more_than_they_take(times):
    series = step_series(steps(times))
    assert (series.lost >= 0).all()
    assert (series.lost[~series.paused] == 0).all()
    assert (series.lost <= series.times).all()
    assert 0 <= series.lost_share < 1
    assert series.mean_ns == pytest.approx(np.mean(times))
