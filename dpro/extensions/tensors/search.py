"""Searches by replays for the division of gradients into buckets with the shortest step.

Takes a job, possibly with other edits, and how it reduces gradients; returns the best division that was
found, by the mean step that `dpro whatif` would predict for it.

It replays the job's own buckets, all uniform sizes that edit `bucket` knows, and, of the divisions that are
best on one link (`dpro.replay.whatif.graph_ops.divisions.best_divisions`), those that end earliest. From the
best of all, a local search moves an end of a bucket that is on the critical path, cuts that bucket or joins
it with a neighbour, in the order predicted by the model of one link, and continues from the first move that
shortens the replayed step. Ends in repeated blocks of the model are also moved together. If there are few
enough divisions, all are replayed, and the answer is optimal; otherwise it may miss a better one. Of
divisions whose steps differ by less than `AS_GOOD` it takes the one with the fewest reductions, so no
replayed division, uniform sizes included, is better by more.

Buckets consist of neighbours in the order in which gradients become ready; `divisions` says when that loses
nothing. The search is deterministic and reads no clock: one run always gives one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.extensions.tensors.edits import gradient_names, is_recorded, require_equal_passes, with_planned
from dpro.extensions.tensors.plan_file import PlannedReduction
from dpro.replay.gradient_passes import MB
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import Timeline, path_of_steps
from dpro.replay.whatif.choices import Codec, compressed
from dpro.replay.whatif.edits.gradients import closing_of
from dpro.replay.whatif.graph_ops.divisions import (
    SIZES_MB,
    ReadyGradients,
    best_divisions,
    gradients_of,
    reductions_end,
)
from dpro.replay.whatif.graph_ops.reductions import (
    GradientReductions,
    closing,
    plain_reductions,
    reductions_of,
)
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import steps_under

MAX_ENDS = 128  # possible ends of buckets; with more gradients, small neighbours stay together
EARLIEST = 4  # replayed divisions among those that are best on one link for their number of buckets
NEARLY = (1e-3, 3e-3, 1e-2)  # plus those with the fewest buckets that end later by this share at most
MAX_DIVISIONS = 64  # up to which all are replayed
SHORTER = 2e-4  # of the step: minimum gain of a move
AS_GOOD = 1e-3  # of the step: of divisions that differ by less, the one with the fewest reductions is taken
TO_SETTLE = 6  # replays that are reserved for finding it
MOVES = 16  # most promising moves of a division, which are replayed
SHIFTS = (1, 2, 4)  # positions by which the end of a bucket moves
MAX_PIECES = 8


class Part(NamedTuple):
    """One bucket: all gradients after the last one of the bucket before it.

    Attributes:
        last: position of its last gradient in the order in which they become ready.
        pieces, reduce_in: as in `PlannedReduction`.
    """

    last: int
    pieces: int = 1
    reduce_in: str = ""


Division = tuple[Part, ...]


def last_gradients(division: Division) -> tuple[int, ...]:
    """Return the last gradient of each bucket."""
    return tuple(part.last for part in division)


def positions_in(division: Division) -> list[range]:
    """Return the gradients of each bucket."""
    return [range(begin + 1, end + 1) for begin, end in pairwise((-1, *last_gradients(division)))]


def as_plan(division: Division, names: Sequence[str]) -> tuple[PlannedReduction, ...]:
    """Return a division as reductions of a plan."""
    return tuple(
        PlannedReduction(tuple(names[number] for number in within), part.pieces, part.reduce_in)
        for part, within in zip(division, positions_in(division))
    )


@dataclass
class Replays:
    """Divisions of the gradients of a job, each replayed once.

    Attributes:
        before: the job as it is, with which steps are compared.
        job: the job that is divided: as it is, or with other edits.
        baseline: `baseline_steps` of the job as it is.
        slowdowns: as `dpro.replay.whatif.predict.slowdowns_of` returns them.
        samples: samples in a step of `job` relative to the job as it is.
        left: number of remaining replays.
        count: called for each replay.
        steps_ns: mean step for the current number of samples, by replayed division.
        best: the division with the shortest step; among equals one with fewest buckets.
    """

    before: ReplayedJob
    job: ReplayedJob
    baseline: pl.DataFrame
    slowdowns: Sequence[float]
    samples: float
    left: int
    count: Callable[[], None]
    steps_ns: dict[Division, float] = field(default_factory=dict)
    best: Division = ()

    @cached_property
    def reductions(self) -> GradientReductions:
        """How the job reduces its gradients.

        Raises:
            Unanswerable: the run lacks what a plan needs.
        """
        reductions = reductions_of(self.job.graph)
        require_equal_passes(reductions)
        return reductions

    @cached_property
    def gradients(self) -> ReadyGradients:
        """The gradients as the model of one link needs them."""
        return gradients_of(self.reductions)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the gradients."""
        return gradient_names(self.reductions)

    @property
    def best_ns(self) -> float:
        """The shortest step; infinite before the first replay."""
        return self.steps_ns.get(self.best, float("inf"))

    def step_ns(self, division: Division) -> float:
        """Return the mean step with a division; infinite where no replay is left."""
        if division in self.steps_ns:
            return self.steps_ns[division]
        if self.left <= 0:
            return float("inf")
        self.left -= 1
        after, timeline = self._replayed(division, as_it_is=True)
        step_ns = float(steps_under(self.baseline, self.before, after, timeline).mean()) / self.samples
        self.steps_ns[division] = step_ns
        in_pieces = any(part.pieces > 1 for part in division)  # which must gain more than rounding errors
        best_ns = self.best_ns * (1 - SHORTER * in_pieces)
        if (step_ns, len(division)) < (best_ns, len(self.best)):
            self.best = division
        self.count()
        return step_ns

    def _replayed(self, division: Division, as_it_is: bool) -> tuple[ReplayedJob, Timeline]:
        """Return the job with a division, and its replay.

        Args:
            as_it_is: whether to leave buckets as recorded if the job has them already.
        """
        plan, positions = as_plan(division, self.names), positions_in(division)
        after = self.job
        if not (as_it_is and is_recorded(self.reductions, plan, positions)):
            changed = with_planned(self.reductions, plan, positions)
            shared = with_shared_links(self.job.graph, changed)
            after = dataclasses.replace(self.job, graph=shared, made={})
        return after, next(self.before.replays(after, self.slowdowns[:1]))

    def on_critical_path(self, division: Division) -> list[int]:
        """Return the buckets whose reductions are on the critical path, by time on it, longest first."""
        _, timeline = self._replayed(division, as_it_is=False)
        nodes, path = timeline.graph.nodes, path_of_steps(timeline, sorted(set(self.baseline["window"])))
        first = int(self.reductions.graph.nodes.collective.max(initial=-1)) + 1
        moves = path[(nodes.kind[path] == NodeKind.TRANSFER) & (nodes.collective[path] >= first)]
        bucket_of = np.repeat(np.arange(len(division)), [part.pieces for part in division])
        # New collectives are numbered by pass, then in the order of its reductions.
        bucket = bucket_of[(nodes.collective[moves] - first) % bucket_of.size]
        spent = np.bincount(bucket, nodes.duration[moves] + 1, minlength=len(division))
        order = np.lexsort((np.arange(spent.size), -spent))
        return [int(number) for number in order if spent[number]]

    def modelled_ns(self, division: Division) -> float:
        """Return when the last reduction ends on one link."""
        return reductions_end(self.gradients, last_gradients(division))[-1]


def uniform_divisions(reductions: GradientReductions) -> dict[Division, float]:
    """Return the divisions by one size for all buckets, with the smallest such size in 2**20 bytes."""
    backward = reductions.passes[0]
    divisions: dict[Division, float] = {}
    for size in SIZES_MB:
        closes = closing_of(reductions, backward, round(size * MB), round(size * MB))
        divisions.setdefault(tuple(map(Part, closes.tolist())), size)
    return divisions


def search_division(replays: Replays, reduce_in: str = "", seeds: Iterable[Division] = ()) -> None:
    """Replay promising divisions, and leave the best in `replays`.

    Args:
        reduce_in: half precision that reductions may use.
        seeds: divisions to begin with, besides those of the job.

    Raises:
        Unanswerable: the run lacks what a plan needs.
    """
    reductions = replays.reductions
    ends = ends_of(replays.gradients)
    recorded = {tuple(map(Part, backward.closes.tolist())) for backward in reductions.passes}
    starts = [*seeds, *sorted(recorded), *uniform_divisions(reductions), *_modelled(replays, ends)]
    if reduce_in:
        starts += [in_half(division, reduce_in) for division in starts]
    elif _count_divisions(replays.gradients, ends) <= min(MAX_DIVISIONS, replays.left - len(starts)):
        starts += all_divisions(replays.gradients, ends)
    for division in dict.fromkeys(starts):
        replays.step_ns(division)
    search_locally(replays, ends)
    prefer_few_reductions(replays)
    if reduce_in:
        critical = set(replays.on_critical_path(replays.best))
        kept = tuple(
            part if number in critical else part._replace(reduce_in="")
            for number, part in enumerate(replays.best)
        )
        if replays.step_ns(kept) <= replays.best_ns * (1 + AS_GOOD):
            replays.best = kept  # hidden reductions keep full precision


def require_reducible(reductions: GradientReductions, reduce_in: str) -> None:
    """Raise if gradients cannot be reduced in half precision.

    Raises:
        Unanswerable: some have few bits already, or are of unknown type.
    """
    backward = reductions.passes[0]
    for bucket in plain_reductions(reductions, backward, backward.closes):
        compressed(reductions, bucket, Codec(reduce_in))


def in_half(division: Division, reduce_in: str) -> Division:
    """Return the division with all buckets reduced in half precision."""
    return tuple(part._replace(reduce_in=reduce_in) for part in division)


def ends_of(gradients: ReadyGradients) -> list[int]:
    """Return the gradients at which a bucket may end: all, or about `MAX_ENDS` that divide bytes evenly."""
    count = gradients.ready.size
    if count <= MAX_ENDS:
        return list(range(count))
    sizes = np.rint(gradients.num_bytes).astype(np.int64)
    cap = max(int(sizes.sum()) // MAX_ENDS, 1)
    return sorted({*closing(sizes, cap, cap).tolist(), *gradients.ends})


def _modelled(replays: Replays, ends: Sequence[int]) -> list[Division]:
    """Return the divisions that end first of those that are best on one link, and some with few buckets."""
    divisions = [tuple(map(Part, closes)) for closes in best_divisions(replays.gradients, closes=ends)]
    end_ns = np.array(list(map(replays.modelled_ns, divisions)))
    chosen = np.argsort(end_ns, kind="stable")[:EARLIEST].tolist()
    chosen += [int(np.argmax(end_ns <= end_ns.min() * (1 + later))) for later in NEARLY]
    return [divisions[number] for number in chosen]


def _count_divisions(gradients: ReadyGradients, ends: Sequence[int]) -> int:
    free = len(ends) - 1 - len(gradients.ends)
    return 1 << min(free, 62)


def all_divisions(gradients: ReadyGradients, ends: Sequence[int]) -> Iterator[Division]:
    """Yield every division with ends at some gradients, fewer buckets first."""
    last = gradients.ready.size - 1
    free = [end for end in ends if end not in gradients.ends and end != last]
    for count in range(len(free) + 1):
        for chosen in combinations(free, count):
            yield tuple(map(Part, sorted({*chosen, *gradients.ends, last})))


# Local search.


def search_locally(replays: Replays, ends: Sequence[int]) -> None:
    """Move to better divisions, starting from the best, while moves shorten the step and replays are left."""
    while replays.left > TO_SETTLE:
        best_ns, division = replays.best_ns, replays.best
        moves = [move for move in moves_of(replays, division, ends) if move not in replays.steps_ns]
        moves.sort(key=lambda move: (replays.modelled_ns(move), len(move), move))
        for move in moves[: min(MOVES, replays.left - TO_SETTLE)]:
            if replays.step_ns(move) < best_ns * (1 - SHORTER):
                break
        else:
            return


def prefer_few_reductions(replays: Replays) -> None:
    """Choose the division with the fewest reductions among those as good as the best, and join more buckets.

    Fewer reductions are better at equal steps, since a run with few sizes may not show their cost: an unknown
    latency is taken as 0.
    """
    limit_ns = replays.best_ns * (1 + AS_GOOD)

    def order(division: Division) -> tuple[int, float]:
        return sum(part.pieces for part in division), replays.steps_ns[division]

    as_good = [division for division, step_ns in replays.steps_ns.items() if step_ns <= limit_ns]
    replays.best = min(as_good, key=order)
    forced = {*replays.gradients.ends, replays.best[-1].last}
    while replays.left > 0:
        closes = last_gradients(replays.best)
        joined = [
            _with_closes(replays.best, sorted({*closes} - {end})) for end in closes if end not in forced
        ]
        joined = [division for division in joined if division not in replays.steps_ns]
        joined.sort(key=lambda division: (replays.modelled_ns(division), division))
        fewer = next((division for division in joined if replays.step_ns(division) <= limit_ns), None)
        if fewer is None:
            return
        replays.best = fewer


def moves_of(replays: Replays, division: Division, ends: Sequence[int]) -> set[Division]:
    """Return the divisions with a changed end of a bucket on the critical path, or of all equal blocks."""
    closes = last_gradients(division)
    equal = _equal_ends(replays, ends)
    moves: set[Division] = set()
    for bucket in replays.on_critical_path(division) or range(len(division)):
        for gone, come in _changes(replays.gradients, closes, ends, bucket):
            for together in (False, True):
                out, into = (_in_all(equal, place) if together else place for place in (gone, come))
                changed = ({*closes} - out) | into | {*replays.gradients.ends, closes[-1]}
                moves.add(_with_closes(division, sorted(changed)))
        within = positions_in(division)[bucket]
        if len(within) == 1 and division[bucket].pieces < MAX_PIECES:
            part = division[bucket]
            cut = part._replace(pieces=2 * part.pieces)
            moves.add((*division[:bucket], cut, *division[bucket + 1 :]))
    return moves


def _changes(
    gradients: ReadyGradients, closes: Sequence[int], ends: Sequence[int], bucket: int
) -> Iterator[tuple[set[int], set[int]]]:
    """Yield ends to remove, and ends to add: for moving an end, joining with a neighbour, and cutting."""
    bounds = (-1, *closes)
    for number in (bucket, bucket + 1):  # the end before the bucket, and its own
        if not 0 < number < len(bounds) - 1:
            continue
        end, lowest, highest = bounds[number], bounds[number - 1], bounds[number + 1]
        yield {end}, set()
        place = int(np.searchsorted(ends, end))
        for shift in (*SHIFTS, *(-shift for shift in SHIFTS)):
            other = place + shift
            if 0 <= other < len(ends) and lowest < ends[other] < highest:
                yield {end}, {ends[other]}
    first, last = bounds[bucket] + 1, bounds[bucket + 1]
    inside = [end for end in ends if first <= end < last]
    before = np.cumsum(gradients.num_bytes[first : last + 1])
    for share in (0.25, 0.5, 0.75) if inside else ():
        middle = first + int(np.searchsorted(before, share * before[-1]))
        yield set(), {min(inside, key=lambda end: (abs(end - middle), end))}


def _with_closes(division: Division, closes: Iterable[int]) -> Division:
    """Return a division with other ends: each bucket inherits from the one that had its last gradient."""
    old = last_gradients(division)
    return tuple(
        division[int(np.searchsorted(old, close))]._replace(last=close, pieces=1)
        if close not in old
        else division[old.index(close)]
        for close in closes
    )


def _in_all(equal: dict[int, set[int]], places: set[int]) -> set[int]:
    """Return ends at the same positions in all equal blocks."""
    return {other for place in places for other in equal.get(place, {place})}


def _equal_ends(replays: Replays, ends: Sequence[int]) -> dict[int, set[int]]:
    """Map each end in a repeated block to the ends at the same position in all of them."""
    parameters = replays.reductions.passes[0].parameters
    kinds: dict[object, int] = {}
    looks = parameters.shapes or parameters.num_bytes.tolist()
    kind = np.array([kinds.setdefault(look, len(kinds)) for look in looks])
    first, last, length = repeated(kind)
    places: dict[int, set[int]] = {}
    for end in ends:
        if first <= end < last:
            places.setdefault((end - first) % length, set()).add(end)
    return {end: equal for equal in places.values() for end in equal}


def repeated(kind: Ints) -> tuple[int, int, int]:
    """Find the longest stretch of repeated blocks of gradients.

    Args:
        kind: [P] equal for gradients that look the same.

    Returns:
        Its first gradient, the one after its last, and the length of a block; 0, 0, 1 where nothing repeats.
    """
    best = (0, 0, 1)
    for length in range(1, kind.size // 2 + 1):
        same = np.append(kind[length:] == kind[:-length], False)
        breaks = np.flatnonzero(~same)
        begins = np.append(0, breaks[:-1] + 1)
        longest = int(np.argmax(breaks - begins))
        begin, end = int(begins[longest]), int(breaks[longest]) + length
        if end - begin >= 2 * length and end - begin > best[1] - best[0]:
            best = (begin, end, length)
    return best
