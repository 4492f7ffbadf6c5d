"""CPU threads of one rank: which matter, and where each waited for another or for a collective.

In: a `Local`. Out: segments of the threads, and for each rule its waits and links. Waits for the GPU are
found in `dpro.replay.streams`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import EdgeKind
from dpro.replay.links import WORK, Links, join, links
from dpro.replay.local import KIND, Local
from dpro.replay.threads import Segments, bursts, thread_segments, top_level

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A thread that waited for a CPU collective goes on within this time of its end, or within this share of the
# time it did nothing else: woken threads share their cores with the ones that woke them.
CPU_WAKE_UP_NS = 500_000
CPU_WAKE_UP_SHARE = 0.2
# It may also go on so much before the end that the worker recorded, having been idle for a multiple of that.
TOLD_EARLY_NS = 5_000_000
TOLD_EARLY_TIMES = 10

AUTOGRAD = r"^autograd::engine::evaluate_function"
BACKWARD = "dpro::backward"
QUIET = (KIND["annotation"], KIND["python"])


@dataclass(frozen=True)
class Threads:
    """The threads of a rank that matter: those that drive the loop, run backward, or put work elsewhere.

    Attributes:
        segments: what each thread was doing, by thread.
        annotations: which annotation was around it.
        backward: threads that run backward for the main thread.
        background: number of spans on all other threads.
    """

    segments: dict[int, Segments]
    annotations: dict[int, Segments]
    backward: list[int]
    background: int


@dataclass(frozen=True)
class Waits:
    """What a rule found: stretches in which threads waited, and the dependencies that end them.

    Attributes:
        tid, start, end: [W] thread and ns.
        links: the dependencies.
    """

    tid: Ints
    start: Ints
    end: Ints
    links: Links


def threads_of(local: Local, names: pl.Series) -> Threads:
    """Sort out the threads of a rank.

    Args:
        local: the rank.
        names: the graph's names by code.
    """
    cpu = np.flatnonzero(local.on_cpu)
    autograd = names.str.contains(AUTOGRAD).to_numpy()[local.name[cpu]]
    runs_backward = set(np.unique(local.tid[cpu[autograd]]).tolist())
    active = {local.main_tid, *np.unique(local.tid[local.calls]).tolist(), *runs_backward}
    segments, annotations = {}, {}
    for tid in sorted(active & set(np.unique(local.tid[cpu]).tolist())):
        spans = cpu[local.tid[cpu] == tid]
        finish = int(local.end[spans].max())  # after the end of its last span a thread did nothing
        annotation = spans[local.kind[spans] == KIND["annotation"]]
        segments[tid], annotations[tid] = (_segments(local, of, finish) for of in (spans, annotation))
    background = int((~np.isin(local.tid[cpu], list(active))).sum())
    return Threads(segments, annotations, sorted(runs_backward - {local.main_tid}), background)


def _segments(local: Local, spans: Ints, finish: int) -> Segments:
    """What a thread did from the beginning of the window to a time."""
    return thread_segments(local.start[spans], local.end[spans], spans, local.begin, finish)


def hand_over(local: Local, threads: Threads, tid: int, told: Links) -> Waits:
    """Forward to backward and back: the caller waits while its backward thread works, and in turn.

    That is inferred from when they work, unless the trace tells that the one works on what the other made.

    Args:
        local: the rank.
        threads: its threads.
        tid: one of its backward threads.
        told: what the trace tells of hand-overs between threads.
    """
    cpu = np.flatnonzero(local.on_cpu & (local.tid == tid))
    outer = cpu[top_level(local.start[cpu], local.end[cpu])]
    main = local.main_tid
    begin, finish, contained = bursts(threads.segments[main], local.start[outer], local.end[outer])
    idle_from, idle_to = np.append(local.begin, finish), np.append(begin, local.finish)
    done = finish[contained]
    mine = (told.source_thread == main) & (told.target_thread == tid)
    started = np.sort(told.target_at[mine])
    unsaid = np.searchsorted(started, begin) == np.searchsorted(started, finish)
    given = links(EdgeKind.HANDOVER, (main, begin), (tid, begin), unsaid)
    returned = links(EdgeKind.HANDOVER, (tid, done), (main, done), unsaid[contained])
    return Waits(
        tid=np.repeat([main, tid], [done.size, idle_from.size]),
        start=np.append(begin[contained], idle_from),
        end=np.append(done, idle_to),
        links=join([given, returned]),
    )


def results_of_collectives(local: Local, threads: Threads, names: pl.Series) -> Waits:
    """Where the thread that called a CPU collective needs its result.

    If the collective ends while its caller is in no operator, and the caller goes on soon after, the caller
    was waiting. If it ends while the caller computes, its result is needed at the end of the backward pass
    that called it, or (inferred) at the end of the step.
    """
    is_backward = local.on_cpu & (names == BACKWARD).to_numpy()[local.name]
    waits: list[tuple[int, int, int]] = []
    needs: list[tuple[int, int, int, bool]] = []  # span, thread, time, inferred
    for span in np.flatnonzero((local.instance >= 0) & ~local.on_gpu & (local.launch >= 0)).tolist():
        call, end = int(local.launch[span]), int(local.end[span])
        tid = int(local.tid[call])
        segments = threads.segments.get(tid)
        if segments is None:
            continue
        at = _waited_in(local, segments, int(local.end[call]), end)
        begin, finish, inner = int(segments.start[at]), int(segments.end[at]), int(segments.span[at])
        quiet = (inner < 0 or local.kind[inner] in QUIET) and begin < end
        end = min(end, finish)  # the caller may have been told before the range closed
        if quiet and finish - end <= max(CPU_WAKE_UP_NS, CPU_WAKE_UP_SHARE * (finish - begin)):
            waits.append((tid, max(begin, int(local.end[call])), end))
            needs.append((span, tid, end, True))
        elif quiet:
            needs.append((span, tid, finish, True))
        else:
            needs.append((span, tid, *_needed_by(local, is_backward, call, end)))
    waited, needed = np.array(waits, np.int64).reshape(-1, 3), np.array(needs, np.int64).reshape(-1, 4)
    found = links(EdgeKind.SYNC, (WORK, needed[:, 0]), (needed[:, 1], needed[:, 2]), needed[:, 3] > 0)
    return Waits(waited[:, 0], waited[:, 1], waited[:, 2], found)


def _waited_in(local: Local, segments: Segments, called: int, end: int) -> int:
    """The segment in which a thread may have waited for the end of a collective.

    That is where it ends, or where it ends just as the next operator begins, the one before. A worker tells
    the caller a little before it closes its own range: then the stretch of quiet that ended so little
    earlier, if the caller had been quiet for much longer than that.
    """
    at = int(segments.at(np.array([end - 1]))[0])
    before = np.arange(np.searchsorted(segments.end, end - TOLD_EARLY_NS), at)
    inner, finish = segments.span[before], segments.end[before]
    quiet = (inner < 0) | np.isin(local.kind[np.maximum(inner, 0)], QUIET)
    idle = finish - np.maximum(segments.start[before], called)
    told = before[quiet & (idle >= TOLD_EARLY_TIMES * (end - finish))]
    return int(told[-1]) if told.size else at


def _needed_by(local: Local, is_backward: Bools, call: int, end: int) -> tuple[int, bool]:
    """When a result that nobody waited for is needed, and whether that is inferred."""
    on_thread = is_backward & (local.tid == local.tid[call])
    around = on_thread & (local.start <= local.start[call]) & (local.end >= max(local.end[call], end))
    if around.any():
        return int(local.end[around].min()), False
    later = local.step_start[local.step_start >= end]
    return (int(later[0]) if later.size else local.finish), True
