"""Where a series of times changes its level, distinguished from noise, outliers and slow drift.

In: a series. Out: the places from which on its level is another. Ranks of values are compared, so values that
are far off now and then (checkpoints, evaluations) move nothing. What a change means is not decided here.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA

Values = NDArray[np.float64]

CHANCE = 1e-4  # of a change somewhere in a series that has none
SHORTEST = 12  # values; fewer in a row are no level of their own


def change_points(values: Values, least: float, chance: float = CHANCE, clear: float = math.inf) -> list[int]:
    """The places where the level changes.

    The series is cut where the values before and after differ most by the rank-sum statistic, if that is
    beyond chance and the medians on both sides differ enough; and then each part likewise (Pettitt, "A non-
    parametric approach to the change-point problem", Applied Statistics 28, 1979; here in units of the
    statistic's standard deviation, so that changes near an end are found, too). Ranks of few values are
    never beyond chance, however far apart they lie: levels may also be distinguished by their distance.

    Args:
        values: [N], positive.
        least: share by which medians must differ.
        chance: of a change in a series that has none; less where many series are looked at.
        clear: deviations of single values from their median (robust, logarithms) by which levels that are so
            far apart count as two without the test.

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
    """Where one change is, 0 for none."""
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
    """Distance of the medians on both sides, in standard deviations of a value (from absolute deviations)."""
    before, after = values[:cut], values[cut:]
    rest = np.concatenate([part - np.median(part) for part in (before, after)])
    deviation = MAD_TO_SIGMA * float(np.median(np.abs(rest)))
    distance = abs(float(np.median(after) - np.median(before)))
    return distance / deviation if deviation else math.inf


def _independent(rank: Values, cut: int) -> float:
    """Share of the values that count as independent, by the correlation of neighbours beside a cut.

    For a correlation r of neighbours that falls off geometrically it is (1 - r) / (1 + r) (Bayley and
    Hammersley, "The effective number of independent observations in an autocorrelated time series", 1946).
    """
    rest = np.concatenate([part - part.mean() for part in (rank[:cut], rank[cut:])])
    spread = float((rest**2).sum())
    correlation = float((rest[1:] * rest[:-1]).sum()) / spread if spread else 0.0
    correlation = min(max(correlation, 0.0), 0.99)
    return (1 - correlation) / (1 + correlation)
