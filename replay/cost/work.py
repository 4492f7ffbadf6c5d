"""Work of a step: samples, tokens, operations of matmuls, and their share of the GPUs' peak.

Reads spans whose operators have shapes and the steps of deep windows, or calls of the model and their number
per step; returns samples and tokens per step of each rank, and model FLOPs utilisation, or raises the reason
why they are not known.

Element types of operators are not recorded, so only operators whose shapes identify their input count.
Indices [batch, sequence] of an embedding are tokens; of several embeddings, the one with the largest table is
the vocabulary's. Input [batch, channels, height, width] of a convolution with one or three channels is
images. A batch that was flattened before, or fused into other kernels, does not show its size.

By shapes, operations are those of matmuls and convolutions as executed (`roofline.matmul_of`): recomputation
counts, fused attention does not. By parameters they are six per weight and token: neither recomputation nor
attention counts. Otherwise the measure is that of Chowdhery et al., "PaLM: Scaling Language Modeling with
Pathways", 2022, appendix B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.roofline import MATMULS, gpu_named, matmul_of, model_named, stored_as
from dpro.replay.steps import device_steps

BACKWARD_CALLS = "step_backward_calls"
EMBEDDING, CONVOLUTION = "aten::embedding", "aten::convolution"
IMAGE_CHANNELS = (1, 3)
NO_SHAPES = "operators were recorded without their shapes (`dpro record --shapes`, or record_shapes=True)"
_NEEDED = "an embedding of [batch, sequence] or a convolution of images"
_INTEGERS = ("int64", "int32")


class InputCall(NamedTuple):
    """Input of one call: size of the operator's weight, samples, and tokens (0 of images)."""

    weight: int
    samples: int
    tokens: int


def find_inputs(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Count the samples and tokens of a step, by the shapes of operators.

    Args:
        stretches: the steps in deep windows, as from `dpro.replay.steps.recorded_steps`.

    Returns:
        `rank`, `samples` and `tokens` per step, Float64; tokens are 0 of images.

    Raises:
        Unanswerable: no shapes were recorded, or no operator identifies the input.
    """
    windows = stretches.group_by("rank", "window").agg(
        begin_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max(), steps=pl.len()
    )
    with_shapes = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("shapes") != ""))
    if with_shapes.is_empty():
        raise Unanswerable(NO_SHAPES)
    counted = (
        with_shapes.filter(pl.col("name").is_in([EMBEDDING, CONVOLUTION]))
        .join(windows, on=["rank", "window"])
        .filter(pl.col("start_ns").is_between("begin_ns", "last_ns", closed="left"))
        .group_by("rank", "name", "shapes")
        .len()
        .sort("rank", "name", "shapes")
    )
    calls = [
        (rank, call, count)
        for rank, name, shapes, count in counted.iter_rows()
        for call in _input_call(name, shapes)
    ]
    if not calls:
        raise Unanswerable(
            f"no shape identifies the input: there is neither {_NEEDED.replace(' or ', ' nor ')}"
        )
    texts = [call for call in calls if call[1].tokens]
    chosen = texts or calls
    largest = max(call.weight for _, call, _ in chosen)
    if not texts and len({call.weight for _, call, _ in chosen}) > 1:
        raise Unanswerable("several convolutions take images: which one takes the batch is not known")
    steps = dict(windows.group_by("rank").agg(pl.col("steps").sum()).iter_rows())
    rows = [
        (rank, call.samples * count / steps[rank], call.tokens * count / steps[rank])
        for rank, call, count in chosen
        if call.weight == largest
    ]
    frame = pl.DataFrame(
        rows, schema={"rank": pl.Int64, "samples": pl.Float64, "tokens": pl.Float64}, orient="row"
    )
    return frame.group_by("rank").sum().sort("rank")


def inputs_of_calls(calls: pl.DataFrame, counters: pl.DataFrame) -> pl.DataFrame:
    """Count the samples and tokens of a step: the mean call of the model, times the backward calls of a step.

    Args:
        calls: table `model_calls`.

    Returns:
        As `find_inputs`.

    Raises:
        Unanswerable: no call was recorded, several models are called, or a call does not identify its input.
    """
    models = calls.filter(pl.col("parameters") != 0)  # a loss is a module, too
    if models.is_empty():
        raise Unanswerable("no call of a model in training was recorded")
    if models.group_by("rank").agg(pl.col("model").n_unique())["model"].max() != 1:
        raise Unanswerable("several models are trained: which of them takes the step's input is not known")
    times = (
        counters.filter((pl.col("counter") == BACKWARD_CALLS) & (pl.col("value") > 0))
        .group_by("rank")
        .agg(times=pl.col("value").median())
    )
    if models.join(times, on="rank", how="anti").height:
        raise Unanswerable("how often the model is called in a step was not recorded")
    given = models["rank", "shapes", "dtypes"].iter_rows()
    sizes = [(rank, *_input_size(shapes, dtypes)) for rank, shapes, dtypes in given]
    columns: dict[str, pl.DataType | type[pl.DataType]]
    columns = {"rank": models.schema["rank"], "samples": pl.Float64, "tokens": pl.Float64}
    mean = pl.DataFrame(sizes, schema=columns, orient="row").group_by("rank").mean().join(times, on="rank")
    per_step = [pl.col(name) * pl.col("times") for name in ("samples", "tokens")]
    return mean.select(pl.col("rank").cast(pl.Int64), *per_step).sort("rank")


def _input_size(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> tuple[int, int]:
    """Return samples and tokens (0 without text) of one call of a model.

    Raises:
        Unanswerable: its tensors do not show them.
    """
    tensors = list(zip(map(tuple, shapes), dtypes))
    texts = {shape for shape, dtype in tensors if len(shape) == 2 and dtype in _INTEGERS}
    images = {
        shape
        for shape, dtype in tensors
        if len(shape) == 4 and shape[1] in IMAGE_CHANNELS and dtype not in _INTEGERS
    }
    if len(texts) == 1 and not any(shape[1] == max(IMAGE_CHANNELS) for shape in images):
        ((batch, sequence),) = texts
        return batch, batch * sequence
    if not texts and len(images) == 1:
        return next(iter(images))[0], 0
    if not texts and tensors and len(tensors[0][0]) == 2 and "float" in tensors[0][1]:
        return tensors[0][0][0], 0
    shown = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors) or "none"
    raise Unanswerable(
        f"the model takes neither one [batch, sequence] of tokens, nor images, nor [batch, features]: {shown}"
    )


def _input_call(name: str, shapes: str) -> Iterator[InputCall]:
    """Yield the input of an operator, if its shapes identify it."""
    try:
        read = json.loads(shapes)
    except ValueError:
        return
    lists = [value if isinstance(value, list) else [] for value in read] if isinstance(read, list) else []
    of_integers = [sizes if all(isinstance(size, int) for size in sizes) else [] for sizes in lists]
    first, second = [*of_integers, [], []][:2]
    if name == EMBEDDING and len(first) == 2 and len(second) == 2:
        batch, sequence = second
        if batch * sequence > 0:
            yield InputCall(first[0], batch, batch * sequence)
    elif (
        name == CONVOLUTION and len(first) == len(second) == 4 and first[1] in IMAGE_CHANNELS and first[0] > 0
    ):
        yield InputCall(second[0] * second[1] * second[2] * second[3], first[0], 0)


SHAPES, PARAMETERS = "shapes", "parameters"  # bases by which operations are counted
MAX_CONVOLUTIONS = 0.01  # of the weights: a weight of a convolution is used at many positions of an image
_MATMUL_KERNELS = r"(?i)gemm|nvjet|cutlass|Cijk|xmma|wgrad|dgrad|conv|matmul"


class Mfu(NamedTuple):
    """Model FLOPs utilisation of a run.

    Attributes:
        share: of the peak, 0 to 1.
        operations: floating-point operations of matmuls of one rank in one step, the mean.
        dtype: element type of most of the time in matmuls.
        peak_tflops: of one GPU at that precision, dense, 1e12 operations per second.
        gpu: the model.
        basis: of the operations: `shapes` of operators, or `parameters` of the model.
    """

    share: float
    operations: float
    dtype: str
    peak_tflops: float
    gpu: str
    basis: str = SHAPES

    def within(self, step_ns: float) -> Mfu:
        """Return the utilisation in a step of another length, such as one not slowed by recording."""
        return self._replace(share=self.operations / (step_ns * self.peak_tflops * 1e3))


def find_mfu(
    spans: pl.DataFrame, stretches: pl.DataFrame, gpus: Sequence[str], by_parameters: float = 0.0
) -> Mfu:
    """Compute the utilisation over the steps of deep windows.

    Args:
        stretches: the steps in deep windows, as from `dpro.replay.steps.recorded_steps`.
        by_parameters: operations of one rank in one step as from `operations_of_calls`, 0 where not known;
            used where no matmul has shapes.

    Raises:
        Unanswerable: the operations, the GPUs or the precision are not known.
    """
    gpu = gpu_named(gpus)
    kernels = spans.filter((pl.col("kind") == "kernel") & pl.col("name").str.contains(_MATMUL_KERNELS))
    times: dict[str, int] = {}
    for name, ns in kernels.group_by("name").agg(pl.col("duration_ns").sum()).iter_rows():
        dtype = stored_as(name)
        times[dtype] = times.get(dtype, 0) + ns
    known_types = {dtype: ns for dtype, ns in times.items() if dtype in gpu.tflops}
    if not known_types:
        raise Unanswerable("the precision of its matmuls is not in the names of its kernels")
    dtype = max(known_types, key=lambda dtype: (known_types[dtype], dtype))
    operations, basis = _operations(spans, stretches) / max(stretches.height, 1), SHAPES
    if operations <= 0:
        operations, basis = by_parameters, PARAMETERS
    if operations <= 0:
        raise Unanswerable(NO_SHAPES)
    took = device_steps(spans, stretches)
    mean_ns = float((took["end_ns"] - took["start_ns"]).sum()) / took.height
    share = operations / (mean_ns * gpu.tflops[dtype] * 1e3)  # 1e12 operations per second are 1e3 per ns
    return Mfu(share, operations, dtype, gpu.tflops[dtype], model_named(gpus[0]), basis)


def operations_of_calls(calls: pl.DataFrame, counters: pl.DataFrame) -> float:
    """Estimate the operations of one rank in one step from the parameters of its model; the mean over ranks.

    Each weight is multiplied with each token, or sample where there are no tokens: 2 operations forward, 2
    for the gradient of the input, and 2 for that of a weight that is trained (Kaplan et al., "Scaling Laws
    for Neural Language Models", 2020, section 2.1). Embeddings, attention scores and recomputation are left
    out.

    Args:
        calls: table `model_calls`.

    Raises:
        Unanswerable: the input is not known, or not every weight is multiplied with every token.
    """
    inputs = inputs_of_calls(calls, counters)
    models = (
        calls.filter(pl.col("parameters") != 0).unique("rank").with_columns(pl.col("rank").cast(pl.Int64))
    )
    if models["experts"].any():
        raise Unanswerable("it has expert modules: the number of tokens through each is not known")
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
