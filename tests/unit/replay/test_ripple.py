"""What a local change moves, against a replay of the whole graph."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.graph import Graph
from dpro.replay.ripple import Ripple
from dpro.replay.timeline import replay
from tests.builders import tiny_graph


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs of a few or a few hundred nodes, so that some stretches of nodes are passed over."""
    size = draw(st.sampled_from([1, 2, 5, 64, 65, 300]))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    ends = np.sort(random.integers(0, size, (draw(st.integers(0, 2 * size)), 2)), axis=1)
    ends = ends[ends[:, 0] < ends[:, 1]]
    edges = [(int(a), int(b), int(lag)) for (a, b), lag in zip(ends, random.integers(-30, 50, len(ends)))]
    earliest = random.choice([0, 0, 0, 200], size)
    return tiny_graph(random.integers(0, 40, size).tolist(), edges, earliest=earliest.tolist())


def changed(graph: Graph, nodes: np.ndarray, durations: np.ndarray, edges: np.ndarray, lags: np.ndarray):
    duration, lag = graph.nodes.duration.copy(), graph.edges.lag.copy()
    duration[nodes], lag[edges] = durations, lags
    return replay(graph.with_durations(duration).with_lags(lag))


@given(graphs(), st.data())
def test_what_a_local_change_moves_is_what_a_whole_replay_moves(graph, data):
    before = replay(graph)
    ripple = Ripple(before)
    for _ in range(2):  # a question leaves the baseline as it was
        random = np.random.default_rng(data.draw(st.integers(0, 10_000)))
        nodes = random.permutation(graph.num_nodes)[: data.draw(st.integers(0, 3))]
        edges = random.permutation(graph.edges.lag.size)[: data.draw(st.integers(0, 2))]
        durations, lags = random.integers(0, 80, nodes.size), random.integers(-30, 50, edges.size)
        moved, starts = ripple.moved(nodes, durations, edges, lags)
        whole = changed(graph, nodes, durations, edges, lags).start
        assert moved.tolist() == np.flatnonzero(whole != before.start).tolist()
        assert starts.tolist() == whole[moved].tolist()


def test_a_change_that_slack_absorbs_moves_only_what_is_before_the_slack():
    # 0 -> 1 -> 3 takes 10 + 5, 2 -> 3 takes 40: node 0 may take 20 longer before node 3 moves.
    graph = tiny_graph([10, 5, 40, 1], [(0, 1, 0), (1, 3, 0), (2, 3, 0)])
    node = {name: i for i, name in enumerate(graph.nodes.name.tolist())}
    ripple = Ripple(replay(graph))
    first = np.array([node[0]])
    assert ripple.moved(first, np.array([30]))[0].tolist() == [node[1]]
    moved, starts = ripple.moved(first, np.array([50]))
    assert dict(zip(moved.tolist(), starts.tolist())) == {node[1]: 50, node[3]: 55}


def test_a_question_does_not_write_to_the_graph_or_its_replay():
    graph = tiny_graph([10, 5], [(0, 1, 0)])
    timeline = replay(graph)
    kept = dataclasses.replace(timeline, start=timeline.start.copy())
    Ripple(timeline).moved(np.array([0]), np.array([99]))
    assert timeline.start.tolist() == kept.start.tolist() == replay(graph).start.tolist()
