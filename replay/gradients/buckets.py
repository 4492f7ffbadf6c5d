"""Each reduction of gradients with what it holds: recorded where the framework said so, else inferred.

In: a graph and its run. Out: the passes that edits change.
"""

from __future__ import annotations

from contextlib import suppress

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.gradients.buffers import buffered_passes
from dpro.replay.gradients.inferred import inferred_passes
from dpro.replay.gradients.passes import Parameters, Pass, parameters_of, passes_of
from dpro.replay.graph import Graph
from dpro.replay.kept import kept
from dpro.schema import BUCKETS
from dpro.store import Run

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
    found = [dtype for dtype, marks in NAMED_TYPES.items() if any(mark in name for mark in marks)]
    return found[0] if len(found) == 1 else ""


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
