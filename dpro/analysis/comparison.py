"""Comparison of two runs, or of the same steps of both: the change of the step, its causes, its doubts.

Takes the analyses of both runs; returns a `DifferenceDocument`, and the sentences shown above it.
"""

from __future__ import annotations

import math
import shlex

import polars as pl
from msgspec.structs import replace

from dpro.analysis.analysis import Analysis
from dpro.analysis.jobs import difference_in_words
from dpro.analysis.selected import replayed_steps
from dpro.analysis.step_time import MIN_CHANGE, SIGMAS, median_change
from dpro.detect.pauses import mean_pause
from dpro.replay.difference import DifferenceDocument, PauseChange, TypicalChange, explain
from dpro.replay.fidelity.accuracy import MIN_USUAL_STEPS
from dpro.replay.steps import series_outside, step_series
from dpro.selection import ALL, Selection
from dpro.units import NS_PER_MS, format_duration, ms, signed_ms
from dpro.words import counted

WITHIN = "the change is within the variation of steps"
UNLIKE = "these are different jobs"  # how the doubt begins that comes before all figures


def difference_of(a: Analysis, b: Analysis, selection: Selection = ALL) -> DifferenceDocument:
    """Compare two runs.

    Raises:
        UsageError: the selection is empty in one of the runs.
    """
    sides = (("A", a), ("B", b))
    if selection:
        for name, analysis in sides:
            selection.checked(replayed_steps(analysis), f"{name}: ")
    doubts = [f"{name}: {reason}" for name, analysis in sides for reason in analysis.trust.reasons]
    names = a.run.label, b.run.label
    longest_ns = a.longest_deep_ns, b.longest_deep_ns
    document = explain(a.built.predictive, b.built.predictive, selection, names, doubts, longest_ns)
    measured = None if selection else typical_change(a.steps, b.steps)
    # To be read before all contributions.
    first_doubts = [f"{name}: {run.end.sentence}" for name, run in (("A", a), ("B", b)) if run.end.early]
    kinds = [_kind_in_words(run) for run in (a, b)]
    if kinds[0] != kinds[1]:
        first_doubts.append(f"{UNLIKE}: {kinds[0]}, and {kinds[1]}")
    if measured and measured.is_clear and measured.change * document.delta_ms < 0:
        first_doubts.append(
            "steps in deep windows changed the other way: the rows do not explain the other steps"
        )
    if not (selection or measured) and is_within_variation(a.steps, b.steps):
        first_doubts.append(WITHIN)
    has_rows = measured is None or measured.is_clear
    if has_rows and abs(document.unexplained_ms) > abs(document.delta_ms):
        first_doubts.append("the unexplained part exceeds the whole change: the rows say little about it")
    return replace(
        document,
        measured=measured,
        pauses=pause_change(a.steps, b.steps) if measured else None,
        commands=difference_in_words(*(shlex.join(run.run.manifest.command) for run in (a, b))),
        doubts=[*first_doubts, *doubts],
    )


ERRORS = 2.0  # standard errors of the difference of two means up to which they count as equal


def is_within_variation(a: pl.DataFrame, b: pl.DataFrame) -> bool:
    """Return whether the mean steps of two runs differ by no more than chance may cause.

    Args:
        a, b: tables from `Analysis.steps`; with fewer than two steps in one, nothing is known of chance.
    """
    series = step_series(a), step_series(b)
    usual_ns = [run.times[~run.paused] for run in series if run is not None]
    if len(usual_ns) < len(series) or min(times.size for times in usual_ns) < 2:
        return False
    error_ns = math.sqrt(sum(times.var(ddof=1) / times.size for times in usual_ns))
    return bool(abs(usual_ns[1].mean() - usual_ns[0].mean()) <= ERRORS * error_ns)


def is_clear(document: DifferenceDocument) -> bool:
    """Return whether the steps changed by more than they vary, so that there is something to explain."""
    return WITHIN not in document.doubts if document.measured is None else document.measured.is_clear


def how_known(document: DifferenceDocument) -> list[str]:
    """Return the steps that the measured change rests on, and the change of the usual step, in words.

    Pauses come first where they differ. Empty where no steps outside deep windows were compared.
    """
    measured = document.measured
    if measured is None:
        return []
    low, high = measured.between
    counts = f"{measured.a_steps} and {measured.b_steps} steps outside deep windows"
    clear = "" if measured.is_clear else ", within the variation of steps"
    paused = []
    if document.pauses is not None:
        added_ms = document.pauses.a_ms, document.pauses.b_ms
        a, b = (format_duration(added * NS_PER_MS) if added else "nothing" for added in added_ms)
        paused = [f"of the mean step, pauses take {a} in A and {b} in B (dpro diagnose)"]
    return [
        *paused,
        f"typical step of {counts} ({low:+.1%} to {high:+.1%}{clear})",
        f"the usual step, as the job runs, changed by {signed_ms(document.delta_ms)}",
    ]


def typical_change(a: pl.DataFrame, b: pl.DataFrame) -> TypicalChange | None:
    """Return the change of the typical step outside deep windows; None if a run has too few such steps.

    Args:
        a, b: tables from `Analysis.steps`.
    """
    before, after = series_outside(a, MIN_USUAL_STEPS), series_outside(b, MIN_USUAL_STEPS)
    if before is None or after is None:
        return None
    usual_a, usual_b = before.times[~before.paused], after.times[~after.paused]
    change, (low, high) = median_change(usual_a, usual_b, (before.cycle, after.cycle))
    return TypicalChange(
        a_ms=ms(before.typical_ns), b_ms=ms(after.typical_ns), change=round(change, 4),
        between=(round(low, 4), round(high, 4)), a_steps=usual_a.size, b_steps=usual_b.size,
    )  # fmt: skip


def pause_change(a: pl.DataFrame, b: pl.DataFrame) -> PauseChange | None:
    """Return what pauses add to the mean step of two runs; None where that does not differ clearly.

    First steps, which start the job, do not count.

    Args:
        a, b: tables from `Analysis.steps`.
    """
    before, after = series_outside(a, MIN_USUAL_STEPS), series_outside(b, MIN_USUAL_STEPS)
    if before is None or after is None:
        return None
    (before_ns, error_ns), (after_ns, after_error_ns) = mean_pause(before), mean_pause(after)
    least_ns = SIGMAS * math.hypot(error_ns, after_error_ns)
    least_ns = max(least_ns, MIN_CHANGE * min(before.typical_ns, after.typical_ns))
    return PauseChange(ms(before_ns), ms(after_ns)) if abs(after_ns - before_ns) > least_ns else None


def _kind_in_words(analysis: Analysis) -> str:
    """Describe a job: `2 ranks on H200`."""
    manifest = analysis.run.manifest
    models = sorted({name for name in manifest.gpus if name})
    return f"{counted(manifest.world_size, 'rank')} on {', '.join(models) or 'CPUs'}"
