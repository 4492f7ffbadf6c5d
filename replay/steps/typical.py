"""How long the steps of a job take: the typical step, the mean step with pauses, and which steps are pauses.

In: table `steps`, and how long each took, as `dpro.timed` says. Out: one row per step of the job,
and the two numbers that everything else names:

    typical step            the median of the steps that are no pauses
    mean step with pauses   the time of all steps over their number: what the job makes of the wall clock

A pause is a step, or a few in a row, that takes far longer than its neighbours: a checkpoint, a validation,
a collection. Steps are compared with the median of those around them, so that a job that becomes slower for
good has no pauses by that. Steps in deep windows, and those right after one, are left out: recording slows
them down. What pauses are of is not known here, but in `dpro.detect.pauses.find`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats
from dpro.timed import disturbed, with_times

AROUND = 40  # steps whose median is what a step would take, however long two in five of them are
MIN_STEPS = 12  # fewer do not show what is usual
MIN_LONGER = 0.2  # of the steps around: what is less is no pause, whatever it is
CLEAR = 6.0  # standard deviations, by the median deviation, which pauses do not sway
MIN_NOISE = 0.02  # of the step: noise is never taken to be less
MAX_RUN = 5  # steps in a row: what lasts longer is a slow spell
MAX_SHARE = 0.4  # of the steps around: what is more frequent is how the job is


@dataclass(frozen=True)
class StepSeries:
    """The steps of a job, in order.

    Attributes:
        steps: [T] int64, their numbers.
        times: [T] ns, each the median over ranks.
        usual: [T] ns, the median of the steps around each.
        paused: [T] which are pauses.
        lost: [T] ns by which pauses are longer than usual, less what the steps after them catch up; else 0.
        recorded: whether these are steps of deep windows, since there are no others.
        by_device: whether their device timed them.
        cycle: over how many steps each time is a mean: 1, but for hosts that run ahead of a device.
    """

    steps: NDArray[np.int64]
    times: Floats
    usual: Floats
    paused: Bools
    lost: Floats
    recorded: bool
    by_device: bool
    cycle: int

    @property
    def typical_ns(self) -> float:
        """The typical step."""
        return float(np.median(self.times[~self.paused]))

    @property
    def mean_ns(self) -> float:
        """The mean step with pauses."""
        return float(self.times.mean())

    @property
    def lost_share(self) -> float:
        """Share of the wall time that is lost to pauses."""
        return float(self.lost.sum() / self.times.sum())


def job_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The job's steps, in order: `step`, `duration_ns` (median over ranks), `begin_ns` and `end_ns`.

    Of a trace that was recorded in depth all along, all steps count. When a step began and ended is by the
    host, how long it took by the device where that timed it.

    Args:
        steps: table `steps`.
    """
    timed = with_times(steps).filter(pl.col("time_ns") > 0)
    outside = timed.filter(pl.col("window") < 0)
    return (
        (timed if outside.is_empty() else outside)
        .group_by("step")
        .agg(
            duration_ns=pl.col("time_ns").median(),
            begin_ns=pl.col("start_ns").min(),
            end_ns=(pl.col("start_ns") + pl.col("duration_ns")).max(),
        )
        .sort("step")
    )


def step_series(steps: pl.DataFrame) -> StepSeries | None:
    """How long the steps of a job take; None where no step was timed.

    Args:
        steps: table `steps`.
    """
    known = undisturbed(with_times(steps))
    series = job_steps(known)
    if series.is_empty():
        return None
    times = series["duration_ns"].to_numpy().astype(np.float64)
    usual = _usual(times)
    noise = _noise(times / usual)
    paused = _paused(times / usual - 1, noise)
    return StepSeries(
        series["step"].to_numpy(),
        times,
        usual,
        paused,
        _lost(times - usual, paused, noise * usual),
        recorded=bool((known["window"] >= 0).all()),
        by_device=bool(known["by_device"].any()),
        cycle=int(known["cycle"].to_numpy().max()),
    )


def undisturbed(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps that recording did not slow down; all, where there are no such steps.

    Args:
        steps: table `steps`.
    """
    outside = steps.sort("rank", "step").filter(~disturbed(steps))
    return steps if outside.is_empty() else outside


def _usual(times: Floats) -> Floats:
    """The median of the steps around each; just where the job becomes slower, what it is then."""
    median = pl.Series(_full(pl.Series(times).rolling_median(min(AROUND, times.size), center=True)))
    return np.asarray(np.maximum(median.rolling_max(3, center=True, min_samples=1).to_numpy(), 1.0))


def _full(rolled: pl.Series) -> Floats:
    """The first and last steps have the value of the nearest that has enough steps around."""
    return np.asarray(rolled.fill_null(strategy="forward").fill_null(strategy="backward").to_numpy())


def _noise(ratios: Floats) -> float:
    """Standard deviation of the times, relative to the usual ones."""
    return max(float(MAD_TO_SIGMA * np.median(np.abs(ratios - np.median(ratios)))), MIN_NOISE)


def _paused(longer: Floats, noise: float) -> Bools:
    """Which steps are far longer than usual, alone or a few in a row."""
    far = longer >= max(MIN_LONGER, CLEAR * noise)
    edges = np.flatnonzero(np.diff(far.astype(np.int8), prepend=0, append=0))
    for begin, end in edges.reshape(-1, 2):
        far[begin:end] &= end - begin <= MAX_RUN
    if far.size < MIN_STEPS:
        return np.zeros_like(far)
    often = _full(pl.Series(far, dtype=pl.Float64).rolling_mean(min(AROUND, far.size), center=True))
    return np.asarray(far & (often <= MAX_SHARE))


def _lost(longer: Floats, paused: Bools, noise: Floats) -> Floats:
    """What pauses cost: a host that was ahead of its GPU goes on faster until it is ahead again."""
    lost = np.where(paused, longer, 0.0)
    caught_up = (longer < -2 * noise) & ~paused
    for at in np.flatnonzero(paused):
        following = at + 1
        while following < longer.size and caught_up[following] and lost[at] > 0:
            lost[at] = max(lost[at] + longer[following], 0.0)
            following += 1
    return np.asarray(lost)
