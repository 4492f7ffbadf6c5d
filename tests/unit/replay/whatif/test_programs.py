"""Choices within a budget, by hand and against all there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.whatif.choices import ReductionPipeline, assign, assign_in_pipeline


def test_the_budget_goes_where_it_saves_most():
    # One option as it is, one that costs a tenth. Of three things two may be changed: the dearest two.
    costs = np.array([[10.0, 1.0], [30.0, 3.0], [20.0, 2.0]])
    errors = np.array([[0.0, 1.0]] * 3)
    assert assign(costs, errors, 2.0).tolist() == [0, 1, 1]


def test_one_large_error_may_be_worth_less_than_two_small_ones():
    costs = np.array([[100.0, 60.0], [50.0, 20.0], [50.0, 20.0]])
    errors = np.array([[0.0, 1.0], [0.0, 0.5], [0.0, 0.5]])
    assert assign(costs, errors, 1.0).tolist() == [0, 1, 1]  # 60 saved, not 40


def test_an_option_that_is_not_there_is_not_chosen():
    assert assign(np.array([[5.0, np.inf], [5.0, 1.0]]), np.zeros((2, 2)), 1.0).tolist() == [0, 1]


def test_what_no_choice_can_keep_is_refused():
    with pytest.raises(Unanswerable, match="budget"):
        assign(np.array([[1.0]]), np.array([[2.0]]), 1.0)


def of_three(ready, thread=0.0):
    """Three buckets that take the link 10 each, or 4 compressed."""
    options = np.tile([10.0, 4.0], (3, 1))
    busy = np.tile([0.0, thread], (3, 1))
    return ReductionPipeline(np.array(ready, float), busy, np.zeros((3, 2)), options, workers=2)


def test_only_what_is_not_hidden_is_compressed():
    # Gradients are ready at 0, 100 and 200: the first two are reduced long before the last is ready.
    errors = np.tile([0.0, 0.1], (3, 1))
    assert assign_in_pipeline(of_three([0, 100, 200]), errors, 1.0).tolist() == [0, 0, 1]


def test_on_a_link_that_is_never_idle_all_are_compressed():
    errors = np.tile([0.0, 0.1], (3, 1))
    assert assign_in_pipeline(of_three([0, 1, 2]), errors, 1.0).tolist() == [1, 1, 1]  # the end is 12, not 30


def test_of_a_budget_for_two_the_end_of_the_queue_is_as_good_as_its_beginning_but_loses_less():
    errors = np.array([[0.0, 0.5], [0.0, 0.4], [0.0, 0.3]])
    assert assign_in_pipeline(of_three([0, 1, 2]), errors, 0.8).tolist() == [0, 1, 1]


def test_what_compressing_costs_the_thread_is_weighed_against_the_link():
    errors = np.tile([0.0, 0.1], (3, 1))
    assert assign_in_pipeline(of_three([0, 100, 200], thread=7), errors, 1.0).tolist() == [0, 0, 0]
    assert assign_in_pipeline(of_three([0, 100, 200], thread=5), errors, 1.0).tolist() == [0, 0, 1]


def end_of(buckets: ReductionPipeline, chosen) -> float:
    """When the last reduction ends, step by step."""
    busy, ends = 0.0, []
    for b, option in enumerate(chosen):
        busy += buckets.thread[b, option]
        moving = buckets.moving[b, option]
        whole = buckets.fixed[b, option] + moving
        begins = [buckets.ready[b] + busy + whole]
        begins += [ends[-1] + moving] if ends else []
        begins += [ends[-buckets.workers] + whole] if len(ends) >= buckets.workers else []
        ends.append(max(begins))
    return ends[-1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 2))
def test_no_other_choice_ends_earlier_within_the_budget(seed, workers):
    random = np.random.default_rng(seed)
    shape = (4, 3)
    buckets = ReductionPipeline(
        np.sort(random.uniform(0, 30, 4)),
        *(random.uniform(0, scale, shape) for scale in (2, 2, 10)),
        workers=workers,
    )
    errors = random.uniform(0, 1, shape) * [0, 1, 1]
    within = [c for c in itertools.product(range(3), repeat=4) if errors[range(4), list(c)].sum() <= 1.0]
    best = min(end_of(buckets, choice) for choice in within)
    chosen = assign_in_pipeline(buckets, errors, 1.0)
    assert errors[range(4), chosen].sum() <= 1.0 + 1e-6
    assert end_of(buckets, chosen) <= best * (1 + 1e-3)
