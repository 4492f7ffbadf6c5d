"""The unchanged graph of deep windows, and what several detectors ask of it: each computed once.

In: a graph. Out: its replay, its steps, the work of its ranks by phase, and their peers; how long members of
collectives wait for the last one to arrive. Nothing is computed before it is asked for. What is slow is not
decided here, nor whether the last one is the cause: it may itself have waited elsewhere.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.peers import phase_work, teams
from dpro.replay.timeline import (
    AFTER_STEPS,
    Timeline,
    chain_to,
    changed_step_times,
    durations_of,
    replay,
    step_ends,
)


class Baseline:
    """A graph, its replay, and what follows from them.

    Attributes:
        graph: as recorded, or as it would be with balanced work.
    """

    def __init__(self, graph: Graph) -> None:
        """Nothing is computed yet."""
        self.graph = graph

    @cached_property
    def timeline(self) -> Timeline:
        """The replay of the graph."""
        return replay(self.graph)

    @cached_property
    def step_ends(self) -> pl.DataFrame:
        """`window`, `step`, `finish_ns`, `begin_ns` of each replayed step."""
        return step_ends(self.graph, self.timeline.start, self.timeline.end)

    @cached_property
    def steps(self) -> Ints:
        """[T] the numbers of the steps."""
        return durations_of(self.step_ends)["step"].to_numpy()

    @cached_property
    def step_ns(self) -> Ints:
        """[T] ns, how long each step takes."""
        return durations_of(self.step_ends)["duration_ns"].to_numpy()

    @cached_property
    def work(self) -> pl.DataFrame:
        """Work of each rank in each phase of each step, as `phase_work` returns it."""
        return phase_work(self.graph)

    @cached_property
    def teams(self) -> list[list[int]]:
        """Ranks that do the same work."""
        return teams(self.work)

    @cached_property
    def decisive(self) -> Ints:
        """Nodes that decide when the last step of each window ends: none ends earlier than these allow."""
        nodes, end = self.graph.nodes, self.timeline.end
        counts = (nodes.step != AFTER_STEPS) & (nodes.kind != NodeKind.RENDEZVOUS)
        last = [
            int(np.argmax(np.where(counts & (nodes.window == window), end, -1)))
            for window in np.unique(nodes.window)
        ]
        return np.concatenate([chain_to(self.timeline, node) for node in last])

    def changed_step_ns(self, changed: Graph) -> Ints:
        """[T] ns, how long each step takes in a changed graph.

        Args:
            changed: the same graph with other durations, lags or edges.
        """
        after = replay(changed)
        return changed_step_times(self.step_ends, changed, after.start, after.end)["duration_ns"].to_numpy()


def waits(graph: Graph, start: Ints) -> pl.DataFrame:
    """How long each member of a collective of several ranks waits for the last one, in steps.

    Args:
        graph: the graph.
        start: [N] ns at which nodes start.

    Returns:
        `instance` (of the collective), `rank`, `step`, `last` (the rank that arrives last), `wait_ns`.
    """
    nodes = graph.nodes
    arrive = np.flatnonzero((nodes.kind == NodeKind.ARRIVE) & (nodes.step >= 0))
    frame = pl.DataFrame(
        {
            "instance": nodes.collective[arrive],
            "rank": nodes.rank[arrive],
            "step": nodes.step[arrive],
            "time": start[arrive],
        }
    )
    return (
        frame.filter(pl.len().over("instance") > 1)
        .with_columns(
            last=pl.col("rank").sort_by("time", "rank").last().over("instance"),
            wait_ns=pl.col("time").max().over("instance") - pl.col("time"),
        )
        .select("instance", "rank", "step", "last", "wait_ns")
    )
