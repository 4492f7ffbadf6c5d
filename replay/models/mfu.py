"""Model FLOPs utilisation: operations of matmuls per second, as a share of what the GPUs can do.

In: spans whose operators have shapes, and the time of their steps. Out: the share, with the precision and the
peak that it is of; or why it is not known. Operations are those of matmuls and convolutions as executed
(`roofline.matmul_of`): recomputed ones count, fused attention does not. The measure is that of Chowdhery et
al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, but for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.models.gpus import gpu_named, model_named
from dpro.replay.models.roofline import MATMULS, matmul_of, stored_as

_MATMUL_KERNELS = r"(?i)gemm|nvjet|cutlass|Cijk|xmma|wgrad|dgrad|conv|matmul"


class Mfu(NamedTuple):
    """What share of its peak a run reaches.

    Attributes:
        share: of the peak.
        operations: floating-point operations of matmuls of one rank in one step, the mean.
        dtype: element type in which most of the time of matmuls is spent.
        peak_tflops: of one GPU at that precision, dense, 1e12 operations per second.
        gpu: the model.
    """

    share: float
    operations: float
    dtype: str
    peak_tflops: float
    gpu: str


def find_mfu(spans: pl.DataFrame, stretches: pl.DataFrame, gpus: Sequence[str]) -> Mfu:
    """Compute the utilisation over the steps of deep windows.

    Args:
        spans: table `spans`.
        stretches: the steps in deep windows, as from `dpro.replay.steps.breakdown.recorded_steps`.
        gpus: names of the run's GPUs.

    Raises:
        Unanswerable: no matmul has shapes, or the GPUs or the precision are not known.
    """
    gpu = gpu_named(gpus)
    dtype = _precision(spans, gpu.tflops)
    operations = _operations(spans, stretches)
    if operations <= 0:
        raise Unanswerable("no shapes: record operators with their shapes (record_shapes=True)")
    total_ns = float((stretches["end_ns"] - stretches["start_ns"]).sum())
    share = operations / (total_ns * gpu.tflops[dtype] * 1e3)  # 1e12 operations per second are 1e3 per ns
    return Mfu(share, operations / stretches.height, dtype, gpu.tflops[dtype], model_named(gpus[0]))


def _operations(spans: pl.DataFrame, stretches: pl.DataFrame) -> float:
    """Return the operations of all matmuls that begin within steps."""
    windows = stretches.group_by("rank", "window").agg(
        begin_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max()
    )
    matmuls = spans.filter(
        (pl.col("kind") == "cpu_op") & pl.col("name").is_in(MATMULS) & (pl.col("shapes") != "")
    )
    inside = matmuls.join(windows, on=["rank", "window"]).filter(
        pl.col("start_ns").is_between("begin_ns", "last_ns", closed="left")
    )
    counted = inside.group_by("name", "shapes").len()
    asked = ((matmul_of(name, shapes), count) for name, shapes, count in counted.iter_rows())
    return float(sum(matmul.operations * count for matmul, count in asked if matmul is not None))


def _precision(spans: pl.DataFrame, known: Collection[str]) -> str:
    """Return the element type that matmul kernels spend most of their time on, by their names.

    Raises:
        Unanswerable: no name of a kernel says it.
    """
    kernels = spans.filter((pl.col("kind") == "kernel") & pl.col("name").str.contains(_MATMUL_KERNELS))
    times: dict[str, int] = {}
    for name, ns in kernels.group_by("name").agg(pl.col("duration_ns").sum()).iter_rows():
        dtype = stored_as(name)
        times[dtype] = times.get(dtype, 0) + ns
    known_types = {dtype: ns for dtype, ns in times.items() if dtype in known}
    if not known_types:
        raise Unanswerable("the precision of its matmuls is not in the names of its kernels")
    return max(known_types, key=lambda dtype: (known_types[dtype], dtype))
