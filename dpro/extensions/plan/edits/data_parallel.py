"""Another number of data-parallel ranks.

Each does the work of a recorded one: the cost of its collectives follows from the formulas of their
algorithm, and each waits for the slowest of more ranks. Groups along other axes of parallelism stay as they
are; where axes are not known, all ranks must be in one group.
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
from dpro.replay.graph import (
    CPU_KINDS,
    GPU_KINDS,
    EdgeKind,
    Graph,
    Message,
    NodeKind,
    computed_once,
    is_one_of,
    once,
)
from dpro.replay.kept import kept_as
from dpro.replay.mesh import BY, axes_of_messages
from dpro.replay.peers import ON_GPU, phase_work
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.communication import recorded_algorithm, require_communication
from dpro.replay.whatif.edits.scaling import REPLICAS
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.scope import (
    optimizing,
)
from dpro.replay.whatif.graph_ops.selected import hosts_of

SCATTER = "reduce_scatter"  # each rank receives its shard of the sums
MIN_DURATIONS = 4  # of a phase, needed to estimate its noise


@dataclass(frozen=True)
class DataParallelSize(Edit):
    """The job has another number of data-parallel ranks."""

    name = "data-parallel"
    of_torch = True
    summary = "change the number of data-parallel ranks, with constant work per rank"
    example = "data-parallel:ranks=16"
    needs = "groups with known axes, or one group of all ranks, and transfers of known size in them"
    assumes = (
        "additional ranks and their network are like the recorded ones, their noise is independent and "
        "normal, and the batch per rank stays constant, so that the global batch grows; if each rank "
        "updates a shard, the device work of the update scales with the shard"
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
    training = "the batch grows with the ranks, which may reduce sample efficiency"
    ranks: int = key("number of data-parallel ranks", least=1, most=MAX_RANKS)
    now: str = key("current algorithm; default: ring", "", choices=FLAT)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits to twice as many ranks, and to half of them."""
        recorded = replicas_of(facts.graph)
        return [cls(ranks) for ranks in (2 * recorded, recorded // 2) if ranks >= 2]

    def bound(self, facts: RunFacts) -> float:
        least_ns = facts.base_ns - facts.idle_without_communication
        return max(facts.base_ns - least_ns / self.samples(facts.graph), 0.0)

    def samples(self, graph: Graph) -> float:
        return self.ranks / replicas_of(graph)

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers, and delay each by how much later the slowest of this many ranks is."""
        (changed,) = self._with_noise(graph, 1.0)
        on_gpu = bool(is_one_of(graph.nodes.kind, GPU_KINDS).any())
        return self._with_shards(graph, changed, GPU_KINDS if on_gpu else (NodeKind.CPU,))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return graphs without more noise, and with twice the expected; with shards, of the whole update."""
        changed = self._with_noise(graph, 0.0, 2.0)
        return (*changed, *(self._with_shards(graph, end, (*GPU_KINDS, *CPU_KINDS)) for end in changed))

    def _with_shards(self, graph: Graph, changed: Graph, kinds: Sequence[NodeKind]) -> Graph:
        """Scale the update to the shard of a rank, where each has one; else return `changed`."""
        between = _between_replicas(graph)
        scattered = any(of and message.op == SCATTER for of, message in zip(between.tolist(), graph.messages))
        if not scattered:
            return changed
        updates = optimizing(graph) & is_one_of(graph.nodes.kind, kinds)
        longer = changed.nodes.duration * replicas_of(graph) / self.ranks
        return changed.with_durations(
            np.where(updates, np.rint(longer), changed.nodes.duration).astype(np.int64)
        )

    def _with_noise(self, graph: Graph, *times: float) -> tuple[Graph, ...]:
        """Return the job with the new number of ranks, for each multiple of the expected additional noise."""
        recorded = replicas_of(graph)
        if recorded == self.ranks:
            return (graph,) * len(times)
        between = _between_replicas(graph)
        scaled = graph.with_durations(once(graph, ("among replicas", self), self._transfers))
        into_transfers = np.append(between, False)[graph.nodes.message[graph.edges.target]]
        noise = _noise_before(graph)
        later = (largest_of(self.ranks) - largest_of(recorded)) * noise * into_transfers
        lag = graph.edges.lag
        made = tuple(scaled.with_lags(lag + np.rint(many * later).astype(np.int64)) for many in times)
        # [E] rendezvous of groups of which only one rank is left.
        left = [self._ranks_of(message, recorded) == 1 for message in graph.messages]
        single = np.append(between & np.array(left, np.bool_), False)[graph.nodes.message]
        collectives = graph.nodes.collective[single & (graph.nodes.kind == NodeKind.TRANSFER)]
        met: Bools = graph.edges.kind == EdgeKind.RENDEZVOUS
        alone = met & np.isin(graph.nodes.collective[graph.edges.source], collectives)
        return tuple(end.without_edges(alone) for end in made) if alone.any() else made

    def _ranks_of(self, message: Message, recorded: int) -> int:
        """Return the new number of ranks of a group that contains data-parallel ranks."""
        return max(message.num_ranks * self.ranks // recorded, 1)

    def _transfers(self, graph: Graph) -> NDArray[np.int64]:
        """Return [N] ns, with transfers between replicas as long as among this many ranks."""
        recorded, between = replicas_of(graph), _between_replicas(graph)
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
        """Return [T] ratio of times by the network table; None if it lacks either number of ranks."""
        if graph.network is None or not transfers.size:
            return None
        num_bytes, took = (
            column[transfers].astype(np.float64) for column in (graph.nodes.bytes, graph.nodes.duration)
        )
        return ratio_by_table(graph, graph.messages[message], then, num_bytes, took)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report operations by the network table, those that it lacks, and unknown latencies."""
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
        """Report that a run of one host does not show the cost of links between hosts."""
        try:
            hosts = hosts_of(graph)
        except Unanswerable:
            return ()
        if self.ranks <= replicas_of(graph) or len(hosts) < 2 or len(set(hosts.values())) > 1:
            return ()
        return ("all ranks are on one host: the run does not show the cost of links between hosts",)

    def describe(self) -> str:
        return f"{self.ranks} data-parallel ranks"

    def how(self) -> str:
        return f"torchrun with {self.ranks} processes in total; check the learning rate"


def replicas_of(graph: Graph) -> int:
    """Return the number of data-parallel ranks: by the axes of groups, else if all ranks are in each group.

    Raises:
        Unanswerable: neither shows it.
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
        raise Unanswerable("the number of ranks in the group is unknown")
    return ranks


def _ranks_of_job(graph: Graph) -> int:
    """Return the number of ranks of the job, 0 where not known: a group of this many has all of them."""
    return 0 if graph.run is None else graph.run.manifest.world_size


def _between_replicas(graph: Graph) -> Bools:
    """Return [messages] a mask of those whose groups grow with the number of replicas."""
    axes = axes_of_messages(graph)
    return np.array([REPLICAS in axis.split(BY) or not axis for axis in axes], np.bool_)


def largest_of(count: int) -> float:
    """Return the expected largest of this many normal deviates, in deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@computed_once
def _noise_before(graph: Graph) -> Floats:
    """Return [E] the noise of the work before a rendezvous, ns, on edges to its transfers; 0 on others."""
    nodes, edges = graph.nodes, graph.edges
    spread = np.zeros(graph.num_edges)
    deviation = _find_deviation_of_phases(graph)
    meets = np.flatnonzero(edges.kind == EdgeKind.RENDEZVOUS)
    met = meets[nodes.kind[edges.target[meets]] == NodeKind.TRANSFER]
    arrives = meets[nodes.kind[edges.source[meets]] == NodeKind.ARRIVE]
    phase = np.full(graph.num_nodes, -1)
    phase[edges.target[arrives]] = nodes.phase[edges.source[arrives]]
    spread[met] = [deviation.get(position, 0.0) for position in phase[edges.source[met]].tolist()]
    return spread


@kept_as("deviation-of-phases")
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
