"""Stages side by side: how deep the pipeline is, and what waits for what."""

from __future__ import annotations

import pytest

from dpro.extensions.plan.schedules import (
    BACKWARD,
    FORWARD,
    KINDS,
    branched,
    branched_table,
    distances,
    most_in_flight,
)


@pytest.mark.parametrize(
    ("stages", "branches", "expected"),
    [
        (4, [range(1, 2), range(2, 3)], [2, 1, 1, 0]),
        (5, [range(1, 3), range(3, 4)], [3, 2, 1, 1, 0]),
        (3, [range(0, 1), range(1, 2)], [1, 1, 0]),
    ],
)
def test_a_pipeline_is_as_deep_as_its_longest_path(stages, branches, expected):
    assert distances(stages, branches) == expected
    orders = branched(stages, 8, branches)
    assert [most_in_flight(order) for order in orders] == [each + 1 for each in expected]


def test_branches_wait_for_what_is_before_both_and_what_follows_waits_for_both():
    branches = [range(1, 2), range(2, 3)]
    table = branched_table(branched(4, 1, branches), branches)

    def named(piece: int) -> tuple[str, int]:
        return KINDS[table.kind[piece]], int(table.stage[piece])

    pairs = {(named(one), named(other)) for one, other in zip(table.source.tolist(), table.target.tolist())}
    ways = {(0, 1), (0, 2), (1, 3), (2, 3)}
    there = {((FORWARD, one), (FORWARD, other)) for one, other in ways}
    back = {((BACKWARD, other), (BACKWARD, one)) for one, other in ways}
    assert pairs == there | back | {((FORWARD, 3), (BACKWARD, 3))}
