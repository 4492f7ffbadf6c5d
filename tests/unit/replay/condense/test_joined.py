"""Condensed graphs against whole ones, on random jobs: nothing may differ by a nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.condense import cut_by_rank
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from tests.builders import tiny_graph
from tests.reference.condensed import assert_replays_as, condense, jobs, with_transfers_of


def scaled(graph: Graph, chosen: np.ndarray, seed: int) -> Graph:
    """Other durations of the chosen nodes, from none to ten times as long."""
    drawn = np.random.default_rng(seed).uniform(0, 10, graph.num_nodes)
    return graph.with_durations(
        np.where(chosen, (graph.nodes.duration * drawn).astype(np.int64), graph.nodes.duration)
    )


@given(jobs(), st.integers(0, 99))
@settings(max_examples=25)
def test_kept_starts_and_steps_equal_those_of_the_whole_graph_however_long_transfers_last(graph, seed):
    small, node = condense(graph)
    assert_replays_as(graph, small, node)
    changed = scaled(graph, cut_by_rank(graph).free, seed)
    assert_replays_as(changed, with_transfers_of(small, node, changed), node)


@pytest.mark.slow
@given(jobs(most=40), st.integers(0, 9999))
@settings(max_examples=1500)
def test_large_random_jobs_replay_condensed_as_whole_with_any_durations(graph, seed):
    small, node = condense(graph)
    assert_replays_as(graph, small, node)
    changed = scaled(graph, cut_by_rank(graph).free, seed)
    assert_replays_as(changed, with_transfers_of(small, node, changed), node)
    for chosen in (graph.nodes.rank == 0, graph.nodes.rank >= 0):
        changed = scaled(graph, chosen, seed)
        assert_replays_as(changed, *condense(changed))


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
    small, node = condense(graph)
    kinds = sorted(NodeKind(each).name for each in small.nodes.kind)
    assert kinds == sorted(["CPU", "ARRIVE", "TRANSFER", "END"] * 2 + ["RENDEZVOUS"])
    assert sorted(small.edges.lag[small.edges.kind == EdgeKind.PATH]) == [30, 30, 90, 99]
    assert_replays_as(graph, small, node)
