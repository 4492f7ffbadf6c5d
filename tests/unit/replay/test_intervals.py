from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.intervals import covered, union

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def _arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _moments(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in pairs for moment in range(start, end)}


def test_intervals_that_overlap_or_touch_become_one():
    starts, ends = _arrays([(10, 20), (0, 3), (15, 18), (20, 25), (30, 30)])
    assert union(starts, ends).tolist() == [[0, 3], [10, 25]]


def test_nothing_has_an_empty_union_and_covers_nothing():
    empty = union(*_arrays([]))
    assert empty.shape == (0, 2)
    assert covered(empty, np.array([0]), np.array([9])).tolist() == [0]


def test_a_stretch_that_cuts_through_intervals_counts_the_parts_inside():
    merged = union(*_arrays([(0, 10), (20, 30)]))
    starts, ends = _arrays([(5, 25), (12, 18), (-5, 100), (25, 26)])
    assert covered(merged, starts, ends).tolist() == [10, 0, 20, 1]


@given(intervals)
def test_a_union_holds_exactly_the_moments_of_its_parts(pairs):
    merged = union(*_arrays(pairs))
    assert _moments(merged.tolist()) == _moments(pairs)
    assert (merged[1:, 0] > merged[:-1, 1]).all()


@given(intervals, st.integers(-5, 45), st.integers(0, 50))
def test_coverage_counts_moments(pairs, start, length):
    merged = union(*_arrays(pairs))
    inside = _moments(pairs) & set(range(start, start + length))
    assert covered(merged, np.array([start]), np.array([start + length])).tolist() == [len(inside)]
