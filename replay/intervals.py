"""Sets of moments in time: half-open intervals as `[N, 2]` int64 ns arrays, sorted and disjoint.

In: starts and ends in any order, overlapping or not. Out: their union, and how much of it lies between
two moments. Shares of a step (compute, communication, both, neither) follow from lengths of unions alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpro.replay.engine import compiled

Times: TypeAlias = NDArray[np.int64]  # [N] ns
Intervals: TypeAlias = NDArray[np.int64]  # [N, 2] ns: start, end


def union(starts: Times, ends: Times) -> Intervals:
    """The moments covered by at least one interval; empty and reversed intervals cover none.

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
    last = np.roll(first, -1)  # the interval before a first one is a last one, and so is the very last
    return np.stack([starts[first], reach[last]], axis=1)


def covered(intervals: Intervals, starts: Times, ends: Times) -> Times:
    """How much of each stretch `[start, end)` lies inside the intervals.

    Args:
        intervals: `[N, 2]` int64 ns, sorted and disjoint.
        starts: `[K]` int64 ns; the stretches may overlap each other.
        ends: `[K]` int64 ns, none before its start.

    Returns:
        `[K]` int64 ns.
    """
    return _covered_before(intervals, ends) - _covered_before(intervals, starts)


def _covered_before(intervals: Intervals, times: Times) -> Times:
    if len(intervals) == 0:
        return np.zeros(len(times), dtype=np.int64)
    first, last = np.ascontiguousarray(intervals.T)
    before = np.empty(len(times), np.int64)
    _lies_before(first, last, np.append(0, np.cumsum(last - first)), np.ascontiguousarray(times), before)
    return before


@compiled
def _lies_before(first: Any, last: Any, whole: Any, times: Any, before: Any) -> None:
    # Moments of one stream mostly lie between the same two beginnings as the one before: only others are
    # searched for. Of the last interval that has begun, what lies after the moment is taken off again.
    begun = 0
    for i in range(times.size):
        time = times[i]
        if (begun > 0 and first[begun - 1] > time) or (begun < first.size and first[begun] <= time):
            begun, above = 0, first.size
            while begun < above:
                middle = (begun + above) // 2
                if first[middle] <= time:
                    begun = middle + 1
                else:
                    above = middle
        before[i] = whole[begun]
        if begun > 0 and last[begun - 1] > time:
            before[i] -= last[begun - 1] - time
