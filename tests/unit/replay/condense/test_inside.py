"""Looking inside the ranks of a condensed graph gives what a replay of the whole does."""

from __future__ import annotations

from hypothesis import given, settings

from dpro.replay.condense.inside import Inside, critical_nodes_inside
from dpro.replay.condense.joined import condense
from dpro.replay.timeline import critical_nodes, replay
from tests.reference.condensed import jobs


@given(jobs())
@settings(max_examples=25)
def test_a_rank_replayed_by_itself_starts_all_its_nodes_when_the_whole_does(graph):
    whole, condensed = replay(graph), condense(graph)
    inside = Inside(condensed, replay(condensed.graph))
    for rank in condensed.cut.ranks.tolist():
        own = inside.of_rank(rank)
        assert (graph.nodes.rank[own] == rank).all()
        assert (inside.start[own] == whole.start[own]).all()


@given(jobs())
@settings(max_examples=25)
def test_what_decides_when_a_window_ends_is_found_without_a_replay_of_the_whole(graph):
    whole, condensed = replay(graph), condense(graph)
    for window in set(graph.nodes.window[graph.nodes.rank >= 0].tolist()):
        inside = Inside(condensed, replay(condensed.graph))
        found = critical_nodes_inside(inside, window)
        chain = critical_nodes(whole, window)
        if graph.nodes.rank[chain[-1]] >= 0:
            assert found.tolist() == chain.tolist()
