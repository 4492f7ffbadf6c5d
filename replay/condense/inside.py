"""What happens inside the ranks of a condensed graph, found again where someone looks.

In: a condensed graph and its timeline. Out: when each node of a rank starts: the rank replayed by itself,
with the starts of its transfers given; and the chain of nodes that decides when a window ends, for which only
the ranks are replayed that it goes through.
"""

from __future__ import annotations

import numpy as np

from dpro.arrays import Ints
from dpro.replay.condense.joined import Condensed
from dpro.replay.condense.parts import rank_alone
from dpro.replay.engine import longest_path
from dpro.replay.timeline import Timeline


class Inside:
    """Starts of nodes of the whole graph, found rank by rank as they are asked for.

    Attributes:
        condensed: the graph.
        timeline: of `condensed.graph`.
        start: [N] ns of the whole graph's nodes: of kept ones and of the ranks in `known`.
        known: [R] ranks that were asked for.
    """

    def __init__(self, condensed: Condensed, timeline: Timeline) -> None:
        """Only the kept nodes are known."""
        self.condensed, self.timeline = condensed, timeline
        self.start = np.zeros(condensed.whole.num_nodes, np.int64)
        real = condensed.node >= 0
        self.start[condensed.node[real]] = timeline.start[real]
        self.known = np.zeros(condensed.cut.ranks.size, np.bool_)

    def of_rank(self, rank: int) -> Ints:
        """The nodes of a rank; when they start is in `start` from now on.

        Args:
            rank: which.
        """
        cut, whole = self.condensed.cut, self.condensed.whole
        number = int(np.searchsorted(cut.ranks, rank))
        members = cut.members(number)
        if not self.known[number]:
            part = rank_alone(whole, cut, number)
            earliest = part.nodes.earliest.copy()
            given = whole.edges.target[cut.between]
            given = given[whole.nodes.rank[given] == rank]
            earliest[np.searchsorted(members, given)] = self.start[given]
            durations, edges = part.nodes.duration, part.edges
            start, _, _ = longest_path(durations, earliest, part.indptr, edges.source, edges.lag)
            self.start[members] = start
            self.known[number] = True
        return members


def critical_nodes_inside(inside: Inside, window: int) -> Ints:
    """The chain of nodes of the whole graph that decides when a window ends, first to last.

    It is that of `dpro.replay.timeline.critical_nodes`, without a replay of the whole.

    Args:
        inside: of a condensed graph.
        window: which.
    """
    kept, whole = inside.condensed.graph.nodes, inside.condensed.whole
    ends = np.where(kept.window == window, inside.timeline.end, -1)
    chain: list[int] = []
    node = _first_to_end(inside, np.unique(kept.rank[ends == ends.max()]), window, int(ends.max()))
    while node >= 0:
        chain.append(node)
        inside.of_rank(int(whole.nodes.rank[node]))
        node = _decided_by(inside, node)
    return np.array(chain[::-1], np.int64)


def _first_to_end(inside: Inside, ranks: Ints, window: int, end: int) -> int:
    """The first of the nodes of some ranks that end with their window."""
    nodes = inside.condensed.whole.nodes
    found = []
    for rank in ranks.tolist():
        own = inside.of_rank(rank)
        own = own[(nodes.window[own] == window) & (inside.start[own] + nodes.duration[own] == end)]
        found += own[:1].tolist()
    return int(min(found))


def _decided_by(inside: Inside, node: int) -> int:
    """The node that sets the start of another, -1 where its own earliest time does."""
    whole = inside.condensed.whole
    edges = slice(whole.indptr[node], whole.indptr[node + 1])
    before = whole.edges.source[edges]
    ready = inside.start[before] + whole.nodes.duration[before] + whole.edges.lag[edges]
    if not ready.size or ready.max() <= whole.nodes.earliest[node]:
        return -1
    return int(before[ready.argmax()])
