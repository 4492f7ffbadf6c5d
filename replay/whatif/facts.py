"""What a run shows before anything is changed: from it edits take their candidates, and bounds of their gain.

In: a graph, its baseline, and the ranks that findings name. Out: what the job's critical path and its busiest
lane say that no change can gain.

Two bounds hold for every replay. The path that decides when a window ends is still there if work on it takes
less time, so the window ends sooner by no more than what is taken from the path (Kelley and Walker,
Critical-path planning and scheduling, 1959). And what is left on one thread or stream is still done one piece
after the other, so no window is shorter than its busiest lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.engine import NO_NODE
from dpro.replay.graph import CPU_KINDS, Graph, NodeKind
from dpro.replay.timeline import AFTER_STEPS, Timeline, path_of_steps, replayed, step_ends, step_lengths

MAX_RANKS = 8  # that are looked at one by one: those that decide most of the critical path
LARGEST_OPS = 4  # operations on the critical path that are looked at one by one
COMMUNICATION = (NodeKind.ARRIVE, NodeKind.RENDEZVOUS, NodeKind.TRANSFER)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a graph before it is changed.

    Attributes:
        graph: the unchanged graph.
        timeline: its replay.
        baseline: `baseline_steps` of it.
        suspects: ranks that findings name as slow.
    """

    graph: Graph
    timeline: Timeline
    baseline: pl.DataFrame
    suspects: tuple[int, ...] = ()

    @cached_property
    def base_ns(self) -> float:
        """The mean step as it is."""
        return float(step_lengths(self.baseline).mean())

    @cached_property
    def path(self) -> Ints:
        """What decides when the last steps of all windows end."""
        return path_of_steps(self.timeline, sorted(set(self.baseline["window"].to_list())))

    @cached_property
    def of_critical_path(self) -> Ints:
        """[N] ns for which each node, with the lag that leads to it, is on the critical path."""
        spent = np.zeros(self.graph.num_nodes, np.int64)
        np.add.at(spent, self.path, self.graph.nodes.duration[self.path] + self._path_lag)
        return spent

    def of_ranks_on_path(self, ranks: Collection[int]) -> float:
        """`on_path` of the work of some ranks without their communication."""
        return self.per_step(float(sum(self._path_of_ranks[rank] for rank in ranks)))

    @cached_property
    def _path_of_ranks(self) -> Counter[int]:
        """ns of the path that are work of each rank without its communication."""
        nodes, works = self.graph.nodes, ~np.isin(self.graph.nodes.kind[self.path], COMMUNICATION)
        rank, lasts = nodes.rank[self.path][works], self._path_duration[works]
        return Counter({number: int(lasts[rank == number].sum()) for number in np.unique(rank).tolist()})

    @cached_property
    def _path_duration(self) -> Ints:
        return self.graph.nodes.duration[self.path]

    @cached_property
    def _path_lag(self) -> Ints:
        """ns between the one before and each node of the path, where the former had ended."""
        lag: Ints = np.append(self.graph.edges.lag, 0)[self._path_edge]
        return np.maximum(lag, 0)

    @cached_property
    def _path_edge(self) -> Ints:
        """The edge that decides when each node of the path starts; behind the last where none does."""
        binding = self.timeline.binding[self.path]
        return np.where(binding == NO_NODE, self.graph.edges.lag.size, binding)

    def per_step(self, total_ns: float) -> float:
        """What a saving in all windows is of the mean step; of selected steps it may be any part.

        Args:
            total_ns: ns.
        """
        if "counted" in self.baseline.columns and not self.baseline["counted"].all():
            return self.base_ns if total_ns > 0 else 0.0
        return min(total_ns / max(self.baseline.height, 1), self.base_ns)

    def on_path(self, work: Bools | Floats, lags: Bools | None = None) -> float:
        """The most that work on the critical path can be shortened, ns of the mean step.

        Args:
            work: [N] which nodes may come to take no time; or ns by which each may get shorter.
            lags: [E] edges whose lag may come to be 0.
        """
        chosen = work[self.path]
        if work.dtype == np.bool_:
            total = float(self._path_duration[chosen].sum())
        else:
            total = float(np.minimum(chosen, self._path_duration).sum())
        if lags is not None:
            total += float(self._path_lag[np.append(lags, False)[self._path_edge]].sum())
        return self.per_step(total)

    def idle(self, besides: Bools | Floats) -> float:
        """What the mean step takes longer than the busiest thread or stream has work, ns.

        Args:
            besides: [N] what may go away, and is no work here; or the share of each that may.
        """
        nodes, edges = self.graph.nodes, self.graph.edges
        stays = (nodes.step != AFTER_STEPS) & (nodes.lane >= 0) & (besides < 1)
        lasts = nodes.duration if besides.dtype == np.bool_ else nodes.duration * (1 - besides)
        num_lanes = len(self.graph.lanes)
        queued = (
            (nodes.lane[edges.source] == nodes.lane[edges.target]) & stays[edges.target] & (edges.lag < 0)
        )
        total = 0.0
        for window in self.baseline["window"].unique().sort().to_list():
            in_window = nodes.window == window
            work, lagged = in_window & stays, queued & in_window[edges.target]
            busy = np.bincount(nodes.lane[work], lasts[work], minlength=num_lanes)
            busy += np.bincount(nodes.lane[edges.target[lagged]], edges.lag[lagged], minlength=num_lanes)
            ends = int(self.timeline.end[in_window & (nodes.step != AFTER_STEPS)].max())
            total += max(ends - int(self.timeline.start[in_window].min()) - float(busy.max()), 0.0)
        return self.per_step(total)

    @cached_property
    def idle_without_communication(self) -> float:
        """`idle`, where all communication may go away."""
        return self.idle(self.communication)

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return self.graph.ranks

    @cached_property
    def deciding_ranks(self) -> list[int]:
        """Ranks that findings name, and those that most of the critical path runs over, in order."""
        if len(self.ranks) < 2:
            return []
        rank = self.graph.nodes.rank
        of_ranks = rank >= 0
        share = np.bincount(rank[of_ranks], self.of_critical_path[of_ranks], minlength=max(self.ranks) + 1)
        most = sorted(self.ranks, key=lambda number: (number not in self.suspects, -share[number], number))
        return sorted(most[:MAX_RANKS])

    @cached_property
    def largest_ops(self) -> list[tuple[str, NodeKind]]:
        """Names of kernels and operators that most of the critical path is, the largest first."""
        by_time = [*self._on_path_by_name(NodeKind.KERNEL), *self._on_path_by_name(NodeKind.CPU)]
        by_time.sort(key=lambda row: (-row[0], row[1]))
        return [(name, kind) for _, name, kind in by_time[:LARGEST_OPS]]

    @cached_property
    def largest_host_code(self) -> list[str]:
        """The range whose code in no operator is most of the critical path; nothing where there is none."""
        by_time = sorted(self._on_path_by_name(NodeKind.HOST), key=lambda row: (-row[0], row[1]))
        return [name for _, name, _ in by_time[:1]]

    def _on_path_by_name(self, kind: NodeKind) -> list[tuple[float, str, NodeKind]]:
        nodes, spent = self.graph.nodes, self.of_critical_path
        on_path = (nodes.kind == kind) & (spent > 0) & (nodes.span >= 0)
        total = np.bincount(nodes.name[on_path], spent[on_path], minlength=len(self.graph.names))
        return [(float(total[i]), self.graph.names[i], kind) for i in np.flatnonzero(total).tolist()]

    @cached_property
    def communication(self) -> Bools:
        """[N] arrivals, rendezvous and transfers."""
        return np.isin(self.graph.nodes.kind, COMMUNICATION)

    @cached_property
    def on_cpu(self) -> Bools:
        """[N] work of the host."""
        return np.isin(self.graph.nodes.kind, CPU_KINDS)


def facts_of(graph: Graph, baseline: pl.DataFrame | None = None, suspects: Collection[int] = ()) -> RunFacts:
    """Take the replay of a graph, and keep what candidates and bounds are taken from.

    Args:
        baseline: `baseline_steps` of it, if at hand or not of all steps.

    Raises:
        Unanswerable: there is no whole step.
    """
    timeline = replayed(graph)
    ends = step_ends(graph, timeline.start, timeline.end) if baseline is None else baseline
    if ends.is_empty():
        raise Unanswerable("no complete step in the run: record at least two steps")
    return RunFacts(graph, timeline, ends, tuple(sorted(suspects)))
