"""Compressed gradients: fewer bytes to move, and the work of compressing them.

What compressing costs is counted in passes over the gradients, each of which takes what it took to copy them
into their buckets. That a processor may be slow at sums in a format it does not know (fp16 on most CPUs) is
not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpro.errors import Unanswerable, UsageError
from dpro.replay.costs import untold
from dpro.replay.graph import Graph
from dpro.replay.whatif.bucket import buckets
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.reduction import Reduced, Reduction, reduced, with_reductions

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
HALF = {"fp16": "float16", "bf16": "bfloat16"}
INDEX_BYTES = 4
MIN_COMPRESSION_RATE = 2  # PowerSGDState: a matrix is compressed if that saves so much

# Passes over the gradients, one being 4 bytes read and 4 written per element: before and after the reduction.
HALF_PASSES = (10 / 8, 6 / 8)  # read 4, write 2, divide 2 in place; read 2, write 4
# Add the error, copy, orthogonalise, multiply; orthogonalise, multiply twice, subtract. A product with a
# matrix of a few columns takes what 3 passes do, as measured on a CPU.
POWERSGD_PASSES = (6.0, 8.0)
TOPK_PASSES = (10.0, 2.0)  # select; scatter


@dataclass(frozen=True)
class Compress(Edit):
    """Gradients are compressed, bucket by bucket, before they are reduced."""

    name = "compress"
    summary = "compressed gradients: half precision, PowerSGD or the largest only"
    example = "compress:to=fp16"
    needs = "a DDP job recorded by dpro without a communication hook; shapes of parameters for PowerSGD"
    assumes = (
        "each pass over the gradients takes what copying them into buckets took, and arithmetic in half "
        "precision is no slower"
    )
    source = (
        "PyTorch's fp16, bf16 and PowerSGD hooks (Vogels et al., NeurIPS 2019); the largest: k values and "
        "indices, gathered (Aji and Heafield, EMNLP 2017)"
    )
    proof = "fp16 and PowerSGD of rank 2, gloo"
    to: str = key("half precision", "", choices=tuple(HALF))
    powersgd_rank: int | None = key("rank of PowerSGD's matrices", None, least=1)
    topk: float | None = key("share of gradients that is sent", None, least=0.0, most=1.0)
    doubt: float = 0.3

    def __post_init__(self) -> None:
        """Refuse none or several of the ways."""
        super().__post_init__()
        if sum([bool(self.to), self.powersgd_rank is not None, self.topk is not None]) != 1:
            raise UsageError("compress needs one of to=fp16, to=bf16, powersgd_rank=2, topk=0.01")

    def apply(self, graph: Graph) -> Graph:
        """Shrink what each bucket moves and add what compressing costs."""
        known = reduced(graph)
        if known.ratio < 1:
            raise Unanswerable("gradients are compressed already")
        plain = [buckets(known, each.closes) for each in known.passes]
        wanted = [[self._compressed(known, bucket) for bucket in own] for own in plain]
        return with_reductions(known, wanted)

    def _compressed(self, known: Reduced, plain: Reduction) -> Reduction:
        dtype = known.message.dtype
        item = ITEM_BYTES.get(dtype)
        if item is None:
            raise Unanswerable(f"gradients of type {dtype or 'unknown'} are not known to be compressed")
        messages, passes = 1, HALF_PASSES
        if self.to:
            if item <= 2:
                raise Unanswerable(f"gradients are {dtype} already")
            size = plain.num_bytes * 2 // item
        elif self.powersgd_rank is not None:
            size = item * _low_rank(known.parameters.shapes[plain.first : plain.last + 1], self.powersgd_rank)
            messages, passes = 3, POWERSGD_PASSES
        else:
            kept = plain.num_bytes / item * float(self.topk or 0.0)
            # A rank gets k from each of n - 1 others; of a reduction of b bytes it gets 2 b (n - 1) / n.
            size = round(kept * (item + INDEX_BYTES) * known.message.num_ranks / 2)
            passes = TOPK_PASSES
        copying = known.copy_ns_per_byte * plain.num_bytes
        return Reduction(
            plain.first,
            plain.last,
            max(size, 1),
            known.line.ns_per_byte * size,
            messages * known.line.latency_ns + passes[1] * copying,
            plain.call_ns + passes[0] * copying,
            plain.called_after,
        )

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def is_proven(self) -> bool:
        """Sending only the largest was not measured."""
        return self.topk is None

    def describe(self) -> str:
        """What is changed."""
        if self.to:
            return f"gradients reduced in {HALF[self.to]}"
        if self.topk is not None:
            return f"the largest {self.topk:.2%} of the gradients exchanged"
        return f"gradients reduced by PowerSGD of rank {self.powersgd_rank}"

    def how(self) -> str:
        """How to do it."""
        if self.to:
            return f"model.register_comm_hook(None, default_hooks.{self.to}_compress_hook)"
        if self.topk is not None:
            return "a hook that gathers the largest gradients and keeps the others, as `dpro try` makes it"
        state = f"PowerSGDState(None, matrix_approximation_rank={self.powersgd_rank})"
        return f"model.register_comm_hook({state}, powerSGD_hook); look after accuracy"


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
