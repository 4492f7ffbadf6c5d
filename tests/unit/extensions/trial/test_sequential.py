"""When enough pairs were made."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.extensions.trial.measure import EFFECT, confidence_of, decide, half_width


def test_a_single_pair_decides_nothing():
    assert not decide([0.5], 8).stop


def test_a_clear_gain_is_decided_after_a_few_pairs():
    decision = decide([0.8, 0.81, 0.79], 8)
    assert (decision.stop, decision.decided) == (True, True)


def test_a_change_without_effect_is_decided_once_any_effect_of_two_percent_is_excluded():
    assert decide([1.0, 1.0005, 0.9995, 1.0], 8).decided


def test_no_more_pairs_are_made_where_noise_would_need_too_many():
    decision = decide([0.8, 1.3, 1.0], 6)
    assert (decision.stop, decision.decided) == (True, False)
    assert decision.needed > 6


def test_of_two_pairs_it_is_not_yet_said_that_too_many_would_be_needed():
    assert not decide([0.8, 1.3], 6).stop


def test_the_last_pair_ends_it():
    assert decide([0.97, 1.0], 2).stop


def test_student_interval_of_one_look_is_the_table_of_it():
    assert confidence_of(2) == pytest.approx(0.95)
    assert half_width(1.0, 2, 0.95) == pytest.approx(12.706 / math.sqrt(2), rel=1e-4)
    assert half_width(1.0, 11, 0.95) == pytest.approx(2.228 / math.sqrt(11), rel=1e-3)


@given(st.lists(st.floats(0.5, 2), min_size=3, max_size=8))
def test_what_is_needed_would_be_enough(ratios):
    decision = decide(ratios, 20)
    if decision.decided or decision.needed >= 10_000:
        return
    logs = np.log(ratios)
    mean, deviation = abs(logs.mean()), logs.std(ddof=1)
    enough = max(mean, EFFECT - mean)
    assert half_width(deviation, decision.needed, confidence_of(20)) < enough
    assert half_width(deviation, decision.needed - 1, confidence_of(20)) >= enough


def test_looking_after_every_pair_errs_in_no_more_than_a_twentieth_of_all_cases():
    random = np.random.default_rng(0)
    wrong, tries = 0, 2000
    for _ in range(tries):
        ratios = np.exp(0.05 * random.standard_normal(8)).tolist()  # no effect
        for count in range(2, 9):
            decision = decide(ratios[:count], 8)
            if decision.stop:
                break
        wrong += decision.decided and abs(np.log(ratios[:count]).mean()) > EFFECT / 2
    assert wrong / tries <= 0.05
