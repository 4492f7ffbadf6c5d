"""Partial pipelines: paths that share stages evenly and do not collide, and orders that can be run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.extensions.plan.schedules import (
    BACKWARD,
    FORWARD,
    looped,
    most_in_flight,
    partial,
    paths_of,
    table_of,
)

shapes = st.integers(3, 8).flatmap(
    lambda stages: st.tuples(st.just(stages), st.integers(1, 16), st.integers(0, stages - 2))
)


@given(shapes)
def test_every_micro_batch_skips_as_many_stages_but_never_the_ends(shape):
    stages, count, skipped = shape
    paths = paths_of(*shape)
    assert len(paths) == count
    for path in paths:
        assert len(path) == stages - skipped
        assert (path[0], path[-1]) == (0, stages - 1)
        assert list(path) == sorted(path)


@given(shapes)
def test_orders_are_of_the_paths_and_can_be_run(shape):
    stages, count, _ = shape
    orders, paths = partial(*shape), paths_of(*shape)
    for stage, order in enumerate(orders):
        visiting = {batch for batch in range(count) if stage in paths[batch]}
        for kind in (FORWARD, BACKWARD):
            assert sorted(task.batch for task in order if task.kind == kind) == sorted(visiting)
        assert most_in_flight(order) <= stages - stage
    table = table_of(orders, looped)
    done: set[int] = set()
    waits = dict(zip(table.target.tolist(), table.source.tolist()))
    first = [sum(len(order) for order in orders[:stage]) for stage in range(stages)]
    at = [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        before = len(done)
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                piece = first[stage] + at[stage]
                if waits.get(piece, -1) >= 0 and waits[piece] not in done:
                    break
                done.add(piece)
                at[stage] += 1
        assert len(done) > before, "the order waits for itself"


def test_one_of_four_stages_is_skipped_in_turn():
    # Of stages 1 and 2 either is skipped. The second micro-batch goes 0 - 2 - 3 and would meet none; all
    # visit two stages before the last, so that none arrives there with another.
    paths = paths_of(4, 4, 1)
    assert Counter(paths) == {(0, 2, 3): 2, (0, 1, 3): 2}


def test_without_skipping_it_is_as_fast_as_one_forward_one_backward():
    orders = partial(4, 8, 0)
    assert [task.kind for task in orders[3]] == [FORWARD, BACKWARD] * 8
    assert most_in_flight(orders[0]) == 4


@given(shapes)
def test_no_two_micro_batches_reach_a_stage_in_the_same_slot(shape):
    taken: set[tuple[int, int]] = set()
    enters = 0
    for path in paths_of(*shape):
        while {(stage, enters + slot) for slot, stage in enumerate(path)} & taken:
            enters += 1
        taken |= {(stage, enters + slot) for slot, stage in enumerate(path)}
        enters += 1
    # Waiting is rare: fewer slots than micro-batches and stages together.
    assert enters <= 2 * shape[1] + shape[0]


def test_the_ends_of_the_pipeline_cannot_be_skipped():
    with pytest.raises(UsageError, match="the first and last are required"):
        paths_of(4, 8, 3)
