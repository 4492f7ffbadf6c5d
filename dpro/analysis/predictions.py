"""Predictions of a run's usual step under edits, each computed once for all answers.

Takes an `Analysis` and edits; returns a `Prediction` relative to the usual step of the job as it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import condensed_job
from dpro.analysis.selected import replayed_steps
from dpro.detect.findings import Finding
from dpro.errors import DproError
from dpro.plugins import hooks_of
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.heal import Heal
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict
from dpro.selection import ALL, Selection
from dpro.units import format_duration
from dpro.words import ranks_in_words

OTHER_LOAD = "other processes use cores of these hosts: gains hold only under that load"
UNDER_ANY_LOAD = (0.5, 1.5)  # powers of the least and most gain where other jobs took cores


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
        return calibrated(analysis, compute())
    return analysis.once(("prediction", *edits), lambda: calibrated(analysis, compute()))


def calibrated(analysis: Analysis, prediction: Prediction) -> Prediction:
    """Pass a prediction through the extensions that calibrate it by the measured errors of tried changes.

    The interval also covers the cost of findings on ranks that are healed, which steps outside deep windows
    may show, and other loads where other jobs took cores of the hosts.
    """
    for calibrate in hooks_of("predicted"):
        prediction = calibrate(prediction)
    if costs_ns := _costs_healed(analysis, prediction):
        if healed_in_part(prediction, max(costs_ns)):
            note = healed_in_part_in_words(prediction, max(costs_ns))
            prediction = dataclasses.replace(prediction, notes=(*prediction.notes, note))
        prediction = prediction.covering(*costs_ns)
    if notes := _costs_left_out(analysis, prediction):
        prediction = dataclasses.replace(prediction, notes=(*prediction.notes, *notes))
    if analysis.shared_hosts and prediction.edits:
        ends_ns = (prediction.gain_low_ns, prediction.gain_high_ns)
        of_any_load = under_any_load(*map(prediction.speedup_at, ends_ns))
        prediction = prediction.covering(*(prediction.base_ns * (1 - 1 / gain) for gain in of_any_load))
    return prediction


def _costs_healed(analysis: Analysis, prediction: Prediction) -> list[float]:
    """Return the costs in the usual step, ns, of findings that blame just the ranks that are healed."""
    ranks = {edit.place.rank for edit in prediction.edits if isinstance(edit, Heal)}
    if not ranks or not all(isinstance(edit, Heal) for edit in prediction.edits):
        return []
    with suppress(DproError):  # the run cannot be diagnosed
        return [
            min(finding.cost_ns, prediction.base_ns)
            for finding in analysis.verdict[0]
            if finding.component_kind in ("rank", "ranks")
            and set(finding.ranks) == ranks
            and finding.cost_ns > 0
            and not finding.costs_pauses
        ]
    return []


def _costs_left_out(analysis: Analysis, prediction: Prediction) -> list[str]:
    """Return a note for each rank that is healed and loses time in pauses: usual steps have none."""
    ranks = {edit.place.rank for edit in prediction.edits if isinstance(edit, Heal)}
    if not ranks:
        return []
    with suppress(DproError):  # the run cannot be diagnosed
        return [
            left_out_in_words(finding)
            for finding in analysis.verdict[0]
            if finding.component_kind in ("rank", "ranks")
            and ranks & set(finding.ranks)
            and finding.cost_ns > 0
            and finding.costs_pauses
        ]
    return []


def left_out_in_words(finding: Finding) -> str:
    """Word the cost of a finding that lies in pauses: predictions are of steps without these."""
    cost = format_duration(finding.cost_ns)
    return f"usual steps only: the {cost} a step that {ranks_in_words(finding.ranks)} costs are in pauses"


def healed_in_part(prediction: Prediction, cost_ns: float) -> bool:
    """Return whether healing models little of a finding's cost, as where another process has the GPU."""
    return prediction.gain_ns < cost_ns / 2


def healed_in_part_in_words(prediction: Prediction, cost_ns: float) -> str:
    """Word that healing ranks models little of what a finding on them costs."""
    healed = (edit.place.rank for edit in prediction.edits if isinstance(edit, Heal))
    ranks = {rank for rank in healed if rank is not None}
    cost, gain = format_duration(cost_ns), prediction.gain_ns
    models = format_duration(gain) if gain >= 1 else "nothing"
    costs = f"{ranks_in_words(ranks)} cost{'s' if len(ranks) == 1 else ''} {cost} a step"
    return f"{costs}, of which this edit models {models}: the rest counts in the interval only"


def under_any_load(low: float, high: float) -> tuple[float, float]:
    """Widen the interval of a speed-up on hosts where other jobs took cores, whose load will differ."""
    least, most = UNDER_ANY_LOAD
    return min(low, low**least), max(high, high**most)


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
