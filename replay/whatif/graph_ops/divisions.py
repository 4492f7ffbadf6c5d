"""Divisions of gradients into buckets, by when each gradient is ready and what a reduction takes on one link.

In: how a graph reduces its gradients. Out: the bucket sizes that are worth a replay; and, for each number of
buckets, the division of which the last reduction ends first. Only what passes over the link is looked at:
what waits for a reduction, other ranks and other work on the link are the replay's.

The condition is dPRO's theorem on tensor fusion and partition (Hu et al., MLSys 2022, Theorem 2): tensor n
is ready at p_n, its reduction ends at q_n and takes t(s_n) for its size. Apart, the second of two ends at
max(q_(n-1), p_n) + t(s_n); fused, both end at max(q_(n-2), p_n) + t(s_(n-1) + s_n). Where the link is free
by p_n, fused is earlier if q_(n-1) > p_n + t(s_(n-1) + s_n) - t(s_n), which is the theorem. Read backwards
it says which buckets are better in two. On CPUs, where two workers take turns, what one reduction costs
beside its bytes overlaps with the other. All of this is exact for one link.

The theorem compares two neighbours, and a division of which no two neighbours are better fused need not be
the best. `best_divisions` is: the state of the link after the first i gradients in k buckets decides when any
further bucket ends, and a link that is free earlier ends none of them later, so that of all ways to get there
only those are kept that no other beats (dynamic programming; with two workers the state has two times).

Buckets of neighbours in the order of readiness lose nothing where reductions follow each other on one worker,
bytes cost the same everywhere, and what waits, waits for the last. Of any division with buckets called at
c_1 <= c_2 <= ..., the last reduction ends at the latest of c_b + (what buckets b, b+1, ... take). Gradients
that are ready after c_(b-1) are in one of these buckets in every division. Put each gradient into the first
bucket that is called no earlier than it is ready: buckets from b on hold these gradients and no others.
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
CLEARLY = 0.01  # of the time of a pass: what is better by less is as good
MAX_SIZES = 3


@dataclass(frozen=True)
class ReadyGradients:
    """Gradients as the theorem sees them.

    Attributes:
        ready: [P] ns since backward began, on the last rank, in the middle of the passes, without calls.
        num_bytes: [P] that are moved.
        line: what a reduction takes.
        workers: how many reductions may run at once, which share the link: one, or two that take turns.
        call_ns: by which each call delays the gradients behind it.
        ends: gradients behind which a bucket has to close, since the next one is of another element type.
    """

    ready: Floats
    num_bytes: Floats
    line: LinkCost
    workers: int
    call_ns: float = 0.0
    ends: tuple[int, ...] = ()

    def end_ns(self, ends: Sequence[float], first: int, last: int) -> float:
        """When the reduction of a bucket ends.

        Args:
            ends: of the reductions before it.
        """
        moving = float(self.line.moving_ns(float(self.num_bytes[first : last + 1].sum())))
        return self.moved_ns(ends, last, moving)

    def moved_ns(self, ends: Sequence[float], last: int, moving_ns: float) -> float:
        """As `end_ns`, of a bucket whose bytes take `moving_ns`."""
        free = ends[-self.workers] if len(ends) >= self.workers else 0.0
        ready = float(self.ready[last]) + self.call_ns * len(ends)
        return max(max(free, ready) + self.line.latency_ns, ends[-1] if ends else 0.0) + moving_ns


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
    """By how much a call delays gradients: on GPUs, whose work is launched ahead, by nothing."""
    return 0.0 if on_stream(reductions) else reductions.call_ns


def _ready_ns(reductions: GradientReductions, backward: Pass, around: Surroundings) -> Floats:
    """[P] when the gradients of a pass are ready, if no reduction were called: on GPUs when kernels end."""
    end, called = reductions.end, reductions.graph.nodes.measured_end[backward.ready]
    calls = np.searchsorted(backward.closes, np.arange(backward.ready.size))
    ready = end[backward.ready] - _delay_ns(reductions) * calls
    if around.inputs.size:
        last = np.maximum(around.launched.searchsorted(called) - 1, 0)
        ready = np.maximum(ready, end[around.inputs[last]] + around.input_lag)
    return np.maximum.accumulate(ready)


def reductions_end(gradients: ReadyGradients, closes: tuple[int, ...]) -> list[float]:
    """When the reduction of each bucket ends, ns since backward began."""
    ends: list[float] = []
    before = np.cumsum(gradients.num_bytes)[list(closes)]
    moving = gradients.line.moving_ns(np.diff(before, prepend=0.0)).tolist()
    for last, moving_ns in zip(closes, moving):
        ends.append(gradients.moved_ns(ends, last, moving_ns))
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


# The best division for each number of buckets.

MAX_BUCKETS = 64
MAX_FRONT = 64  # ways to get to a state that no other beats; more were not seen


def best_divisions(
    gradients: ReadyGradients, most: int = MAX_BUCKETS, closes: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """For each number of buckets the division of which the last reduction ends first.

    Args:
        most: buckets.
        closes: gradients behind which a bucket may close; any where None.

    Returns:
        Divisions by the last gradient of each of their buckets, fewer buckets first. A number of buckets that
        gradients of several types leave no division for has none.
    """
    last = gradients.ready.size - 1
    allowed = np.array(sorted({*(range(last) if closes is None else closes), *gradients.ends, last}))
    begins = np.append(0, allowed + 1)  # where buckets may begin: by the number of the end before it
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
    """Ways to reduce the first gradients in one number of buckets, [S] each.

    Attributes:
        closed: at which of the places where buckets may end the last one does, from 1 on; 0 for no bucket.
        free: ns, when the worker whose turn it is next is free.
        end: ns, when the last reduction ends.
        before: which way of one bucket less it goes on from.
    """

    closed: Ints
    free: Floats
    end: Floats
    before: Ints

    @classmethod
    def none(cls) -> _States:
        """No gradient is reduced yet."""
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
    """Ways with one bucket more, which ends at a place: those that no other of them beats.

    Args:
        number: of buckets so far.
        place: where it ends, as in `_States`.
        last: its last gradient.
        moving: ns that its bytes take, by the place where the bucket before it ends.
        of_type: places at which gradients of another type begin, the first one included.
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
    """The division that a state of the last layer ends."""
    closes = []
    for states in reversed(layers):
        closes.append(int(allowed[states.closed[state] - 1]))
        state = int(states.before[state])
    return tuple(reversed(closes))
