"""Whether steps became slower with the first deep window, for good.

In: table `steps`. Out: how much longer the typical step is after the first window than before it, steps in
and around windows left out. On a GPU there is a known cause: CUPTI, once it is attached, stays so. Where
there are too few steps before the window, or the difference is within what steps vary by, nothing is said.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.documents import DocumentPart
from dpro.replay.steps.durations import step_series

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

    The interval is that of two medians by their order statistics, the widest that both allow.

    Args:
        steps: table `steps`.
        gpu: whether the job computes on GPUs.
    """
    first, series = steps.filter(pl.col("window") >= 0)["step"].min(), step_series(steps)
    if not isinstance(first, int) or series is None or series.recorded:
        return None
    usual = ~series.paused & (series.steps >= WARM_UP)
    before = series.times[usual & (series.steps < first)][-MAX_SIDE:]
    after = series.times[usual & (series.steps > first)][:MAX_SIDE]
    if min(before.size, after.size) < MIN_SIDE * series.cycle:
        return None
    change = float(np.median(after) / np.median(before)) - 1
    (low, high), (low_after, high_after) = (_median_between(each, series.cycle) for each in (before, after))
    lowest, highest = low_after / high - 1, high_after / low - 1
    if abs(change) < SMALL or lowest <= 0 <= highest:
        return None
    between = (round(lowest, 4), round(highest, 4))
    return AfterWindow(round(change, 4), between, before.size, after.size, gpu)


def in_words(document: AfterWindow) -> str:
    """`steps after the first deep window take 12% longer (9% to 15%; medians of 95 and 400 steps)`.

    Args:
        document: as `after_first_window` gives it.
    """
    low, high = sorted(map(abs, document.between))
    longer = "longer" if document.change > 0 else "less time"
    why = "; CUPTI stays attached once there was a window, --no-windows avoids that"
    return (
        f"steps after the first deep window take {abs(document.change):.0%} {longer} "
        f"({low:.0%} to {high:.0%}; medians of {document.steps_before} steps before "
        f"and {document.steps_after} after it){why if document.gpu and document.change > 0 else ''}"
    )


def _median_between(times: Floats, cycle: int) -> tuple[float, float]:
    """Bounds of the median; of steps that a host times in cycles, each cycle counts once."""
    ordered = np.sort(times)
    from_middle = SIGMAS * math.sqrt(times.size * cycle) / 2
    low = max(0, math.floor(times.size / 2 - from_middle))
    return float(ordered[low]), float(ordered[times.size - 1 - low])
