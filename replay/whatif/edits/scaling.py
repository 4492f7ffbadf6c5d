"""Edits of the amount of work per step and rank: micro-batches, recomputation, batch size.

Gradients are reduced along the data-parallel axis, where axes are known; else in the only group that reduces.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.classify import REDUCTIONS
from dpro.errors import Unanswerable
from dpro.limits import refuse_large_graph
from dpro.recorders import MODULES, how_to_record
from dpro.replay.cost.memory import Footprint, footprint_of, freed_by_recomputing, step_bytes_of
from dpro.replay.cost.transfers import (
    fit_costs,
    messages_by_kind,
)
from dpro.replay.engine import longest_path
from dpro.replay.graph import (
    CPU_KINDS,
    GPU_KINDS,
    EdgeKind,
    Edges,
    Graph,
    GraphError,
    NodeKind,
    Nodes,
    assembled,
    is_one_of,
    once,
    order_of,
    renumbered,
)
from dpro.replay.kept import kept_as
from dpro.replay.mesh import BY, axes_of_messages
from dpro.replay.timeline import AFTER_STEPS, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.selected_work import removed_parts, scaled, times_without
from dpro.replay.whatif.edits.training_loop import fetched_ready
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.scope import (
    DATA_LOADING,
    blocks_of,
    blocks_of_run,
    optimizing,
    outermost_modules,
)
from dpro.replay.whatif.graph_ops.selected import NodeSelection, messages_fitting
from dpro.replay.whatif.graph_ops.shared_links import unqueued_ns
from dpro.schema import COLLECTIVES, SPANS, STEPS
from dpro.store import Run
from dpro.units import format_bytes

REPLICAS = "dp"  # the axis along which ranks are replicas


@dataclass(frozen=True)
class Accumulate(Edit):
    """An optimizer step is several forward and backward passes; gradients are reduced in the last."""

    name = "accumulate"
    of_torch = True
    summary = "accumulate gradients over several batches before they are reduced and applied"
    example = "accumulate:steps=2"
    needs = "gradient reductions along a known data-parallel axis, in one process group, or group="
    assumes = "each pass is like the recorded one, and all reductions of the group are gradient reductions"
    source = "the step, preceded by copies of itself without these reductions and without the optimizer"
    proof = "2 passes, DDP and FSDP2 on gloo; also beside tensor parallelism"
    of_training = True
    effort = "code"
    training = "a larger batch per update, which may reduce sample efficiency"
    steps: int = key("passes per optimizer step; the predicted step contains them all", 2, least=1)
    group: str = key("pattern for the process group that reduces gradients", "")
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit to two passes; where several groups reduce, for the group that moves most."""
        refuse_operations(facts.graph)
        group = _group_of_gradients(facts.graph)
        return [cls(2, group)]

    def bound(self, facts: RunFacts) -> float:
        # A step of several passes takes no less than one of a single pass. No other bound holds: ranks no
        # longer wait for each other in each pass, and gaps between steps occur once.
        return facts.base_ns * (1 - 1 / self.steps)

    def samples(self, graph: Graph) -> float:
        return self.steps

    def apply(self, graph: Graph) -> Graph:
        """Insert the further passes before each step."""
        gone, unmet = once(graph, ("no update", self.group), self._left_out)
        return with_copies(graph, *times_without(graph, gone), unmet, self.steps - 1)

    def _left_out(self, graph: Graph) -> tuple[Bools, Bools]:
        """Return what all passes but the last leave out: reductions and the optimizer."""
        refuse_operations(graph)
        return removed_parts(graph, _gradient_reductions(graph, self.group) | optimizing(graph))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the number of batches in a step."""
        return (f"a step has {self.steps} batches: divide by that to compare the time of one",)

    def describe(self) -> str:
        return f"{self.steps} batches per optimizer step"

    def how(self) -> str:
        return (
            f"model.no_sync() around all but one of {self.steps} passes (FSDP2: set_requires_gradient_sync)"
        )


def refuse_operations(graph: Graph) -> None:
    """Raise for a graph of whole operations.

    Raises:
        Unanswerable: it is one.
    """
    if not (is_one_of(graph.nodes.kind, CPU_KINDS) & (graph.nodes.rank >= 0)).any():
        raise Unanswerable("in an operation-level trace, steps already have micro-batches")


def _gradient_reductions(graph: Graph, group: str) -> Bools:
    """Return [N] a mask of transfers that reduce gradients.

    Raises:
        Unanswerable: there are none, or several groups reduce, none is given, and axes do not show which.
    """
    fits = np.array([message.op in REDUCTIONS for message in graph.messages] + [False], np.bool_)
    if group:
        fits[:-1] &= messages_fitting(graph, group=group)
    else:
        fits[:-1] &= _of_replicas(graph, fits[:-1])
    reduces: Bools = fits[graph.nodes.message] & (graph.nodes.kind == NodeKind.TRANSFER)
    if not reduces.any():
        raise Unanswerable("the run has no gradient reduction" + (f" in group {group!r}" if group else ""))
    groups = sorted({graph.messages[index].group for index in np.unique(graph.nodes.message[reduces])})
    if len(groups) > 1 and not group and not _along(graph, fits[:-1]):
        raise Unanswerable(
            f"several groups reduce: give the one with the gradients with group= ({', '.join(groups)})"
        )
    return reduces


def _of_replicas(graph: Graph, fits: Bools) -> Bools:
    """Return [messages] a mask of those between replicas; of all where axes are not known.

    Raises:
        Unanswerable: all of `fits` are known to be along other axes.
    """
    axes = axes_of_messages(graph)
    between = np.array([REPLICAS in axis.split(BY) for axis in axes], np.bool_)
    if (fits & between).any():
        return between
    if fits.any() and all(axis for axis, fit in zip(axes, fits) if fit):
        along = ", ".join(sorted({axis for axis, fit in zip(axes, fits) if fit}))
        raise Unanswerable(f"no reduction in the run is between data-parallel ranks: all are along {along}")
    return np.ones_like(fits)


def _along(graph: Graph, messages: Bools) -> set[str]:
    """Return the axes of some messages; empty where one of them is not known."""
    along = {axis for axis, fit in zip(axes_of_messages(graph), messages) if fit}
    return set() if "" in along else along


def _group_of_gradients(graph: Graph) -> str:
    """Return the group whose reductions move most; empty for a single group, none, or known axes."""
    moved = Counter[str]()
    if any(REPLICAS in axis.split(BY) for axis in axes_of_messages(graph)):
        return ""
    for number, message in enumerate(graph.messages):
        if message.op in REDUCTIONS:
            moved[message.group] += int(graph.nodes.bytes[graph.nodes.message == number].clip(0).sum())
    return max(moved, key=lambda group: (moved[group], group)) if len(moved) > 1 else ""


@dataclass(frozen=True)
class Recompute(Edit):
    """Blocks keep only their inputs: backward repeats the forward pass of each block first."""

    name = "recompute"
    of_torch = True
    summary = "recompute the activations of modules in backward"
    example = "recompute:module=layers.*"
    needs = (
        "modules (`dpro record --modules`, or torch.profiler with stacks), and backward operators with "
        "sequence numbers"
    )
    assumes = (
        "the second forward pass takes as long as the first, and only one block at a time holds activations"
    )
    source = (
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: one more forward pass per block"
    )
    proof = "blocks of a GPT and a ResNet, CPU"
    of_training = True
    effort = "code"
    memory = "frees"
    module: str = key("pattern for modules; the outermost matching ones are the checkpointed blocks")
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        patterns = sorted(blocks_of_run(facts.graph.run))
        if not patterns:
            how = how_to_record(MODULES, facts.graph.run)
            raise Unanswerable(f"no modules in the run: record with {how}")
        return [cls(pattern) for pattern in patterns]

    def bound(self, facts: RunFacts) -> float:
        return 0.0

    def apply(self, graph: Graph) -> Graph:
        """Lengthen the first backward work of each block by its forward work, on CPU and GPU."""
        changed = with_recomputed_blocks(graph, self.module)
        with suppress(Unanswerable):  # the run has no record of its allocator
            freed = freed_by_recomputing(graph.run, outermost_modules(graph, self.module))
            changed = dataclasses.replace(changed, step_bytes=max(step_bytes_of(graph) - freed, 0))
        return changed

    def describe(self) -> str:
        return f"{self.module} is recomputed in backward"

    def how(self) -> str:
        return "torch.utils.checkpoint.checkpoint(block, …, use_reentrant=False) around each block"


GB = 1e9
SHORT_KERNEL_NS = 10_000  # shorter kernels hardly fill a GPU: most of their time is latency
SHORT_KERNEL_POWER = 0.5  # of the factor of the batch, between no growth and growth in proportion


@dataclass(frozen=True)
class Batch(Edit):
    """Each step has a larger batch: more work on the device, as many launches, gradients of the same size."""

    name = "batch"
    of_torch = True
    summary = "increase the batch size, if memory allows"
    example = "batch:factor=2"
    needs = "work in steps; for the memory check, allocations (`dpro record --memory`) and the memory size"
    assumes = (
        "forward, backward, loading and a step's allocations scale with the batch, kernels under 10 us with "
        "its square root, and batches that workers have ready take no longer; all-to-alls, point-to-point "
        "messages and reductions in forward move activations, all other communication moves gradients or "
        "parameters"
    )
    source = (
        "ours: duration * factor for GPU work outside the optimizer (on CPUs: for operators), an upper "
        "bound, since larger kernels use a GPU better; short kernels fill it only in part, and take between "
        "as long and factor times as long; transfers of activations by the cost of their bytes"
    )
    proof = "twice the batch of a GPT, a ResNet and a DLRM; DDP, FSDP2 and tensor parallelism on gloo"
    effort = "flag"
    memory = "takes"
    training = "another batch size, which may change sample efficiency"
    factor: float = key("multiple of the batch size", 2.0, least=0.01)
    memory_gb: float | None = key("free memory in 1e9 bytes, if not recorded", None, least=0.0)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits to two and four times the batch; without memory, others are tried that free some."""
        if footprint_of(facts.graph.run).free_bytes is None:
            raise Unanswerable("the memory size was not recorded: give the free memory with memory_gb=")
        return [cls(2.0), cls(4.0)]

    def bound(self, facts: RunFacts) -> float:
        return facts.base_ns * max(1 - 1 / self.factor, 0.0)

    def samples(self, graph: Graph) -> float:
        return self.factor

    def apply(self, graph: Graph) -> Graph:
        """Scale work that depends on the batch, unless memory is known not to suffice."""
        refuse_operations(graph)
        larger, room = with_larger_batch(graph, self.factor), self._room(graph)
        if room is None:
            return larger
        footprint, free = room
        then = round(self.factor * step_bytes_of(graph, footprint))
        more = then - footprint.within_step_bytes
        if more > free:
            raise Unanswerable(
                f"a step would allocate {format_bytes(more)} more, and {format_bytes(free)} are free"
            )
        return dataclasses.replace(larger, step_bytes=then)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return graphs whose short kernels and batch fetches do not grow, and grow by the whole factor."""
        return tuple(with_larger_batch(graph, self.factor, share) for share in (0.0, 1.0))

    def _room(self, graph: Graph) -> tuple[Footprint, int] | None:
        """Return the allocations of steps, and free bytes, as given or as recorded; None where unknown."""
        if self.memory_gb is not None:
            return footprint_of(graph.run), round(self.memory_gb * GB)
        with suppress(Unanswerable):  # the run has no record of its allocator
            footprint = footprint_of(graph.run)
            return None if footprint.free_bytes is None else (footprint, footprint.free_bytes)
        return None

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the samples of a step, and its allocations."""
        step = f"a step has {self.factor:g} times the samples: divide by that to compare the time of one"
        room = self._room(graph)
        if room is None:
            return step, (
                "the memory size was not recorded, so the fit is unknown: give the free memory "
                "with memory_gb="
            )
        now, then = (format_bytes(step_bytes_of(graph, room[0]) * times) for times in (1, self.factor))
        return step, f"a step allocates {now} now, {then} then"

    def describe(self) -> str:
        return f"batches {self.factor:g} times as large"

    def how(self) -> str:
        return f"DataLoader(batch_size={self.factor:g} times as large); check the learning rate"


def with_larger_batch(graph: Graph, factor: float, share: float | None = None) -> Graph:
    """Return the graph with all work that depends on the batch longer by a factor.

    Args:
        share: power of the factor for work that need not grow in proportion: kernels below `SHORT_KERNEL_NS`,
            and fetches of ready batches. By default a half for the former, none for the latter.
    """
    nodes = graph.nodes
    on_device: NDArray[np.bool_] = np.isin(nodes.kind, GPU_KINDS)
    work = on_device if on_device.any() else nodes.kind == NodeKind.CPU
    reading = NodeSelection(within=DATA_LOADING).mask(graph) & (nodes.kind != NodeKind.TRANSFER)
    power = np.ones(graph.num_nodes)
    power[(nodes.kind == NodeKind.KERNEL) & (nodes.duration < SHORT_KERNEL_NS)] = SHORT_KERNEL_POWER
    power[reading & fetched_ready(graph)] = 0.0
    grows = (work & ~optimizing(graph)) | reading
    power = power[grows] if share is None else np.where(power[grows] < 1, share, 1.0)
    larger = graph.with_durations(scaled(graph, grows, factor**power))
    return with_more_activations(larger, factor)


# Communication of activations, whose size is that of the batch, unlike gradients or parameters.

BETWEEN_LAYERS = ("all_to_all", "send", "recv")
KEY = ["rank", "window"]


def with_more_activations(graph: Graph, factor: float) -> Graph:
    """Return the graph with transfers of activations as long as for this multiple of their bytes.

    Time in a queue behind other transfers does not grow.

    Args:
        factor: of the bytes.
    """
    nodes, duration = graph.nodes, graph.nodes.duration.astype(np.float64)
    grows, costs, alone_ns = np.flatnonzero(moves_activations(graph)), fit_costs(graph), unqueued_ns(graph)
    for kind, messages in messages_by_kind(graph).items():
        moved = grows[np.isin(nodes.message[grows], messages)]
        num_bytes = nodes.bytes[moved].astype(np.float64)
        is_fitted = kind in costs and bool((num_bytes > 0).all())
        now = costs[kind].time_ns(num_bytes) if is_fitted else np.ones(moved.size)
        then = costs[kind].time_ns(factor * num_bytes) if is_fitted else factor * now
        duration[moved] += alone_ns[moved] * (then / np.maximum(now, 1e-9) - 1)
    return graph.with_durations(np.rint(duration).astype(np.int64))


def moves_activations(graph: Graph) -> Bools:
    """Return [N] a mask of transfers of activations, or of their gradients.

    These are all-to-alls, messages between two ranks, and all-reduces of a size that a forward pass reduces:
    tensor parallelism reduces the results of layers there, and as much in the backward pass; DDP and FSDP
    reduce in the backward pass only.
    """
    moves = np.zeros(graph.num_nodes, np.bool_)
    moves[_moving_activations(graph)] = True
    return moves


@kept_as("transfers-of-activations")
def _moving_activations(graph: Graph) -> Ints:
    nodes = graph.nodes
    moving = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    ops = np.array([message.op for message in graph.messages] + [""])[nodes.message[moving]]
    activations: Bools = np.isin(ops, BETWEEN_LAYERS)
    if graph.run is not None:
        activations |= (ops == "all_reduce") & np.isin(nodes.bytes[moving], _reduced_forward(graph.run))
    return moving[activations]


def _reduced_forward(run: Run) -> list[int]:
    """Return the sizes of all-reduces called before the first backward operator of a step, in bytes."""
    calls = run.table(COLLECTIVES, [*KEY, "op", "bytes_in", "start_ns", "launch_span_id"])
    calls = calls.filter((pl.col("op") == "all_reduce") & (pl.col("bytes_in") > 0))
    spans = run.table(SPANS, [*KEY, "span_id", "name", "forward_thread", "start_ns"])
    called = spans.select("rank", launch_span_id="span_id", called_ns="start_ns")
    calls = calls.join(called, on=["rank", "launch_span_id"], how="left").select(
        *KEY, "bytes_in", at=pl.coalesce("called_ns", "start_ns")
    )
    begins = run.table(STEPS, [*KEY, "start_ns"]).select(*KEY, at="start_ns", step_ns="start_ns").sort("at")
    backward = spans.filter((pl.col("forward_thread") > 0) | (pl.col("name") == "dpro::backward"))
    turns = (
        backward.select(*KEY, at="start_ns", turn_ns="start_ns")
        .sort("at")
        .join_asof(begins, on="at", by=KEY, check_sortedness=False)
        .group_by(*KEY, "step_ns")
        .agg(pl.col("turn_ns").min())
    )
    placed = (
        calls.sort("at")
        .join_asof(begins, on="at", by=KEY, check_sortedness=False)
        .join(turns, on=[*KEY, "step_ns"])
    )
    early = placed.filter(pl.col("at") < pl.col("turn_ns"))
    return early["bytes_in"].unique().to_list()


# Repeated work: copies of a step before it, forward passes repeated before backward.


MAX_COPIES = 8  # of a step in the graph: by then each copy takes as long as the one before it


def with_copies(graph: Graph, duration: Ints, lag: Ints, unmet: Bools, times: int) -> Graph:
    """Put copies of each step before it.

    Only the first of many copies are made. After a few equal passes, each takes as long as the one before (in
    max-plus algebra, powers of a matrix become periodic), so the others are a lag on each lane: their number
    times the distance of the last two copies.

    Args:
        duration: [N] ns, of the nodes in the copies.
        lag: [E] ns, of the edges in the copies.
        unmet: [E] edges that the copies lack; passing one array again saves work.

    Returns:
        The graph with copies, or the given one for 0.

    Raises:
        Unanswerable: there is not enough memory.
    """
    if times == 0:
        return graph
    made_times = min(times, MAX_COPIES)
    refuse_large_graph(graph.num_nodes * (1 + made_times))
    nodes, edges = graph.nodes, graph.edges
    # The order of nodes depends on no duration or lag: graphs that differ only in these share it.
    made = once(
        graph,
        ("copies", made_times),
        lambda graph: _numbered_with_copies(graph, unmet, made_times),
        (unmet,),
    )
    durations = np.concatenate([nodes.duration, duration])[made.nodes.duration]
    between = max(int(made.edges.lag.max(initial=0)) + 1 - 2 * graph.num_edges, 0)
    lags = np.concatenate([edges.lag, lag, np.zeros(between + 1, np.int64)])
    copied = made.with_durations(durations).with_lags(lags[made.edges.lag]).with_job_of(graph)
    return _with_further_copies(copied, made.edges, 2 * graph.num_edges, times - made_times)


def _with_further_copies(graph: Graph, numbered: Edges, begin: int, times: int) -> Graph:
    """Delay each step by the time of its further copies.

    Args:
        numbered: the graph's edges. From `begin` on, the lag of an edge between copies is its number: first
            those into the last copy, then, in the same order, those from it into the step itself.
    """
    if not times:
        return graph
    between = np.flatnonzero(numbered.lag >= begin)
    into_last, into_step = np.split(between[np.argsort(numbered.lag[between])], 2)
    end = replay(graph).end
    taken = end[numbered.source[into_step]] - end[numbered.source[into_last]]
    lags = graph.edges.lag.copy()
    lags[into_step] += times * taken
    return graph.with_lags(lags)


def with_recomputed_blocks(graph: Graph, pattern: str) -> Graph:
    """Lengthen the first backward work of each block by its forward work, on CPU and GPU.

    Raises:
        Unanswerable: there is no such module, it has no backward pass, or it communicates.
    """
    blocks = blocks_of(graph, pattern)
    if blocks.filter("backward").is_empty():
        raise Unanswerable(f"no backward pass of {pattern!r} in the run has sequence numbers")
    nodes = graph.nodes
    node = blocks["node"].to_numpy()
    if (nodes.kind[node] == NodeKind.TRANSFER).any():
        raise Unanswerable(f"{pattern!r} communicates: whether that is repeated depends on the job")
    on_gpu = np.isin(nodes.kind[node], GPU_KINDS)
    rows = blocks.with_columns(
        on_gpu=pl.Series(on_gpu),
        works=pl.Series(on_gpu | np.isin(nodes.kind[node], CPU_KINDS)),
        ns=pl.Series(nodes.duration[node]),
        start=pl.Series(nodes.measured_start[node]),
    ).filter("works")
    forward = rows.filter(~pl.col("backward")).group_by("block", "on_gpu").agg(pl.col("ns").sum())
    begins = rows.filter("backward").sort("start", "node").unique(["block", "on_gpu"], keep="first")
    longer = begins.drop("ns").join(forward, on=["block", "on_gpu"])
    duration = nodes.duration.copy()
    np.add.at(duration, longer["node"].to_numpy(), longer["ns"].to_numpy())
    return graph.with_durations(duration)


def _numbered_with_copies(graph: Graph, unmet: Bools, times: int) -> Graph:
    """Return the graph with copies, and numbers as durations and lags: the graph's own, then the copies'.

    New edges have lag -1, except the last between copies, from which further copies are extrapolated: they
    have the numbers after those.
    """
    size, num_edges = graph.num_nodes, graph.num_edges
    graph = graph.with_durations(np.arange(size)).with_lags(np.arange(num_edges))
    copied = graph.with_durations(size + np.arange(size)).with_lags(num_edges + np.arange(num_edges))
    copied = copied.without_edges(unmet)
    step = _steps(graph)
    picked = np.flatnonzero(step >= 0)
    position = np.full(graph.num_nodes, -1)
    position[picked] = np.arange(picked.size)
    first = graph.num_nodes + picked.size * np.arange(times)  # first node of each copy
    edges = [_edges_into_copy(copied, step, position + first[0])]
    edges += [_edges_within_copy(copied, step, position + shift) for shift in first]
    behind = _chained_copies(graph, step, position, first)
    if times == MAX_COPIES:
        between = 2 * num_edges + np.arange(behind[-1].lag.size)
        behind[-2:] = [dataclasses.replace(behind[-2], lag=between),
                       dataclasses.replace(behind[-1], lag=between + between.size)]  # fmt: skip
    edges += behind
    joined = graph.edges.extended(*edges)
    del edges
    begins = np.append(graph.nodes.measured_start, np.tile(graph.nodes.measured_start[picked], times))
    order, stuck = order_of(joined, begins)
    if stuck.size:
        raise GraphError("copies of the steps of this graph would wait for each other")
    nodes = _nodes(copied, graph, picked, times, order)
    return assembled(nodes, renumbered(joined, order), graph.names, graph.lanes, graph.origin_ns)


def _steps(graph: Graph) -> Ints:
    """Return [N] the step with which each node is copied, so that none depends on a later one.

    A node that an earlier step needs belongs to that step. This is a longest path over the reversed graph, of
    the steps left until the last.
    """
    nodes, edges = graph.nodes, graph.edges
    last = int(nodes.step.max(initial=0)) + 1
    works = nodes.kind != NodeKind.RENDEZVOUS
    left = np.where(nodes.step == AFTER_STEPS, 0, np.where(works, last - nodes.step, 0))
    order = np.argsort(-edges.source, kind="stable")
    target = graph.num_nodes - 1 - edges.source[order]
    indptr = np.searchsorted(target, np.arange(graph.num_nodes + 1)).astype(np.int64)
    none = np.zeros(graph.num_nodes, np.int64)
    back, _, _ = longest_path(
        none, left[::-1].copy(), indptr, graph.num_nodes - 1 - edges.target[order], np.zeros_like(order)
    )
    step: Ints = last - back[::-1]
    return np.where(step == last, AFTER_STEPS, step)


def _nodes(copied: Graph, graph: Graph, picked: Ints, times: int, order: Ints) -> Nodes:
    """Return the nodes of the graph and its copies in order, with new collective numbers in copies.

    Columns are reordered one at a time, since two copies of all would take gigabytes for large graphs.
    """
    columns = {}
    instances = int(graph.nodes.collective.max(initial=-1)) + 1
    for f in dataclasses.fields(Nodes):
        as_is, new = getattr(graph.nodes, f.name), np.tile(getattr(copied.nodes, f.name)[picked], times)
        if f.name in ("earliest", "anchored"):
            new = np.zeros_like(new)
        if f.name == "collective":
            copy = np.repeat(np.arange(times) + 1, picked.size)
            new = np.where(new >= 0, new + copy * instances, new)
        columns[f.name] = np.append(as_is, new)[order]
    return Nodes(**columns)


def _edges_within_copy(graph: Graph, step: Ints, number: Ints) -> Edges:
    """Return edges within steps, between the nodes of a copy."""
    edges, window = graph.edges, graph.nodes.window
    source, target = edges.source, edges.target
    inside = (step[source] == step[target]) & (step[source] >= 0) & (window[source] == window[target])
    kept = edges.taken(np.flatnonzero(inside))
    return dataclasses.replace(kept, source=number[kept.source], target=number[kept.target])


def _edges_into_copy(graph: Graph, step: Ints, number: Ints) -> Edges:
    """Return edges into a step from before it, redirected to its first copy."""
    edges = graph.edges
    enters = (step[edges.target] >= 0) & (step[edges.source] < step[edges.target])
    kept = edges.taken(np.flatnonzero(enters))
    return dataclasses.replace(kept, target=number[kept.target])


def _chained_copies(graph: Graph, step: Ints, position: Ints, first: Ints) -> list[Edges]:
    """Link, on every lane, the end of each copy to the first node of the next copy, or of the step itself."""
    nodes = graph.nodes
    on_lane = np.flatnonzero((step >= 0) & (nodes.lane >= 0))
    order = on_lane[np.lexsort((on_lane, step[on_lane], nodes.lane[on_lane], nodes.window[on_lane]))]
    columns = (step[order], nodes.lane[order], nodes.window[order])
    opens = np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: order.size]
    begin, end = order[opens], order[np.append(opens[1:], True)[: order.size]]
    kind = np.where(np.isin(nodes.kind[begin], CPU_KINDS), EdgeKind.THREAD, EdgeKind.STREAM)
    size = begin.size
    none, sure = np.full(size, -1), np.zeros(size, np.bool_)
    edges = []
    for copy, shift in enumerate(first):
        after = position[begin] + first[copy + 1] if copy + 1 < first.size else begin
        edges.append(Edges(position[end] + shift, after, none, kind.astype(np.int64), sure))
    return edges
