"""Where a graph falls apart into ranks, and which nodes of them have to stay.

In: a graph. Out: a `Cut`, and its `Ends`. Three kinds of nodes stay: those with an edge from or to another
rank, a virtual node for the end of each step of a rank, and nodes that may be the first of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.replay.condense import kernels
from dpro.replay.graph import Graph


@dataclass(frozen=True)
class Cut:
    """Where a graph falls apart into ranks.

    Attributes:
        ranks: [R] ascending; -1 has the rendezvous.
        indptr, order: nodes of rank i of them are order[indptr[i]:indptr[i + 1]], ascending.
        between: [C] edges between ranks.
        joins: [N] nodes that such an edge ends at.
        free: [N] transfers among them: how long they last is the network's to say.
    """

    ranks: Ints
    indptr: Ints
    order: Ints
    between: Ints
    joins: Bools
    free: Bools


@dataclass(frozen=True)
class Ends:
    """What else a rank's share has than its nodes.

    Attributes:
        flags: [N] what is known of each node, as the compiled loops have it.
        begins: [R + 1] virtual ends of rank i are begins[i]:begins[i + 1].
        rank, window, step: [V] of the virtual ends.
        indptr, source: [V + 1], [.] nodes that a virtual end is behind.
    """

    flags: NDArray[np.uint8]
    begins: Ints
    rank: Ints
    window: Ints
    step: Ints
    indptr: Ints
    source: Ints


def cut_by_rank(graph: Graph) -> Cut:
    """Find the nodes of each rank, and the edges between ranks."""
    nodes, edges, size = graph.nodes, graph.edges, graph.num_nodes
    lowest = int(nodes.rank.min()) if size else 0
    groups = int(nodes.rank.max()) - lowest + 1 if size else 0
    begins, place = np.zeros(groups + 1, np.int64), np.empty(groups, np.int64)
    order, between = np.empty(size, np.int64), np.empty(edges.source.size, np.int64)
    joins, free = np.zeros(size, np.bool_), np.empty(size, np.bool_)
    into, found = (graph.indptr, edges.source), (order, between, joins, free)
    count = kernels.cut(nodes.rank, nodes.kind, into, lowest, begins, place, found)
    there = np.flatnonzero(np.diff(begins))
    return Cut(lowest + there, np.append(begins[there], size), order, between[:count].copy(), joins, free)


def ends_of(graph: Graph, cut: Cut, duration: Ints) -> Ends:
    """Find what has to stay of ranks.

    Args:
        duration: [N, K] ns of its nodes in each of several scenarios.
    """
    nodes, size = graph.nodes, cut.order.size
    least = np.where(cut.free, 0, duration[:, 0] if duration.shape[1] == 1 else duration.min(axis=1))
    flags = cut.joins * np.uint8(kernels.STAYS) + cut.free * np.uint8(kernels.FREE)
    last, first, early, sizes = (np.empty(each, np.int64) for each in (size, size, size, 3))
    sizes[:] = 0
    kernels.mark(
        cut.order, cut.indptr, (nodes.rank, nodes.window, nodes.step, nodes.kind), least,
        (graph.indptr, graph.edges.source, graph.edges.lag), flags, (last, first, early), sizes,
    )  # fmt: skip
    last, first, early = (found[:count] for found, count in zip((last, first, early), sizes.tolist()))
    # A window may begin with a node that holds no work of its rank before its first step.
    several = int(nodes.window[np.append(first, early)].max(initial=0)) + 2
    opens, before = (nodes.rank[each] * several + nodes.window[each] for each in (first, early))
    flags[first[~np.isin(opens, before)]] |= kernels.STAYS
    last = last[np.lexsort((nodes.step[last], nodes.window[last], nodes.rank[last]))]
    columns = [column[last] for column in (nodes.rank, nodes.window, nodes.step)]
    opens = np.flatnonzero(
        np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: last.size]
    )
    rank, window, step = (column[opens] for column in columns)
    begins = np.append(np.searchsorted(rank, cut.ranks), rank.size)
    return Ends(flags, begins, rank, window, step, np.append(opens, last.size), last)
