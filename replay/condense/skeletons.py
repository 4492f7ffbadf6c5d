"""Ranks between what they wait for and what others wait for: with only the nodes that matter.

In: a graph and its `Cut`. Out: `Skeletons`. However long its transfers last, and whenever they begin, every
node of a rank starts exactly when it does in the whole: a rank is a linear map in max-plus algebra from the
starts of its transfers to those of its arrivals (Baccelli et al., Synchronization and Linearity, 1992). It
holds for these durations and lags only: under others the rank is condensed anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
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

    def of(self, which: Bools) -> Skeletons:
        """Those of some ranks.

        Args:
            which: [M] whether each node is of one of them.
        """
        entering = np.diff(self.indptr)
        edges = np.repeat(which, entering)
        nodes = {
            name: getattr(self, name)[which]
            for name in ("node", "rank", "window", "step", "duration", "earliest")
        }
        return Skeletons(
            **nodes,
            indptr=np.append(0, np.cumsum(entering[which])),
            source=(np.cumsum(which) - 1)[self.source[edges]],
            lag=self.lag[edges],
        )


def together(several: Sequence[Skeletons]) -> Skeletons:
    """Skeletons of different ranks, behind one another.

    Args:
        several: of some ranks each.
    """
    first = np.cumsum([0, *(each.node.size for each in several)])
    columns = {
        f.name: np.concatenate([getattr(each, f.name) for each in several])
        for f in dataclasses.fields(Skeletons)
    }
    columns["source"] = np.concatenate([each.source + at for each, at in zip(several, first)])
    columns["indptr"] = np.append(0, np.cumsum(np.concatenate([np.diff(each.indptr) for each in several])))
    return Skeletons(**columns)


def skeletons_of(
    graph: Graph, cut: Cut, asked: Bools | None = None, duration: Ints | None = None, reach: int = REACH
) -> Skeletons:
    """Leave out the nodes whose starts are not asked for outside their rank.

    Nodes at which paths merge and part again stay: without them an edge would lead from each node before to
    each behind.

    Args:
        graph: the graph.
        cut: of it, or of some of its ranks.
        asked: [N] nodes whose starts are wanted.
        duration: [N, K] ns of its nodes in several scenarios; as they are.
        reach: over how many kept nodes back edges are compared.
    """
    nodes, edges = graph.nodes, graph.edges
    duration = nodes.duration[:, None] if duration is None else duration
    count = duration.shape[1]
    ends = ends_of(graph, cut, duration, asked)
    earliest, lag = (_for_all(column, count) for column in (nodes.earliest, edges.lag))
    behind = (ends.begins, ends.indptr, ends.source, np.zeros((ends.source.size, count), np.int64))
    ranks = (cut.order, cut.indptr, nodes.rank)
    kept, *swept = kernels.sweep(
        ranks, (duration, earliest), (graph.indptr, edges.source, lag), behind, ends.flags, reach
    )
    end = np.flatnonzero(kept >= nodes.rank.size)
    number = kept[end] - nodes.rank.size
    kept[end] = 0
    rank, lasts, flags = nodes.rank[kept], duration[kept], ends.flags[kept]
    rank[end], lasts[end], flags[end], kept[end] = ends.rank[number], 0, kernels.STAYS, -1
    window, step = np.full((2, kept.size), -1, np.int64)
    window[end], step[end] = ends.window[number], ends.step[number]
    at, (earliest, indptr, source, lag) = _fewer(cut, rank, lasts, flags, swept, reach)
    # What a virtual end is behind has begun by then.
    earliest = np.maximum(earliest, nodes.earliest.min(initial=0))
    return Skeletons(kept[at], rank[at], window[at], step[at], lasts[at], earliest, indptr, source, lag)


def _fewer(
    cut: Cut, rank: Ints, lasts: Ints, flags: NDArray[np.uint8], swept: Sequence[Ints], reach: int
) -> tuple[Ints, Sequence[Ints]]:
    """Leave out nodes at which paths merge, if that needs no more edges: those left, and what `sweep` gives.

    Args:
        cut: of the ranks.
        rank, lasts, flags: of the nodes.
        swept: what else is known of them.
        reach: as of `skeletons_of`.
    """
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
        kept, *swept = kernels.sweep(ranks, (lasts, earliest), (indptr, source, lag), nothing, marks, reach)
        at, rank, lasts, flags = at[kept], rank[kept], lasts[kept], flags[kept]
    return at, swept


def _for_all(column: Ints, count: int) -> Ints:
    """A column with the same values in each scenario."""
    return np.repeat(column[:, None], count, axis=1) if count > 1 else column[:, None]
