"""Facts of a run before any change, from which edits take candidates and bounds of their gain.

Takes a graph, its baseline, and the ranks that findings name; returns the critical path, the busiest lanes,
and the upper bounds of gains that follow from them.

Two bounds hold for every replay. The path that decides when a window ends remains if work on it takes less
time, so the window ends sooner by no more than what is taken from the path (Kelley and Walker, Critical-path
planning and scheduling, 1959). And the remaining work of one thread or stream still runs in sequence, so no
window is shorter than its busiest lane.
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
from dpro.replay.whatif.graph_ops.reductions import calling, reductions_of

MAX_RANKS = 8  # ranks with candidates of their own: those with most of the critical path
LARGEST_OPS = 4  # operations on the critical path with candidates of their own
COMMUNICATION = (NodeKind.ARRIVE, NodeKind.RENDEZVOUS, NodeKind.TRANSFER)


@dataclass(frozen=True)
class RunFacts:
    """Facts of a graph before it is changed.

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
        """Mean step of the unchanged graph, ns."""
        return float(step_lengths(self.baseline).mean())

    @cached_property
    def path(self) -> Ints:
        """Nodes on the critical paths to the ends of the last steps of all windows."""
        return path_of_steps(self.timeline, sorted(set(self.baseline["window"].to_list())))

    @cached_property
    def of_critical_path(self) -> Ints:
        """[N] ns of each node, with the lag that leads to it, on the critical path."""
        spent = np.zeros(self.graph.num_nodes, np.int64)
        np.add.at(spent, self.path, self.graph.nodes.duration[self.path] + self._path_lag)
        return spent

    def of_ranks_on_path(self, ranks: Collection[int]) -> float:
        """Return `on_path` of the work of some ranks without their communication."""
        return self.per_step(float(sum(self._path_of_ranks[rank] for rank in ranks)))

    @cached_property
    def _path_of_ranks(self) -> Counter[int]:
        """Work on the path by rank, ns, without communication."""
        nodes, works = self.graph.nodes, ~np.isin(self.graph.nodes.kind[self.path], COMMUNICATION)
        rank, lasts = nodes.rank[self.path][works], self._path_duration[works]
        return Counter({number: int(lasts[rank == number].sum()) for number in np.unique(rank).tolist()})

    @cached_property
    def _path_duration(self) -> Ints:
        return self.graph.nodes.duration[self.path]

    @cached_property
    def _path_lag(self) -> Ints:
        """Gap between each node of the path and its predecessor, ns; 0 where they overlap."""
        lag: Ints = np.append(self.graph.edges.lag, 0)[self._path_edge]
        return np.maximum(lag, 0)

    @cached_property
    def edges_of_path(self) -> Ints:
        """Edges that decide the starts of nodes of the path, in its order."""
        binding = self.timeline.binding[self.path]
        edges: Ints = binding[binding != NO_NODE]
        return edges

    @cached_property
    def _path_edge(self) -> Ints:
        """Edge that decides the start of each node of the path; the number of edges where none does."""
        binding = self.timeline.binding[self.path]
        return np.where(binding == NO_NODE, self.graph.num_edges, binding)

    def per_step(self, total_ns: float) -> float:
        """Convert a saving over all windows to ns of the mean step; of selected steps, it may be all of it.

        Args:
            total_ns: saving in ns.
        """
        if "counted" in self.baseline.columns and not self.baseline["counted"].all():
            return self.base_ns if total_ns > 0 else 0.0
        return min(total_ns / max(self.baseline.height, 1), self.base_ns)

    def on_path(self, work: Bools | Floats, lags: Bools | None = None) -> float:
        """Return the most by which work on the critical path can be shortened, ns of the mean step.

        Args:
            work: [N] mask of nodes that may become 0 ns long, or ns by which each may become shorter.
            lags: [E] edges whose lag may become 0.
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
        """Return ns by which the mean step is longer than the work of its busiest thread or stream.

        Args:
            besides: [N] mask of work that may disappear and does not count; or the share of each that may.
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
        """`idle` where all communication may disappear, ns."""
        return self.idle(self.communication)

    @cached_property
    def idle_without_reductions(self) -> float:
        """`idle` where all communication and the calls of gradient reductions may disappear, ns.

        Raises:
            Unanswerable: as for `reductions_of`.
        """
        return self.idle(self.communication | calling(self.graph, reductions_of(self.graph).passes))

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return self.graph.ranks

    @cached_property
    def deciding_ranks(self) -> list[int]:
        """Ranks that findings name, and those with most of the critical path, ascending."""
        if len(self.ranks) < 2:
            return []
        rank = self.graph.nodes.rank
        of_ranks = rank >= 0
        share = np.bincount(rank[of_ranks], self.of_critical_path[of_ranks], minlength=max(self.ranks) + 1)
        most = sorted(self.ranks, key=lambda number: (number not in self.suspects, -share[number], number))
        return sorted(most[:MAX_RANKS])

    @cached_property
    def largest_ops(self) -> list[tuple[str, NodeKind]]:
        """Names of kernels and operators with most of the critical path, the largest first."""
        by_time = [*self._on_path_by_name(NodeKind.KERNEL), *self._on_path_by_name(NodeKind.CPU)]
        by_time.sort(key=lambda row: (-row[0], row[1]))
        return [(name, kind) for _, name, kind in by_time[:LARGEST_OPS]]

    @cached_property
    def largest_host_code(self) -> list[str]:
        """Range with most of the critical path in code outside operators; empty without any."""
        by_time = sorted(self._on_path_by_name(NodeKind.HOST), key=lambda row: (-row[0], row[1]))
        return [name for _, name, _ in by_time[:1]]

    def _on_path_by_name(self, kind: NodeKind) -> list[tuple[float, str, NodeKind]]:
        nodes, spent = self.graph.nodes, self.of_critical_path
        on_path = (nodes.kind == kind) & (spent > 0) & (nodes.span >= 0)
        total = np.bincount(nodes.name[on_path], spent[on_path], minlength=len(self.graph.names))
        return [(float(total[i]), self.graph.names[i], kind) for i in np.flatnonzero(total).tolist()]

    @cached_property
    def communication(self) -> Bools:
        """[N] mask of arrivals, rendezvous and transfers."""
        return np.isin(self.graph.nodes.kind, COMMUNICATION)

    @cached_property
    def on_cpu(self) -> Bools:
        """[N] mask of work of the host."""
        return np.isin(self.graph.nodes.kind, CPU_KINDS)


def facts_of(graph: Graph, baseline: pl.DataFrame | None = None, suspects: Collection[int] = ()) -> RunFacts:
    """Replay a graph, and return the facts from which candidates and bounds are taken.

    Args:
        baseline: `baseline_steps` of it, where known already or not of all steps.

    Raises:
        Unanswerable: there is no complete step.
    """
    timeline = replayed(graph)
    ends = step_ends(graph, timeline.start, timeline.end) if baseline is None else baseline
    if ends.is_empty():
        raise Unanswerable("no complete step in the run: record at least two steps")
    return RunFacts(graph, timeline, ends, tuple(sorted(suspects)))
