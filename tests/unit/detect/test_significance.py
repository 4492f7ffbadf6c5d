"""When a gain per step counts: large, there in nearly every step, and more than chance. By hand."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.detect.significance import clear_gain, confidence, first_of_latest

BASE = np.full(10, 100.0)


def test_a_steady_gain_of_three_percent_counts_and_one_just_below_does_not() -> None:
    assert clear_gain(np.full(10, 3.0), BASE)
    assert not clear_gain(np.full(10, 2.99), BASE)


def test_a_gain_counts_where_it_is_there_in_eight_of_ten_steps() -> None:
    assert clear_gain(np.array([20.0] * 8 + [2.0] * 2), BASE)
    assert not clear_gain(np.array([40.0] * 7 + [2.9] * 3), BASE)


@pytest.mark.parametrize(
    ("steps", "factor"),
    # Of few steps Student's t at 99.9% decides: 318.3 / sqrt(2), 22.33 / sqrt(3), … 4.79 / sqrt(8); of many
    # 1.5.
    [(2, 225.07), (3, 12.892), (4, 5.105), (5, 3.206), (6, 2.405), (8, 1.6935), (10, 1.5), (40, 1.5)],
)
def test_the_mean_gain_must_be_so_many_of_its_standard_deviations(steps: int, factor: float) -> None:
    wave = np.resize([1.0, -1.0], steps)
    wave -= wave.mean()
    deviation = float(wave.std(ddof=1))
    base = np.full(steps, 1.0)  # so small that only the deviation decides
    assert clear_gain(wave / deviation + factor * 1.002, base)
    assert not clear_gain(wave / deviation + factor * 0.998, base)


def test_the_share_is_taken_of_each_step_and_of_their_mean() -> None:
    base = np.array([100.0] * 9 + [1000.0])
    assert not clear_gain(np.full(10, 5.0), base)  # 2.6% of the mean step
    assert clear_gain(np.full(10, 6.0), base)  # 3.2%, and there in nine of ten


def test_confidence_is_certainty_of_the_mean_times_persistence() -> None:
    assert confidence(np.full(10, 5.0), BASE) == 1.0
    assert confidence(np.array([8.0] * 5 + [0.0] * 5), BASE) == pytest.approx(0.5 * (1 - 1 / 3), abs=1e-3)
    assert confidence(np.array([9.0, 11.0, 10.0, 10.0]), BASE[:4]) == pytest.approx(1 - 0.0408, abs=1e-3)
    # A gain in one step of ten is as uncertain as it is large.
    assert confidence(np.array([50.0] + [0.0] * 9), BASE) == 0.0


def test_the_latest_half_and_quarter_are_looked_at_while_four_steps_are_left() -> None:
    assert first_of_latest(np.arange(100, 116)) == [100, 108, 112]
    assert first_of_latest(np.arange(100, 115)) == [100, 108]
    assert first_of_latest(np.arange(100, 108)) == [100, 104]
    assert first_of_latest(np.arange(100, 107)) == [100]


def test_confidence_is_at_most_the_share_of_steps_that_gain() -> None:
    # Of a mean below zero the standard error is, too: it must not count for more than certainty.
    assert confidence(np.array([10.0, 10.0, -50.0]), BASE[:3]) == pytest.approx(2 / 3, abs=1e-3)
