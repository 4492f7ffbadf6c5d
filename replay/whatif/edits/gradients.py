"""Edits of gradients: buckets of another size, reduction in the order of their next use, or compression.

Also has the base class of all edits of gradient reductions: their needs of a run, and the alternatives where
it leaves reductions open, one graph for each.

With priorities, gradients are cut into pieces, moved in the order in which the next forward pass uses them,
and awaited by the layer that does, instead of by the whole next step. `dpro.replay.whatif.choices` has the
effect of compression on a bucket.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.cost.transfers import unknown_latencies
from dpro.replay.gradient_buckets import (
    NOT_THERE,
    bucket_size_setting,
    framework_of,
    gradient_passes,
    half_precision_setting,
)
from dpro.replay.gradient_passes import MB, Pass, first_uses
from dpro.replay.graph import EdgeKind, Edges, Graph, Nodes, once
from dpro.replay.kept import kept
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.choices import (
    HALF,
    ITEM_BYTES,
    Codec,
    by_choice,
    choose,
    compressed,
    compression_lines,
)
from dpro.replay.whatif.edit import Edit, kind_of_job
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import MAX_TIMES, key
from dpro.replay.whatif.graph_ops.divisions import sizes_worth_replaying
from dpro.replay.whatif.graph_ops.reductions import (
    STEP,
    GradientReductions,
    Reduction,
    alternatives,
    calling,
    closing,
    dtypes_of,
    next_of_rank,
    on_stream,
    plain_reductions,
    recorded_reductions,
    reductions_of,
    with_reductions,
)
from dpro.schema import BUCKETS, CODECS


class ReductionEdit(Edit):
    """A change to the reductions of gradients."""

    of_training = True

    @abstractmethod
    def changed(self, reductions: GradientReductions) -> Graph:
        """Return the graph of the changed job, or the given graph where nothing changes.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    def apply(self, graph: Graph) -> Graph:
        return self.changed(reductions_of(graph))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return the changed graph at both ends of sizes and waits that the run does not show."""
        return tuple(self.changed(reductions) for reductions in alternatives(reductions_of(graph)))

    def wanted(self, reductions: GradientReductions) -> Sequence[Sequence[Reduction]]:
        """Return the changed reductions of each pass, where they are known without their order; else none.

        Raises:
            Unanswerable: the run lacks what the edit needs.
        """
        return []

    def bound(self, facts: RunFacts) -> float:
        """Return how much longer the step is than its busiest lane, or than with only calls of reductions."""
        reductions = reductions_of(facts.graph)
        alone_ns = _of_calls_alone(facts, reductions, self.wanted(reductions))
        return min(facts.idle_without_reductions, facts.base_ns - alone_ns)

    def bound_with(self, other: Edit, facts: RunFacts) -> float:
        """Return the gain without any reductions, which bounds that of two changes to them."""
        if not isinstance(other, ReductionEdit):
            return math.inf
        return facts.base_ns - _without_any(facts, reductions_of(facts.graph).passes)

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """Return the gain without reductions and their calls, where `after` has the nodes of `before`."""
        if after.graph.nodes.measured_start is not before.graph.nodes.measured_start:
            return self.bound(after)
        return after.base_ns - _without_any(after, reductions_of(before.graph).passes)

    def is_proven(self, graph: Graph) -> bool:
        """Return whether gradients of reductions are recorded, as in all pairs, which are DDP jobs."""
        reductions = reductions_of(graph)
        return super().is_proven(graph) and reductions.is_recorded and not reductions.parameters.closes_before

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the setting in the job's framework, inferred facts, and unknown latencies."""
        reductions, framework = reductions_of(graph), framework_of(graph.run)
        said = f"in {framework}: {self.setting(reductions)}" if framework else ""
        return (*filter(None, (said,)), *reductions.notes(), *unknown_latencies(graph))

    def setting(self, reductions: GradientReductions) -> str:
        """Return the setting in the job's framework, where that is not DDP."""
        return NOT_THERE


def _of_calls_alone(
    facts: RunFacts, reductions: GradientReductions, wanted: Sequence[Sequence[Reduction]]
) -> float:
    """Return the mean step with calls of reductions but no transfers, ns, which transfers only lengthen."""
    graph = facts.graph
    edges, nodes = once(graph, "no reductions", lambda graph: _without(graph, reductions_of(graph).passes))
    edges = dataclasses.replace(edges, lag=_with_calls(edges, reductions, wanted))
    alone = dataclasses.replace(graph, nodes=nodes, edges=edges)
    timeline = replay(alone)
    return float(changed_durations(facts.baseline, alone, timeline.end).mean())


def _without_any(facts: RunFacts, passes: Sequence[Pass]) -> float:
    """Return the mean step if neither reductions nor their calls took any time, ns."""
    baseline = facts.baseline

    def compute(graph: Graph) -> float:
        edges, nodes = _without(graph, passes)
        alone = dataclasses.replace(graph, nodes=nodes, edges=edges)
        timeline = replay(alone)
        return float(changed_durations(baseline, alone, timeline.end).mean())

    return once(facts.graph, "a step without reductions", compute, (baseline, passes))


def _without(graph: Graph, passes: Sequence[Pass]) -> tuple[Edges, Nodes]:
    """Return edges and nodes of a graph whose reductions and calls take no time."""

    def compute(graph: Graph) -> tuple[Bools, Bools, Bools]:
        gone = recorded_reductions(graph, passes)
        waits = gone[graph.edges.source] | gone[graph.edges.target]
        return gone, gone | calling(graph, passes), waits

    gone, free, waits = once(graph, "nodes and edges of reductions", compute, (passes,))
    left = graph.without_waits(waits)
    duration = np.where(free, 0, graph.nodes.duration)
    nodes = dataclasses.replace(
        graph.nodes, duration=duration, earliest=np.where(gone, 0, graph.nodes.earliest)
    )
    return left.edges, nodes


def _with_calls(edges: Edges, reductions: GradientReductions, wanted: Sequence[Sequence[Reduction]]) -> Ints:
    """Return [E] lags, ns, with the calls of reductions: a thread continues after the call for a gradient."""
    calls = [
        (int(backward.ready[reduction.called_after]), round(reduction.call_ns))
        for backward, pass_wanted in zip(reductions.passes, wanted)
        for reduction in pass_wanted
        if reduction.called_after != STEP
    ]
    if not calls:
        return edges.lag
    after, takes = np.array(calls, np.int64).T
    on_thread = np.flatnonzero(edges.kind == EdgeKind.THREAD)
    follows = np.full(reductions.graph.num_nodes, -1)
    follows[edges.source[on_thread]] = on_thread
    edge, lag = follows[after], edges.lag.copy()
    np.add.at(lag, edge[edge >= 0], takes[edge >= 0])
    return lag


@dataclass(frozen=True)
class Bucket(ReductionEdit):
    """DDP groups its gradients into buckets of another size."""

    name = "bucket"
    of_torch = True
    summary = "change the size of gradient buckets"
    example = "bucket:mb=1"
    needs = (
        "reductions with their bytes, and autograd spans, recorded by torch.profiler and dpro; gradient "
        "sizes missing from the job and its shapes are inferred"
    )
    assumes = "gradients become ready in the recorded order, and the cost per byte stays unchanged"
    source = (
        "a bucket closes once it holds the size or more, as DDP rebuilds them; re-bucketing as in dPRO (Hu "
        "et al., MLSys 2022); times from the run's own latency and bandwidth"
    )
    proof = "25 and 1 MB, gloo"
    effort = "line"
    mb: float = key("bucket size in 2**20 bytes", least=0.0)
    first_mb: float | None = key("size of the first bucket; default: mb", None, least=0.0)
    doubt: float = 0.15

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return sizes that may be best, by the gain from fusing or splitting their buckets."""
        require_buckets(facts.graph)
        return [cls(size) for size in sizes_worth_replaying(reductions_of(facts.graph))]

    def changed(self, reductions: GradientReductions) -> Graph:
        """Close buckets where DDP would, and reduce each once its last gradient is ready."""
        require_buckets(reductions.graph)
        require_bytes(reductions)
        first = self.mb if self.first_mb is None else self.first_mb
        closes = [
            closing_of(reductions, backward, round(first * MB), round(self.mb * MB))
            for backward in reductions.passes
        ]
        if all(
            np.array_equal(backward.closes, pass_closes)
            for backward, pass_closes in zip(reductions.passes, closes)
        ):
            return reductions.graph
        return with_reductions(
            reductions,
            [
                plain_reductions(reductions, backward, pass_closes)
                for backward, pass_closes in zip(reductions.passes, closes)
            ],
        )

    def describe(self) -> str:
        return f"gradient buckets of {self.mb:g} MB"

    def setting(self, reductions: GradientReductions) -> str:
        item = ITEM_BYTES.get(dtypes_of(reductions, reductions.passes[0])[0], ITEM_BYTES["float32"])
        return bucket_size_setting(framework_of(reductions.graph.run), round(self.mb * MB / item))

    def how(self) -> str:
        return f"DistributedDataParallel(bucket_cap_mb={self.mb:g})"


def require_buckets(graph: Graph) -> None:
    """Raise for a job whose gradients no framework puts into buckets.

    Raises:
        Unanswerable: neither buckets nor DDP's own ranges were recorded.
    """
    is_recorded = graph.run is not None and bool(graph.run.num_rows(BUCKETS))
    if graph.run is not None and not is_recorded and not kind_of_job(graph).ddp:
        raise Unanswerable(
            "the recording has no DistributedDataParallel: the job reduces its gradients in its own "
            "chunks; edits `overlap` and `compress` apply to any reductions"
        )


def closing_of(reductions: GradientReductions, backward: Pass, first_cap: int, cap: int) -> Ints:
    """Return the last parameter of each bucket of a pass; gradients of different types share no bucket.

    Args:
        first_cap, cap: bytes, of the first bucket and of the others.
    """
    dtypes, sizes = dtypes_of(reductions, backward), backward.parameters.num_bytes
    ends = [
        gradient
        for gradient in range(len(dtypes))
        if gradient + 1 == len(dtypes) or dtypes[gradient + 1] != dtypes[gradient]
    ]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    parts = [
        first
        + closing(
            sizes[first : end + 1],
            first_cap if first == 0 else cap,
            cap,
            backward.parameters.closes_before,
        )
        for first, end in zip(firsts, ends)
    ]
    return np.concatenate(parts)


def require_bytes(reductions: GradientReductions) -> None:
    """Raise for a run that does not record the bytes of its reductions.

    Raises:
        Unanswerable: it does not.
    """
    if not reductions.are_bytes_known:
        raise Unanswerable(
            "the bytes of reductions were not recorded: use torch.profiler of PyTorch 2.1 or newer, or "
            "`dpro record`"
        )


@dataclass(frozen=True)
class Priority(ReductionEdit):
    """Gradients are reduced in chunks; the chunk for the first layer of the next step goes first."""

    name = "priority"
    of_torch = True
    summary = "reduce gradients in chunks, in the order in which the next forward pass needs them"
    example = "priority:mb=4"
    needs = "the needs of edit bucket, and autograd sequence numbers, recorded by torch.profiler and dpro"
    assumes = (
        "each parameter is updated once its gradient is reduced, at today's cost, a chunk in flight is "
        "not interrupted, and each chunk costs one call"
    )
    source = (
        "ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019): priority by layer, no "
        "barrier between steps; gradients cut as in dPRO (Hu et al., MLSys 2022)"
    )
    proof = "separate layers, gloo"
    effort = "code"
    mb: float = key("chunk size in 2**20 bytes", least=1 / MAX_TIMES)
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        return [cls(size) for size in (1.0, 4.0)]

    def wanted(self, reductions: GradientReductions) -> Sequence[Sequence[Reduction]]:
        require_bytes(reductions)
        return [cut(reductions, backward, round(self.mb * MB)) for backward in reductions.passes]

    def changed(self, reductions: GradientReductions) -> Graph:
        """Order the pieces as on a link that always moves the ready piece that is needed first."""
        require_bytes(reductions)
        uses = _uses(reductions)
        following = next_of_rank(reductions)
        if all(after < 0 for after in following):
            raise Unanswerable(
                "no window has two consecutive steps, which would show when gradients are needed: `dpro "
                "record --window-steps 2`"
            )
        kind = EdgeKind.EVENT if on_stream(reductions) else EdgeKind.SYNC
        pieces = self.wanted(reductions)
        order = _orders(reductions, pieces, uses)
        wanted = []
        for number, after in enumerate(following):
            ordered = [pieces[number][piece] for piece in order[number]]
            if not reductions.is_scattered:  # otherwise parameters are gathered after the whole update
                used = uses[after] if after >= 0 else np.empty(0, np.int64)
                ordered = [replace(piece, needed=_needed(piece, used, kind)) for piece in ordered]
            wanted.append(ordered)
        return with_reductions(reductions, wanted)

    def describe(self) -> str:
        return f"priority-ordered {self.mb:g} MB gradient chunks"

    def how(self) -> str:
        return (
            "use BytePS (BYTEPS_PARTITION_BYTES), and an optimizer that updates a parameter when its "
            "layer runs"
        )


def _uses(reductions: GradientReductions) -> list[Ints]:
    """Return `first_uses` for each pass of the reductions."""
    on_gpu = on_stream(reductions)

    def compute(graph: Graph) -> tuple[Ints, ...]:
        return tuple(first_uses(graph, gradient_passes(graph), on_gpu))

    return list(kept(reductions.graph, f"first-uses-on-{'gpu' if on_gpu else 'cpu'}", compute))


def _needed(piece: Reduction, used: Ints, kind: EdgeKind) -> tuple[tuple[int, EdgeKind], ...]:
    return tuple((int(node), kind) for node in np.unique(used[piece.first : piece.last + 1]))


def cut(reductions: GradientReductions, backward: Pass, size: int) -> list[Reduction]:
    """Cut gradients into reductions of one size: small ones together, large ones in even pieces.

    Args:
        size: bytes.
    """
    pieces = []
    for bucket in plain_reductions(reductions, backward, closing_of(reductions, backward, size, size)):
        count = max(round(bucket.num_bytes / max(size, 1)), 1) if bucket.first == bucket.last else 1
        pieces += [
            replace(bucket, num_bytes=max(bucket.num_bytes // count, 1), moving_ns=bucket.moving_ns / count)
        ] * count
    return pieces


def _orders(
    reductions: GradientReductions, pieces: Sequence[Sequence[Reduction]], uses: list[Ints]
) -> list[list[int]]:
    """Return the pieces of each pass in the order in which they move, equal on all ranks of a pass."""
    nodes = reductions.graph.nodes
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, backward in enumerate(reductions.passes):
        together[int(nodes.collective[backward.arrive[0]]), len(pieces[number])].append(number)
    orders: list[list[int]] = [[]] * len(reductions.passes)
    for members in together.values():
        of_first, used = pieces[members[0]], nodes.measured_start[uses[members[0]]]
        last = np.array([piece.last for piece in of_first])
        takes = np.array([piece.moving_ns + piece.fixed_ns for piece in of_first])
        ready = np.max([reductions.end[reductions.passes[number].ready][last] for number in members], axis=0)
        urgency = np.array([used[piece.first : piece.last + 1].min() for piece in of_first])
        order = by_priority(ready, urgency, takes)
        for number in members:
            orders[number] = order
    return orders


def by_priority(ready: Ints, urgency: Ints, takes: NDArray[np.float64]) -> list[int]:
    """Return the order in which a link moves pieces if it always takes the most urgent ready one.

    Args:
        ready: [C] ns from which each can be moved.
        urgency: [C] smaller is more urgent; the first of equal ones goes first.
        takes: [C] ns.
    """
    coming = sorted(range(ready.size), key=lambda piece: (int(ready[piece]), piece))
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, float(ready[coming[0]]))
        while coming and ready[coming[0]] <= now:
            piece = coming.pop(0)
            heappush(waiting, (int(urgency[piece]), piece))
        _, piece = heappop(waiting)
        order.append(piece)
        now += float(takes[piece])
    return order


@dataclass(frozen=True)
class Compress(ReductionEdit):
    """Gradients are compressed, bucket by bucket, before they are reduced."""

    name = "compress"
    of_torch = True
    summary = "compress gradients: half precision, PowerSGD or top-k"
    example = "compress:to=fp16"
    needs = (
        "gradient reductions without a communication hook, and autograd spans; gradient shapes for PowerSGD"
    )
    assumes = (
        "each pass over the gradients takes as long as copying them into buckets did, and "
        "half-precision arithmetic is not slower"
    )
    source = (
        "PyTorch's fp16, bf16 and PowerSGD hooks (Vogels et al., NeurIPS 2019); the largest: k values and "
        "indices, gathered (Aji and Heafield, EMNLP 2017); by bucket: an integer program over what "
        "`dpro try compress:probe` measured (Espresso, EuroSys 2023; L-GreCo, MLSys 2024)"
    )
    proof = "fp16, bf16 and PowerSGD of rank 2, gloo"
    effort = "line"
    training = "less exact gradients, which may reduce sample efficiency"
    to: str = key("half precision", "", choices=tuple(HALF))
    powersgd_rank: int | None = key("rank of the PowerSGD matrices", None, least=1)
    topk: float | None = key("share of gradients to send", None, least=0.0, most=1.0)
    budget: float | None = key("choose a codec per bucket: maximum total error", None, least=0.0, most=1.0)
    doubt: float = 0.3

    def __post_init__(self) -> None:
        """Raise unless exactly one way to compress is given."""
        super().__post_init__()
        ways = (self.powersgd_rank, self.topk, self.budget)
        if bool(self.to) + sum(way is not None for way in ways) != 1:
            raise UsageError(
                "compress needs one of to=fp16, to=bf16, powersgd_rank=2, topk=0.01, budget=0.05"
            )

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return half precision, PowerSGD, the largest hundredth; and a codec per bucket where measured."""
        run = facts.graph.run
        measured = run is not None and run.table(CODECS).height > 0
        chosen = [cls(budget=share) for share in (0.01, 0.1)] if measured else []
        return [cls("bf16"), cls(powersgd_rank=2), cls(topk=0.01), *chosen]

    def changed(self, reductions: GradientReductions) -> Graph:
        """Shrink the payload of each bucket, and add the time of compression."""
        if reductions.ratio < 1:
            raise Unanswerable("gradients are already compressed")
        if self.budget is not None:
            chosen = choose(reductions, self.budget)
            if all(choice.option.codec is None for choice in chosen):
                return reductions.graph
            return with_reductions(
                reductions,
                [
                    by_choice(reductions, plain_reductions(reductions, backward, backward.closes), chosen)
                    for backward in reductions.passes
                ],
            )
        return with_reductions(reductions, self.wanted(reductions))

    def wanted(self, reductions: GradientReductions) -> Sequence[Sequence[Reduction]]:
        """Return all buckets with one codec; with a budget, codecs are chosen only on application."""
        if self.budget is not None:
            return []
        codec = Codec(self.to, self.powersgd_rank, self.topk)
        plain = [plain_reductions(reductions, backward, backward.closes) for backward in reductions.passes]
        is_mixed = len({bucket.dtype for buckets in plain for bucket in buckets}) > 1
        return [
            [self._compressed(reductions, bucket, codec, is_mixed) for bucket in buckets] for buckets in plain
        ]

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the chosen codecs, inferred facts, and unknown latencies."""
        chosen = [] if self.budget is None else compression_lines(choose(reductions_of(graph), self.budget))
        return (*chosen, *super().notes(graph))

    def _compressed(
        self, reductions: GradientReductions, bucket: Reduction, codec: Codec, is_mixed: bool
    ) -> Reduction:
        """Compress a bucket; keep one that has half precision already if others do not."""
        if self.to and is_mixed and ITEM_BYTES.get(bucket.dtype) == ITEM_BYTES[HALF[self.to]]:
            return bucket
        return compressed(reductions, bucket, codec)

    def is_proven(self, graph: Graph) -> bool:
        """Return whether the edit was measured: neither top-k nor codecs by bucket were."""
        return self.topk is None and self.budget is None and super().is_proven(graph)

    def describe(self) -> str:
        if self.budget is not None:
            return f"gradients compressed with a codec per bucket, at most {self.budget:.2%} error"
        if self.to:
            return f"gradients reduced in {HALF[self.to]}"
        if self.topk is not None:
            return f"only the largest {self.topk:.2%} of gradients exchanged"
        return f"gradients reduced by PowerSGD of rank {self.powersgd_rank}"

    def setting(self, reductions: GradientReductions) -> str:
        framework = framework_of(reductions.graph.run)
        return half_precision_setting(framework, self.to) if self.to else NOT_THERE

    def how(self) -> str:
        if self.to == "bf16":  # DDP refuses PyTorch's hook without NCCL by its name
            hook = "lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)"
            return f"with DDP: model.register_comm_hook(None, {hook})"
        if self.to:
            return f"with DDP: model.register_comm_hook(None, default_hooks.{self.to}_compress_hook)"
        if self.topk is not None:
            return (
                "use a hook that gathers the largest gradients and keeps the others, such as the "
                "hook of `dpro try`"
            )
        if self.budget is not None:
            return f"use a hook with the codec chosen for each bucket, as dpro try {self} does"
        state = f"PowerSGDState(None, matrix_approximation_rank={self.powersgd_rank})"
        return f"with DDP: model.register_comm_hook({state}, powerSGD_hook); check accuracy"
