"""The compiled loops of condensing: a rank's own edges, and the sweep that leaves the nodes kept.

In: flat int64 arrays of nodes in topological order; what differs between scenarios has a column for each.
Out: the same of fewer nodes. What the arrays mean is said in `parts.py` and `skeletons.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.engine import compiled
from dpro.replay.timeline import AFTER_STEPS

LONG_AGO = -(2**60)
# Over how many kept nodes back distances are known; what is further apart is not compared.
REACH = 256


@compiled
def own_edges(
    members: Any, place: Any, rank: Any, window: Any, step: Any, least: Any, into: Any, own: Any
) -> int:
    """Copy the edges inside a rank, and mark the nodes with which its steps may begin and end.

    Args:
        members: [M] nodes of the rank, ascending.
        place: [N] index of each node among those of its rank.
        rank, window, step: [N].
        least: [M] ns that each of the rank's nodes lasts at least.
        into: `indptr`, `source` and `lag` of the graph.
        own: what is filled in: [M + 1] `indptr`, room for `source` and for `lag`, [., K]; [M] `outlasted`:
            another node of the rank's step surely ends no earlier; [M] `preceded`: one of the rank's window
            that is not behind its steps surely starts no later.

    Returns:
        How many edges there are.
    """
    indptr, source, lag = into
    own_indptr, own_source, own_lag, outlasted, preceded = own
    count = 0
    for at in range(members.size):
        node = members[at]
        for edge in range(indptr[node], indptr[node + 1]):
            before = source[edge]
            if rank[before] != rank[node]:
                continue
            own_source[count] = place[before]
            own_lag[count, :] = lag[edge]
            count += 1
            if window[before] == window[node]:
                if step[before] == step[node] and least[at] + lag[edge] >= 0:
                    outlasted[place[before]] = True
                if step[before] != AFTER_STEPS and least[place[before]] + lag[edge] >= 0:
                    preceded[at] = True
        own_indptr[at + 1] = count
    return count


@compiled
def _gather(node: int, edges: Any, state: Any, pool: Any, slot: Any, found: Any, floor: Any) -> int:
    # The labels of a node's start: of those of its predecessors the longest from each kept node. `slot` says
    # where in `found` a kept node is.
    indptr, source, lag = edges
    set_of, shift, ready = state
    begin, pool_who, pool_weight = pool
    who, weight = found
    count = 0
    for edge in range(indptr[node], indptr[node + 1]):
        before = source[edge]
        for k in range(lag.shape[1]):
            floor[k] = max(floor[k], ready[before, k] + lag[edge, k])
        for label in range(begin[set_of[before]], begin[set_of[before] + 1]):
            ancestor = pool_who[label]
            if slot[ancestor] < 0:
                slot[ancestor] = count
                who[count] = ancestor
                weight[count, :] = LONG_AGO
                count += 1
            at = slot[ancestor]
            for k in range(lag.shape[1]):
                long = pool_weight[label, k] + shift[before, k] + lag[edge, k]
                weight[at, k] = max(weight[at, k], long)
    for at in range(count):
        slot[who[at]] = -1
    return count


@compiled
def _prune(count: int, found: Any, drop: Any, kept: int, distance: Any) -> int:
    # A label is dropped that never decides: the way over another kept node behind it is as long, always.
    if count < 2:
        return count
    who, weight = found
    reach = distance.shape[0]
    left = 0
    for at in range(count):
        drop[at] = False
        for other in range(count):
            if drop[at] or who[other] <= who[at] or who[at] <= kept - reach:
                continue
            over = True
            for k in range(weight.shape[1]):
                between = distance[who[other] % reach, who[at] % reach, k]
                over = over and between + weight[other, k] >= weight[at, k]
            drop[at] = over
    for at in range(count):
        if not drop[at]:
            who[left] = who[at]
            weight[left, :] = weight[at, :]
            left += 1
    return left


@compiled
def _measure(kept: int, count: int, found: Any, lasts: Any, distance: Any) -> None:
    # [reach, reach] how long after the end of each of the last kept nodes this one ends at least.
    who, weight = found
    reach = distance.shape[0]
    row = distance[kept % reach]
    row[:, :] = LONG_AGO
    for at in range(count):
        near = who[at]
        if near <= kept - reach:
            continue
        for k in range(lasts.size):
            long = weight[at, k] + lasts[k]
            row[near % reach, k] = max(row[near % reach, k], long)
            for far in range(max(kept - reach + 1, 0), near):
                over = distance[near % reach, far % reach, k] + long
                row[far % reach, k] = max(row[far % reach, k], over)


@compiled
def _with_room(who: Any, weight: Any, size: int) -> Any:
    if size <= who.size:
        return who, weight
    more_who = np.empty(2 * size, who.dtype)
    more_weight = np.empty((2 * size, weight.shape[1]), weight.dtype)
    more_who[: who.size] = who
    more_weight[: who.size] = weight
    return more_who, more_weight


@compiled
def _sweep(work: Any, edges: Any, marks: Any, state: Any, scratch: Any, result: Any, distance: Any) -> Any:
    # One pass: each node has a set of labels, which a node with one predecessor shares with it, and for how
    # long after them it ends (`shift`); and when it ends by what needs no kept node (`ready`).
    duration, earliest = work
    indptr, source, lag = edges
    keep, free, hub = marks
    set_of, shift, ready = state
    begin, slot, drop, who, weight = scratch
    nodes, floors, ways = result
    pool_who, pool_weight = np.empty(1024, np.int64), np.empty((1024, lag.shape[1]), np.int64)
    way_from, way_lag = np.empty(1024, np.int64), np.empty((1024, lag.shape[1]), np.int64)
    sets, kept = 0, 0
    begin[0], ways[0] = 0, 0
    floor, lasts = np.empty(lag.shape[1], np.int64), np.zeros(lag.shape[1], np.int64)
    for node in range(keep.size):
        only = indptr[node]
        if indptr[node + 1] == only + 1 and not keep[node]:
            before = source[only]
            mine = set_of[before]
            if not hub[node] or begin[mine + 1] - begin[mine] < 2:
                set_of[node] = mine
                for k in range(lag.shape[1]):
                    shift[node, k] = shift[before, k] + lag[only, k] + duration[node, k]
                    began = max(earliest[node, k], ready[before, k] + lag[only, k])
                    ready[node, k] = began + duration[node, k]
                continue
        floor[:] = earliest[node]
        pool = (begin, pool_who, pool_weight)
        count = _gather(node, edges, state, pool, slot, (who, weight), floor)
        count = _prune(count, (who, weight), drop, kept, distance)
        for k in range(lag.shape[1]):
            shift[node, k], ready[node, k] = duration[node, k], floor[k] + duration[node, k]
        if keep[node] or (hub[node] and count >= 2):
            way_from, way_lag = _with_room(way_from, way_lag, ways[kept] + count)
            way_from[ways[kept] : ways[kept] + count] = who[:count]
            way_lag[ways[kept] : ways[kept] + count] = weight[:count]
            ways[kept + 1] = ways[kept] + count
            nodes[kept], floors[kept] = node, floor
            for k in range(lasts.size):
                lasts[k] = 0 if free[node] else duration[node, k]
            _measure(kept, count, (who, weight), lasts, distance)
            who[0], count, weight[0], shift[node], ready[node] = kept, 1, 0, 0, LONG_AGO
            kept += 1
        pool_who, pool_weight = _with_room(pool_who, pool_weight, begin[sets] + count)
        pool_who[begin[sets] : begin[sets] + count] = who[:count]
        pool_weight[begin[sets] : begin[sets] + count] = weight[:count]
        begin[sets + 1] = begin[sets] + count
        set_of[node] = sets
        sets += 1
    return kept, way_from[: ways[kept]], way_lag[: ways[kept]]


def sweep(
    work: tuple[Ints, Ints], edges: tuple[Ints, Ints, Ints], marks: tuple[Bools, Bools, Bools], reach: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Replace all nodes but some by edges as long as the longest paths over them.

    A path is measured from the end of the kept node that it begins at, and a kept node that is free may last
    for any time: so edges hold for all its durations. An edge is left out where a path over another kept node
    is as long for all of them (transitive reduction; Aho, Garey and Ullman, 1972).

    Args:
        work: `duration` and `earliest`, [N, K] ns in each of K scenarios.
        edges: `indptr` [N + 1], `source` [E] and `lag` [E, K].
        marks: [N] `keep`; `free`: may last for any time from 0; `hub`: is kept, too, if it is on paths from
            several kept nodes.
        reach: over how many kept nodes distances are known.

    Returns:
        [M] the nodes kept; their [M, K] `earliest`; `indptr`, `source` and `lag` of the edges between them.
    """
    size, columns = work[0].shape
    state = (
        np.empty(size, np.int64),
        np.empty((size, columns), np.int64),
        np.empty((size, columns), np.int64),
    )
    most = int(np.count_nonzero(marks[0] | marks[2]))
    begin, slot, drop = np.empty(size + 1, np.int64), np.full(most, -1, np.int64), np.empty(most, np.bool_)
    scratch = (begin, slot, drop, np.empty(most + 1, np.int64), np.empty((most + 1, columns), np.int64))
    result = (np.empty(most, np.int64), np.empty((most, columns), np.int64), np.empty(most + 1, np.int64))
    reach = max(min(reach, most), 1)
    distance = np.empty((reach, reach, columns), np.int64)
    kept, source, lag = _sweep(work, edges, marks, state, scratch, result, distance)
    nodes, floors, indptr = result
    return nodes[:kept].copy(), floors[:kept].copy(), indptr[: kept + 1].copy(), source.copy(), lag.copy()
