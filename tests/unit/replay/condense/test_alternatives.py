"""Ranks changed one at a time, from two condensed graphs of one shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.condense import condense_both, with_ranks_of
from dpro.replay.timeline import replay, step_ends
from tests.reference.condensed import jobs


@given(jobs(), st.integers(0, 99), st.sets(st.integers(0, 2)))
@settings(max_examples=25)
def test_any_ranks_changed_take_the_steps_of_the_whole_graph_with_those_ranks_changed(graph, seed, ranks):
    drawn = np.random.default_rng(seed).uniform(0, 3, graph.num_nodes)
    changed = (graph.nodes.duration * drawn).astype(np.int64)
    one, other = condense_both(graph, changed)
    small = with_ranks_of(one, other, ranks)
    mine = np.isin(graph.nodes.rank, list(ranks))
    whole = graph.with_durations(np.where(mine, changed, graph.nodes.duration))
    timelines = replay(small), replay(whole)
    ends = [step_ends(each.graph, each.start, each.end) for each in timelines]
    assert ends[0].equals(ends[1])
