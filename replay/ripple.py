"""What a few changed nodes move, in time proportional to what they move.

In: a replayed graph. Out: the nodes that start at another time once some durations or lags are others, and
when. The graph is not copied, and each question is answered from the same baseline. Worth it where a change
reaches little: most of a graph is moved faster by a whole replay.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpro.replay.engine import grouped, ripple
from dpro.replay.timeline import Timeline

Ints = NDArray[np.int64]
NONE: Ints = np.empty(0, np.int64)


class Ripple:
    """A baseline, and one working copy of its times that every question leaves as it found it."""

    def __init__(self, timeline: Timeline) -> None:
        """Take over a replay.

        Args:
            timeline: of the unchanged graph.
        """
        self._graph = timeline.graph
        edges = self._graph.edges
        self._indptr_after, by_source = grouped(edges.source, self._graph.num_nodes)
        self._after = edges.target[by_source]
        self._start = timeline.start.copy()
        self._duration = self._graph.nodes.duration.copy()
        self._lag = edges.lag.copy()

    def moved(self, nodes: Ints, durations: Ints, edges: Ints = NONE, lags: Ints = NONE) -> tuple[Ints, Ints]:
        """Replay with other durations of some nodes, and other lags of some edges.

        Args:
            nodes: [K] which.
            durations: [K] ns.
            edges: [L] which.
            lags: [L] ns.

        Returns:
            The nodes that start at another time than in the baseline, ascending, and their starts, ns.
        """
        graph = self._graph
        followers = [self._after[slice(*self._indptr_after[node : node + 2])] for node in nodes]
        self._duration[nodes], self._lag[edges] = durations, lags
        moved, before = ripple(
            self._duration,
            graph.nodes.earliest,
            graph.indptr,
            graph.edges.source,
            self._lag,
            self._indptr_after,
            self._after,
            self._start,
            np.concatenate([*followers, graph.edges.target[edges]]),
        )
        after = self._start[moved]
        self._start[moved] = before
        self._duration[nodes], self._lag[edges] = graph.nodes.duration[nodes], graph.edges.lag[edges]
        return moved, after
