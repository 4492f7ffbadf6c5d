"""The one way in which everything names how long a step takes: for programs, and for people.

In: table `steps`. Out: the typical step and the mean step with pauses, as `dpro.replay.steps.durations` has
them. What is replayed are steps in deep windows: their mean is another number, and called so.
"""

from __future__ import annotations

import polars as pl

from dpro.documents import DocumentPart
from dpro.replay.steps.durations import step_series
from dpro.units import NS_PER_MS, format_duration, ms

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
    """What `--json` calls `step_time`; None where no step was timed.

    Args:
        steps: table `steps`.
    """
    series = step_series(steps)
    if series is None:
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
    """The same for people; also that no step was timed.

    Args:
        steps: table `steps`.
    """
    document = step_time_document(steps)
    return in_words(document) if document else "no step was timed"


def in_words(document: StepTimeDocument) -> str:
    """`typical step 25 ms, mean step with pauses 74 ms (96 steps outside deep windows, 9 of them pauses)`.

    Args:
        document: as `step_time_document` gives it.
    """
    typical = format_duration(document.typical_ms * NS_PER_MS)
    mean = format_duration(document.mean_with_pauses_ms * NS_PER_MS)
    steps, pauses = document.steps, document.pauses
    of_them = f", {pauses} of them pauses" if pauses else ""
    return (
        f"typical step {typical}, mean step with pauses {mean} "
        f"({steps:,} step{'s' if steps > 1 else ''} {document.where}{of_them}{_by_what(document)})"
    )


def _by_what(document: StepTimeDocument) -> str:
    """By which clock, unless it is the host's and each step is by itself."""
    if document.clock == "device":
        return ", timed by the device"
    if document.cycle > 1:
        cycles = f"{document.cycle}-step cycles"
        return f"; host steps: the launch queue hides the GPU's time; mean over {cycles}"
    return ""
