"""Compute with fewer bits: autocast to bf16 or fp16, fp8 for matmuls.

A matmul that the GPU's arithmetic limits gains by the ratio of the peaks; one that its memory limits, by the
bytes; both keep the share of the limit that they reached. Casts come on top, and pointwise kernels between
matmuls move fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.replay.gpus import Gpu, gpu_named
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key
from dpro.replay.whatif.fusion import OPTIMIZER, is_pointwise
from dpro.replay.whatif.inside import inside_modules, operators_of_kernels
from dpro.replay.whatif.roofline import BYTES, MATMULS, Matmul, matmul_of, stored_as
from dpro.replay.whatif.select import Selection

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COMPUTES = ("gemm", "convolution", "attention")


@dataclass(frozen=True)
class Precision(Edit):
    """Matmuls and what is between them compute with fewer bits."""

    name = "precision"
    summary = "autocast to bf16 or fp16, or fp8 matmuls"
    example = "precision:dtype=bf16"
    needs = "GPU kernels, operators with shapes (`--shapes`), and a GPU that is known; or speedup="
    assumes = (
        "matmuls reach the same share of their limit, each forward one casts both operands and each backward "
        "one its result, pointwise kernels on floats move half the bytes, and the rest stays in fp32"
    )
    source = "roofline (Williams et al., CACM 2009) with the makers' peaks; casts move old and new bytes"
    selection: Selection
    dtype: str = key("of matmuls", "bf16", choices=("bf16", "fp16", "fp8"))
    speedup: float | None = key("of matmuls, instead of a roofline", None, least=1 / MOST_TIMES)
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Scale the kernels of matmuls by their roofline, and pointwise kernels by their bytes."""
        kernels, computing = self._chosen(graph)
        duration = graph.nodes.duration.astype(np.float64)
        if self.speedup is None:
            nodes, new, _ = _by_roofline(graph, kernels, self.dtype)
            duration[nodes] = new
        else:
            duration[computing] /= self.speedup
        if self.dtype != "fp8":
            duration[kernels & _pointwise_floats(graph)] *= BYTES[self.dtype] / BYTES["fp32"]
        return graph.with_durations(np.rint(duration).astype(np.int64))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Which matmuls the arithmetic limits, and which the memory."""
        kernels, _ = self._chosen(graph)
        halved = int((kernels & _pointwise_floats(graph)).sum()) if self.dtype != "fp8" else 0
        lines = [f"{halved} pointwise kernels on floats move half the bytes"] if halved else []
        if self.speedup is None:
            nodes, _, limits = _by_roofline(graph, kernels, self.dtype)
            total = graph.nodes.duration[nodes].sum()
            for limit in ("compute", "memory"):
                of = limits == limit
                share = graph.nodes.duration[nodes[of]].sum() / max(total, 1)
                lines.append(f"{of.sum()} kernels of matmuls, {share:.0%} of their time, are {limit}-bound")
        return tuple(lines)

    def _chosen(self, graph: Graph) -> tuple[Bools, Bools]:
        """[N] the selected kernels, and which of them are matmuls with more bits.

        Raises:
            Unanswerable: there is none.
        """
        kernels = self.selection.mask(graph) & (graph.nodes.kind == NodeKind.KERNEL)
        if not kernels.any():
            raise Unanswerable("no such GPU kernel in the run: nothing is known of the precision of CPUs")
        matmuls = kernels & _matmuls(graph)
        if not matmuls.any():
            raise Unanswerable(
                "none of these kernels is a matmul, a convolution or attention by its name: fewer bits "
                "change nothing that is known of the others"
            )
        computing = matmuls & _more_bits(graph, self.dtype)
        if self.speedup is not None and not computing.any():
            raise Unanswerable(
                f"no matmul in the run has more bits than {self.dtype}, by the names of its kernels"
            )
        return kernels, computing

    def describe(self) -> str:
        """What is changed."""
        return f"{'matmuls in fp8' if self.dtype == 'fp8' else 'autocast to ' + self.dtype}"

    def how(self) -> str:
        """How to do it."""
        if self.dtype == "fp8":
            return "torchao.float8.convert_to_float8_training(model), or Transformer Engine's fp8_autocast"
        scaler = " and torch.amp.GradScaler" if self.dtype == "fp16" else ""
        kind = "bfloat16" if self.dtype == "bf16" else "float16"
        return f"with torch.autocast('cuda', dtype=torch.{kind}) around forward and loss{scaler}"


def _by_roofline(graph: Graph, kernels: Bools, dtype: str) -> tuple[Ints, Floats, NDArray[np.str_]]:
    """Kernels of matmuls that have more bits, their new times in ns, and what limits each now.

    Raises:
        Unanswerable: no matmul has shapes, all have as few bits already, or the GPU is not known.
    """
    operators = operators_of_kernels(graph, kernels, MATMULS)
    if operators.filter(pl.col("shapes") != "").is_empty():
        raise Unanswerable("no matmul with shapes in the run: record with --shapes, or give speedup=")
    gpu = _gpu_of(graph)
    if dtype not in gpu.tflops:
        raise Unanswerable(f"the run's GPU does not multiply in {dtype}")
    found: list[tuple[int, float, str]] = []
    by = ["rank", "span_id", "name", "shapes", "backward"]
    kernels_of = operators.group_by(by, maintain_order=True).agg(pl.col("node"))
    asks = {told: matmul_of(*told) for told in kernels_of.select("name", "shapes").unique().iter_rows()}
    for name, shapes, backward, at in kernels_of.select("name", "shapes", "backward", "node").iter_rows():
        asked = asks[name, shapes]
        if asked is not None:
            found += _cast(graph, np.array(at, np.int64), asked, gpu, dtype, backward)
    if not found:
        raise Unanswerable(f"no matmul in the run has more bits than {dtype}, by the names of its kernels")
    nodes, new, limits = zip(*found)
    return np.array(nodes, np.int64), np.array(new), np.array(limits)


def _cast(
    graph: Graph, at: Ints, asked: Matmul, gpu: Gpu, dtype: str, backward: bool
) -> list[tuple[int, float, str]]:
    """For each kernel of one matmul its node, its time with the cast, and what limits it; none if it has the
    bits already. The cast is added to the longest.
    """
    own = graph.nodes.duration[at]
    stored = stored_as(graph.names[graph.nodes.name[at[own.argmax()]]])
    if stored not in gpu.tflops or BYTES[stored] <= BYTES[dtype]:
        return []
    # A convolution may do less than its shapes say, by its stride: then only that it moves bytes is known.
    arithmetic = own.sum() >= asked.least_ns(gpu, stored)
    bound = arithmetic and asked.compute_ns(gpu, stored) >= asked.least_ns(gpu, stored)
    fewer = asked.least_ns(gpu, dtype) / asked.least_ns(gpu, stored)
    ratio = fewer if arithmetic else BYTES[dtype] / BYTES[stored]
    cast = (asked.written if backward else asked.read) * _cast_bytes(stored, dtype) / gpu.gbps
    new = own * ratio
    new[own.argmax()] += cast
    return [(int(node), float(time), "compute" if bound else "memory") for node, time in zip(at, new)]


def _cast_bytes(stored: str, dtype: str) -> int:
    """Bytes moved to cast an element: read, written; for fp8 also read once more for its scale."""
    return BYTES[stored] + BYTES[dtype] + (BYTES[stored] if dtype == "fp8" else 0)


def _gpu_of(graph: Graph) -> Gpu:
    return gpu_named(graph.run.manifest.gpus if graph.run is not None else [])


def _matmuls(graph: Graph) -> Bools:
    """[N] kernels of matmuls, convolutions and attention, by their names."""
    found: Bools = np.array([classify(name).kind in COMPUTES for name in graph.names], np.bool_)
    return found[graph.nodes.name]


def _more_bits(graph: Graph, dtype: str) -> Bools:
    """[N] kernels that read more bits than these, by their names."""
    found: Bools = np.array([BYTES.get(stored_as(name), 0) > BYTES[dtype] for name in graph.names], np.bool_)
    return found[graph.nodes.name]


def _pointwise_floats(graph: Graph) -> Bools:
    """[N] pointwise kernels on 32-bit floats but those of the optimizer: parameters stay as they are."""
    fits = np.array([is_pointwise(name) and stored_as(name) == "fp32" for name in graph.names], np.bool_)
    mask: Bools = fits[graph.nodes.name] & (graph.nodes.kind == NodeKind.KERNEL)
    try:
        return mask & ~inside_modules(graph, f"{OPTIMIZER}*")
    except Unanswerable:
        return mask
