"""Which bucket sizes are worth a replay: those whose buckets are not better fused, nor better in two.

In: how a graph reduces its gradients, and sizes. Out: the sizes that remain.

The condition is dPRO's theorem on tensor fusion and partition (Hu et al., MLSys 2022, Theorem 2): tensor n is
ready at p_n, its reduction ends at q_n and takes t(s_n) for its size. Apart, the second of two ends at
max(q_(n-1), p_n) + t(s_n); fused, both end at max(q_(n-2), p_n) + t(s_(n-1) + s_n). Where the link is free by
p_n, fused is earlier if q_(n-1) > p_n + t(s_(n-1) + s_n) - t(s_n), which is the theorem. Read backwards it
says which buckets are better in two. On CPUs, where two workers take turns, what one reduction costs apart
from its bytes overlaps with the other. All of this is exact for one link, and says nothing of what waits for
reductions: so what remains is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Floats
from dpro.replay.cost.curves import LinkCost
from dpro.replay.gradients.passes import MB
from dpro.replay.whatif.graph_ops.reductions.changed import workers_of
from dpro.replay.whatif.graph_ops.reductions.recorded import GradientReductions, closing

SIZES_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 400.0)
CLEARLY = 0.01  # of the time of a pass: what is better by less is as good
MAX_SIZES = 3


@dataclass(frozen=True)
class ReadyGradients:
    """Gradients as the theorem sees them.

    Attributes:
        ready: [P] ns since backward began, on the last rank, in the middle of the passes.
        num_bytes: [P] that are moved.
        line: what a reduction takes.
        workers: how many reductions may run at once, which share the link.
    """

    ready: Floats
    num_bytes: Floats
    line: LinkCost
    workers: int

    def end_ns(self, ends: Sequence[float], first: int, last: int) -> float:
        """When the reduction of a bucket ends."""
        free = ends[-self.workers] if len(ends) >= self.workers else 0.0
        begins = max(free, float(self.ready[last])) + self.line.latency_ns
        moving = float(self.line.moving_ns(float(self.num_bytes[first : last + 1].sum())))
        return max(begins, ends[-1] if ends else 0.0) + moving


def sizes_worth_replaying(reductions: GradientReductions) -> list[float]:
    """Of `SIZES_MB` those that may be best, and those of them that end earliest, at most `MAX_SIZES`."""
    gradients = gradients_of(reductions)
    different: dict[tuple[int, ...], float] = {}
    for size in SIZES_MB:
        parameters, cap = reductions.parameters, round(size * MB)
        closes = closing(parameters.num_bytes, cap, cap, parameters.closes_before)
        different.setdefault(tuple(closes.tolist()), size)
    ends = {closes: reductions_end(gradients, closes)[-1] for closes in different}
    by_end = sorted(different, key=lambda closes: (ends[closes], closes))
    kept = [closes for closes in by_end if not is_better_changed(gradients, closes)]
    return sorted(different[closes] for closes in (kept or by_end)[:MAX_SIZES])


def gradients_of(reductions: GradientReductions) -> ReadyGradients:
    """What the theorem asks of a graph's gradients."""
    end, sizes = reductions.end, reductions.parameters.num_bytes
    equal = [
        backward for backward in reductions.passes if np.array_equal(backward.parameters.num_bytes, sizes)
    ]
    lowest = [int(end[backward.ready].min()) for backward in equal]
    ready = np.array([end[backward.ready] - begin for backward, begin in zip(equal, lowest)])
    return ReadyGradients(
        np.median(ready, axis=0),
        reductions.ratio * sizes.astype(np.float64),
        reductions.line,
        max(workers_of(reductions.graph).values()),
    )


def reductions_end(gradients: ReadyGradients, closes: tuple[int, ...]) -> list[float]:
    """When the reduction of each bucket ends, ns since backward began."""
    ends: list[float] = []
    first = 0
    for last in closes:
        ends.append(gradients.end_ns(ends, first, last))
        first = last + 1
    return ends


def is_better_changed(gradients: ReadyGradients, closes: tuple[int, ...]) -> bool:
    """Whether two neighbours are clearly better fused, or a bucket in two."""
    ends = reductions_end(gradients, closes)
    firsts = [0, *(last + 1 for last in closes[:-1])]
    clearly = CLEARLY * ends[-1]
    for bucket, (first, last) in enumerate(zip(firsts, closes)):
        if bucket and gradients.end_ns(ends[: bucket - 1], firsts[bucket - 1], last) < ends[bucket] - clearly:
            return True
        for cut in range(first, last):
            half = gradients.end_ns(ends[:bucket], first, cut)
            if gradients.end_ns([*ends[:bucket], half], cut + 1, last) < ends[bucket] - clearly:
                return True
    return False
