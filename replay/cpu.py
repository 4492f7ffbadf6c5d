"""CPU threads of one rank: which matter, and where each waited for another.

In: a `Local`. Out: segments of the threads, and for each rule its waits and links. Waits for the GPU are
found in `dpro.replay.streams`, those for collectives in `dpro.replay.results`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import EdgeKind
from dpro.replay.links import Links, join, links
from dpro.replay.local import KIND, Local
from dpro.replay.threads import Segments, bursts, thread_segments, top_level

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

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
