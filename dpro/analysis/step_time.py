"""The one way in which everything names how long a step takes: for programs, and for people.

In: table `steps`. Out: the typical step and the mean step with pauses, as `dpro.replay.steps` has
them; and how much longer the typical step is after the first deep window than before it. What is replayed are
steps in deep windows: their mean is another number, and called so.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.significance import change_points
from dpro.documents import DocumentPart
from dpro.replay.steps import StepSeries, series_outside, step_series
from dpro.units import NS_PER_MS, format_duration, ms
from dpro.words import counted

OUTSIDE, INSIDE = "outside deep windows", "in deep windows"


class StepTimeDocument(DocumentPart, frozen=True):
    """How long a step takes.

    Attributes:
        typical_ms: median of the steps that are no pauses.
        mean_with_pauses_ms: time of all steps over their number.
        lost_to_pauses: share of the time that pauses cost.
        steps: steps that were timed.
        pauses: how many of them are pauses.
        where: outside deep windows, or in deep windows where there are no others.
        clock: device or host.
        cycle: steps that the host times together, where its launch queue hides those of the device.
    """

    typical_ms: float
    mean_with_pauses_ms: float
    lost_to_pauses: float
    steps: int
    pauses: int
    where: str
    clock: str
    cycle: int


def step_time_document(steps: pl.DataFrame) -> StepTimeDocument | None:
    """What `--json` calls `step_time`; None where no step was timed, or one that the host marked.

    Of a single step the mark may end before the devices do: no other step begins that would wait for them.
    """
    series = step_series(steps)
    if series is None or _is_a_mark(series):
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
    )


def step_time_in_words(steps: pl.DataFrame) -> str:
    """The same for people; also that no step was timed."""
    document = step_time_document(steps)
    if document:
        return in_words(document)
    return "no step was timed" if step_series(steps) is None else "one step was marked, in a deep window"


def _is_a_mark(series: StepSeries) -> bool:
    """Whether it is one step of a host alone."""
    return series.recorded and not series.by_device and series.steps.size == 1


def in_words(document: StepTimeDocument) -> str:
    """`typical step 25 ms, mean step with pauses 74 ms (105 steps in deep windows, 9 of them pauses)`.

    Args:
        document: as `step_time_document` gives it.
    """
    typical = format_duration(document.typical_ms * NS_PER_MS)
    mean = format_duration(document.mean_with_pauses_ms * NS_PER_MS)
    paused = f", mean step with pauses {mean}" if mean != typical else ""
    return f"typical step {typical}{paused} ({_of_which(document)})"


def pauses_in_words(steps: pl.DataFrame) -> str:
    """`mean step with pauses 74 ms (105 steps in deep windows, 9 of them pauses)`; empty without any."""
    document = step_time_document(steps)
    if document is None or not document.pauses:
        return ""
    mean = format_duration(document.mean_with_pauses_ms * NS_PER_MS)
    return f"mean step with pauses {mean} ({_of_which(document)})"


def _of_which(document: StepTimeDocument) -> str:
    pauses = f", {document.pauses} of them {'a pause' if document.pauses == 1 else 'pauses'}"
    pauses = pauses if document.pauses else ""
    where = ", none in a deep window or right after one" if document.where == OUTSIDE else f" {INSIDE}"
    return f"{counted(document.steps, 'step')}{where}{pauses}{_by_what(document)}"


def usual_step_in_words(step_ms: float, recorded_ms: float) -> str:
    """`The usual step takes 123.01 ms as the job runs (133.24 ms as recorded).`

    Args:
        step_ms: the usual step as the account has it.
        recorded_ms: the same steps, with what recording cost them.
    """
    return f"The usual step takes {step_ms:.2f} ms as the job runs ({recorded_ms:.2f} ms as recorded)."


def _by_what(document: StepTimeDocument) -> str:
    """By which clock, unless it is the host's and each step is by itself."""
    if document.clock == "device":
        return ", timed by the device"
    if document.cycle > 1:
        cycles = f"{document.cycle}-step cycles"
        return f"; host steps: the launch queue hides the GPU's time; mean over {cycles}"
    return ""


# Whether steps became slower with the first deep window, for good; steps in and around windows left out. On a
# GPU there is a known cause: CUPTI, once it is attached, stays so. Where there are too few steps before the
# window, or the difference is within what steps vary by, nothing is said.

WARM_UP = 10  # steps that are not like the others
MIN_SIDE = 30  # steps on either side
MAX_SIDE = 500  # steps on either side: those next to the window
SIGMAS = 3.0
SMALL = 0.02  # what changes less is not worth a word


class AfterWindow(DocumentPart, frozen=True):
    """How the typical step changed with the first deep window.

    Attributes:
        change: share by which it became longer.
        between: interval of that share.
        steps_before, steps_after: steps that the medians are of.
        gpu: whether the job computes on GPUs.
    """

    change: float
    between: tuple[float, float]
    steps_before: int
    steps_after: int
    gpu: bool


def after_first_window(steps: pl.DataFrame, gpu: bool) -> AfterWindow | None:
    """By how much the typical step changed with the first deep window; None where that does not show.

    The interval is that of two medians by their order statistics, the widest that both allow. Where steps
    changed some time before the window (it may be asked for since they did), only those since then count.
    """
    first, series = steps.filter(pl.col("window") >= 0)["step"].min(), series_outside(steps)
    if not isinstance(first, int) or series is None:
        return None
    usual = ~series.paused & (series.steps >= WARM_UP)
    before = series.times[usual & (series.steps < first)][-MAX_SIDE:]
    before = before[max(change_points(before, SMALL), default=0) :]
    after = series.times[usual & (series.steps > first)][:MAX_SIDE]
    if min(before.size, after.size) < MIN_SIDE * series.cycle:
        return None
    change, between = median_change(before, after, (series.cycle, series.cycle))
    if abs(change) < SMALL or between[0] <= 0 <= between[1]:
        return None
    lowest, highest = between
    return AfterWindow(round(change, 4), (round(lowest, 4), round(highest, 4)), before.size, after.size, gpu)


def after_window_in_words(document: AfterWindow) -> str:
    """`steps after the first deep window take 12% longer (9% to 15%; medians of 95 and 400 steps)`.

    Args:
        document: as `after_first_window` gives it.
    """
    low, high = sorted(map(abs, document.between))
    longer = "longer" if document.change > 0 else "less time"
    why = "; CUPTI stays attached once there was a window: --no-windows or TEARDOWN_CUPTI=1 avoids that"
    return (
        f"steps after the first deep window take {abs(document.change):.0%} {longer} "
        f"({low:.0%} to {high:.0%}; medians of {document.steps_before} steps before "
        f"and {document.steps_after} after it){why if document.gpu and document.change > 0 else ''}"
    )


def median_change(
    before: Floats, after: Floats, cycles: tuple[int, int]
) -> tuple[float, tuple[float, float]]:
    """The share by which a median is larger than another, and the widest interval that both bounds allow.

    Args:
        cycles: over how many steps each time of `before` and of `after` is a mean.
    """
    low, high = median_between(before, cycles[0])
    low_after, high_after = median_between(after, cycles[1])
    change = float(np.median(after) / np.median(before)) - 1
    return change, (low_after / high - 1, high_after / low - 1)


def median_between(times: Floats, cycle: int) -> tuple[float, float]:
    """Bounds of the median; of steps that a host times in cycles, each cycle counts once."""
    ordered = np.sort(times)
    from_middle = SIGMAS * math.sqrt(times.size * cycle) / 2
    low = max(0, math.floor(times.size / 2 - from_middle))
    return float(ordered[low]), float(ordered[times.size - 1 - low])
