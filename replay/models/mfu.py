"""Model FLOPs utilisation: operations of matmuls per second, as a share of what the GPUs can do.

In: spans, and the time of their steps; calls of the model where operators have no shapes. Out: the share,
with the precision and the peak that it is of; or why it is not known. By shapes, operations are those of
matmuls and convolutions as executed (`roofline.matmul_of`): recomputed ones count, fused attention does not.
By parameters they are six per weight and token: neither recomputation nor attention counts. The measure is
that of Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, but for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.models.inputs import inputs_of_calls
from dpro.replay.models.roofline import MATMULS, gpu_named, matmul_of, model_named, stored_as

SHAPES, PARAMETERS = "shapes", "parameters"  # what operations are counted by
MAX_CONVOLUTIONS = 0.01  # of the weights: each of theirs works on many places of an image
_MATMUL_KERNELS = r"(?i)gemm|nvjet|cutlass|Cijk|xmma|wgrad|dgrad|conv|matmul"


class Mfu(NamedTuple):
    """What share of its peak a run reaches.

    Attributes:
        share: of the peak.
        operations: floating-point operations of matmuls of one rank in one step, the mean.
        dtype: element type in which most of the time of matmuls is spent.
        peak_tflops: of one GPU at that precision, dense, 1e12 operations per second.
        gpu: the model.
        basis: what the operations are counted by: `shapes` of operators, or `parameters` of the model.
    """

    share: float
    operations: float
    dtype: str
    peak_tflops: float
    gpu: str
    basis: str = SHAPES


def find_mfu(
    spans: pl.DataFrame, stretches: pl.DataFrame, gpus: Sequence[str], by_parameters: float = 0.0
) -> Mfu:
    """Compute the utilisation over the steps of deep windows.

    Args:
        spans: table `spans`.
        stretches: the steps in deep windows, as from `dpro.replay.steps.breakdown.recorded_steps`.
        gpus: names of the run's GPUs.
        by_parameters: operations of one rank in one step as from `operations_of_calls`, 0 where not known:
            taken where no matmul has shapes.

    Raises:
        Unanswerable: operations are not known, or the GPUs or the precision are not known.
    """
    gpu = gpu_named(gpus)
    dtype = _precision(spans, gpu.tflops)
    operations, basis = _operations(spans, stretches) / max(stretches.height, 1), SHAPES
    if operations <= 0:
        operations, basis = by_parameters, PARAMETERS
    if operations <= 0:
        raise Unanswerable("no shapes: record operators with their shapes (record_shapes=True)")
    mean_ns = float((stretches["end_ns"] - stretches["start_ns"]).sum()) / stretches.height
    share = operations / (mean_ns * gpu.tflops[dtype] * 1e3)  # 1e12 operations per second are 1e3 per ns
    return Mfu(share, operations, dtype, gpu.tflops[dtype], model_named(gpus[0]), basis)


def operations_of_calls(calls: pl.DataFrame, counters: pl.DataFrame) -> float:
    """Estimate the operations of one rank in one step by the parameters of its model; the mean of ranks.

    Each weight is multiplied with each token, or sample where there are no tokens: 2 operations forward, 2
    for the gradient of the input, and 2 for that of a weight that is trained (Kaplan et al., "Scaling Laws
    for Neural Language Models", 2020, section 2.1). Embeddings, attention scores and recomputation are left
    out.

    Args:
        calls: table `model_calls`.
        counters: table `counters`.

    Raises:
        Unanswerable: the input is not known, or not each weight is multiplied with each token.
    """
    inputs = inputs_of_calls(calls, counters)
    models = (
        calls.filter(pl.col("parameters") != 0).unique("rank").with_columns(pl.col("rank").cast(pl.Int64))
    )
    if models["experts"].any():
        raise Unanswerable("its modules are experts: how many tokens go through each is not known")
    if (models["tensors"] > MAX_CONVOLUTIONS * models["matrices"]).any():
        raise Unanswerable("it has convolutions, or weights of more than two dimensions")
    if (models["parameters"] < 0).any() or (models["matrices"] <= 0).any():
        raise Unanswerable("the sizes of its weights are not known")
    rows = pl.when(pl.col("tokens") > 0).then("tokens").otherwise("samples")
    per_row = 4 * pl.col("matrices") + 2 * pl.col("trained_matrices")
    return float(models.join(inputs, on="rank").select((per_row * rows).mean()).item())


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
