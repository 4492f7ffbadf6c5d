"""A codec for each bucket of gradients, so that the last one is reduced first within a budget of errors.

In: how a graph reduces its gradients, and what a probe measured of each codec on the job's own (table
`codecs` of the run). Out: a codec for each bucket, or none. The error is what codecs lose of all gradients of
a step, relative to them; the choice is an integer program over when gradients are ready, what compressing
takes as measured, and what the link takes for what is left (Espresso, Wang et al., EuroSys 2023; L-GreCo,
Markov et al., MLSys 2024). Codecs that keep what they lose for later steps lose less in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.whatif.choices.programs import ReductionPipeline, assign_in_pipeline
from dpro.replay.whatif.graph_ops.reductions import (
    GradientReductions,
    Reduction,
    on_stream,
    plain_reductions,
    workers_of,
)
from dpro.schema import CODECS
from dpro.store import Run

# Codecs of gradients: what each makes of the reduction of a bucket.

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
HALF = {"fp16": "float16", "bf16": "bfloat16"}
INDEX_BYTES = 4
MIN_COMPRESSION_RATE = 2  # PowerSGDState: a matrix is compressed if that saves so much

# Passes over the gradients, one being 4 bytes read and 4 written per element: before and after the reduction.
HALF_PASSES = (10 / 8, 6 / 8)  # read 4, write 2, divide 2 in place; read 2, write 4
# Add the error, copy, orthogonalise, multiply; orthogonalise, multiply twice, subtract. A product with a
# matrix of a few columns took what 3 passes do on one CPU, and a third of one on another.
POWERSGD_PASSES = (4.0, 4.0)
TOPK_PASSES = (10.0, 2.0)  # select; scatter


@dataclass(frozen=True)
class Codec:
    """One way to compress gradients; one of these is given.

    Attributes:
        to: half precision, fp16 or bf16.
        powersgd_rank: rank of PowerSGD's matrices.
        topk: share of gradients that is sent.
    """

    to: str = ""
    powersgd_rank: int | None = None
    topk: float | None = None

    def __str__(self) -> str:
        """As the edit `compress` takes it."""
        if self.to:
            return f"to={self.to}"
        return f"topk={self.topk:g}" if self.topk is not None else f"powersgd_rank={self.powersgd_rank}"


def codec_of(text: str) -> Codec:
    """A codec from what the edit `compress` takes.

    Args:
        text: such as `to=bf16`, `powersgd_rank=4` or `topk=0.01`.

    Raises:
        UsageError: it is none of these.
    """
    name, _, value = text.partition("=")
    with suppress(ValueError):
        if name == "to" and value in HALF:
            return Codec(to=value)
        if name == "powersgd_rank":
            return Codec(powersgd_rank=int(value))
        if name == "topk":
            return Codec(topk=float(value))
    raise UsageError(f"no codec {text!r}")


def compressed(reductions: GradientReductions, plain: Reduction, codec: Codec) -> Reduction:
    """A reduction of fewer bytes that takes time to compress.

    Raises:
        Unanswerable: gradients are of a type that is not known to be compressed, or have few bits already.
    """
    dtype = plain.dtype
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise Unanswerable(f"gradients of type {dtype or 'unknown'} are not known to be compressed")
    messages, passes = 1, HALF_PASSES
    if codec.to:
        if item <= 2:
            raise Unanswerable(f"gradients are {dtype} already")
        size = plain.num_bytes * 2 // item
    elif codec.powersgd_rank is not None:
        if not plain.shapes or not reductions.are_bytes_known:
            raise Unanswerable("shapes of gradients are not in the run: record with --shapes")
        # Its factors are all-reduced, which moves twice what a reduce-scatter does of as many bytes.
        size = item * _low_rank(plain.shapes, codec.powersgd_rank) * (2 if reductions.is_scattered else 1)
        messages, passes = 3, POWERSGD_PASSES
    else:
        kept = plain.num_bytes / item * float(codec.topk or 0.0)
        # A rank gets k from each of n - 1 others; of an all-reduce of b bytes it gets 2 b (n - 1) / n, of a
        # reduce-scatter half of that.
        per_byte = reductions.message.num_ranks / (1 if reductions.is_scattered else 2)
        size = round(kept * (item + INDEX_BYTES) * per_byte)
        passes = TOPK_PASSES
    copying = reductions.copy_ns_per_byte * plain.num_bytes
    return replace(
        plain,
        num_bytes=max(size, 1),
        moving_ns=float(reductions.line.moving_ns(size)),
        fixed_ns=messages * reductions.line.latency_ns + passes[1] * copying,
        call_ns=plain.call_ns + passes[0] * copying,
    )


def _low_rank(shapes: tuple[tuple[int, ...], ...], rank: int) -> int:
    """Elements that PowerSGD exchanges of tensors, seen as matrices; others go as they are."""
    total = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        columns = 1
        for size in shape[1:]:
            columns *= size
        used = min(rows, columns, rank)
        shrunk = (rows + columns) * used
        small = shrunk * MIN_COMPRESSION_RATE < rows * columns
        total += shrunk if small else rows * columns
    return total


HOW = "dpro try compress:probe -- COMMAND records a run that has them"


@dataclass(frozen=True)
class CodecOption:
    """A codec on the gradients of one bucket, mean over ranks and steps.

    Attributes:
        codec: which; None: gradients as they are.
        error: sum of squares of what it loses.
        encode_ns, decode_ns: what it takes.
    """

    codec: Codec | None
    error: float = 0.0
    encode_ns: float = 0.0
    decode_ns: float = 0.0


@dataclass(frozen=True)
class BucketChoice:
    """What is done to one bucket.

    Attributes:
        names: its parameters.
        option: the codec, and what it loses and takes.
        share: the error of the bucket, relative to the bucket.
    """

    names: tuple[str, ...]
    option: CodecOption
    share: float


def choose(reductions: GradientReductions, budget: float) -> list[BucketChoice]:
    """Choose a codec for each bucket.

    Args:
        budget: what may be lost: the norm of the error of all gradients over their norm.

    Returns:
        What is done to each bucket, in the order of their reductions.

    Raises:
        Unanswerable: the run has no measurements of codecs, or they are of other buckets.
    """
    closes = reductions.passes[0].closes
    if any(not np.array_equal(backward.closes, closes) for backward in reductions.passes):
        raise Unanswerable("buckets change from step to step: a codec for each cannot be chosen")
    names, norms, options = _options(reductions, closes)
    given = {option.codec for of_bucket in options for option in of_bucket if option.codec is not None}
    codecs = [None, *sorted(given, key=str)]
    by_codec = [{option.codec: option for option in of_bucket} for of_bucket in options]
    errors = np.array(
        [[of_bucket[c].error if c in of_bucket else np.inf for c in codecs] for of_bucket in by_codec]
    )
    buckets = plain_reductions(reductions, reductions.passes[0], closes)
    made = [
        [reduction_of(reductions, bucket, of_bucket[c]) if c in of_bucket else bucket for c in codecs]
        for bucket, of_bucket in zip(buckets, by_codec)
    ]
    total = sum(norms)
    chosen = assign_in_pipeline(_pipeline(reductions, buckets, made), errors, budget**2 * total)
    options_chosen = [of_bucket[codecs[c]] for of_bucket, c in zip(by_codec, chosen.tolist())]
    return [
        BucketChoice(tuple(parameters), option, (option.error / norm) ** 0.5 if norm else 0.0)
        for parameters, option, norm in zip(names, options_chosen, norms)
    ]


def reduction_of(reductions: GradientReductions, plain: Reduction, option: CodecOption) -> Reduction:
    """A reduction with what a codec really took: on a GPU it delays the result, not the thread."""
    if option.codec is None:
        return plain
    made = compressed(replace(reductions, copy_ns_per_byte=0.0), plain, option.codec)
    on_thread, later = (0.0, option.encode_ns) if on_stream(reductions) else (option.encode_ns, 0.0)
    return replace(made, call_ns=made.call_ns + on_thread, fixed_ns=made.fixed_ns + later + option.decode_ns)


def by_choice(
    reductions: GradientReductions, plain: Sequence[Reduction], chosen: Sequence[BucketChoice]
) -> list[Reduction]:
    """The reductions of a pass, each by the codec that was chosen for its bucket."""
    return [reduction_of(reductions, bucket, choice.option) for bucket, choice in zip(plain, chosen)]


def _ranges(closes: Ints) -> list[tuple[int, int]]:
    """The first and the last parameter of each bucket."""
    return list(zip([0, *(closes[:-1] + 1).tolist()], closes.tolist()))


def _pipeline(
    reductions: GradientReductions, plain: Sequence[Reduction], made: Sequence[Sequence[Reduction]]
) -> ReductionPipeline:
    """The usual pass: when each bucket is ready after the first gradient, and what each option takes."""
    end = reductions.end
    ready = np.array(
        [end[backward.ready[backward.closes]] - end[backward.ready[0]] for backward in reductions.passes]
    )

    def of(what: str) -> Floats:
        return np.array([[float(getattr(option, what)) for option in of_bucket] for of_bucket in made])

    before = np.array([reduction.call_ns for reduction in plain])[:, None]
    return ReductionPipeline(
        np.median(ready, axis=0),
        of("call_ns") - before,
        of("fixed_ns"),
        of("moving_ns"),
        min(workers_of(reductions.graph).values()),
    )


def _options(
    reductions: GradientReductions, closes: Ints
) -> tuple[list[list[str]], list[float], list[list[CodecOption]]]:
    """Of each bucket its parameters, the square of its norm, and what can be done to it."""
    table = measurements(reductions.graph.run)
    sizes = [int(reductions.parameters.num_bytes[first : last + 1].sum()) for first, last in _ranges(closes)]
    means = table.group_by("module", "bucket", "codec").agg(
        pl.col("names").first(), pl.col("elements").first(),
        *(pl.col(name).mean() for name in ("square_norm", "square_error", "encode_ns", "decode_ns")),
    )  # fmt: skip
    buckets = means.sort("module", "bucket", "codec").partition_by("module", "bucket", maintain_order=True)
    elements = [int(bucket["elements"][0]) for bucket in buckets]
    ratios = {size / max(count, 1) for size, count in zip(sizes, elements)}
    if len(elements) != len(sizes) or len(ratios) > 1:
        raise Unanswerable(
            f"the probe saw {len(elements)} buckets, of other sizes than the {len(sizes)} of the run: {HOW}"
        )
    crashes = not on_stream(reductions) and len(buckets) > 1  # as `dpro try` refuses it
    options = [
        [CodecOption(None)]
        + [
            CodecOption(codec, row["square_error"], row["encode_ns"], row["decode_ns"])
            for row in bucket.iter_rows(named=True)
            if not ((codec := codec_of(row["codec"])).powersgd_rank is not None and crashes)
        ]
        for bucket in buckets
    ]
    return (
        [bucket["names"][0].to_list() for bucket in buckets],
        [bucket["square_norm"][0] for bucket in buckets],
        options,
    )


def measurements(run: Run | None) -> pl.DataFrame:
    """What a probe measured of codecs on a run's gradients.

    Raises:
        Unanswerable: there was no probe, or none of its rows can be used.
    """
    table = run.table(CODECS) if run is not None else CODECS.empty()
    if table.is_empty():
        raise Unanswerable(f"what each codec loses of the job's gradients was not measured: {HOW}")
    usable = usable_rows(table)
    if usable.is_empty():
        raise Unanswerable("no row of table codecs has elements, norms and times: it is damaged; probe again")
    return usable


def usable_rows(table: pl.DataFrame) -> pl.DataFrame:
    """The rows of table `codecs` that say what they are there for: damaged ones may say anything."""
    norms = [pl.col(name).is_finite() & (pl.col(name) >= 0) for name in ("square_norm", "square_error")]
    times = [pl.col(name) >= 0 for name in ("encode_ns", "decode_ns")]
    return table.filter(pl.col("elements") > 0, *norms, *times)


def compression_lines(chosen: Sequence[BucketChoice]) -> list[str]:
    """A line per codec: for which buckets it is, and what is lost of them."""
    lines = []
    for codec in dict.fromkeys(choice.option.codec for choice in chosen):
        choices = [choice for choice in chosen if choice.option.codec == codec]
        what = f"{len(choices)} of {len(chosen)} buckets"
        if codec is None:
            lines.append(f"{what} as they are ({_named(choices)})")
        else:
            worst = max(choice.share for choice in choices)
            lines.append(f"{what} by {codec} ({_named(choices)}), which loses at most {worst:.2g} of each")
    return lines


def _named(chosen: Sequence[BucketChoice]) -> str:
    names = [name for choice in chosen for name in choice.names]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
