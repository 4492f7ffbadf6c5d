"""Gradient buckets of another size: fewer and larger reductions, or more that begin earlier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.replay.costs import untold
from dpro.replay.gradients import MB
from dpro.replay.graph import Graph
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.reduction import Reduced, Reduction, reduced, with_reductions

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bucket(Edit):
    """DDP groups its gradients into buckets of another size."""

    name = "bucket"
    summary = "gradient buckets of another size"
    example = "bucket:mb=1"
    needs = "a DDP job recorded by dpro: parameters of its buckets, autograd spans, bytes reduced"
    assumes = "gradients are ready in the same order, and bytes cost what they cost in the run"
    source = (
        "a bucket closes once it holds the size or more, as DDP rebuilds them; re-bucketing as in dPRO (Hu "
        "et al., MLSys 2022); times from the run's own latency and bandwidth"
    )
    proof = "25 and 1 MB, gloo"
    mb: float = key("size of a bucket, 2**20 bytes", least=0.0)
    first_mb: float | None = key("size of the first one; as the others if not given", None, least=0.0)
    doubt: float = 0.15

    def apply(self, graph: Graph) -> Graph:
        """Close buckets where DDP would, and reduce each once its last gradient is ready."""
        known = reduced(graph)
        first = self.mb if self.first_mb is None else self.first_mb
        closes = closing(known.parameters.num_bytes, round(first * MB), round(self.mb * MB))
        if all(np.array_equal(each.closes, closes) for each in known.passes):
            return graph
        return with_reductions(known, [buckets(known, closes)] * len(known.passes))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def describe(self) -> str:
        """What is changed."""
        return f"gradient buckets of {self.mb:g} MB"

    def how(self) -> str:
        """How to do it."""
        return f"DistributedDataParallel(bucket_cap_mb={self.mb:g})"


def closing(num_bytes: Ints, first_cap: int, cap: int) -> Ints:
    """The last parameter of each bucket: a bucket closes once it holds the cap or more.

    Args:
        num_bytes: [P] sizes of gradients in the order in which they are ready.
        first_cap, cap: bytes, of the first bucket and of the others.
    """
    closes: list[int] = []
    held = 0
    for parameter, size in enumerate(num_bytes.tolist()):
        held += size
        if held >= (cap if closes else first_cap):
            closes.append(parameter)
            held = 0
    if not closes or closes[-1] != num_bytes.size - 1:
        closes.append(num_bytes.size - 1)
    return np.array(closes, np.int64)


def buckets(known: Reduced, closes: Ints) -> list[Reduction]:
    """Plain reductions of buckets that close after some parameters, each called as soon as it can be."""
    found = []
    for first, last in zip([0, *(closes[:-1] + 1).tolist()], closes.tolist()):
        size = known.bytes_of(first, last)
        moving = known.line.ns_per_byte * size
        found.append(Reduction(first, last, size, moving, known.line.latency_ns, known.call_ns, last))
    return found
