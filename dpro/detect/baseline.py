"""The unchanged graph of deep windows, and what several detectors ask of it: each computed once.

In: a graph, or the condensed ranks of a large run. Out: its replay, its steps, the work of its ranks by
phase, and their peers; what else ranks show, and the job with some of them changed; how long members of
collectives wait for the last one to arrive. Nothing is computed before it is asked for. What is slow is not
decided here, nor whether the last one is the cause: it may itself have waited elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.condense.skeletons import condense_both, with_ranks_of
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.peers import phase_work, teams, with_calls, work_without_calls
from dpro.replay.timeline import (
    AFTER_STEPS,
    Timeline,
    chain_to,
    changed_step_times,
    critical_stretches,
    durations_of,
    replay,
    step_ends,
)

if TYPE_CHECKING:
    from dpro.replay.whatif.edit import RankChange
    from dpro.replay.whatif.ranks.apart import RanksApart

FEW = 8  # sets of ranks: condensing the graph takes as long as that many replays of it
T = TypeVar("T")


@dataclass(frozen=True)
class ScaledWork:
    """Work that takes a multiple of its time.

    Attributes:
        kinds: of nodes.
        factors: `factor`, by `rank` and perhaps `step`; other work is as it was.
    """

    kinds: Collection[int]
    factors: pl.DataFrame

    def apply(self, graph: Graph) -> Graph:
        """The graph with these durations, rounded to whole nanoseconds."""
        nodes, by = graph.nodes, [name for name in self.factors.columns if name != "factor"]
        node = np.flatnonzero(np.isin(nodes.kind, tuple(self.kinds)))
        places = pl.DataFrame({"node": node, **{name: getattr(nodes, name)[node] for name in by}})
        scaled = places.join(self.factors, on=by)
        durations, at = nodes.duration.copy(), scaled["node"].to_numpy()
        durations[at] = np.rint(durations[at] * scaled["factor"].to_numpy()).astype(np.int64)
        return graph.with_durations(durations)


class Baseline:
    """A graph, its replay, and what follows from them.

    Attributes:
        graph: as recorded, or as it would be with balanced work; of condensed ranks their joined graph, which
            has all collectives and steps, and no other work.
    """

    def __init__(self, graph: Graph) -> None:
        """Nothing is computed yet."""
        self.graph = graph
        self._last: tuple[RankChange, Ints] | None = None

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
        return _decisive(self.timeline)

    @cached_property
    def on_gpus(self) -> bool:
        """Whether any rank has work on a GPU."""
        return bool(np.isin(self.graph.nodes.kind, GPU_KINDS).any())

    def look(self, look: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """What a function returns of the graph; of condensed ranks, of the graph of each.

        Args:
            ranks: which are looked at, where they are apart; all where None.
        """
        return [look(self.graph)]

    def under(self, change: RankChange) -> Baseline:
        """The job under a change.

        Args:
            change: of each rank by itself.

        Raises:
            Unanswerable: there is nothing that it changes.
        """
        return Baseline(change.apply(self.graph))

    def saved_at_most(self, change: RankChange, ranks: Collection[int]) -> Ints:
        """[R + 2] ns by rank + 1: what changing it saves at most of the time until windows end, if anything.

        The chain of work that decides when a window ends is there after the change, too.

        Args:
            ranks: which may be changed.
        """
        nodes, at = self.graph.nodes, self.decisive
        taken = nodes.duration[at] - self._changed(change)[at]
        return np.bincount(nodes.rank[at] + 1, taken, int(nodes.rank.max()) + 2)

    def each_changed(self, change: RankChange, sets: Sequence[Sequence[int]]) -> Iterator[Graph]:
        """Graphs that replay as this one does, with sets of ranks changed in turn."""
        graph, changed = self.graph, self._changed(change)
        if len(sets) > FEW:
            both = condense_both(graph, changed)
            return (with_ranks_of(*both, ranks) for ranks in sets)
        own = graph.nodes.duration
        of_sets = (np.isin(graph.nodes.rank, ranks) for ranks in sets)
        return (graph.with_durations(np.where(mine, changed, own)) for mine in of_sets)

    def _changed(self, change: RankChange) -> Ints:
        """[N] ns, durations of the nodes under a change; those of the last one are kept."""
        if self._last is None or self._last[0] is not change:
            self._last = change, change.apply(self.graph).nodes.duration
        return self._last[1]

    def critical_stretches(self) -> Iterable[tuple[Timeline, Ints]]:
        """What decides when windows end: replays of ranks, or of all, and their nodes that do, in order."""
        return critical_stretches(self.timeline)

    def changed_step_ns(self, changed: Graph) -> Ints:
        """[T] ns, how long each step takes in a changed graph."""
        after = replay(changed)
        return changed_step_times(self.step_ends, changed, after.start, after.end)["duration_ns"].to_numpy()


class BaselineOfRanks(Baseline):
    """The same of condensed ranks: what is inside them is asked of each by itself."""

    def __init__(self, ranks: RanksApart) -> None:
        """Nothing is computed yet."""
        super().__init__(ranks.graph)
        self._ranks = ranks
        self._both: tuple[RankChange, set[int], tuple[Graph, Graph]] | None = None

    @cached_property
    def work(self) -> pl.DataFrame:
        """As of `Baseline`."""
        return with_calls(pl.concat(self.look(work_without_calls)), self.graph)

    @cached_property
    def on_gpus(self) -> bool:
        """As of `Baseline`."""
        return self._ranks.job.condensed.pooled.on_gpu

    def look(self, look: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """As of `Baseline`."""
        return self._ranks.look(look, ranks)

    def under(self, change: RankChange) -> Baseline:
        """As of `Baseline`."""
        return BaselineOfRanks(self._ranks.under(change))

    def saved_at_most(self, change: RankChange, ranks: Collection[int]) -> Ints:
        """As of `Baseline`; only ranks that the chain goes through are condensed again.

        Args:
            ranks: which may be changed.
        """
        rank = self.graph.nodes.rank
        on_chain = set(ranks) & set(rank[self.decisive].tolist())
        if not on_chain:
            return np.zeros(int(rank.max()) + 2, np.int64)
        one, other = self._changed_beside(change, on_chain)
        timeline = replay(one)
        at = _decisive(timeline)
        taken, by = one.nodes.duration[at] - other.nodes.duration[at], timeline.binding[at]
        first, lag = one.nodes.earliest[at] - other.nodes.earliest[at], one.edges.lag - other.edges.lag
        taken = taken + np.where(by < 0, first, np.append(lag, 0)[by])
        return np.bincount(one.nodes.rank[at] + 1, taken, int(rank.max()) + 2)

    def each_changed(self, change: RankChange, sets: Sequence[Sequence[int]]) -> Iterator[Graph]:
        """As of `Baseline`."""
        both = self._changed_beside(change, {rank for ranks in sets for rank in ranks})
        return (with_ranks_of(*both, ranks) for ranks in sets)

    def _changed_beside(self, change: RankChange, ranks: set[int]) -> tuple[Graph, Graph]:
        """The joined graph as it is, and with ranks changed; those of the last change are kept."""
        if self._both is None or self._both[0] is not change or not ranks <= self._both[1]:
            self._both = change, ranks, self._ranks.both(change, sorted(ranks))
        return self._both[2]

    def critical_stretches(self) -> Iterable[tuple[Timeline, Ints]]:
        """As of `Baseline`."""
        return self._ranks.critical_stretches(self.timeline)


def _decisive(timeline: Timeline) -> Ints:
    """As of `Baseline`."""
    nodes = timeline.graph.nodes
    counts = (nodes.step != AFTER_STEPS) & (nodes.kind != NodeKind.RENDEZVOUS)
    last = [
        int(np.argmax(np.where(counts & (nodes.window == window), timeline.end, -1)))
        for window in np.unique(nodes.window)
    ]
    return np.concatenate([chain_to(timeline, node) for node in last])


def waits(graph: Graph, start: Ints) -> pl.DataFrame:
    """How long each member of a collective of several ranks waits for the last one, in steps.

    Args:
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
