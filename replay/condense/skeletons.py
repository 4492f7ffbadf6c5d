"""Ranks between what they wait for and what others wait for: with only the nodes that matter.

In: a graph and its `Cut`. Out: `Skeletons`. However long its transfers last, and whenever they begin, every
node of a rank starts exactly when it does in the whole: a rank is a linear map in max-plus algebra from the
starts of its transfers to those of its arrivals (Baccelli et al., Synchronization and Linearity, 1992). It
holds for these durations and lags only: under others the rank is condensed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.replay.condense import kernels
from dpro.replay.condense.parts import Cut, ends_of
from dpro.replay.graph import Graph

# Rounds after the first, each of which leaves out nodes at which paths merge where that needs no more edges.
ROUNDS = 3
# Over how many kept nodes back distances are known, a power of two; what is further apart is not compared.
REACH = 64


@dataclass(frozen=True)
class Skeletons:
    """Nodes that were kept, rank by rank, and the longest paths between them; K scenarios.

    Attributes:
        node: [M] node of the graph; -1 of the virtual end of a step.
        rank: [M].
        window, step: [M] of virtual ends.
        duration, earliest: [M, K] ns.
        indptr, source: [M + 1], [E]; edges into node i are indptr[i]:indptr[i + 1].
        lag: [E, K] ns.
    """

    node: Ints
    rank: Ints
    window: Ints
    step: Ints
    duration: Ints
    earliest: Ints
    indptr: Ints
    source: Ints
    lag: Ints

    @property
    def target(self) -> Ints:
        """[E] where each edge leads to."""
        return np.repeat(np.arange(self.node.size), np.diff(self.indptr))


def skeletons_of(graph: Graph, cut: Cut, duration: Ints | None = None) -> Skeletons:
    """Leave out the nodes that no other rank waits for.

    Nodes at which paths merge and part again stay: without such a node, an edge would lead from each node
    before it to each node behind it.

    Args:
        duration: [N, K] ns of its nodes in several scenarios; None for the durations of the graph alone.
    """
    nodes, edges = graph.nodes, graph.edges
    duration = nodes.duration[:, None] if duration is None else duration
    count = duration.shape[1]
    ends = ends_of(graph, cut, duration)
    earliest, lag = (_for_all(column, count) for column in (nodes.earliest, edges.lag))
    behind = (ends.begins, ends.indptr, ends.source, np.zeros((ends.source.size, count), np.int64))
    ranks = (cut.order, cut.indptr, nodes.rank)
    kept, *swept = kernels.sweep(
        ranks, (duration, earliest), (graph.indptr, edges.source, lag), behind, ends.flags, REACH
    )
    end = np.flatnonzero(kept >= nodes.rank.size)
    number = kept[end] - nodes.rank.size
    kept[end] = 0
    rank, lasts, flags = nodes.rank[kept], duration[kept], ends.flags[kept]
    rank[end], lasts[end], flags[end], kept[end] = ends.rank[number], 0, kernels.STAYS, -1
    window, step = np.full((2, kept.size), -1, np.int64)
    window[end], step[end] = ends.window[number], ends.step[number]
    at, (earliest, indptr, source, lag) = _fewer(cut, rank, lasts, flags, swept)
    # What a virtual end is behind has begun by then.
    earliest = np.maximum(earliest, nodes.earliest.min(initial=0))
    return Skeletons(kept[at], rank[at], window[at], step[at], lasts[at], earliest, indptr, source, lag)


def _fewer(
    cut: Cut, rank: Ints, lasts: Ints, flags: NDArray[np.uint8], swept: Sequence[Ints]
) -> tuple[Ints, Sequence[Ints]]:
    """Leave out nodes at which paths merge, if that needs no more edges: those left, and `sweep` of them."""
    at = np.arange(rank.size)
    nothing = (np.zeros(cut.ranks.size + 1, np.int64), np.zeros(1, np.int64), at[:0], lasts[:0])
    for _ in range(ROUNDS):
        earliest, indptr, source, lag = swept
        entering, leaving = np.diff(indptr), np.bincount(source, minlength=at.size)
        stays = (flags & kernels.STAYS > 0) | (entering * leaving > entering + leaving)
        if stays.all():
            break
        ranks = (np.arange(at.size), np.append(np.searchsorted(rank, cut.ranks), at.size), rank)
        marks = ((flags & kernels.FREE) | stays * kernels.STAYS).astype(np.uint8)
        kept, *swept = kernels.sweep(ranks, (lasts, earliest), (indptr, source, lag), nothing, marks, REACH)
        at, rank, lasts, flags = at[kept], rank[kept], lasts[kept], flags[kept]
    return at, swept


def _for_all(column: Ints, count: int) -> Ints:
    """A column with the same values in each scenario."""
    return np.repeat(column[:, None], count, axis=1) if count > 1 else column[:, None]
