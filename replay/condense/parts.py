"""The share of each rank of a graph, as a problem of its own.

In: a graph. Out: a `Part` per rank: its nodes, the edges among them, and which nodes have to stay: those that
edges from or to other ranks end at, those asked for, and a virtual one for the end of each step, behind which
no work of the rank in that step ends later. Edges between ranks are left out. Where a window's beginning may
be a node's start, those nodes stay that no other surely precedes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.replay.condense.kernels import own_edges
from dpro.replay.engine import grouped
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import AFTER_STEPS, BEFORE_STEPS


@dataclass(frozen=True)
class Cut:
    """Where a graph falls apart into ranks.

    Attributes:
        ranks: [R] ascending; -1 has the rendezvous.
        indptr, order: nodes of rank i of them are order[indptr[i]:indptr[i + 1]], ascending.
        place: [N] index of each node among those of its rank.
        between: [C] edges between ranks.
        joins: [N] nodes that such an edge ends at.
        free: [N] transfers among them: how long they last is the network's to say.
    """

    ranks: Ints
    indptr: Ints
    order: Ints
    place: Ints
    between: Ints
    joins: Bools
    free: Bools

    def members(self, number: int) -> Ints:
        """Nodes of one rank, ascending.

        Args:
            number: index of the rank.
        """
        return self.order[self.indptr[number] : self.indptr[number + 1]]


@dataclass(frozen=True)
class Part:
    """One rank's nodes, in topological order, and the edges among them; K scenarios.

    Attributes:
        node: [N] node of the graph; -1 of a virtual end.
        duration, earliest: [N, K] ns.
        indptr, source: [N + 1], [E]; edges into node i are indptr[i]:indptr[i + 1].
        lag: [E, K] ns.
        keep: [N] has to stay.
        free: [N] may last for any time.
        ends: [V, 2] window and step of the virtual ends, which are the last nodes.
    """

    node: Ints
    duration: Ints
    earliest: Ints
    indptr: Ints
    source: Ints
    lag: Ints
    keep: Bools
    free: Bools
    ends: Ints


def cut_by_rank(graph: Graph) -> Cut:
    """Find the nodes of each rank, and the edges between ranks.

    Args:
        graph: the graph.
    """
    nodes, edges = graph.nodes, graph.edges
    lowest = int(nodes.rank.min()) if nodes.rank.size else 0
    highest = int(nodes.rank.max()) if nodes.rank.size else -1
    key = nodes.rank - lowest
    indptr, order = grouped(key, highest - lowest + 1)
    place = np.empty(key.size, np.int64)
    place[order] = np.arange(key.size) - np.repeat(indptr[:-1], np.diff(indptr))
    between = np.flatnonzero(key[edges.source] != key[edges.target])
    joins = np.zeros(key.size, np.bool_)
    joins[edges.source[between]] = True
    joins[edges.target[between]] = True
    there = np.diff(indptr) > 0
    ranks = lowest + np.flatnonzero(there)
    bounds = np.append(indptr[:-1][there], key.size)
    return Cut(ranks, bounds, order, place, between, joins, joins & (nodes.kind == NodeKind.TRANSFER))


def part_of(graph: Graph, cut: Cut, number: int, asked: Bools | None = None) -> Part:
    """One rank's share of the graph.

    Args:
        graph: the graph.
        cut: of it.
        number: index of the rank.
        asked: [N] nodes whose starts are wanted.
    """
    return part_under(graph, cut, number, graph.nodes.duration[cut.members(number), None], asked)


def part_under(graph: Graph, cut: Cut, number: int, duration: Ints, asked: Bools | None = None) -> Part:
    """One rank's share of the graph, in several scenarios.

    Args:
        graph: the graph.
        cut: of it.
        number: index of the rank.
        duration: [M, K] ns of the rank's nodes in each scenario.
        asked: [N] nodes whose starts are wanted.
    """
    members, nodes = cut.members(number), graph.nodes
    size, columns = duration.shape
    free = cut.free[members]
    least = np.where(free, 0, duration[:, 0] if columns == 1 else duration.min(axis=1))
    room = int((graph.indptr[members + 1] - graph.indptr[members]).sum()) + size
    indptr, source, lag = (
        np.zeros(size + 1, np.int64),
        np.empty(room, np.int64),
        np.empty((room, columns), np.int64),
    )
    outlasted, preceded = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    into = (graph.indptr, graph.edges.source, graph.edges.lag)
    own = (indptr, source, lag, outlasted, preceded)
    count = own_edges(members, cut.place, nodes.rank, nodes.window, nodes.step, least, into, own)
    keep = cut.joins[members]
    keep[_may_open(graph, members, preceded)] = True
    if asked is not None:
        keep |= asked[members]
    last = np.flatnonzero(~outlasted)
    last = last[nodes.kind[members[last]] != NodeKind.RENDEZVOUS]
    ends, which = _distinct(nodes.window[members[last]], nodes.step[members[last]])
    end_indptr, by_end = grouped(which, len(ends))
    source[count : count + last.size], lag[count : count + last.size] = last[by_end], 0
    begins = nodes.earliest[members]
    return Part(
        node=_with(members, len(ends), -1),
        duration=_with(duration, len(ends), 0),
        earliest=_with(np.broadcast_to(begins[:, None], duration.shape), len(ends), begins.min(initial=0)),
        indptr=np.append(indptr, count + end_indptr[1:]),
        source=source[: count + last.size],
        lag=lag[: count + last.size],
        keep=_with(keep, len(ends), True),
        free=_with(free, len(ends), False),
        ends=ends,
    )


def _distinct(window: Ints, step: Ints) -> tuple[Ints, Ints]:
    """[V, 2] the steps there are, and which of them each entry is."""
    low, span = step.min(initial=0), step.max(initial=0) - step.min(initial=0) + 1
    keys, which = np.unique(window * span + step - low, return_inverse=True)
    return np.stack([keys // span, keys % span + low], axis=1), which


def _may_open(graph: Graph, members: Ints, preceded: Bools) -> Ints:
    """Nodes that a window may begin with: of those that hold no work of the rank before their first step."""
    nodes, first = graph.nodes, np.flatnonzero(~preceded)
    step, window = nodes.step[members], nodes.window[members]
    may = (step[first] != AFTER_STEPS) & (nodes.kind[members[first]] != NodeKind.RENDEZVOUS)
    opening: Ints = first[may & ~np.isin(window[first], window[step == BEFORE_STEPS])]
    return opening


def _with(column: NDArray[Any], more: int, value: int) -> NDArray[Any]:
    """A column with some more entries."""
    longer = np.empty((len(column) + more, *column.shape[1:]), column.dtype)
    longer[: len(column)], longer[len(column) :] = column, value
    return longer
