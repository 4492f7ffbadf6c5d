"""Codecs of gradients: what each makes of the reduction of a bucket.

In: how a graph reduces gradients, a plain reduction, and a codec. Out: the reduction with fewer bytes, and
with the time that compressing takes. That is counted in passes over the gradients, each of which takes what
it took to copy them into their buckets. That a processor may be slow at sums in a format it does not know
(fp16 on most CPUs) is not counted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from dpro.errors import Unanswerable, UsageError
from dpro.replay.whatif.graph_ops.reductions.recorded import GradientReductions, Reduction

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


def compressed(known: GradientReductions, plain: Reduction, codec: Codec) -> Reduction:
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
        if not plain.shapes or not known.are_bytes_known:
            raise Unanswerable("shapes of gradients are not in the run: record with --shapes")
        # Its factors are all-reduced, which moves twice what a reduce-scatter does of as many bytes.
        size = item * _low_rank(plain.shapes, codec.powersgd_rank) * (2 if known.is_scattered else 1)
        messages, passes = 3, POWERSGD_PASSES
    else:
        kept = plain.num_bytes / item * float(codec.topk or 0.0)
        # A rank gets k from each of n - 1 others; of an all-reduce of b bytes it gets 2 b (n - 1) / n, of a
        # reduce-scatter half of that.
        per_byte = known.message.num_ranks / (1 if known.is_scattered else 2)
        size = round(kept * (item + INDEX_BYTES) * per_byte)
        passes = TOPK_PASSES
    copying = known.copy_ns_per_byte * plain.num_bytes
    return replace(
        plain,
        num_bytes=max(size, 1),
        moving_ns=float(known.line.moving_ns(size)),
        fixed_ns=messages * known.line.latency_ns + passes[1] * copying,
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
