"""Compiled loops: longest path, topological order, and the innermost span of a thread at each moment.

Takes and returns flat int64 arrays, whose meaning `graph.py` and `construction/graph_builder.py` define. Each
function is a single exact and reproducible pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro.arrays import Ints
from dpro.compiled import compiled as compiled  # modules with loops import it from here

NO_NODE = -1
FEW = 32  # up to this size a plain loop is the fastest


@compiled
def _longest_path(
    duration: Any, earliest: Any, indptr: Any, source: Any, lag: Any, start: Any, end: Any, binding: Any
) -> None:
    for node in range(duration.size):
        latest = earliest[node]
        edge_of_latest = NO_NODE
        for edge in range(indptr[node], indptr[node + 1]):
            ready = end[source[edge]] + lag[edge]  # one array read: memory access dominates
            if ready > latest:
                latest = ready
                edge_of_latest = edge
        start[node] = latest
        end[node] = latest + duration[node]
        binding[node] = edge_of_latest


def longest_path(
    duration: Ints, earliest: Ints, indptr: Ints, source: Ints, lag: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return start and end of every node, and the edge that determined its start.

    A node starts when each predecessor has ended and the lag of its edge has passed, but not before its own
    earliest time. Nodes are numbered in topological order, so one pass in order of number suffices
    (longest path in a DAG; Cormen et al., section 22.2 on relaxing in topological order).

    Args:
        duration: [N] ns.
        earliest: [N] ns, the time before which a node may not start.
        indptr: [N + 1], edges into node i are indptr[i]:indptr[i + 1].
        source: [E] predecessor of each edge, always smaller than the node it leads to.
        lag: [E] ns between the end of the predecessor and the start of the node; may be negative.

    Returns:
        start, end: [N] ns, and binding: [N] index of the edge that set the start, -1 where `earliest` did.
        The first of several equal edges counts.
    """
    start, end, binding = np.empty_like(duration), np.empty_like(duration), np.empty_like(duration)
    _longest_path(duration, earliest, indptr, source, lag, start, end, binding)
    return start, end, binding


@compiled
def _chain(binding: Any, source: Any, node: int, chain: Any) -> int:
    length = 0
    while True:
        chain[length] = node
        length += 1
        edge = binding[node]
        if edge == NO_NODE:
            return length
        node = source[edge]


def chain_of(binding: Ints, source: Ints, node: int) -> Ints:
    """Return the nodes that determine the start of `node`, first to last, ending with the node itself.

    Args:
        binding: [N] as `longest_path` returns it.
        source: [E].
    """
    chain = np.empty(node + 1, np.int64)  # node numbers decrease along the chain
    return chain[: _chain(binding, source, node, chain)][::-1].copy()


@compiled
def _latest_ends(duration: Any, indptr: Any, source: Any, lag: Any, latest: Any) -> None:
    for node in range(duration.size - 1, -1, -1):
        begins = latest[node] - duration[node]
        for edge in range(indptr[node], indptr[node + 1]):
            before = source[edge]
            latest[before] = min(latest[before], begins - lag[edge])


def latest_ends(duration: Ints, indptr: Ints, source: Ints, lag: Ints, deadline: Ints) -> Ints:
    """Return [N] latest ends, in ns, at which every successor can still meet its deadline.

    The longest path backwards: one pass in descending node number over the edges of `longest_path`
    (Kelley and Walker, Critical-path planning and scheduling, 1959).

    Args:
        duration: [N] ns.
        indptr: [N + 1].
        source: [E].
        lag: [E] ns.
        deadline: [N] ns by which each node itself has to end.
    """
    latest = deadline.copy()
    _latest_ends(duration, indptr, source, lag, latest)
    return latest


@compiled
def _longest_path_batch(
    durations: Any, earliest: Any, indptr: Any, source: Any, lag: Any, starts: Any
) -> None:
    scenarios = durations.shape[1]
    for node in range(durations.shape[0]):
        for s in range(scenarios):
            starts[node, s] = earliest[node]
        for edge in range(indptr[node], indptr[node + 1]):
            before = source[edge]
            for s in range(scenarios):
                ready = starts[before, s] + durations[before, s] + lag[edge]
                if ready > starts[node, s]:
                    starts[node, s] = ready


def longest_path_batch(durations: Ints, earliest: Ints, indptr: Ints, source: Ints, lag: Ints) -> Ints:
    """Return [N, S] starts in S scenarios that differ in durations only, in one pass over the edges.

    Args:
        durations: [N, S] ns, one column per scenario.
        earliest: [N] ns.
        indptr: [N + 1].
        source: [E].
        lag: [E] ns.
    """
    starts = np.empty_like(durations)
    _longest_path_batch(np.ascontiguousarray(durations), earliest, indptr, source, lag, starts)
    return starts


@compiled
def _grouped(key: Any, indptr: Any, place: Any, order: Any) -> None:
    # Three passes: count each group, compute where it begins, put each index in its place.
    for i in range(key.size):
        indptr[key[i] + 1] += 1
    for group in range(indptr.size - 1):
        indptr[group + 1] += indptr[group]
        place[group] = indptr[group]
    for i in range(key.size):
        order[place[key[i]]] = i
        place[key[i]] += 1


def grouped(key: Ints, num_groups: int) -> tuple[Ints, Ints]:
    """Group indices by small integer keys, in linear time (counting sort).

    Args:
        key: [K] from 0 to num_groups - 1.

    Returns:
        indptr: [G + 1], and order: [K]: members of group g are order[indptr[g]:indptr[g + 1]], ascending.
    """
    indptr = np.zeros(num_groups + 1, np.int64)
    order = np.empty(key.size, np.int64)
    _grouped(key, indptr, np.empty(num_groups, np.int64), order)
    return indptr, order


@compiled
def _by_target(source: Any, indptr: Any, order: Any) -> None:
    # Insertion sort by source of the edges into each node, since most nodes have one or two.
    for node in range(indptr.size - 1):
        first, last = indptr[node], indptr[node + 1]
        if last - first > FEW:
            continue
        for place in range(first + 1, last):
            edge = order[place]
            gap = place
            while gap > first and source[order[gap - 1]] > source[edge]:
                order[gap] = order[gap - 1]
                gap -= 1
            order[gap] = edge


def by_target(source: Ints, target: Ints, num_nodes: int) -> tuple[Ints, Ints]:
    """Sort edges by target, and those into one node by source.

    Args:
        source: [E].
        target: [E].

    Returns:
        indptr: [N + 1], and order: [E]: edges into node i are order[indptr[i]:indptr[i + 1]].
    """
    indptr, order = grouped(target, num_nodes)
    _by_target(source, indptr, order)
    for node in np.flatnonzero(np.diff(indptr) > FEW):
        behind = order[indptr[node] : indptr[node + 1]]
        behind[:] = behind[np.argsort(source[behind], kind="stable")]
    return indptr, order


@compiled
def _codes(values: Any, values_seen: Any, code: Any) -> int:
    # The last value is compared first, since most entries equal the one before.
    count = 0
    last = 0
    for i in range(values.size):
        value = values[i]
        if count == 0 or values_seen[last] != value:
            last = 0
            while last < count and values_seen[last] != value:
                last += 1
            if last == count:
                if count == values_seen.size:
                    return -1
                values_seen[count] = value
                count += 1
        code[i] = last
    return count


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """Return the distinct values, ascending, and [V] the index among them of each entry.

    Args:
        values: [V], few distinct values such as threads or streams, mostly equal to the entry before.
    """
    values_seen, code = np.empty(FEW, np.int64), np.empty(values.size, np.int64)
    count = _codes(values, values_seen, code)
    if count < 0:
        few, many = np.unique(values, return_inverse=True)
        return few, many
    order = np.argsort(values_seen[:count])
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return values_seen[:count][order], place[code]


@compiled
def _topological_order(
    indptr: Any, target: Any, waiting: Any, preference: Any, order: Any, stack: Any
) -> int:
    # Depth first from the roots in the given order: the successor of a node on its lane comes right behind
    # it, which keeps a lane's nodes together in memory and the longest-path pass in the cache.
    done = 0
    for i in range(preference.size):
        root = preference[i]
        if waiting[root] != 0:
            continue
        top = 0
        stack[0] = root
        waiting[root] = -1
        while top >= 0:
            node = stack[top]
            top -= 1
            order[done] = node
            done += 1
            for edge in range(indptr[node], indptr[node + 1]):
                after = target[edge]
                waiting[after] -= 1
                if waiting[after] == 0:
                    waiting[after] = -1
                    top += 1
                    stack[top] = after
    return done


def topological_order(num_nodes: int, source: Ints, target: Ints, preference: Ints) -> tuple[Ints, Ints]:
    """Return the nodes in an order in which every edge goes forward, and those that cannot be ordered.

    Args:
        source: [E] start of each edge.
        target: [E] node that it leads to.
        preference: nodes in the order in which those without predecessors are taken; other nodes are ignored.

    Returns:
        order: the nodes that could be ordered (all N if there is no cycle), and the nodes that could not:
        those on a cycle or behind one.
    """
    indptr, by_source = grouped(source, num_nodes)
    waiting = np.bincount(target, minlength=num_nodes).astype(np.int64)
    order = np.empty(num_nodes, np.int64)
    stack = np.empty(num_nodes + 1, np.int64)
    done = _topological_order(indptr, target[by_source], waiting, preference, order, stack)
    stuck = np.setdiff1d(np.arange(num_nodes), order[:done]) if done < num_nodes else np.empty(0, np.int64)
    return order[:done], stuck


@compiled
def _open_segment(span: Any, now: Any, count: int, seg_start: Any, seg_span: Any) -> int:
    # Make this span the innermost from `now` on, overwriting a segment of no length.
    if count > 0 and seg_start[count - 1] == now:
        count -= 1
    seg_start[count] = now
    seg_span[count] = span
    return count + 1


@compiled
def _innermost(start: Any, end: Any, seg_start: Any, seg_span: Any, stack: Any) -> int:
    # A sweep over the starts; `stack` has the spans open at `now`, the innermost on top.
    count = 0  # segments so far
    top = -1
    now = start[0]
    for i in range(start.size + 1):
        # Close the spans that have ended by the start of this one (after the last: all). The span around them
        # is then the innermost; `max`, since an inner span may outlast it, and time does not go back.
        while top >= 0 and (i == start.size or end[stack[top]] <= start[i]):
            now = max(now, end[stack[top]])
            top -= 1
            count = _open_segment(stack[top] if top >= 0 else NO_NODE, now, count, seg_start, seg_span)
        if i < start.size:
            top += 1
            stack[top] = i
            now = start[i]
            count = _open_segment(i, now, count, seg_start, seg_span)
    return count


def innermost_segments(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Cut a thread's nested spans into segments during which one span is the innermost.

    Args:
        start: [S] ns, ascending; of spans that start together the outer (longer) comes first.
        end: [S] ns. A span that ends after the one around it is kept, and the outer one ends there: in
            traces in microseconds, rounding does that to properly nested spans.

    Returns:
        seg_start: [M] ns, strictly ascending; a segment lasts until the next one starts.
        seg_span: [M] index of the innermost span, -1 where no span is open. The last segment is always
        empty and marks the end.
    """
    if start.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    seg_start = np.empty(2 * start.size + 1, np.int64)
    seg_span = np.empty(2 * start.size + 1, np.int64)
    stack = np.empty(start.size + 1, np.int64)
    count = _innermost(start, end, seg_start, seg_span, stack)
    return seg_start[:count].copy(), seg_span[:count].copy()
