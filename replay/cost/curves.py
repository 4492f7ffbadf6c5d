"""Times over bytes: a line, and a curve through the sizes that were measured.

Takes sizes and their times; returns a `LinkCost`: time = latency + bytes / bandwidth (Hockney, Parallel
Computing 20 (1994)), corrected at the measured sizes, and its possible error between them. Between sizes, the
logarithm of time over line is interpolated in the logarithm of the size by a monotone cubic (Fritsch and
Carlson, SIAM J. Numer. Anal. 17 (1980); PCHIP), so that a change of protocol stays where it was measured, and
a curve may dip. Beyond the sizes the line continues, scaled to the nearest measured size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpro.arrays import MAD_TO_SIGMA, Floats, Ints

NOISE = 0.01  # of a time: least difference of two measurements of one size
MIN_LOG_DISTANCE = 0.1  # in logarithm: the times of sizes closer than this differ by noise
# Times the largest, or below the smallest size measured: beyond, a curve says nothing.
MAX_EXTRAPOLATION = 4.0
SIZES_VARY = 2.0  # largest over smallest size from which latency can be separated from bandwidth
MAX_SAMPLES = 4000
ROUNDS = 25
STANDARD_ERRORS = 2.0
UNCLEAR_FIT = "no fit, as the times vary too much"  # instead of latency and bandwidth, where neither is clear
MIN_RESIDUAL = 1e-4  # of the time, in weights: smaller residuals count as this

Between = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True)
class LinkCost:
    """Cost of one kind of communication.

    Attributes:
        latency_ns: time that does not depend on bytes.
        ns_per_byte: time per byte of payload.
        latency_error_ns, ns_per_byte_error: half of the 95% interval of each.
        num_samples: transfers in the fit.
        misfit: median distance of a transfer from the line, as a share of its time.
        bandwidth_only: sizes vary too little to show latency, which is assumed to be 0.
        sizes: frequent sizes in bytes, ascending; empty where there is only the line.
        times: median ns of each of `sizes`.
    """

    latency_ns: float
    ns_per_byte: float
    latency_error_ns: float
    ns_per_byte_error: float
    num_samples: int
    misfit: float
    bandwidth_only: bool
    sizes: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def line_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """Return ns by the line alone, for one or many payloads in bytes."""
        return self.latency_ns + self.ns_per_byte * np.asarray(num_bytes, np.float64)

    def time_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """Return ns for one or many payloads in bytes."""
        line = self.line_ns(num_bytes)
        if not self.sizes:
            return line
        return self._through(np.maximum(np.asarray(num_bytes, np.float64), 1), line)

    @cached_property
    def _through(self) -> Between:
        sizes, times = self.knots
        return through(sizes, times, self.line_ns(sizes))

    def moving_ns(self, num_bytes: Floats | Ints | float) -> Floats:
        """Return the ns that depend on bytes, for one or many payloads in bytes."""
        return np.maximum(self.time_ns(num_bytes) - self.latency_ns, 0)

    @property
    def knots(self) -> tuple[Floats, Floats]:
        """Sizes (bytes) and times (ns) that the curve goes through."""
        return np.array(self.sizes), np.array(self.times)

    @property
    def gbps(self) -> float:
        """Payload per time, 1e9 bytes per second; infinite where bytes cost nothing."""
        return 1 / self.ns_per_byte if self.ns_per_byte else float("inf")

    @property
    def gbps_error(self) -> float | None:
        """Half of the 95% interval of `gbps`; None where bytes cost nothing."""
        return self.gbps * self.ns_per_byte_error / self.ns_per_byte if self.ns_per_byte else None

    @property
    def clear_latency_ns(self) -> float | None:
        """The latency; None where sizes vary too little, or its error is as large as its value."""
        return None if self.bandwidth_only or self.latency_error_ns >= self.latency_ns else self.latency_ns

    @property
    def clear_gbps(self) -> float | None:
        """Payload per time; None where bytes cost nothing, or its error is as large as its value."""
        return None if self.ns_per_byte_error >= self.ns_per_byte else self.gbps

    @property
    def is_line(self) -> bool:
        """Whether the transfers show a dependence on size: sizes vary, and one part of the line is clear."""
        parts = self.clear_latency_ns, self.clear_gbps
        return not self.bandwidth_only and any(part is not None for part in parts)

    def with_knots(self, sizes: Floats, times: Floats) -> LinkCost:
        """Return this line with a curve through measured times [K] ns at sizes [K] bytes, ascending."""
        return replace(self, sizes=tuple(sizes.tolist()), times=tuple(times.tolist()))

    def off(self, sizes: Floats, times: Floats) -> float:
        """Return the median distance, in logarithm, of times [K] ns at sizes [K] bytes from the curve."""
        return float(np.median(np.abs(np.log(times / self.time_ns(sizes)))))


def fit_curve(sizes: Floats, times: Floats) -> LinkCost:
    """Fit the curve through measured times.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns.
    """
    return fit_line(sizes, times).with_knots(sizes, times)


def corrected(curve: LinkCost, sizes: Floats, times: Floats) -> LinkCost:
    """Move a measured curve to the run's own times.

    At the run's sizes the result has the run's times; between two of them its distance from the measured
    curve, in logarithm, is interpolated, and beyond them it is constant.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns of the run.
    """
    off = np.log(times / curve.time_ns(sizes))
    every = np.union1d(curve.knots[0], sizes)
    moved = curve.time_ns(every) * np.exp(np.interp(np.log(every), np.log(sizes), off))
    return replace(fit_curve(every, moved), num_samples=sizes.size)


def fit_line(num_bytes: Floats, time_ns: Floats) -> LinkCost:
    """Fit the line with the least sum of relative distances |time - line| / time; neither part is negative.

    Least absolute deviations by reweighted least squares (Schlossmacher, JASA 68 (1973)): an outlier counts
    by its distance, not squared, and small messages count as much as large ones. The intervals are those of
    the weighted fit, with its deviation from the median distance.

    Args:
        num_bytes: [T] above 0.
        time_ns: [T] above 0.
    """
    if num_bytes.size > MAX_SAMPLES:
        kept = np.linspace(0, num_bytes.size - 1, MAX_SAMPLES).astype(np.int64)
        num_bytes, time_ns = num_bytes[kept], time_ns[kept]
    vary = float(np.max(num_bytes)) >= SIZES_VARY * float(np.min(num_bytes))
    latency, slope = (
        _least_distances(num_bytes, time_ns) if vary else (0.0, _through_origin(num_bytes, time_ns))
    )
    if latency < 0:
        latency, slope = 0.0, _through_origin(num_bytes, time_ns)
    elif slope < 0:
        latency, slope = float(np.median(time_ns)), 0.0
    distance = np.abs(latency + slope * num_bytes - time_ns) / time_ns
    misfit = float(np.median(distance))
    latency_error, slope_error = _errors(num_bytes, time_ns, MAD_TO_SIGMA * misfit, vary)
    return LinkCost(latency, slope, latency_error, slope_error, time_ns.size, misfit, not vary)


def _least_distances(x: Floats, y: Floats) -> tuple[float, float]:
    """Return intercept and slope of the line with the least absolute relative deviations."""
    one, other = 1 / y, x / y  # their weighted sum should be 1 everywhere
    weight: Floats = np.ones_like(x)
    intercept = slope = 0.0
    for _ in range(ROUNDS):
        # The factors of the two weighted columns whose sum is nearest to `weight`, by Gram-Schmidt.
        first, second = one * weight, other * weight
        length = float(first @ first)
        shared = float(first @ second) / length
        rest = second - shared * first
        slope = float(rest @ weight) / float(rest @ rest)
        intercept = float(first @ weight) / length - shared * slope
        distance = np.abs(intercept * one + slope * other - 1)
        weight = 1 / np.sqrt(np.maximum(distance, MIN_RESIDUAL))
    return intercept, slope


def _through_origin(x: Floats, y: Floats) -> float:
    """Return the slope without a latency: the median of y / x, each weighted by its leverage x / y."""
    order = np.argsort(y / x)
    weight = np.cumsum((x / y)[order])
    return float((y / x)[order][np.searchsorted(weight, weight[-1] / 2)])


def _errors(x: Floats, y: Floats, deviation: float, with_latency: bool) -> tuple[float, float]:
    """Return half the intervals of latency and slope."""
    if not with_latency:
        return 0.0, STANDARD_ERRORS * deviation / float(np.sqrt(((x / y) ** 2).sum()))
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    design /= (unit := np.linalg.norm(design, axis=0))
    spread = deviation * np.sqrt(np.diag(np.linalg.pinv(design.T @ design))) / unit
    return STANDARD_ERRORS * float(spread[0]), STANDARD_ERRORS * float(spread[1])


def medians(num_bytes: Floats, time_ns: Floats, enough: int = 1) -> tuple[Floats, Floats]:
    """Return the sizes with at least `enough` times, ascending, and the median time of each.

    Args:
        num_bytes: [T] payloads.
        time_ns: [T] time of each.
    """
    sizes, place = np.unique(num_bytes, return_inverse=True)
    times = np.array([float(np.median(time_ns[place == number])) for number in range(sizes.size)])
    often = np.bincount(place, minlength=sizes.size) >= enough
    return sizes[often].astype(np.float64), times[often]


def through(sizes: Floats, times: Floats, line: Floats) -> Between:
    """Return the curve through measured sizes: a function from [T] bytes and [T] ns by the line to [T] ns.

    Between two sizes it stays within their times.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns measured.
        line: [K] ns by the line.
    """
    ratio = np.log(times / line)
    if sizes.size == 1:
        return lambda num_bytes, line_ns: np.asarray(line_ns * np.exp(ratio[0]), np.float64)
    bend = monotone(np.log(sizes), ratio)

    def curve(num_bytes: Floats, line_ns: Floats) -> Floats:
        inside = np.clip(num_bytes, sizes[0], sizes[-1])
        bent = line_ns * np.exp(bend(np.log(inside)))
        right = np.clip(np.searchsorted(sizes, inside), 1, sizes.size - 1)
        least = np.minimum(times[right - 1], times[right])
        most = np.maximum(times[right - 1], times[right])
        return np.asarray(np.where(inside == num_bytes, np.clip(bent, least, most), bent), np.float64)

    return curve


def monotone(x: Floats, y: Floats) -> Callable[[Floats], Floats]:
    """Return the cubic through points that rises and falls only where they do, and extrapolates beyond them.

    Equals SciPy's `PchipInterpolator` to the last bit, without the 0.4 s that SciPy takes to load.

    Args:
        x: [K] ascending, two or more.
        y: [K].
    """
    step = np.diff(x)
    slope = np.diff(y) / step
    # At inner points the weighted harmonic mean of the slopes on both sides; 0 where the points turn.
    before, after = slope[:-1], slope[1:]
    turns = (np.sign(before) != np.sign(after)) | (before == 0) | (after == 0)
    left, right = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.where(turns, 0.0, 1.0 / ((left / before + right / after) / (left + right)))
    first, last = slope[0], slope[-1]
    if slope.size > 1:
        first = _outer_slope(step[0], step[1], slope[0], slope[1])
        last = _outer_slope(step[-1], step[-2], slope[-1], slope[-2])
    slopes = np.concatenate([[first], inner, [last]])
    cubic = (slopes[:-1] + slopes[1:] - 2 * slope) / step
    square = (slope - slopes[:-1]) / step - cubic
    cubic /= step

    def curve(given: Floats) -> Floats:
        place = np.clip(np.searchsorted(x, given, side="right") - 1, 0, slope.size - 1)
        t = given - x[place]
        value: Floats = y[place] + slopes[place] * t + square[place] * (t * t) + cubic[place] * (t * t * t)
        return value

    return curve


def _outer_slope(step: float, next_step: float, slope: float, next_slope: float) -> float:
    """Return the end slope of a parabola through three points, limited to keep the shape (Moler, pchiptx)."""
    estimate = ((2 * step + next_step) * slope - step * next_slope) / (step + next_step)
    if np.sign(estimate) != np.sign(slope):
        return 0.0
    if np.sign(slope) != np.sign(next_slope) and abs(estimate) > 3.0 * abs(slope):
        return 3.0 * slope
    return estimate


def left_out(sizes: Floats, times: Floats, line: Floats) -> Floats:
    """Return [K] the error of the curve at each size when that is left out, in logarithm; NaN at both ends.

    Every other size is left out at once, then the rest: PCHIP depends on near neighbours only, and each size
    keeps both of its own.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns measured.
        line: [K] ns by the line.
    """
    missed = np.full(sizes.size, np.nan)
    for first in (1, 2):
        out = np.zeros(sizes.size, np.bool_)
        out[first:-1:2] = True
        if out.any():
            predicted = through(sizes[~out], times[~out], line[~out])(sizes[out], line[out])
            missed[out] = np.abs(np.log(predicted / times[out]))
    return missed


def growth(sizes: Floats, missed: Floats) -> Floats:
    """Return [K] the growth of a curve's error with the distance from each size, per factor e in bytes.

    Args:
        sizes: [K] bytes, ascending.
        missed: [K] as from `left_out`.
    """
    if sizes.size < 3:
        return np.full(sizes.size, np.nan)
    gaps = np.diff(np.log(sizes))
    rate = np.empty(sizes.size)
    rate[1:-1] = missed[1:-1] / np.maximum(np.minimum(gaps[:-1], gaps[1:]), MIN_LOG_DISTANCE)
    rate[0], rate[-1] = rate[1], rate[-2]
    return rate


def scale(sizes: Floats, rate: Floats, num_bytes: Floats) -> Floats:
    """Return [T] possible errors of times, in logarithm, up to a common factor (`NetworkTable.times_scale`).

    Args:
        sizes: [K] bytes, ascending.
        rate: [K] as from `growth`.
        num_bytes: [T] of the transfers.
    """
    where, measured = np.log(num_bytes), np.log(sizes)
    right = np.clip(np.searchsorted(sizes, num_bytes), 1, max(sizes.size - 1, 1))
    left = right - 1
    right = np.minimum(right, sizes.size - 1)
    distance = np.minimum(np.abs(where - measured[left]), np.abs(where - measured[right]))
    return np.asarray(
        NOISE + np.maximum(distance, MIN_LOG_DISTANCE) * (rate[left] + rate[right]) / 2, np.float64
    )


def scores(sizes: Floats, missed: Floats) -> Floats:
    """Return the errors of left-out inner sizes as multiples of their scale, judged by their neighbours.

    Args:
        sizes: [K] bytes, ascending.
        missed: [K] as from `left_out`.
    """
    if sizes.size < 4:
        return np.empty(0)
    rate, gaps = growth(sizes, missed), np.diff(np.log(sizes))
    distance = np.maximum(np.minimum(gaps[:-1], gaps[1:]), MIN_LOG_DISTANCE)
    inner = rate[1:-1]
    before, after = np.append(inner[1], inner[:-1]), np.append(inner[1:], inner[-2])
    around = (before + after) / 2
    return np.asarray(missed[1:-1] / (NOISE + distance * around), np.float64)
