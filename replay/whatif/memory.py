"""Trade memory for time: gradient accumulation, and forward passes done again in backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.fusion import OPTIMIZER
from dpro.replay.whatif.inside import blocks_of, inside_modules
from dpro.replay.whatif.repeat import with_copies
from dpro.replay.whatif.scale import without
from dpro.replay.whatif.select import messages_fitting

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Accumulate(Edit):
    """An optimizer step is several forward and backward passes; gradients are reduced in the last."""

    name = "accumulate"
    summary = "gradients of several batches are added up before they are reduced and applied"
    example = "accumulate:steps=2"
    needs = "reductions of gradients in one process group, or group="
    assumes = "each pass is like the recorded one, and all reductions of the group are of gradients"
    source = "the step, preceded by copies of itself without these reductions and without its optimizer"
    proof = "2 passes, gloo"
    steps: int = key("passes per optimizer step; the step that is predicted has them all", 2, least=1)
    group: str = key("pattern for the process group that reduces gradients", "")
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Put the further passes before each step."""
        refuse_operations(graph)
        light = without(graph, _gradient_reductions(graph, self.group) | optimizing(graph))
        return with_copies(graph, light, self.steps - 1)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What a step is."""
        return (f"a step has {self.steps} batches: divide by that to compare the time of one",)

    def describe(self) -> str:
        """What is changed."""
        return f"{self.steps} batches per optimizer step"

    def how(self) -> str:
        """How to do it."""
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
        Unanswerable: there are none, or it cannot be told which of several groups reduces gradients.
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


def optimizing(graph: Graph) -> Bools:
    """[N] what the optimizer does; nothing where its range was not recorded."""
    try:
        return inside_modules(graph, f"{OPTIMIZER}*")
    except Unanswerable:
        return np.zeros(graph.num_nodes, np.bool_)


@dataclass(frozen=True)
class Recompute(Edit):
    """Blocks keep their inputs only: backward does the forward pass of each block again before its own."""

    name = "recompute"
    summary = "activations of modules are computed again in backward"
    example = "recompute:module=layers.*"
    needs = "modules (`dpro record --modules`), and backward operators with sequence numbers"
    assumes = "the second forward pass takes what the first took; what memory it frees is not told"
    source = (
        "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: one more forward pass per block"
    )
    module: str = key("pattern for the modules, of which the outermost that fit are the blocks")
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Make the first backward work of each block longer by its forward work, on CPU and GPU."""
        blocks = blocks_of(graph, self.module)
        if blocks.filter("backward").is_empty():
            raise Unanswerable(f"no backward pass of {self.module!r} in the run has sequence numbers")
        nodes = graph.nodes
        at = blocks["node"].to_numpy()
        if (nodes.kind[at] == NodeKind.TRANSFER).any():
            raise Unanswerable(f"{self.module!r} communicates: whether that is repeated depends on the job")
        on_gpu = np.isin(nodes.kind[at], GPU_KINDS)
        rows = blocks.with_columns(
            on_gpu=pl.Series(on_gpu),
            works=pl.Series(on_gpu | np.isin(nodes.kind[at], CPU_KINDS)),
            ns=pl.Series(nodes.duration[at]),
            start=pl.Series(nodes.measured_start[at]),
        ).filter("works")
        forward = rows.filter(~pl.col("backward")).group_by("block", "on_gpu").agg(pl.col("ns").sum())
        begins = rows.filter("backward").sort("start", "node").unique(["block", "on_gpu"], keep="first")
        longer = begins.drop("ns").join(forward, on=["block", "on_gpu"])
        duration = nodes.duration.copy()
        np.add.at(duration, longer["node"].to_numpy(), longer["ns"].to_numpy())
        return graph.with_durations(duration)

    def describe(self) -> str:
        """What is changed."""
        return f"{self.module} is computed again in backward"

    def how(self) -> str:
        """How to do it."""
        return "torch.utils.checkpoint.checkpoint(block, …, use_reentrant=False) around each block"
