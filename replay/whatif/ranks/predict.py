"""Predictions for condensed ranks, as `dpro.replay.whatif.predict` makes them of whole graphs.

In: a condensed run and edits. Out: a `Prediction`, the same as of the whole graph. An edit that looks at the
whole graph is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.missing_ranks import as_missing_ranks_may_come
from dpro.replay.models.link_costs import beyond_sizes
from dpro.replay.sharded.agreed import Spread
from dpro.replay.timeline import Timeline, changed_durations, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.graph_ops.kept_tables import with_kept_tables
from dpro.replay.whatif.predict import Prediction, compare_replays
from dpro.replay.whatif.ranks.changed import CondensedJob, apply_edit
from dpro.replay.whatif.ranks.slowed import replays_by_rank
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
    known = () if overlap is None else (overlap.slowdown, overlap.low, overlap.high)
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
