"""Condensed graphs against whole ones, on random jobs: nothing may differ by a nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.condense.joined import Condensed, condense, ranks_to_condense, recondense
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.timeline import rank_step_times, replay, step_ends
from tests.builders import tiny_graph
from tests.reference.condensed import jobs


def assert_equal(graph: Graph, condensed: Condensed) -> None:
    whole, small = replay(graph), replay(condensed.graph)
    real = condensed.node >= 0
    assert (small.start[real] == whole.start[condensed.node[real]]).all()
    assert (small.end[real] == whole.end[condensed.node[real]]).all()
    for steps in (step_ends, rank_step_times):
        assert steps(graph, whole.start, whole.end).equals(steps(condensed.graph, small.start, small.end))


def scaled(graph: Graph, chosen: np.ndarray, seed: int) -> Graph:
    """Other durations of the chosen nodes, from none to ten times as long."""
    drawn = np.random.default_rng(seed).uniform(0, 10, graph.num_nodes)
    return graph.with_durations(
        np.where(chosen, (graph.nodes.duration * drawn).astype(np.int64), graph.nodes.duration)
    )


@given(jobs(), st.integers(0, 99), st.data())
@settings(max_examples=25)
def test_kept_starts_and_steps_equal_those_of_the_whole_graph_however_long_transfers_last(graph, seed, data):
    asked = np.array(data.draw(st.lists(st.booleans(), min_size=graph.num_nodes, max_size=graph.num_nodes)))
    condensed = condense(graph, asked)
    assert set(np.flatnonzero(asked)) <= set(condensed.node)
    assert_equal(graph, condensed)
    changed = scaled(graph, condensed.cut.free, seed)
    assert not ranks_to_condense(condensed, changed).any()
    assert_equal(changed, recondense(condensed, changed))


@given(jobs(), st.integers(0, 99))
@settings(max_examples=25)
def test_a_change_inside_one_rank_condenses_that_rank_alone(graph, seed):
    condensed = condense(graph)
    changed = scaled(graph, graph.nodes.rank == 0, seed)
    assert set(condensed.cut.ranks[ranks_to_condense(condensed, changed)]) <= {0}
    assert_equal(changed, recondense(condensed, changed))


@given(jobs(), st.integers(0, 99))
@settings(max_examples=25)
def test_other_lags_and_earliest_times_condense_the_ranks_that_they_are_in(graph, seed):
    draw = np.random.default_rng(seed)
    changed = graph.with_lags(
        graph.edges.lag + draw.integers(-5, 20, graph.edges.lag.size) * draw.integers(0, 2)
    )
    assert_equal(changed, recondense(condense(graph), changed))


@pytest.mark.slow
@given(jobs(most=40), st.integers(0, 9999))
@settings(max_examples=1500)
def test_large_random_jobs_replay_condensed_as_whole_under_every_sort_of_edit(graph, seed):
    condensed = condense(graph)
    assert_equal(graph, condensed)
    for chosen in (condensed.cut.free, graph.nodes.rank == 0, graph.nodes.rank >= 0):
        changed = scaled(graph, chosen, seed)
        assert_equal(changed, recondense(condensed, changed))


def test_a_graph_of_other_edges_is_condensed_as_a_whole():
    graph = tiny_graph([5, 7, 1], [(0, 1, 0), (1, 2, 0)])
    changed = graph.without_edges(graph.edges.source == 0)
    assert_equal(changed, recondense(condense(graph), changed))


def test_only_what_ranks_wait_for_each_other_at_is_left():
    # Two ranks of ten pieces of work each, an arrival, a rendezvous, a transfer, and ten pieces more.
    durations, edges, rank, kind = [], [], [], []
    ends = []
    for own in (0, 1):
        first = len(durations)
        durations += [10 + own] * 10 + [0, 50] + [3] * 10
        kind += [NodeKind.CPU] * 10 + [NodeKind.ARRIVE, NodeKind.TRANSFER] + [NodeKind.CPU] * 10
        rank += [own] * 22
        edges += [(at, at + 1, 0) for at in range(first, first + 21)]
        ends.append(first + 10)
    durations, rank, kind = [*durations, 0], [*rank, -1], [*kind, NodeKind.RENDEZVOUS]
    edges += [(ends[0], 44, 0), (ends[1], 44, 0), (44, ends[0] + 1, 0), (44, ends[1] + 1, 0)]
    graph = tiny_graph(durations, edges, rank=rank, kind=[int(each) for each in kind])
    condensed = condense(graph)
    kinds = sorted(NodeKind(each).name for each in condensed.graph.nodes.kind)
    assert kinds == sorted(["CPU", "ARRIVE", "TRANSFER", "END"] * 2 + ["RENDEZVOUS"])
    assert sorted(condensed.graph.edges.lag[condensed.graph.edges.kind == EdgeKind.PATH]) == [30, 30, 90, 99]
    assert_equal(graph, condensed)
