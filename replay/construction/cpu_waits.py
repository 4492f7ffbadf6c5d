"""CPU threads of one rank: which matter, where they hand over work, and where they wait for results.

Takes a `RankView`; returns segments of the threads, waits, and dependencies: between the thread that starts
work and the one that does it, and from CPU collectives and messages to where their results are needed. A
trace has the end of a collective, and the time at which a message's caller learned of its end; it seldom has
the call that waited. `gpu_streams.py` finds waits for the GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.construction.cpu_threads import (
    ThreadSegments,
    bursts,
    merge_intervals,
    thread_segments,
    top_level,
)
from dpro.replay.construction.dependencies import WORK, Dependencies, join, links
from dpro.replay.construction.rank_view import KIND, Names, RankView
from dpro.replay.graph import EdgeKind

AUTOGRAD = r"^autograd::engine::evaluate_function|^\w+Backward\d*$"  # old engines have no spans
BACKWARD = r"^dpro::backward$"
QUIET = (KIND["annotation"], KIND["python"])
LONG_TURNS = 8.0  # calls in a row, as a multiple of random turns, from which one thread waits for the other
MEANWHILE = 0.95  # share of those calls during which the other thread calls nothing


@dataclass(frozen=True)
class Threads:
    """The relevant threads of a rank: those that drive the loop, run backward, or launch work elsewhere.

    Attributes:
        segments: innermost spans, by thread.
        annotations: innermost annotations, by thread.
        helpers: threads that work while the main thread waits for them: those that run backward.
    """

    segments: dict[int, ThreadSegments]
    annotations: dict[int, ThreadSegments]
    helpers: list[int]


@dataclass(frozen=True)
class CpuWaits:
    """The result of one rule: stretches in which threads waited, and the dependencies that end them.

    Attributes:
        tid, start, end: [W] thread and ns.
        links: the dependencies.
    """

    tid: Ints
    start: Ints
    end: Ints
    links: Dependencies


def threads_of(view: RankView, names: Names) -> Threads:
    """Find the relevant threads of a rank, and their helpers."""
    cpu = np.flatnonzero(view.on_cpu)
    autograd = names.match(AUTOGRAD, view.name[cpu])
    runs_backward = set(np.unique(view.tid[cpu[autograd]]).tolist())
    active = {view.main_tid, *np.unique(view.tid[view.calls]).tolist(), *runs_backward}
    segments, annotations = {}, {}
    for tid in sorted(active & set(np.unique(view.tid[cpu]).tolist())):
        spans = cpu[view.tid[cpu] == tid]
        finish = int(view.end[spans].max())  # a thread is idle after its last span
        annotation = spans[view.kind[spans] == KIND["annotation"]]
        segments[tid], annotations[tid] = (
            thread_segments(view.start[of], view.end[of], of, view.begin, finish)
            for of in (spans, annotation)
        )
    main = segments.get(view.main_tid)
    in_turn = {tid for tid in segments if main is not None and _launches_in_turn(view, main, tid)}
    return Threads(segments, annotations, sorted((runs_backward | in_turn) - {view.main_tid}))


def _launches_in_turn(view: RankView, main: ThreadSegments, tid: int) -> bool:
    """Return whether a thread and the main one launch in turns, with the main one idle meanwhile.

    This finds threads that run backward where no operators are recorded to identify them.
    """
    calls = view.calls[np.isin(view.tid[view.calls], (view.main_tid, tid))]
    is_helper = view.tid[calls] == tid
    count = np.count_nonzero(is_helper)
    at_random = 1 + 2 * count * (1 - count / max(calls.size, 1))
    if LONG_TURNS * (1 + np.count_nonzero(np.diff(is_helper))) > at_random:
        return False
    during = main.span[main.at(view.start[calls[is_helper]])]
    quiet = (during < 0) | np.isin(view.kind[during], QUIET)
    return float(quiet.mean()) >= MEANWHILE


def hand_over(view: RankView, threads: Threads, tid: int, recorded: Dependencies) -> CpuWaits:
    """Return the waits between forward and backward: the caller waits for its backward thread, and back.

    They are inferred from when the threads work, unless the trace records the data passed between them.
    """
    cpu = np.flatnonzero(view.on_cpu & (view.tid == tid))
    outer = cpu[top_level(view.start[cpu], view.end[cpu])]
    main = view.main_tid
    begin, finish, contained = bursts(threads.segments[main], view.start[outer], view.end[outer])
    idle_from, idle_to = np.append(view.begin, finish), np.append(begin, view.finish)
    done = finish[contained]
    to_thread = (recorded.source_thread == main) & (recorded.target_thread == tid)
    started = np.sort(recorded.target_at[to_thread])
    unsaid = np.searchsorted(started, begin) == np.searchsorted(started, finish)
    given = links(EdgeKind.HANDOVER, (main, begin), (tid, begin), unsaid)
    returned = links(EdgeKind.HANDOVER, (tid, done), (main, done), unsaid[contained])
    return CpuWaits(
        tid=np.repeat([main, tid], [done.size, idle_from.size]),
        start=np.append(begin[contained], idle_from),
        end=np.append(done, idle_to),
        links=join([given, returned]),
    )


def stretches_of(tid: int, waits: Sequence[CpuWaits]) -> tuple[Ints, Ints]:
    """Return [W] starts and ends of a thread's waits, in ns; they may touch or overlap."""
    of_thread = [wait.tid == tid for wait in waits]
    return (
        np.concatenate([wait.start[mine] for wait, mine in zip(waits, of_thread)]),
        np.concatenate([wait.end[mine] for wait, mine in zip(waits, of_thread)]),
    )


# A thread that calls nothing for this long waits, unless it drives the loop.
PAUSE_NS = 1_000_000


def pauses(view: RankView, threads: Threads, tid: int, waits: Sequence[CpuWaits]) -> CpuWaits:
    """Return the pauses of a thread that neither drives the loop nor is waited for, such as a data loader.

    What ends a pause is not in a trace: a free buffer, a request. It is inferred that the thread resumes when
    the loop is as far as it was then: the main thread, the one that runs backward, or, while these wait, the
    device.

    Args:
        waits: those of the other threads.
    """
    segments = threads.segments[tid]
    quiet = (segments.span < 0) | np.isin(view.kind[segments.span], QUIET)
    idle = quiet & (segments.end - segments.start >= PAUSE_NS)
    idle[-1] = False  # the thread does nothing afterwards
    start, end = segments.start[idle], segments.end[idle]
    work = np.flatnonzero(view.on_gpu)
    work = work[np.argsort(view.end[work], kind="stable")]
    ended = np.append(-1, work)[np.searchsorted(view.end[work], end, side="right")]
    source, at, until = np.full(end.size, WORK), ended, np.where(ended >= 0, view.end[ended], -1)
    for driver in (*threads.helpers, view.main_tid):
        waits_from, waits_to = merge_intervals(*stretches_of(driver, waits))
        works = np.searchsorted(waits_from, end, side="left") == np.searchsorted(waits_to, end, side="left")
        source[works], at[works], until[works] = driver, end[works], end[works]
    real = until > start
    given = links(EdgeKind.HANDOVER, (source[real], at[real]), (tid, until[real]), True)
    return CpuWaits(np.full(int(real.sum()), tid), start[real], until[real], given)


# A thread that waited for a collective continues within this time of its end, or within this share of its
# idle time: woken threads share their cores with the ones that woke them.
WAKE_UP_NS = 500_000
WAKE_UP_SHARE = 0.2
# It may also continue this much before the end recorded by the worker, after idling for a multiple of that.
NOTIFIED_EARLY_NS = 5_000_000
NOTIFIED_EARLY_TIMES = 10

# Functional operators, and those of them that wait for the results of others.
FUNCTIONAL = r"^_c10d_functional(_autograd)?::"
WAITS = FUNCTIONAL + r"wait_tensor$"


@dataclass(frozen=True)
class _Operators:
    """Masks [S] of spans: functional waits, functional operators, and backward passes."""

    waits: Bools
    functional: Bools
    backward: Bools


@dataclass(frozen=True)
class _Ended:
    """Collectives and messages of one thread, and its activity when each was known to have ended.

    Attributes:
        span, call: [K] the span that ran it, and its call.
        end: [K] end, in ns.
        asked: [K] ns at which the thread knew of the end; for a collective, its end.
        is_asked: [K] whether the trace has the time at which the thread asked.
        is_functional: [K] whether a functional operator called it, for which another one waits later.
        begin, finish: [K] ns, the thread's segment around `asked`.
        inner: [K] the innermost span there, -1 for none.
        following: [K] the innermost span after that segment, -1 for none.
    """

    span: Ints
    call: Ints
    end: Ints
    asked: Ints
    is_asked: Bools
    is_functional: Bools
    begin: Ints
    finish: Ints
    inner: Ints
    following: Ints


def ended_when_notified(view: RankView, threads: Threads, names: Names) -> RankView:
    """Move the ends of CPU collectives back to when their callers were notified.

    A worker notifies the caller a little before it closes its own range. The notification is the end of a
    stretch in which the caller was idle, if that ended a little earlier and had lasted much longer than that.
    """
    is_wait = names.match(WAITS, view.name)
    end, asked = view.end.copy(), view.asked.copy()
    for span in np.flatnonzero(_called_on_cpu(view) & ~view.is_asked).tolist():
        call = view.launch[span]
        segments = threads.segments.get(int(view.tid[call]))
        if segments is None:
            continue
        segment = int(segments.at(end[[span]] - 1)[0])
        before = np.arange(np.searchsorted(segments.end, end[span] - NOTIFIED_EARLY_NS), segment)
        inner, finish = segments.span[before], segments.end[before]
        idle = (inner < 0) | np.isin(view.kind[inner], QUIET) | is_wait[inner]
        length = finish - np.maximum(segments.start[before], view.end[call])
        notified = finish[idle & (length >= NOTIFIED_EARLY_TIMES * (end[span] - finish))]
        end[span] = asked[span] = notified[-1] if notified.size else end[span]
    return dataclasses.replace(view, end=end, asked=asked)


def _called_on_cpu(view: RankView) -> Bools:
    return (view.instance >= 0) & ~view.on_gpu & (view.launch >= 0)


def waits_for_collectives(view: RankView, threads: Threads, names: Names) -> CpuWaits:
    """Return where threads needed the results of CPU collectives and messages that they called.

    - A message, or a pretended collective, is needed when its caller asked, and waited for if it ended after
      the caller's last operator.
    - One called by a functional operator is awaited by an operator, too: the one during which it ends, or the
      next that awaits no other.
    - Any other that ends while its caller is in no operator that began since the call was waited for, if the
      caller continues soon after, or did so in most such places.
    - One that ends while the caller computes is needed at the end of the backward pass that called it, or
      (inferred) at the end of the step.
    """
    ran = np.flatnonzero(_called_on_cpu(view))
    kinds = _Operators(
        waits=view.on_cpu & names.match(WAITS, view.name),
        functional=view.on_cpu & names.match(FUNCTIONAL, view.name),
        backward=view.on_cpu & names.match(BACKWARD, view.name),
    )
    nothing = links(EdgeKind.SYNC, (WORK, ran[:0]), (ran[:0], ran[:0]))
    waits = [CpuWaits(ran[:0], ran[:0], ran[:0], nothing)] + [
        _waits_of_thread(view, _ended(view, ran, tid, segments, kinds), tid, kinds)
        for tid, segments in threads.segments.items()
    ]
    tid, start, end = (
        np.concatenate([getattr(of_thread, name) for of_thread in waits]) for name in ("tid", "start", "end")
    )
    return CpuWaits(tid, start, end, join([of_thread.links for of_thread in waits]))


def _ended(view: RankView, ran: Ints, tid: int, segments: ThreadSegments, kinds: _Operators) -> _Ended:
    span = ran[view.tid[view.launch[ran]] == tid]
    call = view.launch[span]
    asked = view.asked[span]
    segment = segments.at(asked - 1)  # -1: an end just as the next operator begins ends a wait
    inside = segment + 1 < segments.span.size
    following = np.where(inside, segments.span[np.minimum(segment + 1, segments.span.size - 1)], -1)
    return _Ended(
        span=span,
        call=call,
        end=view.end[span],
        asked=asked,
        is_asked=view.is_asked[span],
        is_functional=_within(view, call, np.flatnonzero(kinds.functional & (view.tid == tid))),
        begin=segments.start[segment],
        finish=segments.end[segment],
        inner=segments.span[segment],
        following=following,
    )


def _within(view: RankView, call: Ints, outer: Ints) -> Bools:
    """Return [K] whether each call is within the last span of `outer` that began before it."""
    if outer.size == 0:
        return np.zeros(call.size, np.bool_)
    place = np.searchsorted(view.start[outer], view.start[call], side="right") - 1
    inside: Bools = (place >= 0) & (view.end[outer[np.maximum(place, 0)]] >= view.end[call])
    return inside


def _waits_of_thread(view: RankView, ended: _Ended, tid: int, kinds: _Operators) -> CpuWaits:
    """Return the waits of one thread for results of its calls, and where it needs them."""
    inner = np.maximum(ended.inner, 0)
    quiet = (ended.inner < 0) | np.isin(view.kind[inner], QUIET)
    around_call = (ended.inner >= 0) & (view.start[inner] <= view.start[ended.call])
    waits = (ended.inner >= 0) & kinds.waits[inner]
    idle = (waits | ((quiet | around_call) & ~ended.is_functional)) & (ended.begin < ended.end)
    waited = ended.is_asked | (idle & (waits | _goes_on_soon(view, ended, idle)))
    since = np.maximum(ended.begin, view.end[ended.call])
    # A message may have been over before its caller asked.
    blocked = waited & (ended.end > since)
    moment = np.select([blocked, waited, idle], [ended.end, ended.asked, ended.finish], -1)
    inferred = ~ended.is_asked & ~waits
    claimed = set(ended.inner[blocked & waits].tolist())
    for number in np.flatnonzero(moment < 0).tolist():
        moment[number], inferred[number] = _needed_by(view, ended, number, kinds, claimed)
    dependencies = links(EdgeKind.SYNC, (WORK, ended.span), (tid, moment), inferred)
    return CpuWaits(np.full(int(blocked.sum()), tid), since[blocked], ended.end[blocked], dependencies)


def _goes_on_soon(view: RankView, ended: _Ended, idle: Bools) -> Bools:
    """Return [K] whether the thread continues soon after the end, or does so in most places of this kind.

    Places are of one kind if the same call was made and the same span follows: a thread that waits in one
    step waits in all, even if it was once delayed by the lack of a core.
    """
    prompt = ended.finish - ended.asked <= np.maximum(
        WAKE_UP_NS, WAKE_UP_SHARE * (ended.finish - ended.begin)
    )
    after = np.where(ended.following >= 0, view.name[np.maximum(ended.following, 0)], -1)
    places = list(zip(view.name[ended.call].tolist(), after.tolist()))
    votes: Counter[tuple[int, int]] = Counter()
    for place, at_once, counts in zip(places, prompt.tolist(), idle.tolist()):
        votes[place] += counts * (1 if at_once else -1)
    soon: Bools = prompt | np.array([votes[place] > 0 for place in places], np.bool_)
    return soon


def _needed_by(
    view: RankView, ended: _Ended, number: int, kinds: _Operators, claimed: set[int]
) -> tuple[int, bool]:
    """Return when a result that no thread waited for is needed, and whether that is inferred."""
    call, end = int(ended.call[number]), int(ended.end[number])
    on_thread = view.tid == view.tid[call]
    if ended.is_functional[number]:
        later = np.flatnonzero(on_thread & kinds.waits & (view.start >= end)).tolist()
        free = [wait for wait in later if wait not in claimed]
        if free:
            claimed.add(free[0])
            return int(view.start[free[0]]), True
    around = on_thread & kinds.backward & (view.start <= view.start[call])
    around &= view.end >= max(int(view.end[call]), end)
    if around.any():
        return int(view.end[around].min()), False
    steps = view.step_start[view.step_start >= end]
    return (int(steps[0]) if steps.size else view.finish), True
