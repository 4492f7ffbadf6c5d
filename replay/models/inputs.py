"""How many samples and tokens a step works on, by the shapes of the model's input.

In: spans whose operators have shapes, and the steps of deep windows; or calls of the model, and how often it
is called in a step. Out: samples and tokens per step of each rank, or why they are not known.

Element types of operators are not recorded, so only those count whose input says by itself what it is.
Indices [batch, sequence] of an embedding are tokens; of several embeddings that with the largest table is the
vocabulary's. Input [batch, channels, height, width] of a convolution with one or three channels is images. A
batch that was flattened before, or fused into other kernels, does not say its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import polars as pl

from dpro.errors import Unanswerable

BACKWARD_CALLS = "step_backward_calls"
EMBEDDING, CONVOLUTION = "aten::embedding", "aten::convolution"
IMAGE_CHANNELS = (1, 3)
_NEEDED = "an embedding of [batch, sequence] or a convolution of images"
_INTEGERS = ("int64", "int32")


class InputCall(NamedTuple):
    """One input of the model: the size of the operator's weight, samples, and tokens (0 of images)."""

    weight: int
    samples: int
    tokens: int


def find_inputs(spans: pl.DataFrame, stretches: pl.DataFrame) -> pl.DataFrame:
    """Count what a step works on.

    Args:
        spans: table `spans`.
        stretches: the steps in deep windows, as from `dpro.replay.steps.breakdown.recorded_steps`.

    Returns:
        `rank`, `samples` and `tokens` per step, Float64; tokens are 0 of images.

    Raises:
        Unanswerable: no shapes were recorded, or no operator says what the input is.
    """
    windows = stretches.group_by("rank", "window").agg(
        begin_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max(), steps=pl.len()
    )
    with_shapes = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("shapes") != ""))
    if with_shapes.is_empty():
        raise Unanswerable("no shapes: record operators with their shapes (record_shapes=True)")
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
        for call in _call(name, shapes)
    ]
    if not calls:
        raise Unanswerable(f"the shapes show neither {_NEEDED.replace(' or ', ' nor ')}")
    texts = [each for each in calls if each[1].tokens]
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
    """Count what a step works on: the mean call of the model, once for each backward call of a step.

    Args:
        calls: table `model_calls`.
        counters: table `counters`.

    Returns:
        As `find_inputs`.

    Raises:
        Unanswerable: no call was met, several models are called, or a call does not say what the input is.
    """
    models = calls.filter(pl.col("parameters") != 0)  # a loss is a module, too
    if models.is_empty():
        raise Unanswerable("no call of a model in training was met")
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
    sizes = [(rank, *_size(shapes, dtypes)) for rank, shapes, dtypes in given]
    columns: dict[str, pl.DataType | type[pl.DataType]]
    columns = {"rank": models.schema["rank"], "samples": pl.Float64, "tokens": pl.Float64}
    mean = pl.DataFrame(sizes, schema=columns, orient="row").group_by("rank").mean().join(times, on="rank")
    per_step = [pl.col(name) * pl.col("times") for name in ("samples", "tokens")]
    return mean.select(pl.col("rank").cast(pl.Int64), *per_step).sort("rank")


def _size(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> tuple[int, int]:
    """Samples and tokens (0 of what is no text) that a model is given in one call.

    Raises:
        Unanswerable: its tensors do not say it.
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
    found = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors) or "none"
    raise Unanswerable(
        f"the model takes neither one [batch, sequence] of tokens, nor images, nor [batch, features]: {found}"
    )


def _call(name: str, shapes: str) -> Iterator[InputCall]:
    """Yield the input that an operator takes, if it says what it is."""
    first, second = [*_sizes(shapes), [], []][:2]
    if name == EMBEDDING and len(first) == 2 and len(second) == 2:
        batch, sequence = second
        if batch * sequence > 0:
            yield InputCall(first[0], batch, batch * sequence)
    elif (
        name == CONVOLUTION and len(first) == len(second) == 4 and first[1] in IMAGE_CHANNELS and first[0] > 0
    ):
        yield InputCall(second[0] * second[1] * second[2] * second[3], first[0], 0)


def _sizes(shapes: str) -> Sequence[list[int]]:
    try:
        read = json.loads(shapes)
    except ValueError:
        return []
    known = [each if isinstance(each, list) else [] for each in read] if isinstance(read, list) else []
    return [each if all(isinstance(size, int) for size in each) else [] for each in known]
