"""What edits would make of a run's usual step: one prediction of each change, whichever answer asks for it.

In: an `Analysis`, and edits. Out: a `Prediction`, relative to the usual step of the job as it runs.
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
    """Predict edits together, once for each run; of condensed ranks where no edit looks at the whole graph.

    Args:
        edits: applied in this order.
        selection: the steps whose mean is predicted.
        job: the job of the run, where it is at hand.

    Raises:
        UsageError: no such steps were recorded in depth.
        Unanswerable: an edit needs what the run lacks, or the whole graph, which does not fit into memory.
    """

    def compute() -> Prediction:
        trust, baseline = of_steps(analysis, selection)
        if job is not None:
            return predict(job, baseline, edits, trust)
        condensed = analysis.condensed
        if condensed is None or any(edit.within_ranks() is None for edit in edits):
            return predict(analysis.built.predictive, baseline, edits, trust)
        with condensed_job(analysis.run, condensed) as by_rank:
            return predict(by_rank, baseline, edits, trust)

    if selection:
        return as_tried(compute())
    return analysis.once(("prediction", *edits), lambda: as_tried(compute()))


def as_tried(prediction: Prediction) -> Prediction:
    """A prediction with the errors that such changes showed when they were tried, as extensions know them."""
    for calibrate in hooks_of("predicted"):
        prediction = calibrate(prediction)
    return prediction


def of_steps(analysis: Analysis, selection: Selection) -> tuple[Trust, pl.DataFrame]:
    """What predictions of selected steps start from: how well these fit, and when all end.

    Raises:
        UsageError: none were recorded in depth.
    """
    trust = analysis.trust
    if not selection:
        return trust, analysis.baseline
    selection.checked(replayed_steps(analysis))
    steps = selection.keep(trust.steps)
    error_pct = float(steps["error_pct"].abs().mean() or 0.0)  # type: ignore[arg-type]
    baseline = baseline_steps(analysis.outline.predictive, analysis.outline_timeline, selection)
    return dataclasses.replace(trust, steps=steps, error_pct=error_pct), baseline
