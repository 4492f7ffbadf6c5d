"""Which component is at fault by what flows show, on a fabric small enough to work it out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.detect.network.wires import FALSE, SHOWS, at_fault, votes, votes_of_losses

# Flows 0-3 cross component 0, flows 2-5 component 1, flow 6 component 2.
CROSSING = np.array(
    [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float64
)


def test_a_flow_votes_by_how_much_likelier_a_fault_makes_what_it_shows() -> None:
    assert votes(np.array([True, False])) == pytest.approx(
        [np.log(SHOWS / FALSE), np.log((1 - SHOWS) / (1 - FALSE))]
    )


def test_what_all_slow_flows_cross_and_no_other_does_is_at_fault() -> None:
    (found,) = at_fault(CROSSING, votes(np.array([1, 1, 1, 1, 0, 0, 0], dtype=bool)))
    assert (found.suspects, found.runner_up) == ((0,), 1)
    # Component 1 explains two of the four, and two flows that cross it are well.
    gained = 2 * np.log(SHOWS / FALSE) - 2 * np.log((1 - SHOWS) / (1 - FALSE))
    assert found.behind == pytest.approx(gained)
    assert found.explained.tolist() == [True] * 4 + [False] * 3
    assert found.confidence > 0.95


def test_two_faults_are_found_one_after_the_other() -> None:
    crossing = np.kron(np.eye(2), np.ones((5, 1)))
    found = at_fault(np.hstack([crossing, np.zeros((10, 1))]), votes(np.ones(10, dtype=bool)))
    assert [each.suspects for each in found] == [(0,), (1,)]


def test_components_that_the_same_flows_cross_are_named_together() -> None:
    crossing = np.repeat(np.array([[1.0], [1.0], [1.0], [1.0], [0.0]]), 2, axis=1)
    (found,) = at_fault(crossing, votes(np.array([1, 1, 1, 1, 0], dtype=bool)))
    assert found.suspects == (0, 1)
    assert found.runner_up == -1


def test_flows_whose_path_is_not_known_show_less() -> None:
    half = np.full((12, 2), 0.5)
    shows = np.array([1] * 5 + [0] * 7, dtype=bool)
    (found,) = at_fault(half, votes(shows))
    assert found.suspects == (0, 1)
    assert at_fault(np.full((12, 2), 1.0), votes(shows)) == []  # on known paths half should not be well


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_few_slow_flows_are_chance(slow: int) -> None:
    assert at_fault(np.ones((30, 1)), votes(np.arange(30) < slow)) == []
    assert at_fault(np.eye(30), votes(np.arange(30) < slow)) == []


def test_nothing_is_at_fault_without_flows_or_components() -> None:
    assert at_fault(np.zeros((0, 3)), np.zeros(0)) == []
    assert at_fault(np.zeros((3, 0)), np.zeros(3)) == []


def test_segments_sent_again_vote_by_the_likelihood_of_a_loss_that_harms() -> None:
    sent = np.full(6, 1500)
    found = votes_of_losses(sent, np.array([15, 0, 3, 400, 0, 0]))  # the usual: 0.1%; so 0.2% against 1%
    most, least = votes(np.array([True, False]))
    of_15 = 15 * np.log(5) + 1485 * np.log(0.99 / 0.998)
    of_3 = 3 * np.log(5) + 1497 * np.log(0.99 / 0.998)
    assert found == pytest.approx([of_15 / 4, least, of_3 / 4, most, least, least])
    assert (votes_of_losses(sent, np.full(6, 15)) < 0).all()  # all equal
    assert (votes_of_losses(np.zeros(2, np.int64), np.zeros(2, np.int64)) == 0).all()


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(0, 2**31))
def test_a_component_whose_flows_all_show_it_is_among_what_is_named(which: int, seed: int) -> None:
    crossing = (np.random.default_rng(seed).random((60, 8)) < 0.3).astype(np.float64)
    found = at_fault(crossing, votes(crossing[:, which] > 0))
    assert len(found) == 1
    assert which in found[0].suspects
    assert found[0].suspects == (which,) or found[0].confidence <= 0.99
