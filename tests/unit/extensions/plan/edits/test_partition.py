"""Layers over stages: against all divisions there are, by hand, and within memory."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.stages import balanced, layer_times, regrouped


def _all(count: int, stages: int) -> list[np.ndarray]:
    return [np.diff([0, *cuts, count]) for cuts in combinations(range(1, count), stages - 1)]


def _slowest(layers: np.ndarray, fixed: np.ndarray, counts: np.ndarray) -> float:
    return float((np.add.reduceat(layers, np.cumsum(counts) - counts) + fixed).max())


def test_a_stage_with_the_loss_gets_fewer_layers():
    found = balanced(np.full(8, 10.0), np.array([0.0, 0.0, 0.0, 20.0]), np.full(4, 8))
    assert found.tolist() == [2, 3, 2, 1] or sorted(found[:3].tolist()) == [2, 2, 3]
    assert found.sum() == 8
    assert found[3] == 1


@given(
    st.lists(st.integers(1, 20), min_size=3, max_size=8),
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
def test_no_division_has_a_faster_slowest_stage(layers, fixed, most):
    times, besides, fits = np.array(layers, float), np.array(fixed, float), np.array(most)
    possible = [counts for counts in _all(len(layers), 3) if (counts <= fits).all()]
    if not possible:
        with pytest.raises(Unanswerable, match="do not fit"):
            balanced(times, besides, fits)
        return
    found = balanced(times, besides, fits)
    assert (found <= fits).all()
    assert _slowest(times, besides, found) == min(_slowest(times, besides, each) for each in possible)


@given(st.lists(st.integers(1, 4), min_size=3, max_size=5), st.data())
def test_moving_layers_leaves_the_sum_of_work_and_moving_back_restores_it(now, data):
    counts = np.array(now)
    wanted = data.draw(st.sampled_from(_all(int(counts.sum()), counts.size)))
    each = 10.0 * counts[:, None] * np.ones((1, 2))
    each[-1] += 7.0  # the loss, which stays
    moved = regrouped(each, counts, wanted)
    loss = np.where(np.arange(counts.size) == counts.size - 1, 7.0, 0.0)
    assert moved[:, 0] == pytest.approx(10.0 * wanted + loss)
    assert regrouped(moved, wanted, counts) == pytest.approx(each)


def test_what_the_last_stage_takes_longer_is_no_layer_unless_said_so():
    work = np.array([[20.0], [20.0], [50.0]])
    each, besides = layer_times(work, np.array([2, 2, 2]))
    assert each[:, 0].tolist() == [10.0] * 6
    assert besides[:, 0].tolist() == [0.0, 30.0]
    slower, none = layer_times(work, np.array([2, 2, 2]), ends_stay=False)
    assert slower[:, 0].tolist() == [10.0] * 4 + [25.0] * 2
    assert none[:, 0].tolist() == [0.0, 0.0]
