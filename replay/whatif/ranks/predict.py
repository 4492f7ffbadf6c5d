"""Predictions for condensed ranks, as `dpro.replay.whatif.predict` makes them of whole graphs.

In: a condensed run and edits. Out: a `Prediction`, the same as of the whole graph. An edit that looks at the
whole graph is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.missing_ranks import as_missing_ranks_may_come
from dpro.replay.models.link_costs import beyond_sizes
from dpro.replay.sharded.agreed import Spread
from dpro.replay.timeline import Timeline, replay
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
        run: the run.
        condensed: its ranks.
        baseline: `dpro.replay.whatif.predict.baseline_steps` of the joined graph.
        edits: what to change.
        trust: how well the unchanged replay fits.
        folder: where shares of ranks are kept meanwhile.
        spread: has the work on ranks done: `map`, or that of an executor whose processes see the folder.

    Raises:
        Unanswerable: an edit needs the whole graph, or what the run lacks.
    """
    kept = with_kept_tables(condensed.joined.graph)
    jobs = [CondensedJob(run, condensed, folder, dataclasses.replace(condensed.joined, graph=kept))]
    notes: list[str] = []
    for edit in edits:
        graph = jobs[-1].joined.graph
        jobs.append(apply_edit(jobs[-1], edit, spread))
        notes += [*edit.notes(graph), *beyond_sizes(graph, jobs[-1].joined.graph)]
    graphs = [job.joined.graph for job in jobs]
    timelines = _replays(jobs[0], jobs[-1], trust, spread)
    if trust.rendezvous is not None:
        timelines += as_missing_ranks_may_come(graphs[-1], trust.rendezvous)
    return compare_replays(graphs, timelines, baseline, edits, trust, notes)


def _replays(before: CondensedJob, after: CondensedJob, trust: Trust, spread: Spread) -> list[Timeline]:
    """The replay of a changed job; where the overlap matters also with its slowdown at both bounds."""
    found = trust.overlap
    if found is None:
        return [replay(after.joined.graph)]
    return replays_by_rank(before, after, (found.slowdown, found.low, found.high), spread)
