"""Ranks between what they wait for and what others wait for: with only the nodes that matter.

In: a graph and its `Cut`. Out: `Skeletons`. However long its transfers last, and whenever they begin, every
node of a rank starts exactly when it does in the whole: a rank is a linear map in max-plus algebra from the
starts of its transfers to those of its arrivals (Baccelli et al., Synchronization and Linearity, 1992). It
holds for these durations and lags only: under others the rank is condensed anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.replay.condense import kernels
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled

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


# Where a graph falls apart into ranks, and which nodes of them have to stay.


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


# Scenarios in which some ranks are changed: the condensed graph of each, without condensing again.


def condense_both(graph: Graph, changed: Ints) -> tuple[Graph, Graph]:
    """The condensed graph, and the same with all ranks changed.

    Args:
        changed: [N] ns, durations of its nodes where their rank is changed.
    """
    cut = cut_by_rank(graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    (one, _), (other, _) = (joined_graph(graph, cut, skeletons, scenario) for scenario in (0, 1))
    return one, other


def with_ranks_of(one: Graph, other: Graph, ranks: Collection[int]) -> Graph:
    """The first graph, with some ranks taken from the second.

    Args:
        one, other: of one shape, as from `condense_both`.
        ranks: the ranks to take from `other`.
    """
    mine = np.isin(one.nodes.rank, list(ranks))
    changed = one.with_durations(np.where(mine, other.nodes.duration, one.nodes.duration))
    if other.edges is one.edges:  # all that was changed is how long nodes last
        return changed
    earliest = np.where(mine, other.nodes.earliest, one.nodes.earliest)
    lag = np.where(mine[one.edges.target], other.edges.lag, one.edges.lag)
    nodes = dataclasses.replace(changed.nodes, earliest=earliest)
    return dataclasses.replace(changed, nodes=nodes).with_lags(lag)


# The skeletons of all ranks as one graph, joined where ranks wait for each other.


def joined_graph(graph: Graph, cut: Cut, skeletons: Skeletons, scenario: int = 0) -> tuple[Graph, Ints]:
    """Join the skeletons of ranks.

    Args:
        cut: where it falls apart into ranks.

    Returns:
        The joined graph, and [M] the node of the whole graph that each of its nodes is; -1 for the virtual
        end of a step.
    """
    # The numbers of the whole graph are in topological order; virtual ends are behind everything.
    key = np.where(skeletons.node >= 0, skeletons.node, graph.num_nodes + 1 + skeletons.rank)
    order = np.argsort(key, kind="stable")
    number = np.empty(order.size, np.int64)
    number[order] = np.arange(order.size)
    source, target = number[skeletons.source], number[skeletons.target]
    between, behind = graph.edges.taken(cut.between), key[order]
    between = dataclasses.replace(
        between,
        source=np.searchsorted(behind, between.source).astype(np.int64),
        target=np.searchsorted(behind, between.target).astype(np.int64),
    )
    paths = paths_beside(source, target, skeletons.lag, between, order.size)
    kept = Edges(
        source[paths], target[paths], skeletons.lag[paths, scenario],
        np.full(paths.size, EdgeKind.PATH, np.int64), np.zeros(paths.size, np.bool_),
    )  # fmt: skip
    nodes = _columns(graph, skeletons, order, scenario)
    joined = assembled(nodes, kept.and_also(between), graph.names, graph.lanes, graph.origin_ns)
    return joined.of_same_job(graph), skeletons.node[order]


def paths_beside(source: Ints, target: Ints, lag: Ints, between: Edges, size: int) -> Ints:
    """Edges of the skeletons, less those from arrival to transfer where it is as far over the rendezvous.

    Args:
        source, target, lag: of edges inside ranks; [E, K] ns.
    """
    met, meets = np.full(size, -1, np.int64), np.full(size, -2, np.int64)
    lag_before, lag_after = np.zeros(size, np.int64), np.zeros(size, np.int64)
    meets[between.source], lag_before[between.source] = between.target, between.lag
    met[between.target], lag_after[between.target] = between.source, between.lag
    over = lag_before[source] + lag_after[target]
    return np.flatnonzero((meets[source] != met[target]) | (over[:, None] < lag).any(axis=1))


def _columns(graph: Graph, skeletons: Skeletons, order: Ints, scenario: int) -> Nodes:
    """The columns of the joined nodes: those of the whole graph, and of virtual ends their step's."""
    node = skeletons.node[order]
    columns = {f.name: getattr(graph.nodes, f.name)[node] for f in dataclasses.fields(Nodes)}
    ends = slice(np.count_nonzero(node >= 0), None)
    own = {"kind": NodeKind.END, "anchored": False, "measured_start": 0, "measured_end": 0, "name": 0}
    own |= dict.fromkeys(("around", "span", "collective", "bytes", "message", "phase", "lane"), -1)
    for name, value in own.items():
        columns[name][ends] = value
    for name in ("rank", "window", "step"):
        columns[name][ends] = getattr(skeletons, name)[order[ends]]
    columns["duration"] = skeletons.duration[order, scenario]
    columns["earliest"] = skeletons.earliest[order, scenario]
    return Nodes(**columns)
