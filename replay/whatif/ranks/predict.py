"""Predictions for condensed ranks, as `dpro.replay.whatif.predict` makes them of whole graphs.

In: a condensed run and edits. Out: a `Prediction`, the same as of the whole graph. An edit that looks at the
whole graph is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.errors import Unanswerable
from dpro.replay.cost.transfers import beyond_sizes
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.missing_ranks import as_missing_ranks_may_come
from dpro.replay.fidelity.overlap import ROUNDS, SETTLED_NS, UNCHANGED, overlapped_share
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.sharded.agreed import Spread
from dpro.replay.sharded.joined import Meetings, meetings_of, replay_inside, those_of
from dpro.replay.sharded.share import Share
from dpro.replay.sharded.skeleton import RankSkeleton, skeleton_of_share
from dpro.replay.timeline import Timeline, changed_durations, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.graph_ops.kept_tables import with_kept_tables
from dpro.replay.whatif.predict import Prediction, compare_replays
from dpro.replay.whatif.ranks.changed import CondensedJob, apply_edit, with_ranks
from dpro.replay.whatif.ranks.rank import RankWork, rank_under_edits
from dpro.store import Run


def predict_by_rank(
    run: Run,
    condensed: CondensedRun,
    baseline: pl.DataFrame,
    edits: Sequence[Edit],
    trust: Trust,
    folder: Path,
    spread: Spread,
) -> Prediction:
    """Apply edits one after the other, replay, and compare with the baseline.

    Args:
        baseline: `dpro.replay.whatif.predict.baseline_steps` of the joined graph.
        folder: where shares of ranks are kept meanwhile.
        spread: has the work on ranks done: `map`, or that of an executor whose processes see the folder.

    Raises:
        Unanswerable: an edit needs the whole graph, or what the run lacks.
    """
    kept = with_kept_tables(condensed.joined.graph)
    jobs = [CondensedJob(run, condensed, folder, dataclasses.replace(condensed.joined, graph=kept))]
    notes: list[str] = []
    ends: list[CondensedJob] = []
    limits: list[CondensedJob] = []
    for at, edit in enumerate(edits):
        made = apply_edit(jobs[-1], edit, spread)
        notes += [*made.notes, *beyond_sizes(jobs[-1].joined.graph, made.job.joined.graph)]
        jobs.append(made.job)
        for found, others in ((ends, made.ends), (limits, made.least)):
            found += _under(others, edits[at + 1 :], spread)
    graphs = [job.joined.graph for job in jobs]
    overlap = trust.overlap
    known = () if overlap is None else (overlap.factor, overlap.low, overlap.high)
    timelines = _replays(jobs[0], jobs[-1], known, spread)
    if trust.rendezvous is not None:
        timelines += as_missing_ranks_may_come(graphs[-1], trust.rendezvous)
    others_ns = [
        [_mean_step(_replays(jobs[0], each, known[:1], spread)[0], baseline) for each in found]
        for found in (ends, limits)
    ]
    return compare_replays(graphs, timelines, baseline, edits, trust, notes, others_ns)


def _under(jobs: Sequence[CondensedJob], edits: Sequence[Edit], spread: Spread) -> list[CondensedJob]:
    """Jobs under further edits, but for those in which one finds nothing to change."""
    found = []
    for job in jobs:
        with suppress(Unanswerable):
            for edit in edits:
                job = apply_edit(job, edit, spread, with_ends=False).job
            found.append(job)
    return found


def _mean_step(timeline: Timeline, baseline: pl.DataFrame) -> float:
    return float(changed_durations(baseline, timeline.graph, timeline.end).mean())


def _replays(
    before: CondensedJob, after: CondensedJob, slowdowns: Sequence[float], spread: Spread
) -> list[Timeline]:
    """The replay of a changed job, with each slowdown where communication slows kernels down."""
    if not slowdowns:
        return [replay(after.joined.graph)]
    return replays_by_rank(before, after, slowdowns, spread)


# Kernels of condensed ranks whose slowdown by communication changes, since they overlap it more or less.


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
