"""What links carry, and which connections meet on them: worked out by hand."""

from __future__ import annotations

import numpy as np

from dpro.replay.cost.fabric.connections import meetings, usage
from dpro.replay.cost.fabric.flows import Flows, Load


def _flows(of: list[int], key: list[int]) -> Flows:
    ends = np.array(key)
    return Flows(np.array(of), ends, ends + 100, np.ones(len(of)), ends, max(of) + 1)


def test_a_link_is_busy_while_anything_crosses_it_and_carries_the_share_of_each() -> None:
    """Two overlap from 5 to 8, the third comes after a pause; the second takes half of its bytes over it."""
    load = Load(np.array([0, 1, 3, 4]), np.array([0, 0, 1, 0]), np.array([1.0, 0.5, 1.0, 1.0]))
    begin, end, sent = (np.array(each) for each in ([0.0, 5, 20], [8.0, 10, 24], [100.0, 40, 7]))
    found = usage(load, begin, end, sent, 3)
    assert found.sent.tolist() == [127, 40, 0]
    assert found.busy.tolist() == [14, 5, 0]


def test_an_interval_within_another_adds_nothing_to_the_time_that_a_link_is_busy() -> None:
    load = Load(np.array([0, 1, 2, 3]), np.zeros(3, np.int64), np.ones(3))
    found = usage(load, np.array([0.0, 1, 3]), np.array([10.0, 2, 4]), np.ones(3), 1)
    assert found.busy.tolist() == [10]


def test_connections_meet_while_two_run_and_one_does_not_meet_itself() -> None:
    """Link 7: from 4 to 6 and from 9 to 10; connection 2 comes when all have gone. Link 8: one twice."""
    flows = _flows([0, 1, 2, 3], [0, 1, 2, 0])
    begin, end = np.array([0.0, 4, 20, 9]), np.array([6.0, 10, 30, 12])
    row, links = np.array([0, 1, 2, 3, 0, 3]), np.array([7, 7, 7, 7, 8, 8])
    (only,) = meetings(flows, row, links, np.arange(4), begin, end)
    assert (only.link, only.connections, only.together) == (7, (0, 1), 3.0)


def test_each_communication_of_a_kind_is_a_time_of_its_own() -> None:
    """Connection 1 runs from 0 to 2 and from 8 to 9, the other one from 1 to 8.5."""
    flows = _flows([0, 1], [0, 1])
    begin, end = np.array([1.0, 0, 8]), np.array([8.5, 2, 9])
    (only,) = meetings(flows, np.arange(2), np.zeros(2, int), np.array([0, 1, 1]), begin, end)
    assert only.together == 1.5


_TWO = np.array([0.0, 5]), np.array([5.0, 9])


def test_what_begins_when_another_ends_does_not_meet_it() -> None:
    flows = _flows([0, 1], [0, 1])
    assert meetings(flows, np.arange(2), np.zeros(2, int), np.arange(2), *_TWO) == []
