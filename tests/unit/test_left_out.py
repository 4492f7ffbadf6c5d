"""Constants of verdicts that are set without a trace, and then judge it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.verdicts import constants, graded, middle_of_best, scaled, share_left_out
from dpro.verdict.verdict import Explanation


@pytest.mark.parametrize(
    ("count", "chosen"),
    [([1, 3, 3, 3, 2], 2), ([5, 1, 5, 5, 1], 3), ([0, 0, 0, 0, 7], 4), ([2, 2, 2, 2, 2], 2)],
)
def test_a_constant_is_in_the_middle_of_what_is_right_most_often(count, chosen):
    assert middle_of_best(count) == chosen


def test_a_constant_that_only_one_trace_needs_is_wrong_for_it():
    fits_all = np.array([[False, True, True, True, False]] * 5)
    assert share_left_out(fits_all) == 100
    # The last is right only at half of the constant, which the others do not ask for.
    needs_its_own = np.array([[False, True, True, True, False]] * 4 + [[True, False, False, False, False]])
    assert share_left_out(needs_its_own) == 80


def test_of_a_gain_what_is_above_one_is_scaled():
    assert scaled(1.02, 2.0) == pytest.approx(1.04)
    assert (scaled(0.2, 0.5), scaled(4, 0.5)) == (0.1, 2)


def test_the_bars_of_the_verdict_are_among_the_constants():
    assert {"LARGE", "WORTH", "SLOW_LAUNCH_NS", "COLD"} <= set(constants())
    assert "MAX_ADVICE" not in constants()


@pytest.mark.parametrize(("said", "is_right"), [({}, False), ({"limit_null_acceptable": True}, True)])
def test_no_limit_is_right_where_the_expert_would_accept_that_none_is_named(said, is_right):
    expert = {
        "limit": "host",
        "faulty_ranks": [],
        "advice": [{"kind": "x", "gain_low_x": 1, "gain_high_x": 2}],
    }
    ((right, _),) = graded(Explanation(run="r", job="j", fault="", faulty_ranks=[]), expert | said)["limit"]
    assert right is is_right
