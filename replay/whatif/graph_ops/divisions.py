"""Divisions of gradients into buckets, by when each gradient is ready and what a reduction costs on one link.

Takes the reductions of a graph's gradients; returns the bucket sizes that are worth a replay and, for each
number of buckets, the division whose last reduction ends first. Only the link is modelled: waits for
reductions, other ranks and other work on the link are left to the replay.

The condition is dPRO's theorem on tensor fusion and partition (Hu et al., MLSys 2022, Theorem 2): tensor n
is ready at p_n, its reduction ends at q_n and takes t(s_n) for its size. Apart, the second of two ends at
max(q_(n-1), p_n) + t(s_n); fused, both end at max(q_(n-2), p_n) + t(s_(n-1) + s_n). Where the link is free
by p_n, fused is earlier if q_(n-1) > p_n + t(s_(n-1) + s_n) - t(s_n), which is the theorem. Read backwards
it shows which buckets are better split in two. On CPUs, where two workers take turns, the latency of one
reduction overlaps with the other. All of this is exact for one link.

The theorem compares two neighbours, and a division in which no two neighbours are better fused need not be
the best. `best_divisions` finds the best: the state of the link after the first i gradients in k buckets
decides when any further bucket ends, and a link that is free earlier ends none of them later, so only states
that no other dominates are kept (dynamic programming; with two workers the state has two times).

Buckets of neighbours in the order of readiness lose nothing where reductions follow each other on one worker,
bytes cost the same everywhere, and every consumer waits for the last reduction. In any division with buckets
called at c_1 <= c_2 <= ..., the last reduction ends at the latest of c_b + (time of buckets b, b+1, ...).
Gradients that are ready after c_(b-1) are in one of these buckets in every division. Put each gradient into
the first bucket that is called no earlier than it is ready: buckets from b on contain these gradients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.replay.cost.curves import LinkCost
from dpro.replay.gradient_passes import MB, Pass
from dpro.replay.whatif.graph_ops.reductions import (
    GradientReductions,
    Surroundings,
    closing,
    dtypes_of,
    on_stream,
    surroundings_of,
    workers_of,
)

SIZES_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 400.0)
CLEARLY = 0.01  # of the time of a pass: smaller improvements are ignored
MAX_SIZES = 3


@dataclass(frozen=True)
class ReadyGradients:
    """Gradients as the theorem sees them.

    Attributes:
        ready: [P] ns since backward began, on the last rank, median over passes, without calls.
        num_bytes: [P] bytes to move.
        line: cost of a reduction.
        workers: number of concurrent reductions, which share the link: one, or two that take turns.
        call_ns: delay of later gradients by each call.
        ends: gradients after which a bucket must close, since the next one has another element type.
    """

    ready: Floats
    num_bytes: Floats
    line: LinkCost
    workers: int
    call_ns: float = 0.0
    ends: tuple[int, ...] = ()

    def end_ns(self, ends: Sequence[float], first: int, last: int) -> float:
        """Return when the reduction of a bucket ends, ns.

        Args:
            ends: of the reductions before it.
        """
        moving = float(self.line.moving_ns(float(self.num_bytes[first : last + 1].sum())))
        return self.moved_ns(ends, last, moving)

    def moved_ns(self, ends: Sequence[float], last: int, moving_ns: float) -> float:
        """Return when the reduction of a bucket ends whose bytes take `moving_ns`."""
        free = ends[-self.workers] if len(ends) >= self.workers else 0.0
        ready = float(self.ready[last]) + self.call_ns * len(ends)
        return max(max(free, ready) + self.line.latency_ns, ends[-1] if ends else 0.0) + moving_ns


def sizes_worth_replaying(reductions: GradientReductions) -> list[float]:
    """Return the sizes among `SIZES_MB` that may be best, at most `MAX_SIZES`, those that end earliest."""
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
    """Return a graph's gradients as the theorem needs them."""
    sizes = reductions.parameters.num_bytes
    ready: dict[int, list[Floats]] = {}
    for backward, around in zip(reductions.passes, surroundings_of(reductions)):
        if np.array_equal(backward.parameters.num_bytes, sizes):
            together = int(reductions.graph.nodes.collective[backward.arrive[0]])
            ready.setdefault(together, []).append(_ready_ns(reductions, backward, around))
    on_last = np.array([np.max(of_ranks, axis=0) - np.min(of_ranks) for of_ranks in ready.values()])
    dtypes = dtypes_of(
        reductions, max(reductions.passes, key=lambda one: int(one.parameters.num_bytes.sum()))
    )
    return ReadyGradients(
        np.median(on_last, axis=0),
        reductions.ratio * sizes.astype(np.float64),
        reductions.line,
        max(workers_of(reductions.graph).values()),
        _delay_ns(reductions),
        tuple(last for last in range(len(dtypes) - 1) if dtypes[last] != dtypes[last + 1]),
    )


def _delay_ns(reductions: GradientReductions) -> float:
    """Return the delay of gradients by a call: 0 on GPUs, whose work is launched ahead."""
    return 0.0 if on_stream(reductions) else reductions.call_ns


def _ready_ns(reductions: GradientReductions, backward: Pass, around: Surroundings) -> Floats:
    """Return [P] when gradients of a pass are ready without any calls; on GPUs, when their kernels end."""
    end, called = reductions.end, reductions.graph.nodes.measured_end[backward.ready]
    calls = np.searchsorted(backward.closes, np.arange(backward.ready.size))
    ready = end[backward.ready] - _delay_ns(reductions) * calls
    if around.inputs.size:
        last = np.maximum(around.launched.searchsorted(called) - 1, 0)
        ready = np.maximum(ready, end[around.inputs[last]] + around.input_lag)
    return np.maximum.accumulate(ready)


def reductions_end(gradients: ReadyGradients, closes: tuple[int, ...]) -> list[float]:
    """Return when the reduction of each bucket ends, ns since backward began."""
    ends: list[float] = []
    before = np.cumsum(gradients.num_bytes)[list(closes)]
    moving = gradients.line.moving_ns(np.diff(before, prepend=0.0)).tolist()
    for last, moving_ns in zip(closes, moving):
        ends.append(gradients.moved_ns(ends, last, moving_ns))
    return ends


def is_better_changed(gradients: ReadyGradients, closes: tuple[int, ...]) -> bool:
    """Return whether two neighbours are clearly better fused, or a bucket split in two."""
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


# The best division for each number of buckets.

MAX_BUCKETS = 64
MAX_FRONT = 64  # kept states that no other dominates; larger fronts have not been observed


def best_divisions(
    gradients: ReadyGradients, most: int = MAX_BUCKETS, closes: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Return the division whose last reduction ends first, for each number of buckets.

    Args:
        most: buckets.
        closes: gradients after which a bucket may close; any where None.

    Returns:
        Divisions by the last gradient of each of their buckets, fewer buckets first. Numbers of buckets that
        the types of gradients rule out have none.
    """
    last = gradients.ready.size - 1
    allowed = np.array(sorted({*(range(last) if closes is None else closes), *gradients.ends, last}))
    begins = np.append(0, allowed + 1)  # where buckets may begin, by the number of the end before
    before = np.append(0.0, np.cumsum(gradients.num_bytes))[begins]
    moving = gradients.line.moving_ns(np.maximum(before[1:, None] - before[:-1], 0.0))
    of_type = np.append(0, np.searchsorted(allowed, gradients.ends) + 1)
    states, layers, best = _States.none(), list[_States](), list[tuple[int, ...]]()
    for number in range(min(most, allowed.size)):
        following = [
            _extended(gradients, states, number, end, int(allowed[end - 1]), moving[end - 1], of_type)
            for end in range(number + 1, begins.size)
        ]
        states = _States(*(np.concatenate(columns) for columns in zip(*following)))
        layers.append(states)
        whole = np.flatnonzero(states.closed == allowed.size)
        if whole.size:
            best.append(_traced(layers, allowed, int(whole[np.argmin(states.end[whole])])))
    return best


class _States(NamedTuple):
    """States of the link after the first gradients in a given number of buckets, [S] each.

    Attributes:
        closed: number of the allowed end at which the last bucket closes, from 1 on; 0 for no bucket.
        free: ns, when the next worker is free.
        end: ns, when the last reduction ends.
        before: the preceding state, with one bucket less.
    """

    closed: Ints
    free: Floats
    end: Floats
    before: Ints

    @classmethod
    def none(cls) -> _States:
        """Return the state before any reduction."""
        return cls(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.array([-1]))


def _extended(
    gradients: ReadyGradients,
    states: _States,
    number: int,
    place: int,
    last: int,
    moving: Floats,
    of_type: Ints,
) -> _States:
    """Return the states with one more bucket, which closes at a given end, that no other dominates.

    Args:
        number: of buckets so far.
        place: number of the end at which it closes, as in `_States`.
        last: its last gradient.
        moving: ns that its bytes take, by the end of the bucket before it.
        of_type: ends after which gradients of another type begin, including the beginning.
    """
    least = of_type[np.searchsorted(of_type, place, side="left") - 1]
    chosen = np.flatnonzero((states.closed < place) & (states.closed >= least))
    free, end = states.free[chosen], states.end[chosen]
    ready = gradients.ready[last] + gradients.call_ns * number
    begin = np.maximum(np.maximum(free, ready) + gradients.line.latency_ns, end)
    ends = begin + moving[states.closed[chosen]]
    frees = ends if gradients.workers == 1 else end
    order = np.lexsort((frees, ends))
    lowest = np.minimum.accumulate(frees[order])
    kept = order[np.append(True, frees[order][1:] < lowest[:-1])[: order.size]][:MAX_FRONT]
    return _States(np.full(kept.size, place), frees[kept], ends[kept], chosen[kept])


def _traced(layers: Sequence[_States], allowed: Ints, state: int) -> tuple[int, ...]:
    """Return the division that leads to a state of the last layer."""
    closes = []
    for states in reversed(layers):
        closes.append(int(allowed[states.closed[state] - 1]))
        state = int(states.before[state])
    return tuple(reversed(closes))
