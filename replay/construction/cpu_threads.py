"""CPU threads of one rank: their activity at every moment, and their waits.

Takes the CPU spans of one rank and window; returns per thread a chain of pieces (work) with holes (waits).
Other modules find what a thread waited for. This one cuts threads at given times, and finds the one hand-over
that threads alone show: forward to backward and back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.replay.engine import innermost_segments
from dpro.replay.intervals import union

NOTHING: Ints = np.empty(0, np.int64)

# Traces in microseconds round each time separately: a span can seem to outlast its parent by this much.
ROUNDING_NS = 2_000


@dataclass(frozen=True)
class ThreadSegments:
    """Segments of one thread during which one span is innermost, without holes.

    Attributes:
        start, end: [M] ns; each segment ends where the next one starts.
        span: [M] index of the innermost span in the rank's arrays, -1 where none is open.
    """

    start: Ints
    end: Ints
    span: Ints

    def at(self, time: Ints) -> Ints:
        """Return the index of the segment at each time; times outside count to the nearest segment."""
        index = np.searchsorted(self.start, time, side="right") - 1
        return np.clip(index, 0, max(self.start.size - 1, 0))


@dataclass(frozen=True)
class ThreadPieces:
    """The work of one thread between its waits, ready to become nodes.

    Attributes:
        start, end: [P] ns, ascending; a hole between two pieces is a wait.
        span: [P] index of the innermost span, -1 for none. The last piece is empty and marks the end.
    """

    start: Ints
    end: Ints
    span: Ints

    def ending_by(self, time: Ints) -> Ints:
        """Return the index of the last piece that has ended by each time, -1 where none has.

        The empty last piece does not count: a wait for a result that comes after the thread's last call
        enters there, and the call must not seem to come after it.
        """
        return np.minimum(np.searchsorted(self.end, time, side="right") - 1, max(self.end.size - 2, 0))

    def starting_from(self, time: Ints) -> Ints:
        """Return the index of the first piece that starts at or after each time, else of the last piece."""
        return np.minimum(np.searchsorted(self.start, time, side="left"), self.start.size - 1)


def thread_segments(start: Ints, end: Ints, index: Ints, begin: int, finish: int) -> ThreadSegments:
    """Cut one thread's spans into segments that cover [begin, finish).

    Args:
        start, end: [S] ns of the thread's spans, sorted by start, outer before inner.
        index: [S] index of each span in the result.
        begin, finish: ns; time before the first and after the last span becomes a segment without span.
    """
    cut, inner = innermost_segments(start, end)
    span = np.where(inner >= 0, index[np.maximum(inner, 0)], -1) if index.size else NOTHING
    if cut.size == 0:
        return ThreadSegments(np.array([begin]), np.array([finish]), np.array([-1]))
    if cut[0] > begin:
        cut, span = np.append(begin, cut), np.append(-1, span)
    stop = np.append(cut[1:], max(finish, int(cut[-1])))
    kept = stop > cut
    kept[-1] |= not kept.any()  # no span takes any time
    return ThreadSegments(cut[kept], stop[kept], span[kept])


def cut_thread(segments: ThreadSegments, cuts: Ints, wait_start: Ints, wait_end: Ints) -> ThreadPieces:
    """Return a thread's work without its waits, cut at the ends of waits and at given times.

    Args:
        cuts: [C] ns, further times at which a piece must end and another begin.
        wait_start, wait_end: [W] ns, waits; they may touch or overlap.
    """
    wait_start, wait_end = merge_intervals(wait_start, wait_end)
    finish = segments.end[-1]
    marks = np.concatenate([segments.start, cuts, wait_start, wait_end])
    marks = np.sort(marks[(marks >= segments.start[0]) & (marks < finish)], kind="stable")  # sorted parts
    marks = marks[np.append(True, marks[1:] != marks[:-1])[: marks.size]]
    stops = np.append(marks[1:], finish)
    waiting = np.searchsorted(wait_start, marks, "right") > np.searchsorted(wait_end, marks, "right")
    span = segments.span[segments.at(marks)]
    return ThreadPieces(
        np.append(marks[~waiting], finish), np.append(stops[~waiting], finish), np.append(span[~waiting], -1)
    )


def merge_intervals(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the union of intervals as disjoint ones, ascending; empty ones are dropped.

    Args:
        start, end: [I] ns.
    """
    begins, ends = union(start, end).T
    return begins, ends


def top_level(start: Ints, end: Ints) -> NDArray[np.bool_]:
    """Return [S] which of a thread's spans, sorted by start, are in no earlier one.

    Args:
        start, end: [S] ns.
    """
    latest = np.maximum.accumulate(end) if end.size else end
    return np.append(True, start[1:] >= latest[:-1])[: start.size]


def bursts(segments: ThreadSegments, start: Ints, end: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the stretches in which a helper thread works while its owner stays in one segment.

    `backward()` runs on a separate thread per device while its caller waits: between two actions of the
    caller, the helper's spans form one burst.

    Args:
        start, end: [S] ns, the helper's top-level spans, sorted.

    Returns:
        First start and last end of each burst, and whether it is entirely in one segment of the owner (so
        that the owner can have waited for it).
    """
    home = segments.at(start)
    opens = np.append(True, np.diff(home) != 0)[: start.size]
    first = np.flatnonzero(opens)
    begin = start[first]
    finish = np.maximum.reduceat(end, first) if first.size else NOTHING
    contained = finish <= segments.end[home[first]] + ROUNDING_NS
    return begin, np.minimum(finish, np.where(contained, segments.end[home[first]], finish)), contained
