"""Slow, readable twins of the compiled loops in `dpro.replay.engine`: what the fast ones must equal."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

Edge = tuple[int, int, int]  # from, to, lag


def simulate(durations: Sequence[int], earliest: Sequence[int], edges: Sequence[Edge]) -> list[int]:
    """Run the graph as a discrete-event simulation: a heap of endings, each of which releases what follows.

    Args:
        durations: [N] of each node.
        earliest: [N] time before which a node may not start.
        edges: (from, to, lag); a node starts when all its predecessors have ended and their lags have passed.
            A negative lag lets it start before that ending, so endings may be found out of order of time.

    Returns:
        [N] start of each node.

    Raises:
        ValueError: some nodes never start: they wait for each other.
    """
    waiting_for = [0] * len(durations)
    followers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, target, lag in edges:
        waiting_for[target] += 1
        followers[source].append((target, lag))
    starts = list(earliest)
    started = [count == 0 for count in waiting_for]
    endings = [(starts[n] + durations[n], n) for n, free in enumerate(started) if free]
    heapq.heapify(endings)
    while endings:
        end, node = heapq.heappop(endings)
        for target, lag in followers[node]:
            starts[target] = max(starts[target], end + lag)
            waiting_for[target] -= 1
            if waiting_for[target] == 0:
                started[target] = True
                heapq.heappush(endings, (starts[target] + durations[target], target))
    if not all(started):
        raise ValueError(f"nodes {[n for n, ran in enumerate(started) if not ran]} wait for each other")
    return starts


def paint(spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    """At each moment the span that was opened last of those that are open.

    Args:
        spans: (start, end), by start; of spans that start together the outer one first.

    Returns:
        Moment -> index of the innermost span; moments at which none is open are left out.
    """
    painted: dict[int, int] = {}
    for index, (start, end) in enumerate(spans):
        for moment in range(start, end):
            painted[moment] = index
    return painted
