"""Whether what happens in some steps does so regularly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.detect.pauses import recurrence_of
from dpro.words import ordinal

SEEN = np.arange(200)


@given(st.integers(2, 40), st.integers(0, 40))
def test_a_period_is_found_whatever_it_is_and_wherever_it_begins(period, phase):
    recurrence = recurrence_of(np.arange(phase, 200, period), SEEN)
    assert (recurrence.period, recurrence.exact) == (period, True)


def test_steps_that_were_not_seen_or_did_not_show_it_break_no_period():
    steps = np.array([10, 20, 40, 50, 60, 70, 80, 90])
    without = SEEN[SEEN != 30]
    assert recurrence_of(steps, without).period == 10
    assert recurrence_of(steps, SEEN).period == 10  # one of nine is missing


def test_period_of_which_every_second_time_or_more_was_not_seen_is_found():
    seen = SEEN[~np.isin(SEEN, [20, 40, 50, 70])]  # in deep windows
    assert recurrence_of(np.array([10, 30, 60, 80]), seen).period == 10
    assert recurrence_of(np.array([10, 30, 60, 80]), SEEN).period == 0


def test_one_that_is_out_of_step_breaks_none():
    assert recurrence_of(np.array([10, 20, 30, 33, 40, 50, 60, 70]), SEEN).period == 10


def test_what_comes_about_as_often_is_said_to():
    recurrence = recurrence_of(np.array([10, 49, 91, 130, 172]), SEEN)
    assert (recurrence.period, recurrence.exact) == (40, False)
    assert recurrence.in_words() == "in about every 40th step"


@pytest.mark.parametrize("steps", [[5], [5, 15], [3, 4, 60, 61, 140, 190, 197]])
def test_few_times_and_times_without_order_have_no_period(steps):
    assert recurrence_of(np.array(steps), SEEN).period == 0


def test_words():
    assert recurrence_of(np.array([7]), SEEN).in_words() == "in one step"
    assert recurrence_of(np.array([7]), SEEN).named() == "step 7"
    assert recurrence_of(np.arange(9, 99, 10), SEEN).named() == "steps 9, 19, 29, 39 …"
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip
