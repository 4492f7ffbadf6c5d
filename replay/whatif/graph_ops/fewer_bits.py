"""Matmuls with fewer bits by a roofline: new times from arithmetic or bytes, and from casts.

Takes a graph with shapes of operators, and a dtype; returns new times of kernels. `dpro.replay.cost.kernels`
estimates them from measurements of devices instead.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.recorders import SHAPES, how_to_record
from dpro.replay.cost.kernels.roofline import BYTES, GpuModel, gpu_named, matmul_of, stored_as
from dpro.replay.graph import Graph, once
from dpro.replay.whatif.graph_ops.scope import matmuls_of_kernels


def by_roofline(graph: Graph, kernels: Bools, dtype: str) -> tuple[Ints, Floats, NDArray[np.str_]]:
    """Return the kernels of matmuls with more bits, their new times in ns, and what limits each now.

    Args:
        kernels: [N] those that may change.
        dtype: a key of `BYTES`.

    Raises:
        Unanswerable: no matmul has shapes, all have as few bits already, or the GPU is not known.
    """
    matmuls = _matmuls_of(graph, kernels)
    if not any(shapes for _, shapes, _ in matmuls.kinds):
        how = how_to_record(SHAPES, graph.run)
        raise Unanswerable(f"no matmul with shapes in the run: record with {how}; or give speedup=")
    gpu = gpu_named(graph.run.manifest.gpus if graph.run is not None else [])
    if dtype not in gpu.tflops:
        raise Unanswerable(f"the run's GPU does not multiply in {dtype}")
    node, begins, sizes = matmuls.node, matmuls.begins, matmuls.sizes
    now = graph.nodes.duration[node]
    is_longest = np.flatnonzero(now == np.repeat(np.maximum.reduceat(now, begins), sizes))
    longest = is_longest[np.searchsorted(is_longest, begins)]  # the first longest kernel of each operator
    num_names = len(graph.names)
    kinds, of_kind = np.unique(
        matmuls.kind * num_names + graph.nodes.name[node[longest]], return_inverse=True
    )
    pairs = [divmod(kind, num_names) for kind in kinds.tolist()]
    casts = [_cast(matmuls.kinds[kind], graph.names[name], gpu, dtype) for kind, name in pairs]
    can_be_cast = np.array([cast is not None for cast in casts], np.bool_)
    if not can_be_cast.any():
        raise Unanswerable(f"no matmul in the run has more bits than {dtype}, by the names of its kernels")
    figures = np.array([(*cast,) if cast is not None else (np.nan,) * 5 for cast in casts])
    least, computing, fewer, by_bytes, cast_ns = figures[of_kind].T
    by_arithmetic = np.add.reduceat(now, begins) >= least
    ratio = np.where(by_arithmetic, fewer, by_bytes)
    limits = np.where(by_arithmetic & (computing >= least), "compute", "memory")
    then = now * np.repeat(ratio, sizes)
    then[longest] += cast_ns
    changed = np.repeat(can_be_cast[of_kind], sizes)
    return node[changed], then[changed], np.repeat(limits, sizes)[changed]


class _Matmuls(NamedTuple):
    """Kernels of matmuls, grouped by operator.

    Attributes:
        node: [K] the kernels.
        begins, sizes: [O] first kernel and number of kernels of each operator.
        kind: [O] index of each operator in `kinds`.
        kinds: operator, shapes, and whether it is of a backward pass.
    """

    node: Ints
    begins: Ints
    sizes: Ints
    kind: Ints
    kinds: list[tuple[str, str, bool]]


def _matmuls_of(graph: Graph, kernels: Bools) -> _Matmuls:
    """Return the kernels of matmuls among `kernels`, grouped by operator."""

    def compute(graph: Graph) -> _Matmuls:
        operators = matmuls_of_kernels(graph, kernels)
        by = ["rank", "span_id", "name", "shapes", "backward"]
        matmuls = operators.group_by(by, maintain_order=True).agg(pl.col("node"))
        sizes = matmuls["node"].list.len().to_numpy().astype(np.int64)
        rows = matmuls.select("name", "shapes", "backward").rows()
        number = {kind: index for index, kind in enumerate(dict.fromkeys(rows))}
        kind = np.array([number[row] for row in rows], np.int64)
        node = matmuls["node"].explode().to_numpy()
        return _Matmuls(node, np.cumsum(sizes) - sizes, sizes, kind, list(number))

    chosen = blake2b(np.packbits(kernels).tobytes()).digest()
    return once(graph, ("matmuls of kernels", chosen), compute)


class _Cast(NamedTuple):
    """Effect of fewer bits on the kernels of a matmul.

    Attributes:
        least_ns, compute_ns: lower bounds of its present time, and of the time of its arithmetic.
        fewer, by_bytes: ratio of its times where arithmetic or bytes limit it, and where it is only known to
            move bytes: a convolution may do less than its shapes say, by its stride.
        cast_ns: time that the cast adds to its longest kernel.
    """

    least_ns: float
    compute_ns: float
    fewer: float
    by_bytes: float
    cast_ns: float


def _cast(of: tuple[str, str, bool], kernel: str, gpu: GpuModel, dtype: str) -> _Cast | None:
    """Return the effect on a matmul (operator, shapes, whether backward), given its longest kernel.

    None where it is not a matmul, or has as few bits already.
    """
    name, shapes, backward = of
    asked, stored = matmul_of(name, shapes), stored_as(kernel)
    if asked is None or stored not in gpu.tflops or BYTES[stored] <= BYTES[dtype]:
        return None
    least_ns = asked.least_ns(gpu, stored)
    moved = (asked.written if backward else asked.read) * cast_bytes(stored, dtype)
    return _Cast(
        least_ns,
        asked.compute_ns(gpu, stored),
        asked.least_ns(gpu, dtype) / least_ns,
        BYTES[dtype] / BYTES[stored],
        moved / gpu.gbps,
    )


def cast_bytes(stored: str, dtype: str) -> int:
    """Return the bytes moved to cast an element: read, written; for fp8 also read once more for its scale.

    Args:
        stored, dtype: before and after, keys of `BYTES`.
    """
    return BYTES[stored] + BYTES[dtype] + (BYTES[stored] if dtype == "fp8" else 0)
