"""Larger batches, where there is memory for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.footprint import footprint_of
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.input import DATA_LOADING
from dpro.replay.whatif.memory import optimizing, refuse_operations
from dpro.replay.whatif.scale import scaled
from dpro.replay.whatif.select import Selection
from dpro.units import format_bytes

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
        "what a step allocates grows as much; all communication is of gradients or parameters"
    )
    source = (
        "ours: duration * factor of GPU work outside the optimizer (on CPUs of operators), an upper bound, "
        "since larger kernels use a GPU better"
    )
    factor: float = key("multiple of the batch", 2.0, least=1.0)
    memory_gb: float | None = key("free memory, 1e9 bytes, where the run does not tell", None, least=0.0)
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Scale work that depends on the batch, once memory is known to suffice."""
        refuse_operations(graph)
        footprint = footprint_of(graph.run)
        free = round(self.memory_gb * GB) if self.memory_gb is not None else footprint.free_bytes
        if free is None:
            raise Unanswerable(
                "the run does not tell how much memory there is: give what is free, memory_gb="
            )
        more = round((self.factor - 1) * footprint.within_step_bytes)
        if more > free:
            raise Unanswerable(
                f"a step would allocate {format_bytes(more)} more, and {format_bytes(free)} are free"
            )
        return with_larger_batch(graph, self.factor)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What a step is, and what it allocates."""
        within = footprint_of(graph.run).within_step_bytes
        return (
            f"a step has {self.factor:g} times the samples: divide by that to compare the time of one",
            f"a step allocates {format_bytes(within)} now, {format_bytes(within * self.factor)} then",
        )

    def describe(self) -> str:
        """What is changed."""
        return f"batches of {self.factor:g} times the size"

    def how(self) -> str:
        """How to do it."""
        return f"DataLoader(batch_size={self.factor:g} times as much); look after the learning rate"


def with_larger_batch(graph: Graph, factor: float) -> Graph:
    """The graph with all work that depends on the batch taking so many times as long."""
    kind = graph.nodes.kind
    on_device: NDArray[np.bool_] = np.isin(kind, GPU_KINDS)
    work = on_device if on_device.any() else kind == NodeKind.CPU
    reading = Selection(within=DATA_LOADING).mask(graph) & (kind != NodeKind.TRANSFER)
    return graph.with_durations(scaled(graph, (work & ~optimizing(graph)) | reading, factor))
