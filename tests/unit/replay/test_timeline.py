"""Times of steps from times of nodes."""

from __future__ import annotations

import numpy as np

from dpro.replay.timeline import step_ends, step_times
from tests.builders import tiny_graph


def test_a_step_ends_no_sooner_than_the_one_before_it():
    # What belongs to step 0 may run on in the background while step 1 begins and ends.
    graph = tiny_graph([100, 30, 40], [], step=[0, 1, 2])
    start, end = np.array([0, 50, 80]), np.array([100, 80, 120])
    assert step_ends(graph, start, end)["finish_ns"].to_list() == [100, 100, 120]
    assert step_times(graph, start, end)["duration_ns"].to_list() == [100, 0, 20]
