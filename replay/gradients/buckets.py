"""Each reduction of gradients with what it holds: recorded where the framework said so, else inferred.

In: a graph and its run. Out: the passes that edits change.

Of DeepSpeed, whose gradients fill a buffer, which is reduced before one that no longer fits, the run says
what was in each buffer (table `buckets`). The reductions of a pass are the recorded buffers, one after the
other; a buffer is reduced within the hook of the gradient that comes after it, and the last one after
backward. Where DeepSpeed reduces after backward alone (ZeRO 1 without overlap), gradients are ready for it
then, in the order of the buffers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.gradients.inferred import (
    divided,
    given_passes,
    gradient_calls,
    inferred_passes,
    is_same_bucket,
)
from dpro.replay.gradients.passes import (
    ACCUMULATE,
    Launches,
    Parameters,
    Pass,
    calls_of,
    in_order,
    parameters_of,
    passes_at,
    passes_of,
)
from dpro.replay.graph import Graph
from dpro.replay.kept import kept
from dpro.schema import BUCKETS, SPANS
from dpro.store import Run

SOURCE = "DeepSpeed"
AFTER_BACKWARD = "after backward"
PLACE = ["rank", "window", "tid"]


@dataclass(frozen=True)
class Buffers:
    """What a job reduces in each pass.

    Attributes:
        num_bytes: of each buffer.
        sizes: of the gradients in each, in order.
        shapes: of all gradients, in order.
        after_backward: whether no reduction begins before backward has ended.
        is_zero: whether ranks share out at least the states of the optimizer.
    """

    num_bytes: list[int]
    sizes: list[list[int]]
    shapes: tuple[tuple[int, ...], ...]
    after_backward: bool
    is_zero: bool

    @property
    def num_gradients(self) -> int:
        """Of a pass."""
        return sum(len(sizes) for sizes in self.sizes)


def buffered_passes(graph: Graph) -> list[Pass]:
    """Backward passes that reduce gradients, of all ranks, in order of time on each.

    Raises:
        Unanswerable: the run has no buffers of DeepSpeed, or what was seen does not fit them.
    """
    if graph.run is None:
        raise Unanswerable("the graph has no run")
    buffers, calls = buffers_of(graph.run), gradient_calls(graph.run)
    kinds = set(calls.select("op", "group").iter_rows())
    launches = Launches(graph, np.array([(message.op, message.group) in kinds for message in graph.messages]))
    spans = graph.run.table(SPANS, [*PLACE, "span_id", "name", "start_ns", "duration_ns"])
    ready = spans.filter(pl.col("name") == ACCUMULATE).sort("start_ns")
    ready = ready.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    issued = calls_of(graph)
    passes: list[Pass] = []
    for place, of_thread in calls.group_by(PLACE, maintain_order=True):
        here = ready.filter(pl.all_horizontal(pl.col(name) == value for name, value in zip(PLACE, place)))
        turns = turns_of(of_thread.sort("at"), buffers)
        moments = pl.concat([gradient_moments(turn, here, buffers) for turn in turns])
        moments = moments.with_columns(**dict(zip(PLACE, map(pl.lit, place))))
        given = [
            (number * buffers.num_gradients, _parameters(turn, buffers)) for number, turn in enumerate(turns)
        ]
        passes += passes_at(graph, launches, issued, moments, partial(given_passes, given))
    if not passes:
        raise Unanswerable("no backward pass in the run reduces gradients in whole steps")
    return in_order(passes)


def buffers_of(run: Run) -> Buffers:
    """What the job said that it reduces in each pass.

    Raises:
        Unanswerable: nothing, or experts apart, whose reductions are in another group.
    """
    rows = run.table(BUCKETS).filter(pl.col("source").str.starts_with(SOURCE))
    if rows.is_empty():
        raise Unanswerable("the run does not say what DeepSpeed reduces together")
    of_rank = rows.filter(pl.col("rank") == pl.col("rank").min()).sort("bucket")
    if of_rank["module"].n_unique() > 1:
        raise Unanswerable("DeepSpeed reduces experts or several models apart")
    shapes = tuple(tuple(shape) for listed in of_rank["shapes"].to_list() for shape in listed)
    sizes = [[int(size) for size in buffer] for buffer in of_rank["parameter_bytes"].to_list()]
    source = str(of_rank["source"][0])
    is_zero = source.startswith(f"{SOURCE} ZeRO")
    return Buffers(of_rank["bytes"].to_list(), sizes, shapes, source.endswith(AFTER_BACKWARD), is_zero)


def turns_of(calls: pl.DataFrame, buffers: Buffers) -> list[pl.DataFrame]:
    """Calls of a thread, pass by pass.

    Args:
        calls: in order, as of `gradient_calls`.

    Raises:
        Unanswerable: they are not the recorded buffers, one after the other.
    """
    count = len(buffers.num_bytes)
    turns = [
        of_step.slice(first, count)
        for of_step in calls.partition_by("step", maintain_order=True)
        for first in range(0, of_step.height, count)
    ]
    for turn in turns:
        moved = turn["bytes"].to_list()
        fits = [
            num_bytes < 0 or is_same_bucket(num_bytes, said)
            for num_bytes, said in zip(moved, buffers.num_bytes)
        ]
        if len(moved) != count or not all(fits):
            raise Unanswerable("the reductions seen do not fit the buffers of DeepSpeed that were recorded")
    return turns


def gradient_moments(turn: pl.DataFrame, ready: pl.DataFrame, buffers: Buffers) -> pl.DataFrame:
    """[P] the moments at which the gradients of a pass are ready, in order: `span_id`, `start_ns`, `end_ns`.

    Args:
        turn: the calls of the pass, in order.
        ready: accumulations of gradients on the thread, in order.

    Raises:
        Unanswerable: the pass has other gradients than the buffers.
    """
    begun, ended = turn["start_ns"].to_numpy(), turn["end_ns"].to_numpy()
    last = np.cumsum([len(sizes) for sizes in buffers.sizes]) - 1
    since = turn["since"][0]
    within = ready.filter((pl.col("start_ns") > since) & (pl.col("start_ns") < int(begun[-1])))
    if buffers.after_backward:
        before = max([since, *within["end_ns"].to_list()])
        start = np.repeat(np.append(min(before, int(begun[0])), ended[:-1]), np.diff(last, prepend=-1))
        end = start.copy()
        start[last], end[last] = begun, ended
        span = np.repeat(turn["span_id"].to_numpy(), np.diff(last, prepend=-1))
        return pl.DataFrame({"span_id": span, "start_ns": start, "end_ns": end})
    if within.height != buffers.num_gradients:
        raise Unanswerable(f"a pass has {within.height} gradients, not the {buffers.num_gradients} recorded")
    start, end = within["start_ns"].to_numpy().copy(), within["end_ns"].to_numpy().copy()
    _fit(start, end, last, begun, ended)
    return pl.DataFrame({"span_id": within["span_id"], "start_ns": start, "end_ns": end})


def _fit(start: Ints, end: Ints, last: Ints, begun: Ints, ended: Ints) -> None:
    """Have each call lie in the moment of the last gradient of its buffer, and the next one begin behind it.

    Args:
        start, end: [P] ns, of the moments; changed in place.
        last: [B] the last gradient of each buffer.
        begun, ended: [B] ns, of its call.

    Raises:
        Unanswerable: a call came before its last gradient.
    """
    early: Bools = begun < start[last]
    if early.any():
        raise Unanswerable("a buffer was reduced before all the gradients recorded in it were ready")
    end[last] = np.maximum(end[last], ended)
    behind = last[:-1] + 1
    start[behind] = np.maximum(start[behind], ended[:-1])
    end[behind] = np.maximum(end[behind], start[behind])


def _parameters(turn: pl.DataFrame, buffers: Buffers) -> Parameters:
    """What a pass reduces: sizes as recorded, in the type and with the padding of the reductions."""
    sizes = [
        divided(moved, sizes) if moved > 0 else sizes
        for moved, sizes in zip(turn["bytes"].to_list(), buffers.sizes)
    ]
    whole = np.array([size for buffer in sizes for size in buffer], np.int64)
    return Parameters(whole, buffers.shapes, closes_before=True, is_update_shared_out=buffers.is_zero)


# Passes of any framework.

RECORDS = {"Parameters": Parameters, "Pass": Pass}


def gradient_passes(graph: Graph) -> list[Pass]:
    """Backward passes that reduce gradients, of all ranks, in order of time on each.

    Raises:
        Unanswerable: gradients go through a communication hook, or no pass is seen; the message says why.
    """
    nodes, edges = graph.nodes, graph.edges
    places = (nodes.rank, nodes.window, nodes.step, nodes.lane, nodes.span, nodes.kind, nodes.message)
    columns = (*places, nodes.measured_start, nodes.measured_end, edges.source, edges.target, edges.kind)
    inputs = (*columns, graph.messages, graph.run)
    return list(kept(graph, "gradient-passes", inputs, lambda: tuple(_gradient_passes(graph)), RECORDS))


def _gradient_passes(graph: Graph) -> list[Pass]:
    rows = graph.run.table(BUCKETS) if graph.run is not None else BUCKETS.empty()
    hooks = rows.filter(pl.col("hook") != "")["hook"]
    if hooks.len():
        raise Unanswerable(f"gradients already go through a communication hook ({hooks[0]})")
    with suppress(Unanswerable):
        return passes_of(graph, parameters_of(graph.run))
    with suppress(Unanswerable):
        return buffered_passes(graph)
    return inferred_passes(graph)


NAMED_TYPES = {
    "float32": ("_f32", "_float(", "Sum_float"),
    "bfloat16": ("_bf16", "_bfloat16"),
    "float16": ("_f16", "_half"),
    "float64": ("_f64", "_double"),
}


def dtype_of(graph: Graph, transfer: int) -> str:
    """The element type of a transfer, by the run or else its kernel's name; empty if neither has it."""
    said = graph.messages[int(graph.nodes.message[transfer])].dtype
    if said:
        return said
    name = graph.names[int(graph.nodes.name[transfer])]
    dtypes = [dtype for dtype, marks in NAMED_TYPES.items() if any(mark in name for mark in marks)]
    return dtypes[0] if len(dtypes) == 1 else ""


# Which framework reduces the gradients of a run, and what to write in it for a change of its reductions.

MEGATRON, DEEPSPEED, FSDP2 = "Megatron-core", "DeepSpeed", "FSDP2"
FRAMEWORKS = (MEGATRON, DEEPSPEED, FSDP2)
NOT_THERE = "it has no such setting"


def framework_of(run: Run | None) -> str:
    """One of `FRAMEWORKS`; empty for DDP, for several of them, and where the run does not say."""
    sources = set() if run is None else set(run.table(BUCKETS, ["source"])["source"].unique())
    frameworks = {name for name in FRAMEWORKS for source in sources if source.startswith(name)}
    return frameworks.pop() if len(frameworks) == 1 else ""


def of_bucket_size(framework: str, elements: int) -> str:
    """The setting for buckets of a size.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: (
            f"DistributedDataParallelConfig(bucket_size={elements}, overlap_grad_reduce=True), which counts "
            "parameters; without overlap_grad_reduce there is one bucket"
        ),
        DEEPSPEED: f'"zero_optimization": {{"reduce_bucket_size": {elements}}}, which counts elements',
        FSDP2: f"fully_shard around groups of layers of about {elements} parameters: each is one reduction",
    }[framework]


def of_half_precision(framework: str, dtype: str) -> str:
    """The setting for reductions in half precision.

    Args:
        framework: one of `FRAMEWORKS`.
        dtype: fp16 or bf16.
    """
    torch_dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[dtype]
    return {
        MEGATRON: "DistributedDataParallelConfig(grad_reduce_in_fp32=False), with parameters in that type",
        DEEPSPEED: f'"communication_data_type": "{dtype}"',
        FSDP2: f"fully_shard(…, mp_policy=MixedPrecisionPolicy(reduce_dtype={torch_dtype}))",
    }[framework]


def of_no_overlap(framework: str) -> str:
    """The setting for reductions after backward.

    Args:
        framework: one of `FRAMEWORKS`.
    """
    return {
        MEGATRON: "DistributedDataParallelConfig(overlap_grad_reduce=False)",
        DEEPSPEED: '"zero_optimization": {"overlap_comm": false}',
        FSDP2: NOT_THERE,
    }[framework]
