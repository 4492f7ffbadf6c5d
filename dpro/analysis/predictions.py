"""Predictions of a run's usual step under edits, each computed once for all answers.

Takes an `Analysis` and edits; returns a `Prediction` relative to the usual step of the job as it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import condensed_job
from dpro.analysis.selected import replayed_steps
from dpro.plugins import hooks_of
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict
from dpro.selection import ALL, Selection


def predict_edits(
    analysis: Analysis, edits: Sequence[Edit], selection: Selection = ALL, job: ReplayedJob | None = None
) -> Prediction:
    """Predict the mean step after all edits together; keep the result unless steps are selected.

    Uses the condensed ranks of a large run if no edit needs the whole graph.

    Args:
        edits: edits, applied in this order.
        selection: steps whose mean is predicted.
        job: the job of the run, if already open.

    Raises:
        UsageError: no deep window covers the selected steps.
        Unanswerable: an edit needs data that the run lacks, or a whole graph that does not fit into memory.
    """

    def compute() -> Prediction:
        trust, baseline = trust_and_baseline(analysis, selection)
        if job is not None:
            return predict(job, baseline, edits, trust)
        condensed = analysis.condensed
        if condensed is None or any(edit.within_ranks() is None for edit in edits):
            return predict(analysis.built.predictive, baseline, edits, trust)
        with condensed_job(analysis.run, condensed) as by_rank:
            return predict(by_rank, baseline, edits, trust)

    if selection:
        return calibrated(compute())
    return analysis.once(("prediction", *edits), lambda: calibrated(compute()))


def calibrated(prediction: Prediction) -> Prediction:
    """Pass a prediction through the extensions that calibrate it by the measured errors of tried changes."""
    for calibrate in hooks_of("predicted"):
        prediction = calibrate(prediction)
    return prediction


def trust_and_baseline(analysis: Analysis, selection: Selection) -> tuple[Trust, pl.DataFrame]:
    """Return the trust in the selected steps, and the ends of all steps of the unchanged graph.

    Raises:
        UsageError: no deep window covers the selected steps.
    """
    trust = analysis.trust
    if not selection:
        return trust, analysis.baseline
    selection.checked(replayed_steps(analysis))
    steps = selection.keep(trust.steps)
    error_pct = float(steps["error_pct"].abs().mean() or 0.0)  # type: ignore[arg-type]
    baseline = baseline_steps(analysis.outline.predictive, analysis.outline_timeline, selection)
    return dataclasses.replace(trust, steps=steps, error_pct=error_pct), baseline
