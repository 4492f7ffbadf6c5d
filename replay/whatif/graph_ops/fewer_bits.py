"""Matmuls with fewer bits by a roofline: what their arithmetic or their bytes take then, and their casts.

In: a graph with shapes of operators, and a dtype. Out: new times of kernels. `dpro.replay.devices` says it by
what was measured of devices.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.models.gpus import GpuModel, gpu_named
from dpro.replay.models.roofline import BYTES, MATMULS, Matmul, matmul_of, stored_as
from dpro.replay.whatif.graph_ops.scope import operators_of_kernels


def by_roofline(graph: Graph, kernels: Bools, dtype: str) -> tuple[Ints, Floats, NDArray[np.str_]]:
    """Kernels of matmuls that have more bits, their new times in ns, and what limits each now.

    Args:
        graph: the graph, with its run.
        kernels: [N] those that may change.
        dtype: a key of `BYTES`.

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
    asks = {each: matmul_of(*each) for each in kernels_of.select("name", "shapes").unique().iter_rows()}
    for name, shapes, backward, at in kernels_of.select("name", "shapes", "backward", "node").iter_rows():
        asked = asks[name, shapes]
        if asked is not None:
            found += _cast(graph, np.array(at, np.int64), asked, gpu, dtype, backward)
    if not found:
        raise Unanswerable(f"no matmul in the run has more bits than {dtype}, by the names of its kernels")
    nodes, new, limits = zip(*found)
    return np.array(nodes, np.int64), np.array(new), np.array(limits)


def _cast(
    graph: Graph, at: Ints, asked: Matmul, gpu: GpuModel, dtype: str, backward: bool
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
    cast = (asked.written if backward else asked.read) * cast_bytes(stored, dtype) / gpu.gbps
    new = own * ratio
    new[own.argmax()] += cast
    return [(int(node), float(time), "compute" if bound else "memory") for node, time in zip(at, new)]


def cast_bytes(stored: str, dtype: str) -> int:
    """Bytes moved to cast an element: read, written; for fp8 also read once more for its scale.

    Args:
        stored, dtype: before and after, keys of `BYTES`.
    """
    return BYTES[stored] + BYTES[dtype] + (BYTES[stored] if dtype == "fp8" else 0)


def _gpu_of(graph: Graph) -> GpuModel:
    return gpu_named(graph.run.manifest.gpus if graph.run is not None else [])
