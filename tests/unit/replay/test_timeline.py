"""Times of steps from times of nodes."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.graph import NodeKind, once
from dpro.replay.timeline import (
    are_usual,
    changed_durations,
    changed_ends,
    changed_step_times,
    durations_of,
    extents_of,
    replay,
    replayed,
    step_ends,
    step_lengths,
    step_times,
)
from tests.builders import tiny_graph


def test_a_step_ends_no_sooner_than_the_one_before_it():
    # What belongs to step 0 may run on in the background while step 1 begins and ends.
    graph = tiny_graph([100, 30, 40], [], step=[0, 1, 2])
    start, end = np.array([0, 50, 80]), np.array([100, 80, 120])
    assert step_ends(graph, start, end)["finish_ns"].to_list() == [100, 100, 120]
    assert step_times(graph, start, end)["duration_ns"].to_list() == [100, 0, 20]


def test_of_four_steps_half_of_which_are_long_all_are_usual():
    assert are_usual(np.array([10, 11, 100, 110])).all()


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=8))
def test_some_of_any_steps_are_usual(lengths):
    assert are_usual(np.array(lengths)).any()


@st.composite
def graphs_with_steps(draw):
    """A graph of nodes in windows and steps, when each begins, and the ends of steps of the unchanged one."""
    size = draw(st.integers(3, 40))
    whole = st.lists(st.integers(0, 100), min_size=size, max_size=size)
    steps = draw(st.lists(st.integers(-2, 3), min_size=size, max_size=size))
    windows = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    kinds = draw(st.lists(st.sampled_from([NodeKind.CPU, NodeKind.RENDEZVOUS]), min_size=size, max_size=size))
    durations = draw(whole)
    graph = tiny_graph(durations, [], step=steps, window=windows, kind=kinds)
    starts = [np.array(draw(whole)) for _ in range(2)]
    return graph, *((start, start + graph.nodes.duration) for start in starts)


@given(graphs_with_steps(), st.booleans())
def test_durations_without_a_frame_are_those_of_the_frame(case, counted):
    graph, before, after = case
    baseline = step_ends(graph, *before)
    if counted:
        baseline = baseline.with_columns(counted=pl.col("step") > 1)
    there = step_ends(graph, *after).drop("begin_ns").join(baseline.drop("finish_ns"), on=["window", "step"])
    there = there.sort("window", "step")
    alone = pl.len().over("window") == 1
    finish = pl.when(alone).then(pl.max_horizontal("finish_ns", "begin_ns")).otherwise("finish_ns")
    expected = durations_of(there.with_columns(finish_ns=finish))
    assert changed_step_times(baseline, graph, after[1]).equals(expected)
    durations = expected["duration_ns"].clip(lower_bound=0)
    assert changed_durations(baseline, graph, after[1]).tolist() == durations.to_list()
    assert step_lengths(baseline).tolist() == durations_of(baseline)["duration_ns"].to_list()


@given(graphs_with_steps())
def test_steps_of_a_changed_graph_end_when_its_work_does(case):
    graph, before, (_, end) = case
    baseline = step_ends(graph, *before)
    ends = changed_ends(baseline, graph, end)
    finish = step_ends(graph, end, end)["finish_ns"]
    alone = baseline.select(pl.len().over("window") == 1).to_series()
    no_sooner = pl.select(pl.max_horizontal(finish, baseline["begin_ns"])).to_series()
    assert ends["finish_ns"].to_list() == no_sooner.zip_with(alone, finish).to_list()
    assert ends.drop("finish_ns").equals(baseline.drop("finish_ns"))


def test_step_alone_in_its_window_takes_no_less_than_its_gpu_works_whatever_is_saved_before_it():
    kinds = [NodeKind.CPU, NodeKind.CPU, NodeKind.KERNEL, NodeKind.KERNEL]

    def of(host, steps):
        order = [(0, 1, 0), (1, 2, 0), (2, 3, 0)]
        return tiny_graph([9 * host, host, 30, 20], order, step=steps, kind=kinds, lane=[0, 0, 1, 1])

    def changed(steps):
        before, after = (replay(of(host, steps)) for host in (100, 1))
        baseline = step_ends(before.graph, before.start, before.end)
        expected = changed_step_times(baseline, after.graph, after.end)["duration_ns"].to_list()
        assert changed_durations(baseline, after.graph, after.end).tolist() == [max(ns, 0) for ns in expected]
        return expected

    assert changed([-1, 0, 0, 0]) == [50]  # it would end 840 before it began
    assert sum(changed([-1, 0, 0, 1])) == 60 - 900  # with others, what all of them take counts


@given(graphs_with_steps())
def test_extents_are_from_the_first_start_to_the_last_end_of_each_group(case):
    graph, (start, end), _ = case
    nodes = graph.nodes
    expected = dict[tuple[int, int], tuple[int, int]]()
    for node in np.flatnonzero(nodes.kind != NodeKind.RENDEZVOUS).tolist():
        place = (int(nodes.window[node]), int(nodes.step[node]))
        first, last = expected.get(place, (int(start[node]), int(end[node])))
        expected[place] = min(first, int(start[node])), max(last, int(end[node]))
    found = extents_of(graph, ["window", "step"], start, end)
    assert {row[:2]: row[2:] for row in found.iter_rows()} == expected


def test_a_recorded_graph_is_replayed_once_and_a_changed_one_by_itself():
    graph = tiny_graph([10, 10], [(0, 1, 0)])
    first = replayed(graph)
    assert replayed(graph).start is first.start
    assert (first.start.tolist(), first.end.tolist()) == ([0, 10], [10, 20])
    slower = graph.with_durations(graph.nodes.duration * 2)
    assert replayed(slower).end.tolist() == replay(slower).end.tolist() == [20, 40]
    assert replayed(graph).start is first.start


def test_what_was_computed_counts_for_the_same_columns_only():
    graph = tiny_graph([1, 2], [(0, 1, 0)])
    asked = []

    def compute(graph):
        asked.append(1)
        return int(graph.nodes.duration.sum())

    def total(graph):
        return once(graph, "total", compute)

    longer = graph.with_durations(np.array([5, 5]))
    later = graph.with_lags(np.array([7]))
    assert [total(each) for each in (graph, longer, later, longer, graph)] == [3, 10, 3, 10, 3]
    assert len(asked) == 3  # the longer one twice: what is kept is of the first that asked
