"""Condensed graphs: only the nodes at which ranks wait for each other, and the longest paths between them.

Takes a graph and its `Cut`; returns `Skeletons`. Whatever the durations and starts of its transfers, every
kept node of a rank starts exactly when it does in the whole graph: a rank is a linear map in max-plus algebra
from the starts of its transfers to those of its arrivals (Baccelli et al., Synchronization and Linearity,
1992). A skeleton is valid for its durations and lags only; under others the rank is condensed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.compiled import inlined
from dpro.replay.engine import compiled
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled, frozen
from dpro.replay.timeline import AFTER_STEPS, BEFORE_STEPS, behind_older_work

# Rounds after the first sweep; each drops nodes at which paths merge where that adds no edges.
ROUNDS = 3
# Kept nodes back over which distances are recorded, a power of two; paths further back are not compared.
REACH = 64
LONG_AGO = -(2**60)
TRANSFER, RENDEZVOUS = int(NodeKind.TRANSFER), int(NodeKind.RENDEZVOUS)
# Flags of a node: it has to stay; it may last for any time; several edges leave it; at least one edge leaves
# it; another node of its step never ends earlier; another of its window, not behind the steps, never starts
# later.
MUST_STAY, ANY_DURATION, FORKS, HAS_SUCCESSOR, NEVER_LAST, NEVER_FIRST = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True)
class Skeletons:
    """The kept nodes, rank by rank, and the longest paths between them, in K scenarios.

    Attributes:
        node: [M] node of the graph; -1 for the virtual end of a step.
        rank: [M].
        window, step: [M] of virtual ends, -1 elsewhere.
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
        """[E] target node of each edge."""
        return np.repeat(np.arange(self.node.size), np.diff(self.indptr))


def skeletons_of(graph: Graph, cut: Cut, duration: Ints | None = None) -> Skeletons:
    """Condense each rank to the nodes that other ranks wait for.

    A node at which paths merge and part again is kept: without it, every node before it would need an edge to
    every node behind it.

    Args:
        duration: [N, K] durations of the nodes in K scenarios, in ns; None for those of the graph.
    """
    nodes, edges = graph.nodes, graph.edges
    duration = nodes.duration[:, None] if duration is None else duration
    count = duration.shape[1]
    ends = ends_of(graph, cut, duration)
    earliest, lag = (
        np.repeat(column[:, None], count, axis=1) if count > 1 else column[:, None]
        for column in (nodes.earliest, edges.lag)
    )
    behind = (ends.begins, ends.indptr, ends.source, np.zeros((ends.source.size, count), np.int64))
    ranks = (cut.order, cut.indptr, nodes.rank)
    kept, *swept = _sweep_all(
        ranks, (duration, earliest), (graph.indptr, edges.source, lag), behind, ends.flags
    )
    end = np.flatnonzero(kept >= nodes.rank.size)
    number = kept[end] - nodes.rank.size
    kept[end] = 0
    rank, lasts, flags = nodes.rank[kept], duration[kept], ends.flags[kept]
    rank[end], lasts[end], flags[end], kept[end] = ends.rank[number], 0, MUST_STAY, -1
    window, step = np.full((2, kept.size), -1, np.int64)
    window[end], step[end] = ends.window[number], ends.step[number]
    left, (earliest, indptr, source, lag) = _drop_merges(cut, rank, lasts, flags, swept)
    # Virtual ends have no earliest time; the nodes they follow start no earlier than this.
    earliest = np.maximum(earliest, nodes.earliest.min(initial=0))
    kept, rank, window, step, lasts = (column[left] for column in (kept, rank, window, step, lasts))
    return Skeletons(kept, rank, window, step, lasts, earliest, indptr, source, lag)


def _drop_merges(
    cut: Cut, rank: Ints, lasts: Ints, flags: NDArray[np.uint8], swept: Sequence[Ints]
) -> tuple[Ints, Sequence[Ints]]:
    """Drop nodes at which paths merge where that adds no edges; return the rest, as from `_sweep_all`."""
    left = np.arange(rank.size)
    nothing = (np.zeros(cut.ranks.size + 1, np.int64), np.zeros(1, np.int64), left[:0], lasts[:0])
    for _ in range(ROUNDS):
        earliest, indptr, source, lag = swept
        entering, leaving = np.diff(indptr), np.bincount(source, minlength=left.size)
        stays = (flags & MUST_STAY > 0) | (entering * leaving > entering + leaving)
        if stays.all():
            break
        ranks = (np.arange(left.size), np.append(np.searchsorted(rank, cut.ranks), left.size), rank)
        marks = ((flags & ANY_DURATION) | stays * MUST_STAY).astype(np.uint8)
        kept, *swept = _sweep_all(ranks, (lasts, earliest), (indptr, source, lag), nothing, marks)
        left, rank, lasts, flags = left[kept], rank[kept], lasts[kept], flags[kept]
    return left, swept


# The partition of a graph into ranks, and the nodes of each that have to stay.


@dataclass(frozen=True)
class Cut:
    """The partition of a graph into ranks.

    Attributes:
        ranks: [R] ascending; -1 is the rank of rendezvous.
        indptr, order: nodes of the i-th rank are order[indptr[i]:indptr[i + 1]], ascending.
        between: [C] edges between ranks.
        joins: [N] mask of nodes at either end of such an edge.
        free: [N] mask of transfers among `joins`, whose duration the network decides.
    """

    ranks: Ints
    indptr: Ints
    order: Ints
    between: Ints
    joins: Bools
    free: Bools


@dataclass(frozen=True)
class Ends:
    """Node flags, and the virtual ends of the steps of each rank.

    Attributes:
        flags: [N] flags of each node, for the compiled loops.
        begins: [R + 1] virtual ends of the i-th rank are begins[i]:begins[i + 1].
        rank, window, step: [V] of the virtual ends.
        indptr, source: [V + 1], [.] the nodes that each virtual end follows.
    """

    flags: NDArray[np.uint8]
    begins: Ints
    rank: Ints
    window: Ints
    step: Ints
    indptr: Ints
    source: Ints


def cut_by_rank(graph: Graph) -> Cut:
    """Partition a graph into the nodes of each rank and the edges between ranks."""
    nodes, edges, size = graph.nodes, graph.edges, graph.num_nodes
    lowest = int(nodes.rank.min()) if size else 0
    groups = int(nodes.rank.max()) - lowest + 1 if size else 0
    begins, place = np.zeros(groups + 1, np.int64), np.empty(groups, np.int64)
    order, between = np.empty(size, np.int64), np.empty(edges.source.size, np.int64)
    joins, free = np.zeros(size, np.bool_), np.empty(size, np.bool_)
    into, filled = (graph.indptr, edges.source), (order, between, joins, free)
    count = _cut(nodes.rank, nodes.kind, into, lowest, begins, place, filled)
    there = np.flatnonzero(np.diff(begins))
    return Cut(lowest + there, np.append(begins[there], size), order, between[:count].copy(), joins, free)


def ends_of(graph: Graph, cut: Cut, duration: Ints) -> Ends:
    """Find the nodes that condensing has to keep, and the virtual ends of steps.

    Args:
        duration: [N, K] durations of the nodes in K scenarios, in ns.
    """
    nodes, size = graph.nodes, cut.order.size
    least = np.where(cut.free, 0, duration[:, 0] if duration.shape[1] == 1 else duration.min(axis=1))
    flags = cut.joins * np.uint8(MUST_STAY) + cut.free * np.uint8(ANY_DURATION)
    flags[behind_older_work(graph)] |= MUST_STAY
    last, first, early, sizes = (np.empty(length, np.int64) for length in (size, size, size, 3))
    sizes[:] = 0
    _mark_ends(
        cut.order, cut.indptr, (nodes.rank, nodes.window, nodes.step, nodes.kind), least,
        (graph.indptr, graph.edges.source, graph.edges.lag), flags, (last, first, early), sizes,
    )  # fmt: skip
    last, first, early = (array[:count] for array, count in zip((last, first, early), sizes.tolist()))
    # A window without a node before its steps begins at one of its `first` nodes, which have to stay.
    several = int(nodes.window[np.append(first, early)].max(initial=0)) + 2
    opens, before = (nodes.rank[some] * several + nodes.window[some] for some in (first, early))
    flags[first[~np.isin(opens, before)]] |= MUST_STAY
    last = last[np.lexsort((nodes.step[last], nodes.window[last], nodes.rank[last]))]
    columns = [column[last] for column in (nodes.rank, nodes.window, nodes.step)]
    opens = np.flatnonzero(
        np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: last.size]
    )
    rank, window, step = (column[opens] for column in columns)
    begins = np.append(np.searchsorted(rank, cut.ranks), rank.size)
    return Ends(flags, begins, rank, window, step, np.append(opens, last.size), last)


# Condensed graphs of scenarios that change some ranks, without condensing again.


def condense_both(graph: Graph, changed: Ints) -> tuple[Graph, Graph]:
    """Return the condensed graph twice: unchanged, and with all ranks changed.

    Args:
        changed: [N] durations of the nodes under the change, in ns.
    """
    cut = cut_by_rank(graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    (one, _), (other, _) = (joined_graph(graph, cut, skeletons, scenario) for scenario in (0, 1))
    return one, other


def with_ranks_of(one: Graph, other: Graph, ranks: Collection[int]) -> Graph:
    """Return the first graph with some ranks taken from the second.

    Args:
        one, other: graphs of equal shape, such as those of `condense_both`.
    """
    of_ranks = np.isin(one.nodes.rank, list(ranks))
    changed = one.with_durations(np.where(of_ranks, other.nodes.duration, one.nodes.duration))
    if other.edges is one.edges:  # only durations changed
        return changed
    earliest = np.where(of_ranks, other.nodes.earliest, one.nodes.earliest)
    lag = np.where(of_ranks[one.edges.target], other.edges.lag, one.edges.lag)
    nodes = dataclasses.replace(changed.nodes, earliest=earliest)
    return dataclasses.replace(changed, nodes=nodes).with_lags(lag)


# One graph of all skeletons, joined where ranks wait for each other.


def joined_graph(graph: Graph, cut: Cut, skeletons: Skeletons, scenario: int = 0) -> tuple[Graph, Ints]:
    """Join the skeletons of all ranks into one graph.

    Args:
        cut: the partition of `graph` into ranks.

    Returns:
        The joined graph, and [M] the original node of each of its nodes; -1 for the virtual end of a step.
    """
    # Node numbers of the whole graph are in topological order; virtual ends come last.
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
    nodes = _joined_columns(graph, skeletons, order, scenario)
    joined = assembled(nodes, kept.extended(between), graph.names, graph.lanes, graph.origin_ns)
    return joined.with_job_of(graph), skeletons.node[order]


def paths_beside(source: Ints, target: Ints, lag: Ints, between: Edges, size: int) -> Ints:
    """Return the skeleton edges, without those from arrival to transfer that the rendezvous path covers.

    Args:
        source, target, lag: edges inside ranks; `lag` is [E, K] ns.
    """
    met, meets = np.full(size, -1, np.int64), np.full(size, -2, np.int64)
    lag_before, lag_after = np.zeros(size, np.int64), np.zeros(size, np.int64)
    meets[between.source], lag_before[between.source] = between.target, between.lag
    met[between.target], lag_after[between.target] = between.source, between.lag
    over = lag_before[source] + lag_after[target]
    return np.flatnonzero((meets[source] != met[target]) | (over[:, None] < lag).any(axis=1))


def _joined_columns(graph: Graph, skeletons: Skeletons, order: Ints, scenario: int) -> Nodes:
    """Return the columns of the joined nodes; virtual ends get rank, window and step of their step."""
    node = skeletons.node[order]
    columns = {f.name: getattr(graph.nodes, f.name)[node] for f in dataclasses.fields(Nodes)}
    ends = slice(np.count_nonzero(node >= 0), None)
    of_ends = {"kind": NodeKind.END, "anchored": False, "measured_start": 0, "measured_end": 0, "name": 0}
    of_ends |= dict.fromkeys(("around", "span", "collective", "bytes", "message", "phase", "lane"), -1)
    for name, value in of_ends.items():
        columns[name][ends] = value
    for name in ("rank", "window", "step"):
        columns[name][ends] = getattr(skeletons, name)[order[ends]]
    # Other anchored nodes may have an earliest time only because condensing gave them one.
    columns["anchored"] &= np.isin(node, behind_older_work(graph))
    columns["duration"] = skeletons.duration[order, scenario]
    columns["earliest"] = skeletons.earliest[order, scenario]
    return Nodes(**columns)


# The compiled loops. One call processes all ranks, one after the other; values that differ between scenarios
# have one column each; no compiled loop allocates an array.


@compiled
def _cut(rank: Any, kind: Any, into: Any, lowest: int, begins: Any, place: Any, filled: Any) -> int:
    """Sort nodes by rank, and find the edges between ranks.

    Args:
        rank, kind: [N].
        into: `indptr` and `source` of the graph.
        begins: [G + 1] zeros; filled with the offset of each rank in `order`.
        place: [G] scratch.
        filled: `order` [N], nodes by rank; `between` [E], edges between ranks; `joins` [N], nodes at either
            end of one; `free` [N], transfers among those.

    Returns:
        The number of edges between ranks.
    """
    indptr, source = into
    order, between, joins, free = filled
    count = 0
    for node in range(rank.size):
        its_rank = rank[node]
        begins[its_rank - lowest + 1] += 1
        for edge in range(indptr[node], indptr[node + 1]):
            if rank[source[edge]] != its_rank:
                between[count] = edge
                count += 1
                joins[source[edge]] = True
                joins[node] = True
    for group in range(place.size):
        begins[group + 1] += begins[group]
        place[group] = begins[group]
    for node in range(rank.size):
        group = rank[node] - lowest
        order[place[group]] = node
        place[group] += 1
        free[node] = joins[node] and kind[node] == TRANSFER
    return count


@compiled
def _mark_ends(
    order: Any, begins: Any, columns: Any, least: Any, into: Any, flags: Any, filled: Any, sizes: Any
) -> None:
    """Find the nodes with which steps and windows of ranks may begin and end.

    Args:
        order, begins: [M] nodes by rank, and [R + 1] offsets of the ranks.
        columns: `rank`, `window`, `step` and `kind` of nodes, [N].
        least: [N] minimum duration of each node, in ns.
        into: `indptr`, `source` and `lag` [E] of the graph.
        flags: [N] flags of nodes; more are set here.
        filled: three arrays of nodes, each [M]: those that may end their step; those that may start their
            window; and at least one node of each window that precedes its steps.
        sizes: [3] number of entries in each of `filled`.
    """
    rank, window, step, kind = columns
    indptr, source, lag = into
    last, first, early = filled
    for part in range(begins.size - 1):
        windows = sizes[2]
        for place in range(begins[part], begins[part + 1]):
            node = order[place]
            its_rank, its_window, its_step = rank[node], window[node], step[node]
            its_least, of_this = least[node], 0
            for edge in range(indptr[node], indptr[node + 1]):
                before = source[edge]
                if rank[before] != its_rank:
                    continue
                of_before = flags[before]
                more = FORKS if of_before & HAS_SUCCESSOR else HAS_SUCCESSOR
                if window[before] == its_window:
                    if step[before] == its_step and its_least + lag[edge] >= 0:
                        more |= NEVER_LAST
                    if step[before] != AFTER_STEPS and least[before] + lag[edge] >= 0:
                        of_this |= NEVER_FIRST
                flags[before] = of_before | more
            flags[node] |= of_this
            if its_step == BEFORE_STEPS and (
                sizes[2] == windows or window[early[sizes[2] - 1]] != its_window
            ):
                early[sizes[2]] = node
                sizes[2] += 1
        for place in range(begins[part], begins[part + 1]):
            node = order[place]
            of_node = flags[node]
            if (of_node & NEVER_LAST and of_node & NEVER_FIRST) or kind[node] == RENDEZVOUS:
                continue
            if not of_node & NEVER_FIRST and step[node] != AFTER_STEPS:
                first[sizes[1]] = node
                sizes[1] += 1
            if not of_node & NEVER_LAST:
                last[sizes[0]] = node
                sizes[0] += 1
                flags[node] = of_node | (FORKS if of_node & HAS_SUCCESSOR else HAS_SUCCESSOR)


@inlined
def _gather(
    first: Any,
    last: Any,
    its_rank: Any,
    edges: Any,
    rank: Any,
    state: Any,
    pool: Any,
    slot: Any,
    labels: Any,
    floor: Any,
) -> Any:
    # Collect the labels of a node's start: per kept node, the longest over its predecessors. `slot` is the
    # index in `labels` of each kept node.
    source, lag = edges
    set_of, shift, ready = state
    begin, pool_ancestors, pool_weight = pool
    ancestors, weight = labels
    count = 0
    for edge in range(first, last):
        before = source[edge]
        if rank[before] != its_rank:
            continue
        for k in range(lag.shape[1]):
            floor[k] = max(floor[k], ready[before, k] + lag[edge, k])
        for label in range(begin[set_of[before]], begin[set_of[before] + 1]):
            ancestor = pool_ancestors[label]
            if slot[ancestor] < 0:
                slot[ancestor] = count
                ancestors[count] = ancestor
                for k in range(lag.shape[1]):
                    weight[count, k] = LONG_AGO
                count += 1
            place = slot[ancestor]
            for k in range(lag.shape[1]):
                long = pool_weight[label, k] + shift[before, k] + lag[edge, k]
                weight[place, k] = max(weight[place, k], long)
    for place in range(count):
        slot[ancestors[place]] = -1
    return count


@inlined
def _prune(count: Any, labels: Any, drop: Any, kept: Any, distance: Any) -> Any:
    # Drop labels that never decide: a path over a later kept node is as long in every scenario.
    ancestors, weight = labels
    reach = distance.shape[0]
    left = 0
    for label in range(count):
        drop[label] = False
        for other in range(count):
            back = ancestors[other] - ancestors[label]
            if drop[label] or back <= 0 or back >= reach or ancestors[other] <= kept - reach:
                continue
            over = True
            for k in range(weight.shape[1]):
                between = distance[ancestors[other] & (reach - 1), k, back]
                over = over and between + weight[other, k] >= weight[label, k]
            drop[label] = over
    for label in range(count):
        if not drop[label]:
            ancestors[left] = ancestors[label]
            for k in range(weight.shape[1]):
                weight[left, k] = weight[label, k]
            left += 1
    return left


@inlined
def _record_distances(kept: Any, first: Any, count: Any, labels: Any, lasts: Any, distance: Any) -> None:
    # Record the minimum time from the end of each earlier kept node to the end of this one, by nodes back.
    ancestors, weight = labels
    reach = distance.shape[0]
    row = kept & (reach - 1)
    for k in range(lasts.size):
        for back in range(1, min(reach, kept - first + 1)):
            distance[row, k, back] = LONG_AGO
        for label in range(count):
            near = ancestors[label]
            over = kept - near
            if over >= reach:
                continue
            long = weight[label, k] + lasts[k]
            distance[row, k, over] = max(distance[row, k, over], long)
            behind = near & (reach - 1)
            for back in range(1, min(reach - over, near - first + 1)):
                far = distance[behind, k, back] + long
                distance[row, k, over + back] = max(distance[row, k, over + back], far)


@inlined
def _keep(node: Any, kept: Any, count: Any, labels: Any, floor: Any, slot: Any, result: Any) -> None:
    # Write a kept node, with its labels as edges.
    ancestors, weight = labels
    nodes, floors, ways, way_from, way_lag = result
    into = ways[kept]
    for label in range(count):
        way_from[into + label] = ancestors[label]
        for k in range(floor.size):
            way_lag[into + label, k] = weight[label, k]
    for k in range(floor.size):
        floors[kept, k] = floor[k]
    nodes[kept], ways[kept + 1], slot[kept] = node, into + count, -1


@inlined
def _start_label(node: Any, kept: Any, state: Any, labels: Any) -> int:
    # A kept node passes on one label: itself.
    _, shift, ready = state
    ancestors, weight = labels
    ancestors[0] = kept
    for k in range(shift.shape[1]):
        weight[0, k], shift[node, k], ready[node, k] = 0, 0, LONG_AGO
    return 1


@inlined
def _share_labels(node: Any, edge: Any, work: Any, edges: Any, state: Any) -> None:
    # Let a node share the labels of its only predecessor.
    duration, earliest = work
    source, lag = edges
    _, shift, ready = state
    before = source[edge]
    for k in range(lag.shape[1]):
        shift[node, k] = shift[before, k] + lag[edge, k] + duration[node, k]
        ready[node, k] = max(earliest[node, k], ready[before, k] + lag[edge, k]) + duration[node, k]


@inlined
def _append_labels(sets: Any, count: Any, labels: Any, pool: Any) -> None:
    # Append the labels to the pool as a new set.
    ancestors, weight = labels
    begin, pool_ancestors, pool_weight = pool
    into = begin[sets]
    for label in range(count):
        pool_ancestors[into + label] = ancestors[label]
        for k in range(weight.shape[1]):
            pool_weight[into + label, k] = weight[label, k]
    begin[sets + 1] = into + count


@compiled
def _sweep_ranks(
    ranks: Any, work: Any, edges: Any, ends: Any, flags: Any, state: Any, pool: Any, scratch: Any, result: Any
) -> int:
    # Each node has a set of labels: its distances from kept nodes. A node with one predecessor shares the set
    # of that predecessor, shifted by its own time (`shift`). `ready` is the end of a node by paths that begin
    # at no kept node. Returns -1 where the room for sets or edges is too small.
    order, begins, rank = ranks
    duration, earliest = work
    indptr, into = edges[0], (edges[1], edges[2])
    ends_begin, ends_indptr, ends_source, ends_lag = ends
    set_of, shift, ready = state
    begin = pool[0]
    slot, drop, labels, floor, lasts, distance = scratch
    ways, room = result[2], min(pool[1].size, result[3].size)
    kept, ways[0] = 0, 0
    for part in range(begins.size - 1):
        its_rank, first, sets, begin[0] = rank[order[begins[part]]], kept, 0, 0
        for place in range(begins[part], begins[part + 1]):
            node = order[place]
            flag, edge = flags[node], indptr[node]
            if not flag & MUST_STAY and indptr[node + 1] == edge + 1:
                shared = set_of[into[0][edge]]
                if not flag & FORKS or begin[shared + 1] - begin[shared] < 2:
                    set_of[node] = shared
                    _share_labels(node, edge, work, into, state)
                    continue
            for k in range(floor.size):
                floor[k] = earliest[node, k]
            count = _gather(edge, indptr[node + 1], its_rank, into, rank, state, pool, slot, labels, floor)
            count = _prune(count, labels, drop, kept, distance)
            if max(begin[sets], ways[kept]) + count >= room:
                return -1
            for k in range(floor.size):
                shift[node, k], ready[node, k] = duration[node, k], floor[k] + duration[node, k]
                lasts[k] = 0 if flag & ANY_DURATION else duration[node, k]
            if flag & MUST_STAY or (flag & FORKS and count >= 2):
                _keep(node, kept, count, labels, floor, slot, result)
                _record_distances(kept, first, count, labels, lasts, distance)
                count = _start_label(node, kept, state, labels)
                kept += 1
            _append_labels(sets, count, labels, pool)
            set_of[node] = sets
            sets += 1
        for end in range(ends_begin[part], ends_begin[part + 1]):
            for k in range(floor.size):
                floor[k] = LONG_AGO
            edge, last = ends_indptr[end], ends_indptr[end + 1]
            count = _gather(
                edge, last, its_rank, (ends_source, ends_lag), rank, state, pool, slot, labels, floor
            )
            count = _prune(count, labels, drop, kept, distance)
            if ways[kept] + count >= room:
                return -1
            _keep(rank.size + end, kept, count, labels, floor, slot, result)
            kept += 1
    return kept


def _sweep_all(
    ranks: tuple[Ints, Ints, Ints],
    work: tuple[Ints, Ints],
    edges: tuple[Ints, Ints, Ints],
    ends: tuple[Ints, Ints, Ints, Ints],
    flags: NDArray[np.uint8],
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Replace all but the kept nodes by edges as long as the longest paths through them.

    A path is measured from the end of the kept node at which it begins, so edges are valid for any duration
    of a free node. An edge is dropped where a path over another kept node is as long in all cases (transitive
    reduction; Aho, Garey and Ullman, 1972).

    Args:
        ranks: `order`, `begins` and `rank`: nodes by rank, offsets of the ranks, and the rank of each node.
        work: `duration` and `earliest`, [N, K].
        edges: `indptr`, `source` and `lag` [E, K].
        ends: `begins` [R + 1], `indptr`, `source` and `lag` of the virtual nodes behind each rank.
        flags: [N] flags of the nodes.

    Returns:
        [M] the kept nodes, virtual ends numbered from N on; their [M, K] `earliest`; `indptr`, `source` and
        `lag` of the edges between them.
    """
    size, columns = work[0].shape
    most, room = size + int(ends[0][-1]), size + 1024
    given = [tuple(map(frozen, arrays)) for arrays in (ranks, work, edges, ends)]
    while True:
        state = np.empty(size, np.int64), *np.empty((2, size, columns), np.int64)
        pool = np.empty(size + 1, np.int64), np.empty(room, np.int64), np.empty((room, columns), np.int64)
        labels = np.empty(most, np.int64), np.empty((most, columns), np.int64)
        scratch = (
            np.empty(most, np.int64), np.empty(most, np.bool_), labels, np.empty(columns, np.int64),
            np.empty(columns, np.int64), np.empty((REACH, columns, REACH), np.int64),
        )  # fmt: skip
        result = (
            np.empty(most, np.int64), np.empty((most, columns), np.int64), np.empty(most + 1, np.int64),
            np.empty(room, np.int64), np.empty((room, columns), np.int64),
        )  # fmt: skip
        arguments: list[Any] = [*given, frozen(flags), state, pool, scratch, result]
        kept = _sweep_ranks(*arguments)
        if kept >= 0:
            break
        room *= 2
    count = int(result[2][kept])
    nodes, floors, indptr, source, lag = (
        array[:length].copy() for array, length in zip(result, (kept, kept, kept + 1, count, count))
    )
    return nodes, floors, indptr, source, lag
