"""The compiled loops of condensing: a graph cut into ranks, what has to stay of them, and the sweep.

In: flat int64 arrays of nodes in topological order; what differs between scenarios has a column for each.
Out: the same of fewer nodes. What the arrays mean is said in `parts.py` and `skeletons.py`. All ranks are in
one call, one after the other, and no compiled loop makes an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.compiled import inlined
from dpro.replay.engine import compiled
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import AFTER_STEPS, BEFORE_STEPS

LONG_AGO = -(2**60)
TRANSFER, RENDEZVOUS = int(NodeKind.TRANSFER), int(NodeKind.RENDEZVOUS)
# What is known of a node: it has to stay; it may last for any time; several edges leave it, or one; another
# of its step surely ends no earlier; one of its window that is not behind its steps surely starts no later.
STAYS, FREE, PARTS, LEFT, OUTLASTED, PRECEDED = 1, 2, 4, 8, 16, 32


@compiled
def cut(rank: Any, kind: Any, into: Any, lowest: int, begins: Any, place: Any, found: Any) -> int:
    """Sort nodes by rank, and find the edges between ranks.

    Args:
        rank, kind: [N].
        into: `indptr` and `source` of the graph.
        begins: [G + 1] zeros: where in the order each rank will begin.
        place: [G] scratch.
        found: what is filled in: `order` [N], nodes by rank; `between` [E], edges between ranks; `joins` [N],
            nodes that one of them ends at; `free` [N], transfers among those.

    Returns:
        How many edges are between ranks.
    """
    indptr, source = into
    order, between, joins, free = found
    count = 0
    for node in range(rank.size):
        own = rank[node]
        begins[own - lowest + 1] += 1
        for edge in range(indptr[node], indptr[node + 1]):
            if rank[source[edge]] != own:
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
def mark(
    order: Any, begins: Any, columns: Any, least: Any, into: Any, flags: Any, found: Any, sizes: Any
) -> None:
    """Find the nodes with which steps and windows of ranks may begin and end.

    Args:
        order, begins: [M] nodes by rank, and [R + 1] where each rank begins.
        columns: `rank`, `window`, `step` and `kind` of nodes, [N].
        least: [N] ns that each lasts at least.
        into: `indptr`, `source` and `lag` [E] of the graph.
        flags: [N] what is known of nodes; more is filled in.
        found: what is filled in, each [M]: nodes that no other of their step surely outlasts; those that none
            of their window surely precedes; of each window one node before its steps, or more.
        sizes: [3] how many they are.
    """
    rank, window, step, kind = columns
    indptr, source, lag = into
    last, first, early = found
    for own in range(begins.size - 1):
        windows = sizes[2]
        for at in range(begins[own], begins[own + 1]):
            node = order[at]
            its_rank, its_window, its_step = rank[node], window[node], step[node]
            its_least, known = least[node], 0
            for edge in range(indptr[node], indptr[node + 1]):
                before = source[edge]
                if rank[before] != its_rank:
                    continue
                of_before = flags[before]
                more = PARTS if of_before & LEFT else LEFT
                if window[before] == its_window:
                    if step[before] == its_step and its_least + lag[edge] >= 0:
                        more |= OUTLASTED
                    if step[before] != AFTER_STEPS and least[before] + lag[edge] >= 0:
                        known |= PRECEDED
                flags[before] = of_before | more
            flags[node] |= known
            if its_step == BEFORE_STEPS and (
                sizes[2] == windows or window[early[sizes[2] - 1]] != its_window
            ):
                early[sizes[2]] = node
                sizes[2] += 1
        for at in range(begins[own], begins[own + 1]):
            node = order[at]
            of_node = flags[node]
            if (of_node & OUTLASTED and of_node & PRECEDED) or kind[node] == RENDEZVOUS:
                continue
            if not of_node & PRECEDED and step[node] != AFTER_STEPS:
                first[sizes[1]] = node
                sizes[1] += 1
            if not of_node & OUTLASTED:
                last[sizes[0]] = node
                sizes[0] += 1
                flags[node] = of_node | (PARTS if of_node & LEFT else LEFT)


@inlined
def _gather(
    first: Any,
    last: Any,
    own: Any,
    edges: Any,
    rank: Any,
    state: Any,
    pool: Any,
    slot: Any,
    found: Any,
    floor: Any,
) -> Any:
    # The labels of a node's start: of those of its predecessors the longest from each kept node. `slot` says
    # where in `found` a kept node is.
    source, lag = edges
    set_of, shift, ready = state
    begin, pool_who, pool_weight = pool
    who, weight = found
    count = 0
    for edge in range(first, last):
        before = source[edge]
        if rank[before] != own:
            continue
        for k in range(lag.shape[1]):
            floor[k] = max(floor[k], ready[before, k] + lag[edge, k])
        for label in range(begin[set_of[before]], begin[set_of[before] + 1]):
            ancestor = pool_who[label]
            if slot[ancestor] < 0:
                slot[ancestor] = count
                who[count] = ancestor
                for k in range(lag.shape[1]):
                    weight[count, k] = LONG_AGO
                count += 1
            at = slot[ancestor]
            for k in range(lag.shape[1]):
                long = pool_weight[label, k] + shift[before, k] + lag[edge, k]
                weight[at, k] = max(weight[at, k], long)
    for at in range(count):
        slot[who[at]] = -1
    return count


@inlined
def _prune(count: Any, found: Any, drop: Any, kept: Any, distance: Any) -> Any:
    # A label is dropped that never decides: the way over another kept node behind it is as long, always.
    who, weight = found
    reach = distance.shape[0]
    left = 0
    for at in range(count):
        drop[at] = False
        for other in range(count):
            apart = who[other] - who[at]
            if drop[at] or apart <= 0 or apart >= reach or who[other] <= kept - reach:
                continue
            over = True
            for k in range(weight.shape[1]):
                between = distance[who[other] & (reach - 1), k, apart]
                over = over and between + weight[other, k] >= weight[at, k]
            drop[at] = over
    for at in range(count):
        if not drop[at]:
            who[left] = who[at]
            for k in range(weight.shape[1]):
                weight[left, k] = weight[at, k]
            left += 1
    return left


@inlined
def _measure(kept: Any, first: Any, count: Any, found: Any, lasts: Any, distance: Any) -> None:
    # How long after the end of each of the kept nodes before it, by how many before, this one ends at least.
    who, weight = found
    reach = distance.shape[0]
    row = kept & (reach - 1)
    for k in range(lasts.size):
        for apart in range(1, min(reach, kept - first + 1)):
            distance[row, k, apart] = LONG_AGO
        for at in range(count):
            near = who[at]
            over = kept - near
            if over >= reach:
                continue
            long = weight[at, k] + lasts[k]
            distance[row, k, over] = max(distance[row, k, over], long)
            behind = near & (reach - 1)
            for apart in range(1, min(reach - over, near - first + 1)):
                far = distance[behind, k, apart] + long
                distance[row, k, over + apart] = max(distance[row, k, over + apart], far)


@inlined
def _keep(node: Any, kept: Any, count: Any, found: Any, floor: Any, slot: Any, result: Any) -> None:
    # Write a kept node, and its labels as edges.
    who, weight = found
    nodes, floors, ways, way_from, way_lag = result
    into = ways[kept]
    for at in range(count):
        way_from[into + at] = who[at]
        for k in range(floor.size):
            way_lag[into + at, k] = weight[at, k]
    for k in range(floor.size):
        floors[kept, k] = floor[k]
    nodes[kept], ways[kept + 1], slot[kept] = node, into + count, -1


@inlined
def _begin_anew(node: Any, kept: Any, state: Any, found: Any) -> int:
    # The one label that a kept node hands on: itself.
    _, shift, ready = state
    who, weight = found
    who[0] = kept
    for k in range(shift.shape[1]):
        weight[0, k], shift[node, k], ready[node, k] = 0, 0, LONG_AGO
    return 1


@inlined
def _follow(node: Any, edge: Any, work: Any, edges: Any, state: Any) -> None:
    # A node that shares the labels of the one before it.
    duration, earliest = work
    source, lag = edges
    _, shift, ready = state
    before = source[edge]
    for k in range(lag.shape[1]):
        shift[node, k] = shift[before, k] + lag[edge, k] + duration[node, k]
        ready[node, k] = max(earliest[node, k], ready[before, k] + lag[edge, k]) + duration[node, k]


@inlined
def _put(sets: Any, count: Any, found: Any, pool: Any) -> None:
    # Labels as one more set.
    who, weight = found
    begin, pool_who, pool_weight = pool
    into = begin[sets]
    for at in range(count):
        pool_who[into + at] = who[at]
        for k in range(weight.shape[1]):
            pool_weight[into + at, k] = weight[at, k]
    begin[sets + 1] = into + count


@compiled
def _sweep(
    ranks: Any, work: Any, edges: Any, ends: Any, flags: Any, state: Any, pool: Any, scratch: Any, result: Any
) -> int:
    # Each node has a set of labels: how far it is from which kept nodes. A node with one predecessor shares
    # its set, and ends so much later (`shift`). `ready` is when it ends by what needs no kept node. -1 where
    # there is too little room for sets, or for edges.
    order, begins, rank = ranks
    duration, earliest = work
    indptr, into = edges[0], (edges[1], edges[2])
    ends_begin, ends_indptr, ends_source, ends_lag = ends
    set_of, shift, ready = state
    begin = pool[0]
    slot, drop, found, floor, lasts, distance = scratch
    ways, room = result[2], min(pool[1].size, result[3].size)
    kept, ways[0] = 0, 0
    for part in range(begins.size - 1):
        own, first, sets, begin[0] = rank[order[begins[part]]], kept, 0, 0
        for at in range(begins[part], begins[part + 1]):
            node = order[at]
            flag, edge = flags[node], indptr[node]
            if not flag & STAYS and indptr[node + 1] == edge + 1:
                mine = set_of[into[0][edge]]
                if not flag & PARTS or begin[mine + 1] - begin[mine] < 2:
                    set_of[node] = mine
                    _follow(node, edge, work, into, state)
                    continue
            for k in range(floor.size):
                floor[k] = earliest[node, k]
            count = _gather(edge, indptr[node + 1], own, into, rank, state, pool, slot, found, floor)
            count = _prune(count, found, drop, kept, distance)
            if max(begin[sets], ways[kept]) + count >= room:
                return -1
            for k in range(floor.size):
                shift[node, k], ready[node, k] = duration[node, k], floor[k] + duration[node, k]
                lasts[k] = 0 if flag & FREE else duration[node, k]
            if flag & STAYS or (flag & PARTS and count >= 2):
                _keep(node, kept, count, found, floor, slot, result)
                _measure(kept, first, count, found, lasts, distance)
                count = _begin_anew(node, kept, state, found)
                kept += 1
            _put(sets, count, found, pool)
            set_of[node] = sets
            sets += 1
        for end in range(ends_begin[part], ends_begin[part + 1]):
            for k in range(floor.size):
                floor[k] = LONG_AGO
            edge, last = ends_indptr[end], ends_indptr[end + 1]
            count = _gather(edge, last, own, (ends_source, ends_lag), rank, state, pool, slot, found, floor)
            count = _prune(count, found, drop, kept, distance)
            if ways[kept] + count >= room:
                return -1
            _keep(rank.size + end, kept, count, found, floor, slot, result)
            kept += 1
    return kept


def sweep(
    ranks: tuple[Ints, Ints, Ints],
    work: tuple[Ints, Ints],
    edges: tuple[Ints, Ints, Ints],
    ends: tuple[Ints, Ints, Ints, Ints],
    flags: NDArray[np.uint8],
    reach: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Replace all nodes but some by edges as long as the longest paths over them.

    A path is measured from the end of the kept node that it begins at, and a kept node that is free may last
    for any time: so edges hold for all its durations. An edge is left out where a path over another kept node
    is as long for all of them (transitive reduction; Aho, Garey and Ullman, 1972).

    Args:
        ranks: `order`, `begins` and `rank`: nodes by rank, where each rank begins, and the rank of each node.
        work: `duration` and `earliest`, [N, K].
        edges: `indptr`, `source` and `lag` [E, K].
        ends: of virtual nodes behind those of a rank `begins` [R + 1], `indptr`, `source` and `lag`.
        flags: [N] what is known of the nodes.

    Returns:
        [M] the nodes kept, those of virtual ends from N on; their [M, K] `earliest`; `indptr`, `source` and
        `lag` of the edges between them.
    """
    size, columns = work[0].shape
    most, room = size + int(ends[0][-1]), size + 1024
    given = [tuple(map(_fixed, each)) for each in (ranks, work, edges, ends)]
    while True:
        state = np.empty(size, np.int64), *np.empty((2, size, columns), np.int64)
        pool = np.empty(size + 1, np.int64), np.empty(room, np.int64), np.empty((room, columns), np.int64)
        found = np.empty(most, np.int64), np.empty((most, columns), np.int64)
        scratch = (
            np.empty(most, np.int64), np.empty(most, np.bool_), found, np.empty(columns, np.int64),
            np.empty(columns, np.int64), np.empty((reach, columns, reach), np.int64),
        )  # fmt: skip
        result = (
            np.empty(most, np.int64), np.empty((most, columns), np.int64), np.empty(most + 1, np.int64),
            np.empty(room, np.int64), np.empty((room, columns), np.int64),
        )  # fmt: skip
        arguments: list[Any] = [*given, _fixed(flags), state, pool, scratch, result]
        kept = _sweep(*arguments)
        if kept >= 0:
            break
        room *= 2
    count = int(result[2][kept])
    nodes, floors, indptr, source, lag = (
        each[:length].copy() for each, length in zip(result, (kept, kept, kept + 1, count, count))
    )
    return nodes, floors, indptr, source, lag


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    """An array as loops are compiled for: it cannot be written to."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view
