"""Skeletons against the slow twin, which follows every path."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay import condense as module
from dpro.replay.condense import Cut, Skeletons, cut_by_rank, skeletons_of
from dpro.replay.graph import Graph, NodeKind
from tests.builders import tiny_graph
from tests.reference.condensed import Labels, Name, jobs, labels_of


def named(skeletons: Skeletons, rank: int) -> dict[Name, tuple[int, Labels]]:
    """The skeleton of a rank as the twin has it."""
    names = [
        node if node >= 0 else (window, step)
        for node, window, step in zip(*(each.tolist() for each in (
            skeletons.node, skeletons.window, skeletons.step
        )))
    ]  # fmt: skip
    found = {}
    for at in np.flatnonzero(skeletons.rank == rank).tolist():
        edges = range(skeletons.indptr[at], skeletons.indptr[at + 1])
        labels = {names[skeletons.source[edge]]: int(skeletons.lag[edge, 0]) for edge in edges}
        found[names[at]] = (int(skeletons.earliest[at, 0]), labels)
    return found


def lasting(graph: Graph, cut: Cut) -> dict[Name, int]:
    """How long nodes last at least, whatever the network does."""
    return dict(enumerate(np.where(cut.free, 0, graph.nodes.duration).tolist()))


def keeping(graph: Graph, chosen: np.ndarray) -> Cut:
    """The cut of a graph, as if other ranks waited for the chosen nodes, too."""
    cut = cut_by_rank(graph)
    return dataclasses.replace(cut, joins=cut.joins | chosen)


@given(jobs(), st.sampled_from([1, 2, 64]))
@settings(max_examples=25)
def test_what_is_left_of_a_rank_has_the_longest_paths_and_drops_none_that_decides(graph, reach):
    cut = cut_by_rank(graph)
    with patch.object(module, "REACH", reach):
        skeletons, lasts = skeletons_of(graph, cut), lasting(graph, cut)
    kept = set(skeletons.node.tolist())
    assert set(np.flatnonzero(cut.joins).tolist()) <= kept
    for rank in cut.ranks.tolist():
        whole, small = labels_of(graph, rank, kept), named(skeletons, rank)
        assert whole.keys() == small.keys()
        for node, (floor, labels) in whole.items():
            left = small[node][1]
            assert small[node][0] <= floor <= earliest_by(small, lasts, node)
            assert left.keys() <= labels.keys()
            for before, length in labels.items():
                assert left.get(before, length) <= length <= longest_over(small, lasts, before, node)


@given(jobs())
@settings(max_examples=25)
def test_ranks_condensed_at_once_are_what_they_are_one_by_one(graph):
    cut = cut_by_rank(graph)
    skeletons = skeletons_of(graph, cut)
    for number, rank in enumerate(cut.ranks.tolist()):
        own = cut.order[cut.indptr[number] : cut.indptr[number + 1]]
        of_rank = dataclasses.replace(
            cut, ranks=cut.ranks[[number]], indptr=np.array([0, own.size]), order=own
        )
        assert named(skeletons_of(graph, of_rank), rank) == named(skeletons, rank)


def earliest_by(small: dict, lasts: dict, node: int) -> int:
    """When a node starts at the earliest, if all transfers begin at once and last no time."""
    floor, labels = small[node]
    after = (earliest_by(small, lasts, kept) + lasts[kept] + length for kept, length in labels.items())
    return max([floor, *after])


def longest_over(small: dict, lasts: dict, kept: int, node: int) -> int:
    """The longest path from the end of one kept node to the start of another over kept nodes."""
    left = [-(10**9)]
    for other, length in small[node][1].items():
        whole = 0 if other == kept else longest_over(small, lasts, kept, other) + lasts[other]
        left.append(whole + length)
    return max(left)


def test_an_edge_that_a_path_over_another_kept_node_always_outlasts_is_left_out():
    # Kept: 0, 2 and 4. From 0 to 4 there is a path of 4 beside one over 2 of 5 and 1.
    graph = tiny_graph([1, 5, 2, 4, 1], [(0, 1, 0), (1, 2, 0), (0, 3, 0), (3, 4, 0), (2, 4, 0)])
    cut = keeping(graph, ~np.isin(graph.nodes.name, (1, 3)))
    small = named(skeletons_of(graph, cut), 0)
    number = {int(name): node for node, name in enumerate(graph.nodes.name)}
    assert [small[number[name]][1] for name in (0, 2, 4)] == [{}, {number[0]: 5}, {number[2]: 0}]
    assert small[0, 0][1] == {number[4]: 0}


def test_a_node_at_which_paths_merge_and_part_stays_where_that_saves_edges():
    # Three transfers before, three arrivals behind: nine edges without the node between, six with it.
    size, kinds = 7, [NodeKind.TRANSFER] * 3 + [NodeKind.CPU] + [NodeKind.ARRIVE] * 3
    edges = [(at, 3, 0) for at in range(3)] + [(3, at, 0) for at in range(4, size)]
    graph = tiny_graph([5, 5, 5, 1, 0, 0, 0], edges, kind=[int(each) for each in kinds])
    skeletons = skeletons_of(graph, keeping(graph, graph.nodes.name != 3))
    assert (skeletons.node >= 0).sum() == size
    fewer = tiny_graph([5, 5, 5, 1, 0], edges[:4], kind=[int(each) for each in kinds[:5]])
    skeletons = skeletons_of(fewer, keeping(fewer, fewer.nodes.name != 3))
    assert 3 not in fewer.nodes.name[skeletons.node[skeletons.node >= 0]]


def test_more_edges_than_nodes_are_made_room_for():
    # Fifty transfers with an edge to each of fifty arrivals: 2,500 edges stay of 100 nodes.
    size = 50
    kinds = [int(NodeKind.TRANSFER)] * size + [int(NodeKind.ARRIVE)] * size
    edges = [(at, size + to, at * to) for at in range(size) for to in range(size)]
    graph = tiny_graph([1] * 2 * size, edges, kind=kinds)
    skeletons = skeletons_of(graph, keeping(graph, np.ones(2 * size, np.bool_)))
    assert skeletons.source.size >= size * size
