"""One clock against another: a line through their differences, and exact arithmetic with it.

In: differences of a clock to the reference at some of its times. Out: a `ClockLine` with its uncertainty, and
times moved along it. Drift is fitted only where it stands out from the scatter of the differences; else it
is zero, and what it might be is part of the uncertainty. Where the differences come from is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.arrays import Ints
from dpro.units import NS_PER_S

# Clocks of computers drift apart by less than this, also where no time service disciplines them.
WORST_DRIFT_PPB = 100_000
# A clock is taken to drift when its slope is that many standard errors (where ranks of real jobs share a
# clock it is up to 4), and it leaves at most this share of the scatter about a level one.
CLEARLY_STEEP = 6.0
CLEARLY_LESS = 0.75
ENOUGH_FOR_DRIFT = 16  # of fewer that only scatter, more than one set in a thousand lies about a steep line
ENOUGH = 3  # fewer differences cannot show how much they scatter
# Slopes are taken between all pairs of at most so many differences, evenly chosen.
_MAX_SAMPLES = 400


@dataclass(frozen=True)
class ClockLine:
    """What a clock is ahead of the reference.

    Attributes:
        reference_ns: a time on this clock.
        offset_ns: how far it is ahead then.
        drift_ppb: by how much that grows, ns per second.
        uncertainty_ns: how far the offset may be wrong at the times it is for; -1 where unknown.
    """

    reference_ns: int = 0
    offset_ns: int = 0
    drift_ppb: int = 0
    uncertainty_ns: int = 0

    def offset_at(self, times: Ints) -> Ints:
        """[N] ns by which the clock is ahead at each of its times, in integers: times keep their order."""
        seconds, rest = np.divmod(times - self.reference_ns, NS_PER_S)
        ahead: Ints = self.offset_ns + seconds * self.drift_ppb + rest * self.drift_ppb // NS_PER_S
        return ahead

    def aligned(self, times: Ints) -> Ints:
        """[N] ns on the reference clock."""
        return times - self.offset_at(times)


def fit_scattered(times: Ints, differences: Ints) -> ClockLine:
    """A line through differences that scatter, some of them wildly.

    The slope is the median of the slopes between all pairs (Theil 1950, Sen 1968). It is taken where it is
    many times its own standard error and lessens the interquartile range of what is left.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns it was ahead.
    """
    middle = int(times.min()) + int(np.median(times - times.min()))  # as floats, times of day are too coarse
    low, level, high = np.percentile(differences, (25, 50, 75))
    spread = high - low
    if times.size < ENOUGH:
        return ClockLine(middle, round(level), 0, round(abs(level) + spread))
    slope = _median_slope(times - middle, differences) if times.size >= ENOUGH_FOR_DRIFT else 0.0
    left = differences - slope * (times - middle)
    low, steep_level, high = np.percentile(left, (25, 50, 75))
    # Standard error of a mean slope, for scatter like a normal one's; that of a median is 1.25 times as much.
    error = 1.25 * (high - low) / 1.35 / (np.std(times - middle) * np.sqrt(times.size) + 1.0)
    clear = high - low <= CLEARLY_LESS * spread and abs(slope) > CLEARLY_STEEP * error
    if not clear or abs(slope) * NS_PER_S > WORST_DRIFT_PPB:
        return ClockLine(middle, round(level), 0, round(spread))
    return ClockLine(middle, round(steep_level), round(slope * NS_PER_S), round(high - low))


def _median_slope(times: Ints, differences: Ints) -> float:
    if times.size > _MAX_SAMPLES:
        chosen = np.linspace(0, times.size - 1, _MAX_SAMPLES).round().astype(np.int64)
        times, differences = times[chosen], differences[chosen]
    i, j = np.triu_indices(times.size, 1)
    apart = times[j] != times[i]
    i, j = i[apart], j[apart]
    return float(np.median((differences[j] - differences[i]) / (times[j] - times[i]))) if i.size else 0.0


def fit_bounded(times: Ints, differences: Ints, bounds: Ints, at: tuple[int, int]) -> ClockLine:
    """A line through differences each of which is wrong by no more than a bound.

    Weighted least squares, near bounds counting most. The slope is taken where it is more than the bounds
    allow by themselves.

    Args:
        times: [N] ns on the clock, N > 0.
        differences: [N] ns it was ahead.
        bounds: [N] ns each of them may be wrong by.
        at: the times on the clock, from and to, that the line is for: the uncertainty grows towards them.
    """
    bounds = np.maximum(bounds, 1)
    weight = 1.0 / bounds.astype(np.float64) ** 2
    middle = int(times.min() + np.average(times - times.min(), weights=weight))
    since = (times - middle).astype(np.float64)
    level = float(np.average(differences, weights=weight))
    bound, extent = float(np.median(bounds)), float(np.ptp(times))
    unknown = min(2 * bound / extent, WORST_DRIFT_PPB / NS_PER_S) if extent else WORST_DRIFT_PPB / NS_PER_S
    moment = float(np.sum(weight * since**2))
    slope = float(np.sum(weight * since * (differences - level))) / moment if moment else 0.0
    if abs(slope) * extent <= 2 * bound or abs(slope) * NS_PER_S > WORST_DRIFT_PPB:
        slope = 0.0
    near = bounds <= 2 * bound
    off = float(np.abs(differences - level - slope * since)[near].max())
    beyond = max(int(times.min()) - at[0], at[1] - int(times.max()), 0)
    uncertainty = max(off, bound) + unknown * beyond
    return ClockLine(middle, round(level), round(slope * NS_PER_S), round(uncertainty))
