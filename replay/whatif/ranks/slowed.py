"""Kernels of condensed ranks whose slowdown by communication changes, since they overlap it more or less.

In: a condensed job before and after a change. Out: replays of the changed job, equal to those that
`dpro.replay.fidelity.overlap.replays_with_new_overlap` makes of a whole graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpro.arrays import Floats
from dpro.replay.fidelity.overlap import ROUNDS, SETTLED_NS, UNCHANGED, overlapped_share
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.sharded.agreed import Spread
from dpro.replay.sharded.inside import Meetings, meetings_of, replay_inside, those_of
from dpro.replay.sharded.share import Share
from dpro.replay.sharded.skeleton import RankSkeleton, skeleton_of_share
from dpro.replay.timeline import Timeline, replay
from dpro.replay.whatif.ranks.changed import CondensedJob, with_ranks
from dpro.replay.whatif.ranks.rank import RankWork, rank_under_edits


def replays_by_rank(
    before: CondensedJob, after: CondensedJob, slowdowns: Sequence[float], spread: Spread
) -> list[Timeline]:
    """Replay a changed job with kernels slowed down by the communication that now runs at the same time.

    Args:
        slowdowns: as of `dpro.replay.fidelity.overlap.Contention`.
    """
    timeline, ranks = replay(after.joined.graph), after.condensed.agreed.ranks
    pairs = zip(before.work_on(ranks), after.work_on(ranks))
    met = zip(_meetings(before, replay(before.joined.graph)), _meetings(after, timeline))
    if not any(list(spread(overlap_changes, zip(pairs, met)))):
        return [timeline]
    return [_settled(after, timeline, slowdown, spread) for slowdown in slowdowns]


def _settled(job: CondensedJob, timeline: Timeline, slowdown: float, spread: Spread) -> Timeline:
    """Replays with the durations that go with the last one's overlap, until that changes the end no more."""
    ranks = job.condensed.agreed.ranks
    for round_ in range(ROUNDS):
        slow = partial(slowed_rank, slowdown, round_)
        found = [each for each in spread(slow, zip(job.work_on(ranks), _meetings(job, timeline))) if each]
        if not found:
            break
        again = replay(with_ranks(job, found).graph)
        moved = abs(int(again.end.max(initial=0)) - int(timeline.end.max(initial=0)))
        timeline = again
        if moved < SETTLED_NS:
            break
    return timeline


def _meetings(job: CondensedJob, timeline: Timeline) -> Iterator[Meetings]:
    """The rendezvous of each rank, ascending."""
    meetings, moved = meetings_of(timeline), job.condensed.agreed
    return (those_of(meetings, moved.of(rank).moved["instance"].to_numpy()) for rank in moved.ranks)


def overlap_changes(task: tuple[tuple[RankWork, RankWork], tuple[Meetings, Meetings]]) -> bool:
    """Whether kernels of a rank overlap communication otherwise in the changed job; keeps how they did."""
    (before, after), met = task
    (share, old), (_, new) = rank_under_edits(before), rank_under_edits(after)
    one, other = _overlap(share, old, met[0]), _overlap(share, new, met[1])
    np.save(_file(before, "before"), one)
    return bool((np.abs(other - one) > UNCHANGED).any())


def slowed_rank(slowdown: float, round_: int, task: tuple[RankWork, Meetings]) -> RankSkeleton | None:
    """Condense a rank with kernels as slow as goes with what they overlap; None where that is as it was.

    Args:
        round_: of how many: the first starts from the changed rank, others from where the one before ended.
    """
    work, met = task
    share, graph = rank_under_edits(work)
    before, kernels = np.load(_file(work, "before")), graph.nodes.kind == NodeKind.KERNEL
    kept = _file(work, f"slowed-{slowdown:g}")
    last = graph.with_durations(np.load(kept)) if round_ else graph
    now = _overlap(share, last, met)
    duration: Any = graph.nodes.duration.copy()
    changed = kernels & (np.abs(now - before) > UNCHANGED)
    alone = graph.nodes.duration / (1 + (slowdown - 1) * before)
    duration[changed] = np.rint(alone * (1 + (slowdown - 1) * now))[changed]
    np.save(kept, duration)
    return skeleton_of_share(work.own.rank, share, graph.with_durations(duration)) if changed.any() else None


def _overlap(share: Share, graph: Graph, met: Meetings) -> Floats:
    """[N] `overlapped_share` of a rank that is replayed by itself."""
    timeline = replay_inside(share, graph, met)
    return overlapped_share(timeline.graph, timeline.start, timeline.end)


def _file(work: RankWork, what: str) -> Path:
    return work.folder / f"rank{work.own.rank:05d}-{what}.npy"
