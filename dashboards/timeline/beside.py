"""A second run on the time axis of the first: which steps begin together, and how lanes differ in them.

Takes the lanes of two runs; returns a `Beside`, and a table. Each run has its own clock: the second is
shifted so that a chosen step of it begins with the chosen step of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.dashboards.timeline.area import by_lane, by_range, spans_within
from dpro.dashboards.timeline.counters import CounterTrack
from dpro.dashboards.timeline.lanes import KINDS
from dpro.dashboards.timeline.measured import MeasuredLanes
from dpro.errors import UsageError
from dpro.selection import quoted
from dpro.units import NS_PER_MS

NEAR = 0.1  # share of the median step: a step this close to it is typical
NO_STEP = -1  # in place of a step of a run without steps, which begins with its timeline
IN_NO_OPERATOR = "in no operator"  # after a lane: the row is time of a range alone
LANE_COLUMNS = ("rank", "lane", "before_ns", "after_ns", "delta_ns")


class Stretch(NamedTuple):
    """A step on the timeline of its run, in ns; of a run without steps, the whole timeline."""

    step: int
    begin: int
    end: int


class Beside(NamedTuple):
    """A second run beside the lanes of a first.

    Attributes:
        name: of the second run, as in links.
        measured: lanes of the second run.
        here, there: the steps of the first and of the second run that begin together.
        tracks: the counters of the second run, on the time axis of the first.
    """

    name: str
    measured: MeasuredLanes
    here: Stretch
    there: Stretch
    tracks: Sequence[CounterTrack] = ()

    @property
    def shift_ns(self) -> int:
        """Shift of the second run's times onto the first run's axis, in ns."""
        return self.here.begin - self.there.begin


def beside(
    first: MeasuredLanes,
    name: str,
    second: MeasuredLanes,
    align: str = "",
    tracks: Sequence[CounterTrack] = (),
) -> Beside:
    """Set a run beside another.

    Args:
        align: the steps that begin together, such as `3~5`; empty for the first typical one of each.
        tracks: the counters of the second run.

    Raises:
        UsageError: one of the runs has no such step.
        InputError: a part of a run cannot be read.
    """
    steps = first.clocks.steps, second.clocks.steps
    chosen = _parsed(align) if align else tuple(map(typical_step, steps))
    here, there = (stretch_of(of, step) for of, step in zip((first, second), chosen))
    shift = here.begin - there.begin
    return Beside(name, second, here, there, [replace(track, start=track.start + shift) for track in tracks])


def _parsed(align: str) -> tuple[int, ...]:
    try:
        here, there = map(int, align.split("~"))
    except ValueError as error:
        raise UsageError(f"align {quoted(align)} is invalid: give a step of each run, such as 3~5") from error
    return here, there


def typical_step(steps: pl.DataFrame) -> int:
    """Return the first step that takes about as long as the median one; `NO_STEP` if there are none.

    Args:
        steps: `step`, `begin_ms`, `end_ms`, in order.
    """
    if steps.is_empty():
        return NO_STEP
    lasts = (steps["end_ms"] - steps["begin_ms"]).to_numpy()
    away = np.abs(lasts - np.median(lasts))
    return int(steps["step"][int(np.argmax(away <= max(NEAR * np.median(lasts), away.min())))])


def stretch_of(measured: MeasuredLanes, step: int) -> Stretch:
    """Return when a step begins and ends.

    Raises:
        UsageError: there is no such step.
    """
    if step == NO_STEP:
        return Stretch(NO_STEP, 0, measured.clocks.end_ns)
    rows = measured.clocks.steps.filter(pl.col("step") == step)
    if rows.is_empty():
        raise UsageError(
            f"step {step} is not in a deep window of {measured.run.label}: choose one from the list"
        )
    begin, end = rows.select(pl.col("begin_ms", "end_ms") * NS_PER_MS).row(0)
    return Stretch(step, round(begin), round(end))


def lane_difference(first: MeasuredLanes, second: Beside) -> pl.DataFrame:
    """Return how long each lane is busy in the steps that begin together; the largest difference comes first.

    Ranges around operators count as busy only in lanes that have nothing else. In other lanes, the time that
    a range has for itself, such as that of a loader that waits for a disk, is a row of its own.

    Returns:
        `rank`, `lane` (and the range, if the row is the time of a range alone), `before_ns` (in the second
        run), `after_ns` (in the first), `delta_ns`; null where a run has no such row.
    """
    busy = [_busy(of, stretch) for of, stretch in ((second.measured, second.there), (first, second.here))]
    before, after = (frame.rename({"busy_ns": name}) for frame, name in zip(busy, ("before_ns", "after_ns")))
    both = before.join(after, on=["rank", "lane"], how="full", coalesce=True)
    delta = pl.col("after_ns").fill_null(0) - pl.col("before_ns").fill_null(0)
    rows = both.with_columns(delta_ns=delta).select(LANE_COLUMNS)
    return rows.sort(pl.col("delta_ns").abs(), "rank", "lane", descending=[True, False, False])


def _busy(of: MeasuredLanes, stretch: Stretch) -> pl.DataFrame:
    """Return `rank`, `lane`, `busy_ns` of all lanes, and of ranges where nothing else runs."""
    parts = [pl.DataFrame(schema={"rank": pl.Int64, "lane": pl.String, "busy_ns": pl.Int64})]
    for lanes in of.all().values():
        spans = spans_within(lanes, range(lanes.all.first.size - 1), stretch.begin, stretch.end)
        works = pl.col("kind") != KINDS.index("host")
        busy = spans.filter(works | ~works.any().over("lane"))
        alone = by_range(spans, lanes, of.names.texts)
        ranges = pl.format(f"{{}}, {IN_NO_OPERATOR}: {{}}", "lane", "range")
        parts += [
            by_lane(busy, lanes).drop("spans"),
            alone.select("rank", lane=ranges, busy_ns="alone_ns"),
        ]
    return pl.concat(parts).group_by("rank", "lane").agg(pl.col("busy_ns").sum())
