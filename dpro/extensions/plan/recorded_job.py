"""A recorded job, whose measured layers are resized to any layout.

Takes a graph with its run, and optionally facts that the run lacks; returns a `RecordedJob`, whose `timed`
gives the input of `step.step_times`. Measured products scale with the ratio of `layer.layer_work` between a
layout and the run's own; other work scales with the bytes that it moves; collectives scale with the rings of
both; the unexplained part of the step is equal in all layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2, prod
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.extensions.plan.layer import LayerTimes, LayerWork, layer_work, traffic
from dpro.extensions.plan.layout import (
    AXES,
    COLUMNS,
    RECOMPUTE,
    USUAL_SCHEDULES,
    candidates,
    column,
    gpus_of,
    layouts,
)
from dpro.extensions.plan.memory import GB, memory_of
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.plan import MeasuredLayout, plan
from dpro.extensions.plan.stack import (
    ATTENTION,
    NOTHING,
    PassTime,
    Stack,
    is_host_bound,
    stack_of,
    work_of,
    works_on_gpu,
)
from dpro.extensions.plan.step import MeasuredSent, TimedLayouts, optimizer_us, step_times
from dpro.replay.cost.kernels.estimate import Sources
from dpro.replay.cost.kernels.roofline import GpuModel, common_model, product_of, stored_as
from dpro.replay.cost.machine import Machine, machine_of
from dpro.replay.cost.memory import footprint_of
from dpro.replay.cost.transfers import RING, cost, fit_costs
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.intervals import covered, union
from dpro.replay.mesh import Mesh, groups_of, mesh_of_run
from dpro.replay.timeline import Timeline, replay
from dpro.replay.timeline import step_times as replayed_steps
from dpro.schema import COLLECTIVES, SPANS
from dpro.store import Run

CPU = "CPU"
HEAD_FORWARD = 1 / 3  # of the output layer: one product of three
WHOLE = 2  # value of `recompute` for complete layers
MAX_MEMORY_FACTOR = 4.0  # bounds measured over modelled memory, and its inverse


@dataclass(frozen=True)
class GivenJob:
    """Facts that a run may lack.

    Attributes:
        model: the model that it trains.
        layout: columns of its own layout.
        per_host: GPUs per host.
        memory_gb: of each GPU.
    """

    model: Model | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    per_host: int = 8
    memory_gb: float | None = None


@dataclass(frozen=True)
class RecordedJob:
    """A job as it was recorded.

    Attributes:
        model, machine, software: what it computes, on what, and how.
        layout: [1] its own.
        step_ms: its mean step.
        explained: share of the step that layers, output layer and exposed communication make up.
        stack: layers of its first stage.
        head: output layer and loss of its last stage.
        sent: measured factors on its collectives.
        on_gpu: whether GPUs did the work.
        cut_head: whether tensor parallelism cuts the output layer.
        said: what was found, one line each.
    """

    model: Model
    machine: Machine
    software: Software
    layout: pl.DataFrame
    step_ms: float
    explained: float
    stack: Stack
    head: PassTime
    sent: MeasuredSent
    on_gpu: bool
    cut_head: bool
    said: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks that it ran on."""
        return int(gpus_of(self.layout)[0])

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        row = self.layout.row(0, named=True)
        return int(row["dp"] * row["micro_batch"] * row["micro_batches"])

    def timed(self, rows: pl.DataFrame) -> TimedLayouts:
        """Resize the run's own layers to layouts."""
        work = _resized(self, rows)
        return TimedLayouts(self.model, rows, self.software, work, sent=self.sent)


def recorded_job(graph: Graph, given: GivenJob | None = None) -> RecordedJob:
    """Find the layers of a run, its model, its layout and its links.

    Raises:
        Unanswerable: there is no stack of equal layers, or the layout, the model or the GPU is unknown.
    """
    given = given or GivenJob()
    if graph.run is None:
        raise Unanswerable("the graph has no run, so its operators are unknown")
    timeline = replay(graph)
    mesh = mesh_of_run(graph.run)
    degrees = own_degrees(mesh, graph.run.manifest.world_size, given)
    by_stage = a_rank_of_each_stage(graph, mesh, degrees["pp"])
    stages = list(by_stage.values())
    count = 0 if degrees["pp"] == 1 else degrees.get("micro_batches") or micro_batches_of(graph, stages[0])
    stacks = [stack_of(timeline, rank, count) for rank in stages]
    first = stacks[0]
    layers = (
        sum(stack.layers for stack in stacks)
        if len(stacks) == degrees["pp"]
        else first.layers * degrees["pp"]
    )
    model, micro_batch, cut_head = _model(graph.run, first, stacks[-1], layers, degrees, given, stages[0])
    if degrees["dp"] * degrees["cp"] > 1:
        degrees.setdefault("zero", _zero(graph, first))
    degrees |= {"micro_batch": micro_batch, "micro_batches": first.micro_batches}
    row = layouts([degrees])
    machine, software, said = _machine(timeline, given, first, model, row)
    step_ms = (
        float(replayed_steps(graph, timeline.start, timeline.end)["duration_ns"].to_numpy().mean()) / 1e6
    )
    groups = [
        group.ranks for group in groups_of(graph.run) if len(group.ranks) == degrees["dp"] * degrees["cp"]
    ]
    work, _ = work_of(timeline, stages[0])
    reduced = (
        reduced_of(timeline, stages[0], work.node, groups)
        if degrees["dp"] * degrees["cp"] > 1
        else GradientTraffic(0, 0)
    )
    said = (_found_line(first, layers), *said)
    head, on_gpu = stacks[-1].head, works_on_gpu(graph)
    if degrees["pp"] - 1 not in by_stage and degrees["pp"] > 1:
        head, said = (
            NOTHING,
            (*said, "no rank of the last stage was recorded: the output layer is not counted"),
        )
    job = RecordedJob(
        model, machine, software, row, step_ms, 0.0, first, head, MeasuredSent(), on_gpu, cut_head, said
    )
    return _with_own_memory(_calibrated(job, reduced, message_us_of(graph, stages)), graph.run)


def _found_line(stack: Stack, layers: int) -> str:
    ahead, back = stack.forward, stack.backward
    return (
        f"{layers} equal layers, micro-batches: {stack.micro_batches}; a layer works {ahead.work / 1e3:.3g} "
        f"ms forward and {back.work / 1e3:.3g} ms backward on a rank, "
        f"{(ahead.product + back.product) / max(ahead.work + back.work, 1e-9):.0%} of it products"
    )


def own_degrees(mesh: Mesh, world_size: int, given: GivenJob | None = None) -> dict[str, int]:
    """Return the degrees of a run's own layout: as given, or else by its mesh.

    Raises:
        Unanswerable: neither gives it.
    """
    given, world = given or GivenJob(), max(world_size, 1)
    said = {axis.name: axis.size for axis in mesh.axes if axis.name}
    degrees = (
        dict.fromkeys(AXES, 1) | said | {axis: given.layout[axis] for axis in AXES if axis in given.layout}
    )
    if degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"] != world:
        shown = ", ".join(f"{axis}={size}" for axis, size in degrees.items() if size > 1) or "no axis"
        raise Unanswerable(
            f"the layout of its {world} ranks is not known ({shown}): `dpro plan` takes --layout dp={world}"
        )
    return degrees | {key: value for key, value in given.layout.items() if key not in AXES}


def _zero(graph: Graph, stack: Stack) -> int:
    """Return the stage of ZeRO by the collectives that reduce gradients: all-reduces shard nothing."""
    ops = {message.op for message in graph.messages}
    if "all_gather" in ops and "reduce_scatter" in ops:
        return 3 if stack.forward.sent > 0 else 1
    return 0 if "all_reduce" in ops else 1


def _model(
    run: Run, first: Stack, last: Stack, layers: int, degrees: Mapping[str, int], given: GivenJob, rank: int
) -> tuple[Model, int, bool]:
    """Return the model, sequences of a micro-batch, and whether the output layer is cut."""
    try:
        spans = run.table(SPANS, ["name", "shapes"]).filter(pl.col("name") == "aten::embedding")
        table = embedding_of(spans["shapes"].unique().to_list())
        shapes = shapes_of(
            first.products, (*first.outside, *last.outside), table, layers, degrees["tp"], degrees["cp"]
        )
    except Unanswerable:
        if given.model is None:
            raise
        if "micro_batch" not in given.layout:
            raise Unanswerable(
                "the sequences per micro-batch are unknown: give --layout micro_batch="
            ) from None
        return given.model, given.layout["micro_batch"], degrees["tp"] > 1
    model = given.model or shapes.model
    return model, degrees.get("micro_batch", shapes.micro_batch), shapes.cut_head


def _machine(
    timeline: Timeline, given: GivenJob, stack: Stack, model: Model, row: pl.DataFrame
) -> tuple[Machine, Software, tuple[str, ...]]:
    """Return the machine with the run's own links, the job's software, and what links were found.

    Raises:
        Unanswerable: the GPU model is unknown.
    """
    graph = timeline.graph
    assert graph.run is not None
    if works_on_gpu(graph):
        gpu = common_model(graph.run.manifest.gpus)
        if not gpu:
            raise Unanswerable("the GPU model of the recording is unknown, and its data sheet is needed")
        machine = machine_of(gpu, given.per_host, given.memory_gb)
        machine = replace(machine, sheets=Sources())
    else:
        machine = _cpu(given, stack, model, row)
    machine = replace(machine, compute=1.0, memory=1.0, host_us=1.0, crossed_us=0.0)
    machine, said = with_own_links(machine, timeline, not works_on_gpu(graph))
    return machine, _software(graph, stack, machine), said


def _cpu(given: GivenJob, stack: Stack, model: Model, row: pl.DataFrame) -> Machine:
    """Return a CPU whose rate of operations is that of the run's products."""
    tflops = _operations(model, row)[0] / max(stack.forward.product, 1e-9) / 1e6
    sheet = GpuModel({"fp32": float(tflops), "bf16": float(tflops)}, 10.0, "this run's products")
    return Machine(
        CPU,
        given.per_host,
        given.memory_gb or 0.0,
        inside_gbps=1.0,
        outside_gbps=float(given.per_host),
        inside_us=100.0,
        outside_us=100.0,
        message_us=100.0,
        sheets=Sources(sheets={CPU: sheet}),
    )


def _software(graph: Graph, stack: Stack, machine: Machine) -> Software:
    """Return how the job trains, as its operators and kernels show it."""
    ops = {message.op for message in graph.messages}
    flash = any(
        word in product.lower()
        for product in stack.products
        for word in ("flash", "efficient", "cudnn", "fmha")
    )
    dtype = next((stored_as(product) for product in stack.products if stored_as(product)), "")
    if not dtype:
        names = [name for name in graph.names if "gemm" in name or "nvjet" in name]
        dtype = next((stored_as(name) for name in names if stored_as(name)), "")
    return Software(
        flash=flash,
        sequence_parallel="reduce_scatter" in ops and stack.forward.sent > 0,
        dtype=dtype if dtype in machine.sheet.tflops else next(iter(machine.sheet.tflops)),
        overlap=0.0,
        tensor_overlap=0.0,
    )


def _operations(model: Model, rows: pl.DataFrame) -> Floats:
    """Return [N] operations of the products of a layer, forward, on one rank."""
    micro_batch, tp, cp = (column(rows, name) for name in ("micro_batch", "tp", "cp"))
    tokens = micro_batch * model.sequence / cp
    weights = 2 * tokens * (model.attention_parameters + model.dense_ffn_parameters) / tp
    operations: Floats = weights + 4 * tokens * model.sequence * model.heads / tp * model.widths[1]
    return operations


def _resized(job: RecordedJob, rows: pl.DataFrame) -> LayerWork:
    """Return the times of the run's layers and output layer in each layout."""
    layouts = pl.concat([job.layout.select(rows.columns), rows])
    tokens = _ratio(column(layouts, "micro_batch") / column(layouts, "cp"))
    cut = _ratio(1 / column(layouts, "tp")) if job.cut_head else np.ones(rows.height)
    stack = job.stack
    if job.on_gpu:
        said = layer_work(job.model, layouts, job.machine, job.software)
        ahead, back = (
            _work(timed, _ratio(counted.compute), _ratio(counted.memory), is_host_bound(timed))
            for timed, counted in ((stack.forward, said.forward), (stack.backward, said.backward))
        )
        again = said.scores[np.arange(1, layouts.height)]
    else:
        products = _ratio(_operations(job.model, layouts))
        ahead, back = (_work(timed, products, tokens, False) for timed in (stack.forward, stack.backward))
        again = LayerTimes(*(0 * part for part in ahead.parts()))
    if int(job.layout["recompute"][0]) == WHOLE:
        back = LayerTimes(
            *(np.maximum(us - again_us, 0) for us, again_us in zip(back.parts(), ahead.parts()))
        )
    share = tokens * cut
    heads = [
        LayerTimes(
            job.head.product * part * share,
            (job.head.other + job.head.host) * part * tokens,
            0 * tokens,
            0 * tokens,
        )
        for part in (HEAD_FORWARD, 1 - HEAD_FORWARD)
    ]
    return LayerWork(ahead, back, ahead, back, again, *heads)


def _ratio(values: Floats) -> Floats:
    """Return all values but the first, which is the run's own, as multiples of it; 1 where it is 0."""
    ratio: Floats = np.where(values[0] > 0, values[1:] / max(float(values[0]), 1e-12), 1.0)
    return ratio


def _work(timed: PassTime, compute: Floats, memory: Floats, host_bound: bool) -> LayerTimes:
    """Resize one pass over a layer: products by operations, other work by bytes, the host not at all.

    If the GPU waits for the host, a layer takes as long at any size.
    """
    one = np.ones_like(compute)
    return LayerTimes(
        timed.product * compute,
        timed.other * memory + timed.host * one,
        (timed.whole if host_bound else 0.0) * one,
        0 * one,
    )


def _calibrated(job: RecordedJob, reduced: GradientTraffic, message_us: float) -> RecordedJob:
    """Calibrate the job: measured collectives, and the unexplained rest as a fixed part of the step."""
    machine = replace(job.machine, fixed_ms=0.0, growth=0.0)
    said = traffic(job.model, job.layout, machine, job.software)
    stack, usual = job.stack, 2.0 if job.software.dtype == "fp32" else 1.0  # vectors of four bytes
    modelled = float(said.reduction[0] + said.gathered[0])
    sent = MeasuredSent(
        forward=_measured_ratio(stack.forward.sent, float(said.forward[0]), usual),
        backward=_measured_ratio(stack.backward.sent, float(said.backward[0]), usual),
        message=_measured_ratio(message_us, float(said.message[0]), usual),
        reduction=_measured_ratio(reduced.moving, modelled, 1.0),
        hidden_us=reduced.moving - reduced.exposed if modelled else 0.0,
    )
    probe = replace(job.software, optimizer_bytes=1.0)
    unit = float(
        optimizer_us(TimedLayouts(job.model, job.layout, probe, _resized(job, job.layout)), machine)[0]
    )
    software = replace(job.software, optimizer_bytes=stack.optimizer_us / max(unit, 1e-12))
    job = replace(job, sent=sent, software=software)
    first = _predicted_ms(job, machine)
    if first > job.step_ms:  # some work ran concurrently: all of it is made faster by one factor
        half = _predicted_ms(job, _faster(machine, 0.5))
        share = np.clip((job.step_ms - half) / max(first - half, 1e-9), 0.0, 1.0)
        machine = _faster(machine, 0.5 + 0.5 * float(share))
    left = max(job.step_ms - _predicted_ms(job, machine), 1e-6)
    return replace(job, machine=replace(machine, fixed_ms=left), explained=first / job.step_ms)


def _predicted_ms(job: RecordedJob, machine: Machine) -> float:
    return float(step_times(job.timed(job.layout), machine)["step_ms"][0])


def _faster(machine: Machine, factor: float) -> Machine:
    return replace(machine, compute=factor, memory=factor, host_us=factor)


def _measured_ratio(measured: float, modelled: float, usual: float) -> float:
    """Return measured over modelled; `usual` where either is missing."""
    return measured / modelled if measured > 0 and modelled > 0 else usual


def _with_own_memory(job: RecordedJob, run: Run) -> RecordedJob:
    """Scale the activations of the job to its measured memory, where that was recorded."""
    try:
        within = footprint_of(run).within_step_bytes / GB
    except Unanswerable:
        return replace(job, said=(*job.said, "memory is computed; use `dpro record --memory` to measure it"))
    parts = memory_of(job.model, job.layout, job.software).row(0, named=True)
    modelled = parts["activations"] + parts["logits"] + parts["gradients"]
    factor = float(np.clip(within / max(modelled, 1e-12), 1 / MAX_MEMORY_FACTOR, MAX_MEMORY_FACTOR))
    software = replace(
        job.software,
        activations=job.software.activations * factor,
        logit_bytes=job.software.logit_bytes * factor,
    )
    line = f"a step allocates {within:.3g} GB beyond what it found, {factor:.2f} of what is computed"
    return replace(job, software=software, said=(*job.said, line))


# Links as measured by the collectives of a run: bandwidth, latency, and how much of them is exposed.

US = 1e3  # ns
SHOWS_LATENCY = 1 << 18  # bytes: the fit shows the latency only if a collective is at most this large


class GradientTraffic(NamedTuple):
    """Microseconds per step and rank in which data-parallel collectives move data: all, and exposed."""

    moving: float
    exposed: float


def with_own_links(
    machine: Machine, timeline: Timeline, with_outside: bool
) -> tuple[Machine, tuple[str, ...]]:
    """Return the machine with links as measured by the run's collectives, and the source in words.

    Args:
        with_outside: whether links across hosts, if unseen, are assumed to equal those within one.
    """
    graph = timeline.graph
    curves = fit_costs(graph)
    moved = {kind: _traffic_of_kind(graph, *kind) for kind in curves}
    per_host = machine.per_host
    for kind in sorted(moved, key=lambda kind: (-moved[kind][1], kind)):
        ranks, total, typical, least = moved[kind]
        if not total or ranks < 2:
            continue
        try:
            spent = cost(kind[0], RING, ranks)
        except Unanswerable:
            continue
        curve = curves[kind]
        shown = least <= SHOWS_LATENCY  # else the fitted time at 0 bytes is not a latency
        alpha = curve.latency_ns / spent.messages / US if shown else 0.0
        moving = float(curve.time_ns(typical)) - (curve.latency_ns if shown else 0.0)
        gbps = spent.share * typical / max(moving, 1e-3)
        one_way = spent.messages / (2 if kind[0] == "all_reduce" else 1)
        latency = alpha * one_way / max(log2(ranks), 1) if shown else machine.inside_us
        step_us = alpha if shown else machine.outside_us
        if ranks > per_host:
            recorded = replace(machine, outside_gbps=gbps * per_host, outside_us=step_us)
        elif with_outside:
            recorded = replace(
                machine, inside_gbps=gbps, inside_us=latency, outside_gbps=gbps * per_host, outside_us=step_us
            )
        else:
            recorded = replace(machine, inside_gbps=gbps, inside_us=latency)
        return recorded, (f"links as {kind[0]} among {ranks} ranks show them: {gbps:.3g} GB/s",)
    return machine, ("link speeds are from the data sheet: the run has no collectives of known size",)


def _traffic_of_kind(graph: Graph, op: str, group: str) -> tuple[int, float, float, float]:
    """Return ranks of a kind of communication, its total bytes, its most important and its least size."""
    nodes = graph.nodes
    numbers = [n for n, message in enumerate(graph.messages) if (message.op, message.group) == (op, group)]
    moving = np.isin(nodes.message, numbers) & (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0)
    if not moving.any():
        return 0, 0.0, 0.0, 0.0
    sizes, counts = np.unique(nodes.bytes[moving], return_counts=True)
    return (
        graph.messages[numbers[0]].num_ranks,
        float(nodes.bytes[moving].sum()),
        float(sizes[np.argmax(sizes * counts)]),
        float(sizes[0]),
    )


def reduced_of(
    timeline: Timeline, rank: int, work: Ints, axis: Collection[frozenset[int]]
) -> GradientTraffic:
    """Return how long data-parallel collectives of a rank move data per step, and how long exposed.

    Args:
        work: [N] nodes of its work.
        axis: groups of data parallelism.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    sizes = {len(ranks) for ranks in axis}
    numbers = [
        n
        for n, message in enumerate(graph.messages)
        if message.num_ranks in sizes and _collective(message.op)
    ]
    moving = (nodes.rank == rank) & (nodes.kind == NodeKind.TRANSFER) & (nodes.step >= 0)
    moving &= np.isin(nodes.message, numbers)
    steps = np.unique(nodes.step[work])
    when = union(timeline.start[moving], timeline.end[moving])
    busy = union(timeline.start[work], timeline.end[work])
    if not len(when) or not steps.size:
        return GradientTraffic(0.0, 0.0)
    total = float((when[:, 1] - when[:, 0]).sum())
    hidden = float(covered(busy, when[:, 0], when[:, 1]).sum())
    return GradientTraffic(total / steps.size / US, (total - hidden) / steps.size / US)


def _collective(op: str) -> bool:
    return op not in ("send", "recv", "send_recv")


# The messages of a recorded pipeline: its micro-batches, and the time of a message.

RECEIVED = ("recv", "send_recv")


def a_rank_of_each_stage(graph: Graph, mesh: Mesh, stages: int) -> dict[int, int]:
    """Map each stage to its lowest recorded rank, if any; without a pipeline, 0 to the lowest rank."""
    ranks = [int(rank) for rank in np.unique(graph.nodes.rank) if rank >= 0]
    names = [axis.name for axis in mesh.axes]
    if stages == 1 or "pp" not in names:
        return {0: ranks[0]}
    column = names.index("pp")
    first: dict[int, int] = {}
    for rank in ranks:
        if rank in mesh.coordinates:
            first.setdefault(mesh.coordinates[rank][column], rank)
    return dict(sorted(first.items()))


def micro_batches_of(graph: Graph, rank: int) -> int:
    """Return the micro-batches of a pipeline: messages per step that a rank receives from each neighbour.

    Raises:
        Unanswerable: it received none.
    """
    assert graph.run is not None
    nodes = graph.nodes
    received = _received(graph, ("recv",)) & (nodes.step >= 0) & (nodes.rank == rank)
    steps = np.unique(nodes.step[(nodes.rank == rank) & (nodes.step >= 0)]).size
    calls = graph.run.table(COLLECTIVES, ["rank", "op", "peer"])
    peers = calls.filter((pl.col("rank") == rank) & (pl.col("op") == "recv") & (pl.col("peer") >= 0))["peer"]
    count = round(int(received.sum()) / max(steps, 1) / max(peers.n_unique(), 1))
    if not count:
        raise Unanswerable(
            "the number of micro-batches of the pipeline is unknown: give --layout micro_batches="
        )
    return count


def message_us_of(graph: Graph, ranks: list[int]) -> float:
    """Return the median transfer of a message between two recorded ranks, in microseconds; 0 without any.

    Messages from unrecorded senders do not count: they seem to move as long as the receiver waits.
    """
    nodes = graph.nodes
    ends = nodes.kind == NodeKind.TRANSFER
    numbers, counts = np.unique(nodes.collective[ends], return_counts=True)
    whole = np.isin(nodes.collective, numbers[counts > 1])
    received = _received(graph, RECEIVED) & whole & np.isin(nodes.rank, ranks)
    return float(np.median(nodes.duration[received])) / 1e3 if received.any() else 0.0


def _received(graph: Graph, ops: tuple[str, ...]) -> Bools:
    """Return [N] whether a node is a transfer of one of these operations."""
    numbers = [number for number, message in enumerate(graph.messages) if message.op in ops]
    received: Bools = (graph.nodes.kind == NodeKind.TRANSFER) & np.isin(graph.nodes.message, numbers)
    return received


# The model of a run, from the shapes of the products of one of its layers.

GIVE = "give --model config.json"
MIN_HEADS, MAX_HEAD = 1, 512


class Shapes(NamedTuple):
    """What the shapes of a layer show.

    Attributes:
        micro_batch: sequences of a micro-batch on a rank.
        cut_head: whether tensor parallelism cuts the output layer.
    """

    model: Model
    micro_batch: int
    cut_head: bool


class _AttentionSizes(NamedTuple):
    """Sizes of a rank's attention: sequences, tokens per sequence, heads, key heads, size of a head."""

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    size: int


def shapes_of(
    products: Sequence[str], outside: Sequence[str], embedding: tuple[int, ...], layers: int, tp: int, cp: int
) -> Shapes:
    """Return the model of a run.

    Args:
        products: of one layer, forward, in order: an operator's name and its shapes.
        outside: products outside of layers.
        embedding: [rows, width] of the largest embedding, empty where none was recorded.
        layers: number of layers of the model.
        tp, cp: ranks that share a layer, and a sequence.

    Raises:
        Unanswerable: there are no shapes, or they are not those of a dense transformer.
    """
    if not any("[" in product for product in products):
        raise Unanswerable(f"the run has no shapes of operators: record with `--shapes`, or {GIVE}")
    attended = _attention(products)
    attention_place = next(i for i, product in enumerate(products) if re.search(ATTENTION, product))
    before, after = _weights(products[:attention_place]), _weights(products[attention_place + 1 :])
    if not before or len(after) < 3:
        raise Unanswerable(
            f"{len(before)} matrices before attention and {len(after)} after it are not known: {GIVE}"
        )
    hidden = before[0][0]
    output, *wide, down = after
    if output[1] != hidden or down[1] != hidden or any(inputs != hidden for inputs, _ in (*before, *wide)):
        raise Unanswerable(f"a layer's matrices do not lead from {hidden} back to it: {GIVE}")
    ffn = down[0]
    widths = sum(outputs for _, outputs in wide)
    if widths not in (ffn, 2 * ffn):
        raise Unanswerable(
            f"a feed-forward network of {widths} outputs and {ffn} inputs is not known: {GIVE}"
        )
    heads = attended.heads
    if output[0] != heads * attended.size:
        raise Unanswerable(f"{heads} heads of {attended.size} do not make {output[0]} inputs: {GIVE}")
    kv_heads = (sum(outputs for _, outputs in before) // attended.size - heads) // 2
    if kv_heads < 1 or heads % kv_heads:
        raise Unanswerable(f"{heads} heads of queries do not share {kv_heads} of keys: {GIVE}")
    rows, cut_head = _vocabulary(outside, embedding, hidden, tp)
    model = Model(
        layers=layers,
        hidden=hidden,
        heads=heads * tp,
        kv_heads=kv_heads * tp,
        head_size=attended.size,
        ffn=ffn * tp,
        vocabulary=rows,
        sequence=attended.sequence * cp,
        gated=widths == 2 * ffn,
    )
    return Shapes(model, attended.batch, cut_head)


def _weights(products: Sequence[str]) -> list[tuple[int, int]]:
    """Return inputs and outputs of the matrices that multiply tokens."""
    weights = []
    for product in products:
        sizes = product_of(*_split(product))
        if sizes is not None and sizes[0] == 1:
            weights.append((int(sizes[3]), int(sizes[2])))
    return weights


def _split(text: str) -> tuple[str, str]:
    name, bracket, shapes = text.partition("[")
    return name, bracket + shapes


def _lists(text: str) -> list[list[int]]:
    try:
        read = json.loads(_split(text)[1])
    except ValueError:
        return []
    return [value for value in read if isinstance(value, list) and all(isinstance(n, int) for n in value)]


def _attention(products: Sequence[str]) -> _AttentionSizes:
    """Return the sizes of attention, from [batch, heads, sequence, size] in PyTorch, else with heads third.

    Raises:
        Unanswerable: no operator of attention has such shapes.
    """
    for product in products:
        if not re.search(ATTENTION, product):
            continue
        inputs = [shape for shape in _lists(product) if len(shape) == 4]
        if len(inputs) < 2:
            continue
        batch, one, other, size = inputs[0]
        first = "scaled_dot_product" in product  # PyTorch's own function: heads come first
        heads, sequence = (one, other) if first else (other, one)
        kv_heads = inputs[1][1 if first else 2]
        if heads >= MIN_HEADS and size <= MAX_HEAD:
            return _AttentionSizes(batch, sequence, heads, kv_heads, size)
    raise Unanswerable(f"no operator of attention in a layer has shapes of four dimensions: {GIVE}")


def _vocabulary(outside: Sequence[str], embedding: tuple[int, ...], hidden: int, tp: int) -> tuple[int, bool]:
    """Return the rows of the embedding of all ranks, and whether the output layer is cut."""
    heads = [outputs for inputs, outputs in _weights(outside) if inputs == hidden]
    rows = embedding[0] if len(embedding) == 2 and embedding[1] == hidden else 0
    local = max(heads, default=0)
    if not rows and not local:
        raise Unanswerable(f"neither the embedding nor the output layer is recorded: {GIVE}")
    if tp > 1 and local and rows and local < rows:
        return rows, True
    if tp > 1 and local and local == rows and prod((local, tp)) >= 16384:
        return rows * tp, True  # both are cut: a complete vocabulary has many thousands of rows
    return max(rows, local), False


def embedding_of(shapes: Sequence[str]) -> tuple[int, ...]:
    """Return [rows, width] of the largest embedding among shapes of operators; empty if none."""
    tables = [tuple(_lists(shape)[0]) for shape in shapes if _lists(shape)]
    return max((table for table in tables if len(table) == 2), key=prod, default=())


# Ranked layouts of the job, calibrated by the run's own, which gets its measured step.

SELECTIVE = RECOMPUTE.index("selective")
SHARDED = 3  # stage of ZeRO that shards parameters


def ranked(
    job: RecordedJob,
    gpus: int,
    global_batch: int,
    keep: Mapping[str, int] | None = None,
    measured: Sequence[MeasuredLayout] = (),
    schedules: Sequence[str] = USUAL_SCHEDULES,
) -> pl.DataFrame:
    """Rank all layouts of a recorded job."""
    keep = dict(keep or {})
    rows = candidates(job.model, gpus, job.machine.per_host, global_batch, keep, schedules)
    if job.software.flash and "recompute" not in keep:
        rows = rows.filter(pl.col("recompute") != SELECTIVE)
    unsharded = min(int(job.layout["zero"][0]), SHARDED - 1)  # as the job's framework has it
    if "zero" not in keep:
        kept = pl.when(pl.col("zero") < SHARDED).then(unsharded).otherwise(pl.col("zero"))
        rows = rows.with_columns(zero=kept.cast(pl.Int64))
    if (
        gpus == job.ranks
        and global_batch == job.global_batch
        and all(int(job.layout[name][0]) == value for name, value in keep.items())
    ):
        rows = pl.concat([rows, job.layout.select(rows.columns)])
    return _planned(job, rows.unique(maintain_order=True), measured)


def own_layout(job: RecordedJob) -> pl.DataFrame:
    """Return the row of the run's own layout, as in `ranked`."""
    return _planned(job, job.layout, ())


def _planned(job: RecordedJob, rows: pl.DataFrame, measured: Sequence[MeasuredLayout]) -> pl.DataFrame:
    recorded = {name: int(job.layout[name][0]) for name in COLUMNS}
    steps = [MeasuredLayout(recorded, job.step_ms), *measured]
    ranking = plan(job.model, rows, with_memory(job), job.software, steps, job.timed)
    return ranking if job.on_gpu else ranking.with_columns(mfu=pl.lit(None, pl.Float64))


def with_memory(job: RecordedJob) -> Machine:
    """Return the job's machine; with infinite memory where it is unknown, so that everything fits."""
    return replace(job.machine, memory_gb=job.machine.memory_gb or inf)


def is_own(job: RecordedJob) -> pl.Expr:
    """Return an expression for whether a row is the run's own layout."""
    same = [pl.col(name) == int(job.layout[name][0]) for name in COLUMNS]
    return pl.all_horizontal(same)


def usual_batch(job: RecordedJob, gpus: int) -> int:
    """Return the sequences per step if each rank keeps as many as it has."""
    return max(round(job.global_batch * gpus / int(gpus_of(job.layout)[0])), 1)
