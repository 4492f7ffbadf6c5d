"""Replay of the unchanged graph of deep windows, and the results that several detectors share.

Takes a graph, or the condensed ranks of a large run. Provides its replay, its steps, the work of ranks by
phase and their peers, the job with some ranks changed, and how long members of collectives wait for the last
one to arrive; each is computed once, on first use. Does not decide what is slow, nor whether the last rank to
arrive is the cause: it may itself have waited elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.condense import condense_both, with_ranks_of
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.peers import teams_by_work
from dpro.replay.timeline import (
    Stretch,
    Timeline,
    changed_step_times,
    critical_stretches,
    durations_of,
    path_of_steps,
    replay,
    step_ends,
)
from dpro.replay.whatif.edit import RankChange
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.job import ReplayedJob, job_of

MAX_SETS_UNCONDENSED = (
    8  # sets of ranks above which the graph is condensed: that takes as long as this many replays
)


@dataclass(frozen=True)
class ScaledWork:
    """Change that multiplies the durations of some work.

    Attributes:
        kinds: kinds of nodes that change.
        factors: column `factor`, by `rank` and optionally `step`; other work keeps its durations.
    """

    kinds: Collection[int]
    factors: pl.DataFrame

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with scaled durations, rounded to whole ns."""
        nodes, by = graph.nodes, [name for name in self.factors.columns if name != "factor"]
        node = np.flatnonzero(np.isin(nodes.kind, tuple(self.kinds)))
        places = pl.DataFrame({"node": node, **{name: getattr(nodes, name)[node] for name in by}})
        scaled = places.join(self.factors, on=by)
        durations, work = nodes.duration.copy(), scaled["node"].to_numpy()
        durations[work] = np.rint(durations[work] * scaled["factor"].to_numpy()).astype(np.int64)
        return graph.with_durations(durations)


class Baseline:
    """A job, its replay, and results derived from them.

    Attributes:
        job: as recorded, or with balanced work.
        graph: of the job; of condensed ranks, their joined graph, which has all collectives and steps but no
            other work.
        slowdowns: of kernels beside communication, as from `slowdowns_of`; empty where unknown.
    """

    def __init__(self, job: ReplayedJob | Graph, slowdowns: Sequence[float] = ()) -> None:
        """Take the job; nothing is computed yet."""
        self.job, self.slowdowns = job_of(job), tuple(slowdowns)
        self.graph = self.job.graph
        self._last: tuple[RankChange, set[int], tuple[Graph, Graph]] | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The replay of the graph."""
        return replay(self.graph)

    @cached_property
    def step_ends(self) -> pl.DataFrame:
        """Replayed steps: `window`, `step`, `finish_ns`, `begin_ns`."""
        return step_ends(self.graph, self.timeline.start, self.timeline.end)

    @cached_property
    def steps(self) -> Ints:
        """[T] step numbers."""
        return durations_of(self.step_ends)["step"].to_numpy()

    @cached_property
    def step_ns(self) -> Ints:
        """[T] step times, in ns."""
        return durations_of(self.step_ends)["duration_ns"].to_numpy()

    @cached_property
    def work(self) -> pl.DataFrame:
        """Work of each rank in each phase of each step, as from `phase_work`."""
        return self.job.work

    @cached_property
    def teams(self) -> list[list[int]]:
        """Groups of ranks that do equal work."""
        return teams_by_work(self.work)

    @cached_property
    def decisive(self) -> Ints:
        """Nodes on the critical path to the end of each window's last step."""
        return self._path(self.timeline)

    def _path(self, timeline: Timeline) -> Ints:
        return path_of_steps(timeline, np.unique(timeline.graph.nodes.window).tolist())

    def under(self, change: RankChange) -> Baseline:
        """Return the baseline of the changed job.

        Args:
            change: applies to each rank by itself.

        Raises:
            Unanswerable: the change applies to nothing.
        """
        return Baseline(self.job.with_change(change), self.slowdowns)

    def saved_at_most(self, change: RankChange, ranks: Collection[int]) -> Ints:
        """Return [R + 2] ns, at rank + 1: upper bounds on how much sooner windows end with that rank changed.

        The chain of work that decides when a window ends still exists after the change, so its gain is the
        bound.

        Args:
            ranks: those that may be changed.
        """
        rank = self.graph.nodes.rank
        on_chain = set(ranks) & set(rank[self.decisive].tolist())
        if not on_chain:
            return np.zeros(int(rank.max()) + 2, np.int64)
        one, other = self._beside_changed(change, on_chain)
        timeline = self.timeline if one is self.graph else replay(one)
        chain = self.decisive if one is self.graph else self._path(timeline)
        saved = one.nodes.duration[chain] - other.nodes.duration[chain]
        binding = timeline.binding[chain]
        free, edge = binding < 0, binding[binding >= 0]
        saved[free] += (one.nodes.earliest - other.nodes.earliest)[chain[free]]
        saved[~free] += one.edges.lag[edge] - other.edges.lag[edge]
        return np.bincount(one.nodes.rank[chain] + 1, saved, int(rank.max()) + 2)

    def graphs_changed(self, change: RankChange, sets: Sequence[Sequence[int]]) -> Iterator[Graph]:
        """Yield, for each set of ranks, a graph with these changed; each replays as the whole graph would."""
        one, other = self._beside_changed(change, {rank for ranks in sets for rank in ranks})
        if one is self.graph and len(sets) > MAX_SETS_UNCONDENSED:
            one, other = condense_both(one, other.nodes.duration)
        return (with_ranks_of(one, other, ranks) for ranks in sets)

    def _beside_changed(self, change: RankChange, ranks: set[int]) -> tuple[Graph, Graph]:
        """Return `ReplayedJob.beside_changed`, keeping the graphs of the last change."""
        if self._last is None or self._last[0] is not change or not ranks <= self._last[1]:
            self._last = change, ranks, self.job.beside_changed(change, sorted(ranks))
        return self._last[2]

    def critical_stretches(self) -> Iterator[Stretch]:
        """Yield stretches of the critical path to the ends of windows: a replay, and its nodes in order."""
        return critical_stretches(self.timeline, self.job.path_to(self.timeline))

    def changed_step_ns(self, changed: Graph) -> Ints:
        """Return [T] step times of a changed graph, in ns, replayed as predictions of edits are.

        If the graph has all work, kernels that now overlap more or less communication, and transfers that
        now share a link with others, last accordingly.
        """
        changed = with_shared_links(self.graph, changed)
        slowdowns = () if self.job.by_rank else self.slowdowns[:1]
        after = next(self.job.replays(replace(self.job, graph=changed), slowdowns))
        return changed_step_times(self.step_ends, changed, after.end)["duration_ns"].to_numpy()


def waits(graph: Graph, start: Ints) -> pl.DataFrame:
    """Return how long each member of a multi-rank collective waits for the last one, within steps.

    Args:
        start: [N] start times of nodes, in ns.

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
