"""How good predictions from a run can be: each measured figure against its bars, and a score of them all.

In: the fit of a replay, and the run's steps. Out: figures, a score from 0 to 1 that moves with them, and
words. A figure scores 1 up to its good bar and 0 from its poor bar on, in a straight line between; the run
scores what its worst figure does. What is said on either side of a bar is nearly the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.replay.steps.typical import step_series
from dpro.timed import with_times

STANDARD_ERRORS = 2.0  # of each side of an interval
# By how much recordings of one and the same job differ, in standard deviations of their steps: noise
# lasts, and more steps do not average it away (median of 30 pairs of recordings in docs/accuracy.md).
RUN_TO_RUN = 0.6
GOOD, FAIR = 0.75, 0.25  # scores from which on a run is called so
MIN_USUAL_STEPS = 5  # outside deep windows: fewer do not show what is usual


class Criterion(DocumentPart, frozen=True):
    """One figure that predictions stand or fall with.

    Attributes:
        name: what was measured.
        value: in `unit`; null where the run does not show it.
        good, poor: bars in `unit`: good up to the first, poor from the second on.
        unit: % or x (times).
        score: 0 to 1; null where it is not known.
    """

    name: str
    value: float | None
    good: float
    poor: float
    unit: str
    score: float | None

    def __str__(self) -> str:
        """The figure and its bars."""
        bars = f"good up to {self.good:g}{self.unit}, poor from {self.poor:g}{self.unit}"
        return (
            f"{self.name}: {'not known' if self.value is None else f'{self.value:.3g}{self.unit}'} ({bars})"
        )


def criterion(name: str, value: float | None, good: float, poor: float, unit: str = "%") -> Criterion:
    """A figure with its score: 1 at `good` and below, 0 from `poor` on, in a straight line between."""
    score = None if value is None else float(np.clip((poor - value) / (poor - good), 0.0, 1.0))
    return Criterion(name, value, good, poor, unit, score)


def figures_of(
    steps: pl.DataFrame,
    starts_ns: Mapping[int, float],
    unexplained: float,
    copied: float,
    windows: float | None,
) -> tuple[Criterion, ...]:
    """All that counts, worst first where scores differ.

    Args:
        steps: `measured_ns` and `error_pct` of the replayed steps.
        starts_ns: percentiles of the errors of starts, ns.
        unexplained: share of time that nothing explains.
        copied: share of starts that were taken from the trace.
        windows: as from `windows_to_usual`.
    """
    measured = steps["measured_ns"].to_numpy().astype(np.float64)
    step_ns = float(measured.mean()) if measured.size else 0.0
    error = float(steps["error_pct"].abs().mean()) if steps.height else None  # type: ignore[arg-type]
    half, most = (
        100 * starts_ns[percent] / step_ns if step_ns and percent in starts_ns else None
        for percent in (50, 95)
    )
    found = [
        criterion("error of replayed steps", error, 1.0, 5.0),
        criterion("median error of starts, of a step", half, 0.2, 5.0),
        criterion("95th percentile of errors of starts, of a step", most, 2.0, 50.0),
        criterion("time that nothing explains", 100 * unexplained, 1.0, 10.0),
        criterion("starts taken from the trace", 100 * copied, 5.0, 20.0),
        criterion("steps in deep windows to the typical step outside", windows, 1.1, 1.5, "x"),
        criterion(
            "smallest change that noise does not hide, of a step",
            _smallest_change(measured, error),
            10.0,
            50.0,
        ),
    ]
    return tuple(sorted(found, key=lambda figure: 2.0 if figure.score is None else figure.score))


def _smallest_change(
    measured: np.ndarray[tuple[int], np.dtype[np.float64]], error: float | None
) -> float | None:
    """What a change has to do, in % of the step, for its interval to leave the step as it is out."""
    if measured.size < 2 or error is None:
        return None
    return float(100 * STANDARD_ERRORS * RUN_TO_RUN * measured.std(ddof=1) / measured.mean()) + error


def windows_to_usual(steps: pl.DataFrame) -> float | None:
    """How many times as long steps in deep windows take as the others, or the other way round: 1 or more.

    Args:
        steps: table `steps`.

    Returns:
        None where either are missing.
    """
    steps = with_times(steps)
    deep = steps.filter((pl.col("window") >= 0) & (pl.col("time_ns") > 0))
    usual = step_series(steps)
    if deep.is_empty() or usual is None or usual.recorded or usual.times.size < MIN_USUAL_STEPS:
        return None
    ratio = float(np.median(deep["time_ns"].to_numpy())) / usual.typical_ns
    return max(ratio, 1 / ratio)


def score_of(figures: Sequence[Criterion]) -> float:
    """What the worst figure scores; 0 without any."""
    return min((figure.score for figure in figures if figure.score is not None), default=0.0)


def grade_of(score: float) -> str:
    """The score in a word: good, fair or poor."""
    return "good" if score >= GOOD else "fair" if score >= FAIR else "poor"


ADVICE = {
    "good": "they can be believed within their intervals",
    "fair": "take their intervals at face value, and try what matters",
    "poor": "take none at its word: try a change before it is relied on",
}


def in_words(score: float, figures: Sequence[Criterion]) -> str:
    """The grade, the score, what keeps it down, and what of it the run does not show.

    Args:
        score: from 0 to 1.
    """
    grade = grade_of(score)
    weak = [str(figure) for figure in figures if figure.score is not None and figure.score < GOOD][:2]
    why = f"; weakest: {'; '.join(weak)}" if weak else ""
    unknown = [figure.name for figure in figures if figure.value is None]
    missing = f"; not known: {', '.join(unknown)}" if unknown else ""
    return f"Predictions from this run: {grade} ({score:.2f} of 1): {ADVICE[grade]}{why}{missing}."
