"""Another amount of work per step: micro-batches, recomputation, batch size, data-parallel ranks.

Of more or fewer data-parallel ranks each does what those that were recorded do: what its collectives cost
follows from the formulas of their algorithm, and each waits for the slowest of more. The ranks of the graph
have to be all in one group.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats
from dpro.classify import REDUCTIONS
from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.models.collective_algorithms import FLAT, RING, cost, link_of, time_ns
from dpro.replay.models.link_costs import (
    fit_costs,
    messages_by_kind,
    ratio_by_table,
    unknown_latencies,
    why_no_cost,
)
from dpro.replay.models.memory import footprint_of, freed_by_recomputing, step_bytes_of
from dpro.replay.peers import ON_GPU, phase_work
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.edits.communication import recorded_algorithm, require_communication
from dpro.replay.whatif.edits.gpu.kernels import OPTIMIZER
from dpro.replay.whatif.edits.selected_work import scaled, without
from dpro.replay.whatif.edits.training_loop import DATA_LOADING
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.activations import with_more_activations
from dpro.replay.whatif.graph_ops.repeat import with_copies, with_recomputed_blocks
from dpro.replay.whatif.graph_ops.scope import blocks_of_run, in_modules, outermost_modules
from dpro.replay.whatif.graph_ops.selected import NodeSelection, messages_fitting
from dpro.units import format_bytes


@dataclass(frozen=True)
class Accumulate(Edit):
    """An optimizer step is several forward and backward passes; gradients are reduced in the last."""

    name = "accumulate"
    summary = "gradients of several batches are added up before they are reduced and applied"
    example = "accumulate:steps=2"
    needs = "reductions of gradients in one process group, or group="
    assumes = "each pass is like the recorded one, and all reductions of the group are of gradients"
    source = "the step, preceded by copies of itself without these reductions and without its optimizer"
    proof = "2 passes, DDP and FSDP2 on gloo"
    effort = "code"
    training = "a larger batch for each update: as many samples may teach less"
    steps: int = key("passes per optimizer step; the step that is predicted has them all", 2, least=1)
    group: str = key("pattern for the process group that reduces gradients", "")
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Two passes; where several groups reduce, of the one that moves most."""
        refuse_operations(facts.graph)
        group = _group_of_gradients(facts.graph)
        return [cls(2, group)]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle(facts.communication | optimizing(facts.graph))

    def samples(self, graph: Graph) -> float:
        return self.steps

    def apply(self, graph: Graph) -> Graph:
        """Put the further passes before each step."""
        refuse_operations(graph)
        light = without(graph, _gradient_reductions(graph, self.group) | optimizing(graph))
        return with_copies(graph, light, self.steps - 1)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """How many batches a step of the changed job has."""
        return (f"a step has {self.steps} batches: divide by that to compare the time of one",)

    def describe(self) -> str:
        return f"{self.steps} batches per optimizer step"

    def how(self) -> str:
        return (
            f"model.no_sync() around all but one of {self.steps} passes (FSDP2: set_requires_gradient_sync)"
        )


def refuse_operations(graph: Graph) -> None:
    """Refuse a graph of whole operations.

    Raises:
        Unanswerable: it is one.
    """
    if not (np.isin(graph.nodes.kind, CPU_KINDS) & (graph.nodes.rank >= 0)).any():
        raise Unanswerable("the run consists of whole operations, whose steps have micro-batches already")


def _gradient_reductions(graph: Graph, group: str) -> Bools:
    """[N] transfers that reduce gradients.

    Raises:
        Unanswerable: there are none, or several groups reduce and none is given.
    """
    fits = np.array([message.op in REDUCTIONS for message in graph.messages] + [False], np.bool_)
    if group:
        fits[:-1] &= messages_fitting(graph, "", group)
    found: Bools = fits[graph.nodes.message] & (graph.nodes.kind == NodeKind.TRANSFER)
    if not found.any():
        raise Unanswerable(
            "the run holds no reduction of gradients" + (f" in group {group!r}" if group else "")
        )
    groups = sorted({graph.messages[index].group for index in np.unique(graph.nodes.message[found])})
    if len(groups) > 1 and not group:
        raise Unanswerable(
            f"several groups reduce: say which of {', '.join(groups)} has the gradients (group=)"
        )
    return found


def _group_of_gradients(graph: Graph) -> str:
    """The group whose reductions move most; empty where one reduces, or none."""
    moved = Counter[str]()
    for number, message in enumerate(graph.messages):
        if message.op in REDUCTIONS:
            moved[message.group] += int(graph.nodes.bytes[graph.nodes.message == number].clip(0).sum())
    return max(moved, key=lambda group: (moved[group], group)) if len(moved) > 1 else ""


def optimizing(graph: Graph) -> Bools:
    """[N] what the optimizer does; nothing where its range was not recorded."""
    try:
        return in_modules(graph, f"{OPTIMIZER}*")
    except Unanswerable:
        return np.zeros(graph.num_nodes, np.bool_)


@dataclass(frozen=True)
class Recompute(Edit):
    """Blocks keep their inputs only: backward does the forward pass of each block again before its own."""

    name = "recompute"
    summary = "activations of modules are computed again in backward"
    example = "recompute:module=layers.*"
    needs = "modules (`dpro record --modules`), and backward operators with sequence numbers"
    assumes = "the second forward pass takes what the first took, and one block at a time holds activations"
    source = (
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: one more forward pass per block"
    )
    proof = "blocks of a GPT and a ResNet, CPU"
    effort = "code"
    memory = "frees"
    module: str = key("pattern for the modules, of which the outermost that fit are the blocks")
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        patterns = sorted(blocks_of_run(facts.graph.run))
        if not patterns:
            raise Unanswerable("no modules in the run: `dpro record --modules` names them")
        return [cls(pattern) for pattern in patterns]

    def bound(self, facts: RunFacts) -> float:
        return 0.0

    def apply(self, graph: Graph) -> Graph:
        """Make the first backward work of each block longer by its forward work, on CPU and GPU."""
        changed = with_recomputed_blocks(graph, self.module)
        with suppress(Unanswerable):  # the run does not hold what its allocator gave out
            freed = freed_by_recomputing(graph.run, outermost_modules(graph, self.module))
            changed = dataclasses.replace(changed, step_bytes=max(step_bytes_of(graph) - freed, 0))
        return changed

    def describe(self) -> str:
        return f"{self.module} is computed again in backward"

    def how(self) -> str:
        return "torch.utils.checkpoint.checkpoint(block, …, use_reentrant=False) around each block"


GB = 1e9


@dataclass(frozen=True)
class Batch(Edit):
    """Each step has a larger batch: more work on the device, as many launches, gradients of the same size."""

    name = "batch"
    summary = "a larger batch per step, where memory allows"
    example = "batch:factor=2"
    needs = "what the allocator gave out (`dpro record --memory`), and how much memory there is"
    assumes = (
        "work in forward and backward and reading a batch take as many times as long, all else what it does; "
        "what a step allocates grows as much; all-to-alls, messages between two ranks and what a forward "
        "pass reduces move activations, all other communication gradients or parameters"
    )
    source = (
        "ours: duration * factor of GPU work outside the optimizer (on CPUs of operators), an upper bound, "
        "since larger kernels use a GPU better; activations by the cost of this many bytes"
    )
    proof = "twice the batch of a GPT, a ResNet and a DLRM; DDP, FSDP2 and tensor parallelism on gloo"
    effort = "flag"
    memory = "takes"
    training = "a larger batch: as many samples may teach less"
    factor: float = key("multiple of the batch", 2.0, least=1.0)
    memory_gb: float | None = key("free memory, 1e9 bytes, where the run does not say", None, least=0.0)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Two and four times as much; those without memory are tried where others make room for them."""
        if footprint_of(facts.graph.run).free_bytes is None:
            raise Unanswerable("the run does not say how much memory there is: give what is free, memory_gb=")
        return [cls(2.0), cls(4.0)]

    def bound(self, facts: RunFacts) -> float:
        return facts.base_ns * max(1 - 1 / self.factor, 0.0)

    def samples(self, graph: Graph) -> float:
        return self.factor

    def apply(self, graph: Graph) -> Graph:
        """Scale work that depends on the batch, once memory is known to suffice."""
        refuse_operations(graph)
        footprint = footprint_of(graph.run)
        free = round(self.memory_gb * GB) if self.memory_gb is not None else footprint.free_bytes
        if free is None:
            raise Unanswerable("the run does not say how much memory there is: give what is free, memory_gb=")
        then = round(self.factor * step_bytes_of(graph, footprint))
        more = then - footprint.within_step_bytes
        if more > free:
            raise Unanswerable(
                f"a step would allocate {format_bytes(more)} more, and {format_bytes(free)} are free"
            )
        return dataclasses.replace(with_larger_batch(graph, self.factor), step_bytes=then)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What a step is, and what it allocates."""
        within = step_bytes_of(graph)
        return (
            f"a step has {self.factor:g} times the samples: divide by that to compare the time of one",
            f"a step allocates {format_bytes(within)} now, {format_bytes(within * self.factor)} then",
        )

    def describe(self) -> str:
        return f"batches of {self.factor:g} times the size"

    def how(self) -> str:
        return f"DataLoader(batch_size={self.factor:g} times as much); look after the learning rate"


def with_larger_batch(graph: Graph, factor: float) -> Graph:
    """The graph with all work that depends on the batch taking this many times as long.

    Args:
        graph: the graph.
        factor: multiple of the batch.
    """
    kind = graph.nodes.kind
    on_device: NDArray[np.bool_] = np.isin(kind, GPU_KINDS)
    work = on_device if on_device.any() else kind == NodeKind.CPU
    reading = NodeSelection(within=DATA_LOADING).mask(graph) & (kind != NodeKind.TRANSFER)
    larger = graph.with_durations(scaled(graph, (work & ~optimizing(graph)) | reading, factor))
    return with_more_activations(larger, factor)


MIN_DURATIONS = 4  # that noise is taken from


@dataclass(frozen=True)
class DataParallelSize(Edit):
    """The job has another number of data-parallel ranks."""

    name = "data-parallel"
    summary = "another number of data-parallel ranks, each with the same work"
    example = "data-parallel:ranks=16"
    needs = "ranks that are all in one group, and transfers of known size in it"
    assumes = (
        "further ranks are like the recorded ones and on a like network, their noise is independent and "
        "normal, and the batch of each rank stays: that of the job grows with it"
    )
    source = (
        "a measured network table; else costs of ring, tree or halving (Thakur et al., IJHPCA 2005); waiting "
        "for the slowest: the expected largest of n normal deviates (Blom, 1958) times the noise of work "
        "between collectives"
    )
    proof = "2 to 4 ranks, DDP on gloo"
    is_advice = False
    effort = "money"
    training = "a batch that grows with the ranks: as many samples may teach less"
    ranks: int = key("how many data-parallel ranks", least=2)
    now: str = key("which algorithm runs; ring without", "", choices=FLAT)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Twice as many ranks, and half of them."""
        recorded = _one_group(facts.graph)
        return [cls(ranks) for ranks in (2 * recorded, recorded // 2) if ranks >= 2]

    def bound(self, facts: RunFacts) -> float:
        least_ns = facts.base_ns - facts.idle(facts.communication)
        return max(facts.base_ns - least_ns / self.samples(facts.graph), 0.0)

    def samples(self, graph: Graph) -> float:
        return self.ranks / _one_group(graph)

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers, and let each begin later by what the slowest of this many is later."""
        (changed,) = self._with_noise(graph, 1.0)
        return changed

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """With no more noise than now, and with twice what is expected."""
        return self._with_noise(graph, 0.0, 2.0)

    def _with_noise(self, graph: Graph, *times: float) -> tuple[Graph, ...]:
        """The wider job with multiples of the noise that is expected."""
        recorded = _one_group(graph)
        if recorded == self.ranks:
            return (graph,) * len(times)
        scaled = graph.with_durations(self._transfers(graph, recorded))
        later = (largest_of(self.ranks) - largest_of(recorded)) * _noise_before(graph)
        lag = graph.edges.lag
        return tuple(scaled.with_lags(lag + np.rint(each * later).astype(np.int64)) for each in times)

    def _transfers(self, graph: Graph, recorded: int) -> NDArray[np.int64]:
        """[N] ns, with transfers that take what they do among this many ranks."""
        nodes, lines, duration = graph.nodes, fit_costs(graph), graph.nodes.duration.copy()
        for kind, messages in messages_by_kind(graph).items():
            if kind not in lines:
                raise Unanswerable(why_no_cost(graph, kind))
            mine = np.flatnonzero(np.isin(nodes.message, messages) & (nodes.bytes > 0) & (duration > 0))
            ratio = self._by_table(graph, messages[0], mine)
            if ratio is not None:
                duration[mine] = np.rint(duration[mine] * ratio).astype(np.int64)
                continue
            algorithm = recorded_algorithm(graph, kind[0]) or self.now or RING
            spent = cost(kind[0], algorithm, recorded)
            num_bytes = nodes.bytes[mine].astype(np.float64)
            link = link_of(lines[kind], spent, num_bytes)
            after = time_ns(cost(kind[0], algorithm, self.ranks), link, num_bytes)
            ratio = after / np.maximum(time_ns(spent, link, num_bytes), 1e-9)
            duration[mine] = np.rint(duration[mine] * ratio).astype(np.int64)
        return duration

    def _by_table(self, graph: Graph, message: int, mine: NDArray[np.int64]) -> Floats | None:
        """[T] ratio of times by the measured network table; None without one of both numbers of ranks."""
        if graph.network is None or not mine.size:
            return None
        num_bytes, took = (
            column[mine].astype(np.float64) for column in (graph.nodes.bytes, graph.nodes.duration)
        )
        return ratio_by_table(graph, graph.messages[message], self.ranks, num_bytes, took)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Which operations the network table says, and whose latency the run does not show."""
        if graph.network is None:
            return unknown_latencies(graph)
        lines = {False: list[str](), True: list[str]()}
        for (op, _), messages in messages_by_kind(graph).items():
            mine = np.flatnonzero(
                np.isin(graph.nodes.message, messages) & (graph.nodes.bytes > 0) & (graph.nodes.duration > 0)
            )
            lines[self._by_table(graph, messages[0], mine) is not None].append(op)
        measured, others = (", ".join(sorted(set(lines[by]))) for by in (True, False))
        notes = [f"{measured} among {self.ranks} ranks: by the network table"] if measured else []
        if others:
            notes.append(f"{others} among {self.ranks} ranks: by a formula, the network table lacks it")
        return (*notes, *unknown_latencies(graph))

    def describe(self) -> str:
        return f"{self.ranks} data-parallel ranks"

    def how(self) -> str:
        return f"torchrun with {self.ranks} processes in all; look after the learning rate"


def _one_group(graph: Graph) -> int:
    """How many ranks the job's one group has.

    Raises:
        Unanswerable: there are several, or their size is not known.
    """
    require_communication(graph)
    groups = {(message.group, message.num_ranks) for message in graph.messages}
    if len(groups) > 1:
        raise Unanswerable("ranks communicate in several groups: which are data-parallel is not recorded")
    ((_, ranks),) = groups
    if ranks < 2:
        raise Unanswerable("how many ranks are in the group is not known")
    return ranks


def largest_of(count: int) -> float:
    """What the largest of this many normal deviates is expected to be, in deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _noise_before(graph: Graph) -> Floats:
    """[E] ns, on edges from a rendezvous to its transfers: how the work before it varies; 0 on others."""
    nodes, edges = graph.nodes, graph.edges
    spread = np.zeros(graph.edges.lag.size)
    deviation = _deviation_of_phases(graph)
    met = (edges.kind == EdgeKind.RENDEZVOUS) & (nodes.kind[edges.target] == NodeKind.TRANSFER)
    arrives = (edges.kind == EdgeKind.RENDEZVOUS) & (nodes.kind[edges.source] == NodeKind.ARRIVE)
    phase = np.full(graph.num_nodes, -1)
    phase[edges.target[arrives]] = nodes.phase[edges.source[arrives]]
    spread[met] = [deviation.get(at, 0.0) for at in phase[edges.source[met]].tolist()]
    return spread


def _deviation_of_phases(graph: Graph) -> dict[int, float]:
    """Of each phase of a step how long its work deviates from what its rank usually takes, ns."""
    work = phase_work(graph)
    if (work["resource"] == ON_GPU).any():
        work = work.filter(pl.col("resource") == ON_GPU)
    whole = work.group_by("rank", "step", "position").agg(pl.col("work_ns").sum())
    usual = pl.col("work_ns").median().over("rank", "position")
    spread = (
        whole.with_columns(off=(pl.col("work_ns") - usual).abs())
        .group_by("position")
        .agg(mad=pl.col("off").median(), count=pl.len())
        .filter(pl.col("count") >= MIN_DURATIONS)
    )
    return {int(at): MAD_TO_SIGMA * float(mad) for at, mad in spread.select("position", "mad").iter_rows()}
