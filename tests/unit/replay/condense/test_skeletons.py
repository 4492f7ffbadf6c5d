"""Skeletons against the slow twin, which follows every path."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.condense.parts import cut_by_rank, part_of
from dpro.replay.condense.skeletons import skeleton_of
from dpro.replay.graph import NodeKind
from tests.builders import tiny_graph
from tests.reference.condensed import jobs, labels_of


@given(jobs(), st.sampled_from([1, 2, 256]))
@settings(max_examples=25)
def test_what_is_left_of_a_rank_has_the_longest_paths_and_drops_none_that_decides(graph, reach):
    cut = cut_by_rank(graph)
    for number in range(cut.ranks.size):
        part = part_of(graph, cut, number)
        skeleton = skeleton_of(part, reach)
        whole, small = labels_of(part), labels_of(skeleton)
        assert whole.keys() == small.keys()
        lasts = {
            node: 0 if free else length
            for node, free, length in zip(part.node, part.free, part.duration[:, 0])
        }
        for node, (floor, labels) in whole.items():
            left = small[node][1]
            assert small[node][0] <= floor <= earliest_by(small, lasts, node)
            assert left.keys() <= labels.keys()
            for kept, length in labels.items():
                assert left.get(kept, length) <= length <= longest_over(small, lasts, kept, node)


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
    # Asked for: 0, 2 and 3. From 0 to 3 there is a path of 4 beside one over 2 of 5 and 1.
    graph = tiny_graph([1, 5, 2, 4, 1], [(0, 1, 0), (1, 2, 0), (0, 3, 0), (3, 4, 0), (2, 4, 0)])
    cut = cut_by_rank(graph)
    asked = graph.nodes.name[:] != 1
    asked &= graph.nodes.name != 3
    skeleton = skeleton_of(part_of(graph, cut, 0, asked))
    names = [int(graph.nodes.name[node]) if node >= 0 else -1 for node in skeleton.node]
    lags = {
        (names[skeleton.source[edge]], names[at]): int(skeleton.lag[edge, 0])
        for at in range(len(names))
        for edge in range(skeleton.indptr[at], skeleton.indptr[at + 1])
    }
    assert lags == {(0, 2): 5, (2, 4): 0, (4, -1): 0}


def test_a_node_at_which_paths_merge_and_part_stays_where_that_saves_edges():
    # Three transfers before, three arrivals behind: nine edges without the node between, six with it.
    size, kinds = 7, [NodeKind.TRANSFER] * 3 + [NodeKind.CPU] + [NodeKind.ARRIVE] * 3
    edges = [(at, 3, 0) for at in range(3)] + [(3, at, 0) for at in range(4, size)]
    graph = tiny_graph([5, 5, 5, 1, 0, 0, 0], edges, kind=[int(each) for each in kinds])
    asked = graph.nodes.name != 3
    skeleton = skeleton_of(part_of(graph, cut_by_rank(graph), 0, asked))
    assert (skeleton.node >= 0).sum() == size
    fewer = tiny_graph([5, 5, 5, 1, 0], edges[:4], kind=[int(each) for each in kinds[:5]])
    skeleton = skeleton_of(part_of(fewer, cut_by_rank(fewer), 0, fewer.nodes.name != 3))
    assert 3 not in fewer.nodes.name[skeleton.node[skeleton.node >= 0]]
