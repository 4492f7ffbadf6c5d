"""The step time in all answers, for programs and for people.

Takes table `steps`; returns the typical step and the mean step with pauses, as computed by
`dpro.replay.steps`, and the change of the typical step with the first deep window. The replay covers steps in
deep windows: their mean, the usual step, is a different number, and is not computed here.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.significance import change_points
from dpro.documents import DocumentPart
from dpro.replay.steps import series_outside, step_series
from dpro.units import NS_PER_MS, format_duration, ms

OUTSIDE, INSIDE = "outside deep windows", "in deep windows"


class StepTimeDocument(DocumentPart, frozen=True):
    """The time of a step.

    Attributes:
        typical_ms: median of the steps that are not pauses.
        mean_with_pauses_ms: total time of all steps over their number.
        lost_to_pauses: share of the time that pauses cost.
        steps: number of timed steps.
        pauses: number of pauses among them.
        where: outside deep windows, or in deep windows if there are no other steps.
        clock: device or host.
        cycle: number of steps that the host times together, where its launch queue hides single steps.
        recorded: number of all steps, with those in deep windows and right after one.
    """

    typical_ms: float
    mean_with_pauses_ms: float
    lost_to_pauses: float
    steps: int
    pauses: int
    where: str
    clock: str
    cycle: int
    recorded: int


def step_time_document(steps: pl.DataFrame) -> StepTimeDocument | None:
    """Return the value of key `step_time` in `--json`; None if no step was timed, or only one by the host.

    The host's time of a single step may end before its devices do, as no further step waits for them.
    """
    series = step_series(steps)
    if series is None or (series.recorded and not series.by_device and series.steps.size == 1):
        return None
    return StepTimeDocument(
        typical_ms=ms(series.typical_ns),
        mean_with_pauses_ms=ms(series.mean_ns),
        lost_to_pauses=round(series.lost_share, 4),
        steps=series.steps.size,
        pauses=int(series.paused.sum()),
        where=INSIDE if series.recorded else OUTSIDE,
        clock="device" if series.by_device else "host",
        cycle=series.cycle,
        recorded=steps["step"].n_unique(),
    )


def step_time_in_words(steps: pl.DataFrame) -> str:
    """Describe the time of a step, or that no step was timed."""
    document = step_time_document(steps)
    if document:
        return in_words(document)
    return (
        "no step was timed" if step_series(steps) is None else "only one step was recorded, in a deep window"
    )


def in_words(document: StepTimeDocument) -> str:
    """Word the step time: `typical step 25 ms, mean step with pauses 74 ms (105 steps in deep windows)`."""
    typical = format_duration(document.typical_ms * NS_PER_MS)
    mean = format_duration(document.mean_with_pauses_ms * NS_PER_MS)
    paused = f", mean step with pauses {mean}" if mean != typical else ""
    return f"typical step {typical}{paused} ({_counts_in_words(document)})"


def step_names_in_words(steps: pl.DataFrame) -> str:
    """Say which steps each name of a step time covers; empty if no step was timed."""
    document = step_time_document(steps)
    if document is None:
        return ""
    outside = document.where == OUTSIDE
    return (
        f"Typical step: median of the steps {document.where}, pauses left out. Mean step with pauses: "
        f"{'their' if outside else 'the'} total time over their number, pauses included. Usual step: mean of "
        f"{'the' if outside else 'these'} steps {'in deep windows ' if outside else ''}without the cost of "
        "recording; costs and gains refer to it."
    )


def pauses_in_words(steps: pl.DataFrame) -> str:
    """Word the pauses: `mean step with pauses 74 ms (105 steps …, 9 of them pauses)`; empty without any."""
    document = step_time_document(steps)
    if document is None or not document.pauses:
        return ""
    mean = format_duration(document.mean_with_pauses_ms * NS_PER_MS)
    return f"mean step with pauses {mean} ({_counts_in_words(document)})"


def _counts_in_words(document: StepTimeDocument) -> str:
    pauses = f", {document.pauses} of them {'a pause' if document.pauses == 1 else 'pauses'}"
    pauses = pauses if document.pauses else ""
    where = ", none in a deep window or right after one" if document.where == OUTSIDE else f" {INSIDE}"
    of_all = f" of {document.recorded:,}" if document.steps < document.recorded else ""
    steps = "step" if document.recorded == 1 else "steps"
    return f"{document.steps:,}{of_all} {steps}{where}{pauses}{_clock_in_words(document)}"


def usual_step_in_words(step_ms: float, recorded_ms: float, misleads: bool) -> str:
    """Return `The usual step takes 123.01 ms as the job runs (133.24 ms as recorded).`

    Args:
        step_ms: the step that is replayed.
        recorded_ms: the same with the recorder's cost.
        misleads: whether it is far from the usual step of the job.
    """
    if misleads:
        return f"Replayed steps, of deep windows, take {step_ms:.2f} ms, unlike the usual step."
    return f"The usual step takes {step_ms:.2f} ms as the job runs ({recorded_ms:.2f} ms as recorded)."


def _clock_in_words(document: StepTimeDocument) -> str:
    """Describe which clock timed the steps; empty if the host timed each step separately."""
    if document.clock == "device":
        return ", timed by the device"
    if document.cycle > 1:
        cycles = f"{document.cycle}-step cycles"
        return f"; host steps: the launch queue hides the GPU's time; mean over {cycles}"
    return ""


# Whether steps became permanently slower with the first deep window, without the steps in and right after
# windows. A known cause on GPUs is CUPTI, which stays attached. Nothing is reported if too few steps precede
# the window, or if the change is within the variation of steps.

WARM_UP = 10  # first steps, which are slower than the others
MIN_SIDE = 30  # steps required on either side of the window
MAX_SIDE = 500  # steps used on either side: the nearest ones
SIGMAS = 3.0
MIN_CHANGE = 0.02  # smaller changes are not reported


class AfterWindow(DocumentPart, frozen=True):
    """The change of the typical step with the first deep window.

    Attributes:
        change: share by which the typical step became longer.
        between: interval of that share.
        steps_before, steps_after: number of steps in each median.
        gpu: whether the job computes on GPUs.
    """

    change: float
    between: tuple[float, float]
    steps_before: int
    steps_after: int
    gpu: bool


def after_first_window(steps: pl.DataFrame, gpu: bool) -> AfterWindow | None:
    """Return the change of the typical step with the first deep window; None if it is not significant.

    The interval is the widest that the order-statistics bounds of both medians allow. If steps changed some
    time before the window (perhaps the reason to request it), only the steps since then count.
    """
    first, series = steps.filter(pl.col("window") >= 0)["step"].min(), series_outside(steps)
    if not isinstance(first, int) or series is None:
        return None
    usual = ~series.paused & (series.steps >= WARM_UP)
    before = series.times[usual & (series.steps < first)][-MAX_SIDE:]
    before = before[max(change_points(before, MIN_CHANGE), default=0) :]
    after = series.times[usual & (series.steps > first)][:MAX_SIDE]
    if min(before.size, after.size) < MIN_SIDE * series.cycle:
        return None
    change, between = median_change(before, after, (series.cycle, series.cycle))
    if abs(change) < MIN_CHANGE or between[0] <= 0 <= between[1]:
        return None
    lowest, highest = between
    return AfterWindow(round(change, 4), (round(lowest, 4), round(highest, 4)), before.size, after.size, gpu)


def after_window_in_words(document: AfterWindow) -> str:
    """Word the change: `steps after the first deep window take 12% longer (9% to 15%; medians of …)`."""
    low, high = sorted(map(abs, document.between))
    longer = "longer" if document.change > 0 else "less time"
    why = "; CUPTI stays attached after the first window: --no-windows or TEARDOWN_CUPTI=1 avoids that"
    return (
        f"steps after the first deep window take {abs(document.change):.0%} {longer} "
        f"({low:.0%} to {high:.0%}; medians of {document.steps_before} steps before "
        f"and {document.steps_after} after it){why if document.gpu and document.change > 0 else ''}"
    )


def median_change(
    before: Floats, after: Floats, cycles: tuple[int, int]
) -> tuple[float, tuple[float, float]]:
    """Return the relative change of the median, and the widest interval that the bounds of both allow.

    Args:
        cycles: number of steps over which each time of `before`, and of `after`, is a mean.
    """
    low, high = median_between(before, cycles[0])
    low_after, high_after = median_between(after, cycles[1])
    change = float(np.median(after) / np.median(before)) - 1
    return change, (low_after / high - 1, high_after / low - 1)


def median_between(times: Floats, cycle: int) -> tuple[float, float]:
    """Return the bounds of the median; where a host times steps in cycles, each cycle counts once."""
    ordered = np.sort(times)
    from_middle = SIGMAS * math.sqrt(times.size * cycle) / 2
    low = max(0, math.floor(times.size / 2 - from_middle))
    return float(ordered[low]), float(ordered[times.size - 1 - low])
