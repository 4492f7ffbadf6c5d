"""The compiled loops against their slow twins, on random graphs and random nested spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.engine import (
    FEW,
    by_target,
    distinct,
    grouped,
    innermost_segments,
    longest_path,
    longest_path_batch,
    topological_order,
)
from dpro.replay.graph import Graph, GraphError, NodeKind
from dpro.replay.timeline import critical_nodes, replay, replay_durations, slack_of
from tests.builders import tiny_graph
from tests.reference.event_driven import Edge, paint, simulate


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[int], list[int], list[Edge]]:
    """Durations, earliest times and edges of a graph without cycles, its nodes numbered at random."""
    size = draw(st.integers(1, 12))
    number = draw(st.permutations(range(size)))
    durations = draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))
    earliest = draw(st.lists(st.sampled_from([0, 0, 0, 7, 60]), min_size=size, max_size=size))
    pair = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1), st.integers(-30, 50))
    pairs = draw(st.lists(pair, max_size=25))
    edges = [(number[min(a, b)], number[max(a, b)], lag) for a, b, lag in pairs if a != b]
    return durations, earliest, edges


def _graph(dag: tuple[list[int], list[int], list[Edge]]) -> Graph:
    durations, earliest, edges = dag
    return tiny_graph(durations, edges, earliest=earliest)


@given(dags())
def test_every_start_equals_that_of_the_event_driven_simulation(dag):
    graph = _graph(dag)
    timeline = replay(graph)
    starts = dict(zip(graph.nodes.name.tolist(), timeline.start.tolist()))
    assert [starts[i] for i in range(len(starts))] == simulate(*dag)
    assert (timeline.end == timeline.start + graph.nodes.duration).all()


@given(dags(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_many_scenarios_in_one_pass_equal_without_rendezvous(dag, factors):
    graph = _graph(dag)
    columns = np.stack([graph.nodes.duration * factor for factor in factors], axis=1)
    ends = replay_durations(graph, columns)
    for index in range(len(factors)):
        assert (ends[:, index] == replay(graph.with_durations(columns[:, index])).end).all()


@given(st.lists(st.integers(0, 6), max_size=40))
def test_grouping_sorts_stably_and_says_where_each_group_is(keys):
    key = np.array(keys, np.int64)
    indptr, order = grouped(key, 8)
    assert order.tolist() == np.argsort(key, kind="stable").tolist()
    assert np.diff(indptr).tolist() == np.bincount(key, minlength=8).tolist()


def test_scenarios_need_not_lie_one_behind_the_other_in_memory():
    graph = tiny_graph([5, 7], [(0, 1, 2)])
    transposed = np.asfortranarray(np.array([[1, 10], [1, 1]]))
    starts = longest_path_batch(
        transposed, graph.nodes.earliest, graph.indptr, graph.edges.source, graph.edges.lag
    )
    assert starts.tolist() == [[0, 0], [3, 12]]


@given(dags())
def test_the_binding_edge_really_sets_the_start(dag):
    timeline = replay(_graph(dag))
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    for node, edge in enumerate(timeline.binding.tolist()):
        if edge < 0:
            assert timeline.start[node] == nodes.earliest[node]
        else:
            assert edges.target[edge] == node
            assert timeline.end[edges.source[edge]] + edges.lag[edge] == timeline.start[node]
            assert timeline.start[node] > nodes.earliest[node]


def test_no_priority_among_sorts_of_work_idles_a_device():
    # A transfer and a kernel of one rank, on streams of their own: the kernel is ready first and starts then,
    # whatever is before it in the list or lasts longer; and so does a transfer that is ready before a kernel.
    kinds = [NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.KERNEL, NodeKind.COPY]
    graph = tiny_graph([100, 50, 10, 5], [(0, 1, 0), (2, 3, 0)], kind=[int(kind) for kind in kinds])
    starts = dict(zip(graph.nodes.name.tolist(), replay(graph).start.tolist()))
    assert starts == {0: 0, 1: 100, 2: 0, 3: 10}


@given(dags(), st.data())
def test_what_sort_of_work_a_node_is_does_not_matter_to_when_it_starts(dag, data):
    durations, earliest, edges = dag
    kinds = data.draw(
        st.lists(st.sampled_from(list(NodeKind)), min_size=len(durations), max_size=len(durations))
    )
    graph = tiny_graph(durations, edges, earliest=earliest, kind=[int(kind) for kind in kinds])
    timeline = replay(graph)
    starts = dict(zip(graph.nodes.name.tolist(), timeline.start.tolist()))
    assert [starts[i] for i in range(len(starts))] == simulate(*dag)
    assert (timeline.end == timeline.start + graph.nodes.duration).all()


def test_of_edges_that_set_the_same_start_the_first_counts_and_before_them_the_nodes_own_time():
    graph = tiny_graph([5, 5, 1, 1], [(0, 2, 0), (1, 2, 0), (0, 3, 0)], earliest=[0, 0, 0, 5])
    timeline = replay(graph)
    node = {name: i for i, name in enumerate(graph.nodes.name.tolist())}
    assert timeline.binding[node[2]] == graph.indptr[node[2]]
    assert timeline.start[node[3]] == 5
    assert timeline.binding[node[3]] == -1


@given(dags())
def test_the_critical_path_is_as_long_as_the_makespan(dag):
    timeline = replay(_graph(dag))
    path = critical_nodes(timeline, 0)
    nodes, edges = timeline.graph.nodes, timeline.graph.edges
    lags = sum(int(edges.lag[timeline.binding[node]]) for node in path[1:])
    length = int(nodes.earliest[path[0]]) + int(nodes.duration[path].sum()) + lags
    assert length == timeline.end.max()
    assert timeline.binding[path[0]] == -1


@given(dags(), st.data())
def test_slack_is_what_a_node_can_last_longer_without_anything_ending_later(dag, data):
    timeline = replay(_graph(dag))
    graph, slack = timeline.graph, slack_of(timeline)
    assert (slack >= 0).all()
    assert (slack[critical_nodes(timeline, 0)] == 0).all()
    node = data.draw(st.integers(0, graph.num_nodes - 1))
    for longer, later in ((slack[node], 0), (slack[node] + 1, 1)):
        duration = graph.nodes.duration.copy()
        duration[node] += longer
        assert replay(graph.with_durations(duration)).end.max() == timeline.end.max() + later


def test_slack_ends_with_the_window_that_a_node_is_in():
    graph = tiny_graph([10, 30, 5], [], window=[0, 0, 1])
    slack = dict(zip(graph.nodes.name.tolist(), slack_of(replay(graph)).tolist()))
    assert slack == {0: 20, 1: 0, 2: 0}


@given(dags())
def test_every_edge_goes_forward_in_the_order_of_nodes(dag):
    graph = _graph(dag)
    assert (graph.edges.source < graph.edges.target).all()
    assert sorted(graph.nodes.name.tolist()) == list(range(graph.num_nodes))
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    assert (graph.edges.target == rows).all()


@given(dags(), st.data())
def test_a_cycle_is_found_and_its_names_are_printed(dag, data):
    durations, _, edges = dag
    size = len(durations)
    if size < 2:
        return
    ring = data.draw(st.permutations(range(size)))[: data.draw(st.integers(2, size))]
    closed = [*edges, *((a, b, 0) for a, b in zip(ring, [*ring[1:], ring[0]]))]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(durations, [0] * size, closed)
    names = [f"<{i}>" for i in range(size)]
    with pytest.raises(GraphError, match="cycle") as caught:
        tiny_graph(durations, closed, names)
    text = str(caught.value).partition("cycle: ")[2]
    shown = [int(part.partition(">")[0].strip("<")) for part in text.split(" -> ")]
    assert shown
    # What is printed is connected by edges, in the direction of the arrows.
    pairs = {(a, b) for a, b, _ in closed}
    assert all(pair in pairs for pair in pairwise(shown))
    assert len(shown) == 8 or (shown[-1], shown[0]) in pairs


def test_the_cycle_error_names_the_cycle_and_not_what_waits_behind_it():
    edges = [(0, 1, 0), (1, 2, 0), (2, 1, 0), (2, 3, 0)]
    with pytest.raises(GraphError) as caught:
        tiny_graph([1] * 4, edges, ["root", "ping", "pong", "behind"])
    assert "ping" in str(caught.value)
    assert "pong" in str(caught.value)
    assert "root" not in str(caught.value)
    assert "behind" not in str(caught.value)


def test_nodes_on_or_behind_a_cycle_are_reported_as_not_ordered():
    source, target = np.array([0, 1, 2, 2]), np.array([1, 2, 1, 3])
    order, stuck = topological_order(4, source, target, np.arange(4))
    assert order.tolist() == [0]
    assert stuck.tolist() == [1, 2, 3]


def test_an_edge_that_leaves_the_graph_and_a_negative_duration_are_refused():
    with pytest.raises(GraphError, match="outside"):
        tiny_graph([1, 1], [(0, 2, 0)])
    with pytest.raises(GraphError, match="negative duration on node 'bad'"):
        tiny_graph([1, -1], [], ["good", "bad"])


def test_the_arrays_of_a_graph_cannot_be_written_to():
    graph = tiny_graph([1, 2], [(0, 1, 0)])
    for array in (
        graph.nodes.duration,
        graph.edges.lag,
        graph.indptr,
        graph.with_durations(np.ones(2)).indptr,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_without_edges_keeps_what_is_not_dropped():
    graph = tiny_graph([10, 20, 30], [(0, 2, 0), (1, 2, 5)])
    node = {name: i for i, name in enumerate(graph.nodes.name.tolist())}
    drop = graph.edges.source == node[1]
    assert replay(graph).start[node[2]] == 25
    assert replay(graph.without_edges(drop)).start[node[2]] == 10
    assert replay(graph.without_edges(~drop)).start[node[2]] == 25


def test_what_waits_by_no_edge_starts_as_without_the_edges():
    graph = tiny_graph([10, 20, 30], [(0, 2, 0), (1, 2, 5)], earliest=[3, 0, 4])
    for drop in ([False, False], [True, False], [False, True], [True, True]):
        both = [replay(cut(np.array(drop))).start for cut in (graph.without_waits, graph.without_edges)]
        assert both[0].tolist() == both[1].tolist()


def test_a_graph_without_nodes_replays_to_nothing():
    empty = np.empty(0, np.int64)
    start, end, binding = longest_path(empty, empty, np.zeros(1, np.int64), empty, empty)
    assert start.size == end.size == binding.size == 0


moments = st.integers(0, 40)


def _in_order(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(spans, key=lambda span: (span[0], -span[1]))


def _check_against_painter(spans: list[tuple[int, int]]) -> None:
    start, end = np.array(spans, np.int64).reshape(-1, 2).T
    seg_start, seg_span = innermost_segments(start.copy(), end.copy())
    assert (np.diff(seg_start) > 0).all()
    painted = {
        moment: span
        for a, b, span in zip(seg_start.tolist(), seg_start.tolist()[1:], seg_span.tolist())
        for moment in range(a, b)
        if span >= 0
    }
    assert painted == paint(spans)
    if spans:
        assert seg_span[-1] == -1
        assert seg_start[-1] == end.max()


@given(st.lists(st.tuples(moments, moments).map(lambda p: (min(p), max(p))), max_size=12))
def test_innermost_spans_equal_those_painted_moment_by_moment_however_they_overlap(spans):
    _check_against_painter(_in_order(spans))


@st.composite
def nested_with_rounding(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Properly nested spans, each end then moved by at most one."""
    spans = [(0, 40)]
    for _ in range(draw(st.integers(0, 8))):
        outer = spans[draw(st.integers(0, len(spans) - 1))]
        a, b = sorted((draw(st.integers(*outer)), draw(st.integers(*outer))))
        if all(b <= c or a >= d or (a <= c and d <= b) or (c <= a and b <= d) for c, d in spans):
            spans.append((a, b))
    return _in_order([(a, max(a, b + draw(st.integers(-1, 1)))) for a, b in spans])


@given(nested_with_rounding())
def test_a_span_that_rounding_lets_outlast_the_one_around_it_is_kept_whole(spans):
    _check_against_painter(spans)


@given(st.integers(1, 8), st.data())
@settings(max_examples=30)
def test_edges_come_by_target_then_source_then_as_given(num_nodes, data):
    ends = st.lists(st.integers(0, num_nodes - 1), min_size=3 * FEW, max_size=3 * FEW)
    source, target = (np.array(data.draw(ends), np.int64) for _ in range(2))
    indptr, order = by_target(source, target, num_nodes)
    assert order.tolist() == np.lexsort((np.arange(source.size), source, target)).tolist()
    assert np.diff(indptr).tolist() == np.bincount(target, minlength=num_nodes).tolist()


@given(st.lists(st.integers(-3, 3)), st.sampled_from([1, 2**40]), st.booleans())
@settings(max_examples=30)
def test_distinct_values_are_those_of_unique(values, factor, many):
    column = np.array(values, np.int64) * factor
    if many:  # more than are looked through one by one
        column = np.append(column, np.arange(2 * FEW))
    found, code = distinct(column)
    expected, at = np.unique(column, return_inverse=True)
    assert (found.tolist(), code.tolist()) == (expected.tolist(), at.tolist())
