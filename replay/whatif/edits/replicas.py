"""Another number of data-parallel ranks.

Each does what those that were recorded do: what its collectives cost follows from the formulas of their
algorithm, and each waits for the slowest of more. Groups along other axes of parallelism stay as they are;
where axes are not known, all ranks have to be in one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats
from dpro.errors import Unanswerable
from dpro.limits import MAX_RANKS
from dpro.replay.cost.transfers import (
    FLAT,
    RING,
    cost,
    fit_costs,
    link_of,
    messages_by_kind,
    ratio_by_table,
    time_ns,
    unknown_latencies,
    why_no_cost,
)
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, Message, NodeKind, is_of, once
from dpro.replay.kept import kept
from dpro.replay.mesh import BY, axes_of_messages
from dpro.replay.peers import ON_GPU, phase_work
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.communication import recorded_algorithm, require_communication
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.scope import optimizing
from dpro.replay.whatif.graph_ops.selected import hosts_of

SCATTER = "reduce_scatter"  # of which each rank gets its shard of the sums
REPLICAS = "dp"  # the axis along which ranks are replicas
MIN_DURATIONS = 4  # that noise is taken from


@dataclass(frozen=True)
class DataParallelSize(Edit):
    """The job has another number of data-parallel ranks."""

    name = "data-parallel"
    summary = "another number of data-parallel ranks, each with the same work"
    example = "data-parallel:ranks=16"
    needs = "groups whose axes are known, or one group of all ranks, and transfers of known size in them"
    assumes = (
        "further ranks are like the recorded ones and on a like network, their noise is independent and "
        "normal, and the batch of each rank stays: that of the job grows with it; where each rank updates a "
        "shard, work of the update on the device goes with its size"
    )
    source = (
        "a measured network table; else costs of ring, tree or halving (Thakur et al., IJHPCA 2005); waiting "
        "for the slowest: the expected largest of n normal deviates (Blom, 1958) times the noise of work "
        "between collectives"
    )
    proof = "2 to 4 ranks, DDP on gloo; 2 to 1 beside tensor parallelism"
    is_advice = False
    of_training = True
    effort = "money"
    training = "a batch that grows with the ranks: as many samples may teach less"
    ranks: int = key("how many data-parallel ranks", least=1, most=MAX_RANKS)
    now: str = key("which algorithm runs; ring without", "", choices=FLAT)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Twice as many ranks, and half of them."""
        recorded = replicas_of(facts.graph)
        return [cls(ranks) for ranks in (2 * recorded, recorded // 2) if ranks >= 2]

    def bound(self, facts: RunFacts) -> float:
        least_ns = facts.base_ns - facts.idle_without_communication
        return max(facts.base_ns - least_ns / self.samples(facts.graph), 0.0)

    def samples(self, graph: Graph) -> float:
        return self.ranks / replicas_of(graph)

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers, and let each begin later by what the slowest of this many is later."""
        (changed,) = self._with_noise(graph, 1.0)
        on_gpu = bool(is_of(graph.nodes.kind, GPU_KINDS).any())
        return self._with_shards(graph, changed, GPU_KINDS if on_gpu else (NodeKind.CPU,))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """With no more noise than now, and with twice what is expected; of shards, with all of the update."""
        changed = self._with_noise(graph, 0.0, 2.0)
        return (*changed, *(self._with_shards(graph, end, (*GPU_KINDS, *CPU_KINDS)) for end in changed))

    def _with_shards(self, graph: Graph, changed: Graph, kinds: Sequence[NodeKind]) -> Graph:
        """The update in proportion to the shard of a rank, where each has one; else the graph as it is."""
        between = _between_replicas(graph)
        scattered = any(of and message.op == SCATTER for of, message in zip(between.tolist(), graph.messages))
        if not scattered:
            return changed
        updates = optimizing(graph) & is_of(graph.nodes.kind, kinds)
        longer = changed.nodes.duration * replicas_of(graph) / self.ranks
        return changed.with_durations(
            np.where(updates, np.rint(longer), changed.nodes.duration).astype(np.int64)
        )

    def _with_noise(self, graph: Graph, *times: float) -> tuple[Graph, ...]:
        """The wider job with multiples of the noise that is expected."""
        recorded = replicas_of(graph)
        if recorded == self.ranks:
            return (graph,) * len(times)
        between = _between_replicas(graph)
        nodes, edges = graph.nodes, graph.edges
        columns = (*nodes.columns, *edges.columns, graph.messages, graph.network, graph.run)
        takes = once(
            graph, ("among replicas", self), columns, lambda: self._transfers(graph, recorded, between)
        )
        scaled = graph.with_durations(takes)
        into_transfers = np.append(between, False)[graph.nodes.message[graph.edges.target]]
        noise = once(graph, "noise before transfers", columns, lambda: _noise_before(graph))
        later = (largest_of(self.ranks) - largest_of(recorded)) * noise * into_transfers
        lag = graph.edges.lag
        made = tuple(scaled.with_lags(lag + np.rint(many * later).astype(np.int64)) for many in times)
        alone = self._alone(graph, recorded, between)
        return tuple(end.without_edges(alone) for end in made) if alone.any() else made

    def _alone(self, graph: Graph, recorded: int, between: Bools) -> Bools:
        """[E] where ranks meet of which only one is left."""
        left = [self._ranks_of(message, recorded) == 1 for message in graph.messages]
        single = np.append(between & np.array(left, np.bool_), False)[graph.nodes.message]
        collectives = graph.nodes.collective[single & (graph.nodes.kind == NodeKind.TRANSFER)]
        met: Bools = graph.edges.kind == EdgeKind.RENDEZVOUS
        return met & np.isin(graph.nodes.collective[graph.edges.source], collectives)

    def _ranks_of(self, message: Message, recorded: int) -> int:
        """How many ranks a group that has data-parallel ranks then has."""
        return max(message.num_ranks * self.ranks // recorded, 1)

    def _transfers(self, graph: Graph, recorded: int, between: Bools) -> NDArray[np.int64]:
        """[N] ns, with transfers between replicas that take what they do among this many ranks."""
        nodes, lines, duration = graph.nodes, fit_costs(graph), graph.nodes.duration.copy()
        sized = np.flatnonzero((nodes.bytes > 0) & (duration > 0) & (nodes.message >= 0))
        for kind, messages in messages_by_kind(graph).items():
            if not between[messages[0]]:
                continue
            now = graph.messages[messages[0]].num_ranks
            then = self._ranks_of(graph.messages[messages[0]], recorded)
            of_kind = sized[np.isin(nodes.message[sized], messages)]
            if kind not in lines:
                raise Unanswerable(why_no_cost(graph, kind))
            if then == 1:
                duration[np.isin(nodes.message, messages) & (nodes.kind == NodeKind.TRANSFER)] = 0
                continue
            ratio = self._by_table(graph, messages[0], of_kind, then)
            if ratio is None:
                algorithm = recorded_algorithm(graph, kind[0]) or self.now or RING
                spent = cost(kind[0], algorithm, now)
                num_bytes = nodes.bytes[of_kind].astype(np.float64)
                link = link_of(lines[kind], spent, num_bytes)
                after = time_ns(cost(kind[0], algorithm, then), link, num_bytes)
                ratio = after / np.maximum(time_ns(spent, link, num_bytes), 1e-9)
            duration[of_kind] = np.rint(duration[of_kind] * ratio).astype(np.int64)
        return duration

    def _by_table(self, graph: Graph, message: int, transfers: NDArray[np.int64], then: int) -> Floats | None:
        """[T] ratio of times by the measured network table; None without one of both numbers of ranks."""
        if graph.network is None or not transfers.size:
            return None
        num_bytes, took = (
            column[transfers].astype(np.float64) for column in (graph.nodes.bytes, graph.nodes.duration)
        )
        return ratio_by_table(graph, graph.messages[message], then, num_bytes, took)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Which operations the network table says, whose latency the run does not show, and what it lacks."""
        beyond = self._beyond_host(graph)
        if graph.network is None:
            return (*beyond, *unknown_latencies(graph))
        lines = {False: list[str](), True: list[str]()}
        between, recorded = _between_replicas(graph), replicas_of(graph)
        for (op, _), messages in messages_by_kind(graph).items():
            if not between[messages[0]]:
                continue
            then = self._ranks_of(graph.messages[messages[0]], recorded)
            of_kind = np.flatnonzero(
                np.isin(graph.nodes.message, messages) & (graph.nodes.bytes > 0) & (graph.nodes.duration > 0)
            )
            lines[self._by_table(graph, messages[0], of_kind, then) is not None].append(op)
        measured, others = (", ".join(sorted(set(lines[by]))) for by in (True, False))
        notes = [f"{measured} among {self.ranks} ranks: by the network table"] if measured else []
        if others:
            notes.append(f"{others} among {self.ranks} ranks: by a formula, the network table lacks it")
        return (*notes, *beyond, *unknown_latencies(graph))

    def _beyond_host(self, graph: Graph) -> tuple[str, ...]:
        """That what links between hosts cost is not in a run of one host."""
        try:
            hosts = hosts_of(graph)
        except Unanswerable:
            return ()
        if self.ranks <= replicas_of(graph) or len(hosts) < 2 or len(set(hosts.values())) > 1:
            return ()
        return ("all ranks are on one host: what links to another cost is not in the run",)

    def describe(self) -> str:
        return f"{self.ranks} data-parallel ranks"

    def how(self) -> str:
        return f"torchrun with {self.ranks} processes in all; look after the learning rate"


def replicas_of(graph: Graph) -> int:
    """How many data-parallel ranks a job has: by the axes of its groups, else if all ranks are in each.

    Raises:
        Unanswerable: neither says.
    """
    require_communication(graph)
    axes = axes_of_messages(graph)
    sizes = {message.num_ranks for message, axis in zip(graph.messages, axes) if axis == REPLICAS}
    if len(sizes) == 1 and "" not in axes:
        return sizes.pop()
    groups = {(message.group, message.num_ranks) for message in graph.messages}
    in_groups = {ranks for _, ranks in groups}
    if len(groups) > 1 and in_groups != {_ranks_of_job(graph)}:
        raise Unanswerable("ranks communicate in several groups: which are data-parallel is not recorded")
    if any(axes):
        raise Unanswerable(f"no group in the run is data-parallel: all communication is along {axes[0]}")
    (ranks,) = in_groups
    if ranks < 2:
        raise Unanswerable("how many ranks are in the group is not known")
    return ranks


def _ranks_of_job(graph: Graph) -> int:
    """How many ranks the job has, 0 where that is not known: a group of this many has all of them."""
    return 0 if graph.run is None else graph.run.manifest.world_size


def _between_replicas(graph: Graph) -> Bools:
    """[messages] those whose groups have more ranks where there are more replicas."""
    axes = axes_of_messages(graph)
    return np.array([REPLICAS in axis.split(BY) or not axis for axis in axes], np.bool_)


def largest_of(count: int) -> float:
    """What the largest of this many normal deviates is expected to be, in deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _noise_before(graph: Graph) -> Floats:
    """[E] ns, on edges from a rendezvous to its transfers: how the work before it varies; 0 on others."""
    nodes, edges = graph.nodes, graph.edges
    spread = np.zeros(graph.edges.lag.size)
    deviation = _deviation_of_phases(graph)
    meets = np.flatnonzero(edges.kind == EdgeKind.RENDEZVOUS)
    met = meets[nodes.kind[edges.target[meets]] == NodeKind.TRANSFER]
    arrives = meets[nodes.kind[edges.source[meets]] == NodeKind.ARRIVE]
    phase = np.full(graph.num_nodes, -1)
    phase[edges.target[arrives]] = nodes.phase[edges.source[arrives]]
    spread[met] = [deviation.get(position, 0.0) for position in phase[edges.source[met]].tolist()]
    return spread


def _deviation_of_phases(graph: Graph) -> dict[int, float]:
    """Of each phase of a step how long its work deviates from what its rank usually takes, ns."""
    columns = (*graph.nodes.columns, graph.names, graph.messages)
    return kept(graph, "deviation-of-phases", columns, lambda: _find_deviation_of_phases(graph))


def _find_deviation_of_phases(graph: Graph) -> dict[int, float]:
    work = phase_work(graph)
    if (work["resource"] == ON_GPU).any():
        work = work.filter(pl.col("resource") == ON_GPU)
    phases = work.group_by("rank", "step", "position").agg(pl.col("work_ns").sum())
    usual = pl.col("work_ns").median().over("rank", "position")
    spread = (
        phases.with_columns(off=(pl.col("work_ns") - usual).abs())
        .group_by("position")
        .agg(mad=pl.col("off").median(), count=pl.len())
        .filter(pl.col("count") >= MIN_DURATIONS)
    )
    return {
        int(phase): MAD_TO_SIGMA * float(mad) for phase, mad in spread.select("position", "mad").iter_rows()
    }
