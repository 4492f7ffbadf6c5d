"""Sets of moments in time: half-open intervals as `[N, 2]` int64 ns arrays, sorted and disjoint.

Takes starts and ends in any order, overlapping or not; returns their union, and the covered time between two
moments. Shares of a step (compute, communication, both, neither) follow from lengths of unions alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpro.compiled import compiled, inlined

Times: TypeAlias = NDArray[np.int64]  # [N] ns
Intervals: TypeAlias = NDArray[np.int64]  # [N, 2] ns: start, end


def union(starts: Times, ends: Times) -> Intervals:
    """Return the union of intervals; empty and reversed intervals cover no moment.

    Args:
        starts: `[N]` int64 ns, in any order.
        ends: `[N]` int64 ns.

    Returns:
        `[M, 2]` int64 ns, sorted, no two touching.
    """
    order = np.argsort(starts, kind="stable")
    order = order[ends[order] > starts[order]]
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = starts[1:] > reach[:-1]
    last = np.roll(first, -1)  # a group ends before the next one's first, and at the end
    return np.stack([starts[first], reach[last]], axis=1)


def covered(intervals: Intervals, starts: Times, ends: Times) -> Times:
    """Return how much of each stretch `[start, end)` the intervals cover.

    Args:
        intervals: `[N, 2]` int64 ns, sorted and disjoint.
        starts: `[K]` int64 ns; the stretches may overlap each other.
        ends: `[K]` int64 ns, none before its start.

    Returns:
        `[K]` int64 ns.
    """
    inside_ns = np.zeros(len(starts), np.int64)
    if len(intervals):
        first, last = np.ascontiguousarray(intervals.T)
        whole = np.append(0, np.cumsum(last - first))
        _lies_inside(first, last, whole, np.ascontiguousarray(starts), np.ascontiguousarray(ends), inside_ns)
    return inside_ns


@inlined
def _find_interval(first: Any, time: Any, begun: Any) -> Any:
    # Consecutive moments of a stream mostly fall into the same interval: search only for the others.
    if (begun > 0 and first[begun - 1] > time) or (begun < first.size and first[begun] <= time):
        begun, above = 0, first.size
        while begun < above:
            middle = (begun + above) // 2
            if first[middle] <= time:
                begun = middle + 1
            else:
                above = middle
    return begun


@inlined
def _lies_before(last: Any, whole: Any, time: Any, begun: Any) -> Any:
    # Subtract the part of the last begun interval that is after the moment.
    before = whole[begun]
    if begun > 0 and last[begun - 1] > time:
        before -= last[begun - 1] - time
    return before


@compiled
def _lies_inside(first: Any, last: Any, whole: Any, starts: Any, ends: Any, inside_ns: Any) -> None:
    begun = 0
    for i in range(starts.size):
        begun = _find_interval(first, starts[i], begun)
        before = _lies_before(last, whole, starts[i], begun)
        begun = _find_interval(first, ends[i], begun)
        inside_ns[i] = _lies_before(last, whole, ends[i], begun) - before
