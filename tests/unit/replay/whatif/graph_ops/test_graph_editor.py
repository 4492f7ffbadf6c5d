"""Edited graphs are replayed as what they were edited to be, in whatever order their nodes are numbered."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.graph import EdgeKind, GraphError
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from tests.builders import tiny_graph


def starts(durations, edges):
    """When each node starts, node by node: {node: ns} of {node: ns} and (from, to, lag) edges."""
    before = {node: [(one, lag) for one, to, lag in edges if to == node] for node in durations}
    found = dict[int, int]()
    for node in TopologicalSorter(
        {node: [one for one, _ in each] for node, each in before.items()}
    ).static_order():
        found[node] = max([0, *(found[one] + durations[one] + lag for one, lag in before[node])])
    return found


@st.composite
def edited(draw):
    """A graph, which nodes to take out, how long added ones take, and edges to add, cycles now and then."""
    size, more = draw(st.integers(2, 12)), draw(st.integers(0, 6))
    numbers = st.integers(0, size - 1)
    edges = draw(st.lists(st.tuples(numbers, numbers, st.integers(-5, 5)), max_size=20))
    gone = draw(st.sets(numbers, max_size=size - 1))
    left = sorted(set(range(size + more)) - gone)
    rank = draw(st.permutations(left))  # most added edges go forward in some order of all nodes
    ends = st.sampled_from(range(len(left)))
    links = draw(st.lists(st.tuples(ends, ends, st.integers(-5, 5), st.integers(0, 9)), max_size=12))
    added = [
        (
            rank[max(one, to) if odd == 0 else min(one, to)],
            rank[min(one, to) if odd == 0 else max(one, to)],
            lag,
        )
        for one, to, lag, odd in links
        if one != to
    ]
    durations = draw(st.lists(st.integers(0, 20), min_size=size + more, max_size=size + more))
    forward = [(min(one, to), max(one, to), lag) for one, to, lag in edges if one != to]
    return size, durations, forward, gone, added


@given(edited())
def test_a_graph_edited_in_any_way_is_replayed_as_its_nodes_and_edges_say(case):
    size, durations, edges, gone, added = case
    editor = GraphEditor(tiny_graph(durations[:size], edges))
    named = editor.graph.nodes.span.tolist()
    number = {name: at for at, name in enumerate(named)}
    editor.gone[[number[name] for name in gone]] = True
    for name in range(size, len(durations)):
        number[name] = editor.add(0, duration=durations[name], span=name)
    for one, to, lag in added:
        editor.link(number[one], number[to], EdgeKind.SYNC, lag)
    kept = {name: ns for name, ns in enumerate(durations) if name not in gone}
    left = [each for each in edges if not gone & {*each[:2]}] + added
    try:
        expected = starts(kept, left)
    except CycleError:
        with pytest.raises(GraphError, match="cycle"):
            editor.finish()
        return
    made = editor.finish()
    assert (made.edges.source < made.edges.target).all()
    assert dict(zip(made.nodes.span.tolist(), replay(made).start.tolist())) == expected


def test_old_nodes_that_wait_for_nothing_behind_them_keep_their_order():
    editor = GraphEditor(tiny_graph([1] * 6, [(at, at + 1, 0) for at in range(5)]))
    editor.gone[2] = True
    added = editor.add(4, duration=7, span=9)
    editor.link(1, added, EdgeKind.SYNC)
    editor.link(added, 4, EdgeKind.SYNC)
    made = editor.finish()
    assert made.nodes.span.tolist() == [0, 1, 9, 3, 4, 5]
    assert made.nodes.duration.tolist() == [1, 1, 7, 1, 1, 1]


def test_only_what_lies_between_the_ends_of_a_backward_edge_is_ordered_again():
    editor = GraphEditor(tiny_graph([1] * 8, []))
    editor.link(4, 2, EdgeKind.SYNC)
    spans = editor.finish().nodes.span
    assert spans[[0, 1, 5, 6, 7]].tolist() == [0, 1, 5, 6, 7]
    assert np.flatnonzero(spans == 4) < np.flatnonzero(spans == 2)
