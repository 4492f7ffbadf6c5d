"""Statistical tests: whether a difference between steps is significant, and where a series changes its level.

From a gain per step and the steps without it, decides whether the gain is large, persistent and beyond
chance, and how sure that is. Detectors that replay a changed graph share these thresholds.

From a series of times, returns the indices at which its level changes, distinguished from noise, outliers and
slow drift. Ranks of values are compared, so occasional outliers (checkpoints, evaluations) have no effect.
Does not decide what a change means.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Ints

Times = NDArray[np.int64] | NDArray[np.float64]

# What a finding must cost, as a share of the step.
MIN_SHARE = 0.03  # if the gain alone is the evidence: smaller differences are everywhere
MIN_COST = 0.02  # if own times of many steps, or workloads, show that something is slow
MIN_COST_OF_SLOW = 0.01  # if ranks or transfers are far slower than others
LATEST_STEPS = (10, 20, 40)  # numbers of latest steps that are tested: a fault may begin while the job runs
# A gain must reach MIN_SHARE in this share of the steps, and its mean this many of its standard deviations:
# of two healthy ranks on busy cores, one is always a little slower, but not the same one in every step.
PERSISTENT = 0.8
EFFECT_SIZE = 1.5
MIN_STEPS = 2  # one step cannot show that anything persists
MIN_LATEST = 4  # steps in which a fault that began while the job ran must show
# Student's t, 99.9%, for 1, 2, … degrees of freedom: the spread of few steps is itself hardly known, and
# every rank is one more chance to be wrong.
T_999 = (318.3, 22.33, 10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30)


def clear_gain(saved: Times, base: Times) -> bool:
    """Return whether a gain per step is large enough, present in nearly every step, and beyond chance.

    Args:
        saved: [T] gains per step, in ns.
        base: [T] steps without the gain, in ns.
    """
    return bool(clear_gains(saved[:, None], base)[0])


def clear_gains(saved: Times, base: Times) -> Bools:
    """Return [R] `clear_gain` of each of several gains.

    Beyond chance by Student's t test of one sample, one-sided at 99.9%, and by its effect size (Cohen's d).

    Args:
        saved: [T, R] gains per step, in ns.
        base: [T] steps without the gains, in ns.
    """
    freedom = min(base.size - 1, len(T_999))
    needed = max(EFFECT_SIZE, T_999[freedom - 1] / np.sqrt(base.size)) * saved.std(axis=0, ddof=1)
    persistent = (saved >= MIN_SHARE * base[:, None]).mean(axis=0)
    clear: Bools = (saved.mean(axis=0) >= np.maximum(MIN_SHARE * base.mean(), needed)) & (
        persistent >= PERSISTENT
    )
    return clear


def confidence(saved: Times, base: Times) -> float:
    """Return how steady a gain is: 1 minus its standard error relative to its mean, times its persistence.

    Args:
        saved: [T] gains per step, in ns, above 0 on average.
        base: [T] steps without the gain, in ns.
    """
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size) / float(saved.mean())
    persistent = float((saved >= MIN_SHARE * base).mean())
    return round(float(np.clip(1 - error, 0, 1)) * persistent, 3)


def first_of_latest(steps: Ints) -> list[int]:
    """Return the first of all steps, of the latest half, the latest quarter, …: a fault may be recent.

    Args:
        steps: [T] in order.
    """
    sizes = [steps.size]
    while sizes[-1] // 2 >= MIN_LATEST:
        sizes.append(sizes[-1] // 2)
    return [int(steps[-size]) for size in sizes]


Values = NDArray[np.float64]

CHANCE = 1e-4  # of finding a change anywhere in a series that has none
SHORTEST = 12  # values; fewer in a row are not a level


def change_points(values: Values, least: float, chance: float = CHANCE, clear: float = math.inf) -> list[int]:
    """Return the indices where the level changes.

    The series is cut where the values before and after differ most by the rank-sum statistic, if that is
    beyond chance and the medians on both sides differ enough; then each part is cut in the same way (Pettitt,
    "A non- parametric approach to the change-point problem", Applied Statistics 28, 1979; here in units of
    the statistic's standard deviation, so that changes near an end are found, too). Ranks of few values are
    never beyond chance, however far apart: so levels may also be distinguished by their distance.

    Args:
        values: [N], positive.
        least: share by which medians must differ.
        chance: of a change in a series that has none; smaller where many series are tested.
        clear: distance of medians, in robust deviations of the logarithm of a value, above which two levels
            count without the test.

    Returns:
        Index of the first value of each level but the first, ascending.
    """
    cuts: list[int] = []
    waiting = [(0, values.size)]
    while waiting:
        begin, end = waiting.pop()
        cut = _cut(values[begin:end], least, chance, clear)
        if cut:
            cuts.append(begin + cut)
            waiting += [(begin, begin + cut), (begin + cut, end)]
    return sorted(cuts)


def _cut(values: Values, least: float, most: float, clear: float) -> int:
    """Return the index of one change; 0 for none."""
    count = values.size
    if count < 2 * SHORTEST:
        return 0
    rank = pl.Series(values).rank("average").to_numpy()
    before = np.arange(1, count)
    difference = 2 * np.cumsum(rank)[:-1] - before * (count + 1)
    deviation = np.sqrt(before * (count - before) * (count + 1) / 3)
    score = np.abs(difference) / deviation
    score[: SHORTEST - 1] = 0
    score[count - SHORTEST :] = 0
    cut = int(np.argmax(score)) + 1
    low, high = sorted((float(np.median(values[:cut])), float(np.median(values[cut:]))))
    if high < (1 + least) * low:
        return 0
    if _apart(np.log(values), cut) >= clear:
        return cut
    score_of_independent = float(score[cut - 1]) * math.sqrt(_independent(rank, cut))
    chance = count * math.erfc(score_of_independent / math.sqrt(2))  # Bonferroni: any place could be the one
    return cut if chance < most else 0


def _apart(values: Values, cut: int) -> float:
    """Return the distance of the medians of both sides, in standard deviations (from absolute deviations)."""
    before, after = values[:cut], values[cut:]
    rest = np.concatenate([part - np.median(part) for part in (before, after)])
    deviation = MAD_TO_SIGMA * float(np.median(np.abs(rest)))
    distance = abs(float(np.median(after) - np.median(before)))
    return distance / deviation if deviation else math.inf


def _independent(rank: Values, cut: int) -> float:
    """Return the share of values that count as independent, from the correlation of neighbours beside a cut.

    For a correlation r of neighbours that decays geometrically it is (1 - r) / (1 + r) (Bayley and
    Hammersley, "The effective number of independent observations in an autocorrelated time series", 1946).
    """
    rest = np.concatenate([part - part.mean() for part in (rank[:cut], rank[cut:])])
    spread = float((rest**2).sum())
    correlation = float((rest[1:] * rest[:-1]).sum()) / spread if spread else 0.0
    correlation = min(max(correlation, 0.0), 0.99)
    return (1 - correlation) / (1 + correlation)
