"""Times over bytes between measured sizes: a line, and how far the measured sizes lie off it.

In: sizes, their times, a line through them. Out: times at other sizes, and how far these may be off.
Between sizes the logarithm of time over line is interpolated in the logarithm of the size by a monotone cubic
(Fritsch and Carlson, SIAM J. Numer. Anal. 17 (1980); PCHIP), so that a change of protocol stays where it was
measured, and a curve may dip. Beyond the sizes the line goes on, scaled to the last of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpro.arrays import Floats

NOISE = 0.01  # of a time: what two measurements of one size differ by at least
NEAR = 0.1  # in logarithm: sizes nearer than that differ by noise
FAR = 4.0  # times the largest, or below the smallest size measured: beyond that nothing is known

Between = Callable[[Floats, Floats], Floats]


def medians(num_bytes: Floats, time_ns: Floats, enough: int = 1) -> tuple[Floats, Floats]:
    """The sizes that were seen often enough, in order, and the median time of each.

    Args:
        num_bytes: [T] payloads.
        time_ns: [T] what each took.
        enough: how many times of a size there must be.
    """
    sizes, place = np.unique(num_bytes, return_inverse=True)
    times = np.array([float(np.median(time_ns[place == at])) for at in range(sizes.size)])
    often = np.bincount(place, minlength=sizes.size) >= enough
    return sizes[often].astype(np.float64), times[often]


def through(sizes: Floats, times: Floats, line: Floats) -> Between:
    """The curve through measured sizes: a function from bytes [T] and their ns by the line [T] to ns [T].

    Between two sizes it stays within their times.

    Args:
        sizes: [K] bytes, ascending, each once.
        times: [K] ns measured.
        line: [K] ns by the line.
    """
    ratio = np.log(times / line)
    if sizes.size == 1:
        return lambda at, line_at: np.asarray(line_at * np.exp(ratio[0]), np.float64)
    bend = monotone(np.log(sizes), ratio)

    def curve(at: Floats, line_at: Floats) -> Floats:
        inside = np.clip(at, sizes[0], sizes[-1])
        bent = line_at * np.exp(bend(np.log(inside)))
        right = np.clip(np.searchsorted(sizes, inside), 1, sizes.size - 1)
        least = np.minimum(times[right - 1], times[right])
        most = np.maximum(times[right - 1], times[right])
        return np.asarray(np.where(inside == at, np.clip(bent, least, most), bent), np.float64)

    return curve


def monotone(x: Floats, y: Floats) -> Callable[[Floats], Floats]:
    """The cubic through points that rises and falls only where they do, and goes on beyond them.

    It is SciPy's `PchipInterpolator` to the last bit, without the 0.4 s that SciPy takes to load.

    Args:
        x: [K] ascending, two or more.
        y: [K].
    """
    step = np.diff(x)
    slope = np.diff(y) / step
    inner = _inner_slopes(step, slope)
    first, last = slope[0], slope[-1]
    if slope.size > 1:
        first = _outer_slope(step[0], step[1], slope[0], slope[1])
        last = _outer_slope(step[-1], step[-2], slope[-1], slope[-2])
    at = np.concatenate([[first], inner, [last]])
    cubic = (at[:-1] + at[1:] - 2 * slope) / step
    square = (slope - at[:-1]) / step - cubic
    cubic /= step

    def curve(given: Floats) -> Floats:
        place = np.clip(np.searchsorted(x, given, side="right") - 1, 0, slope.size - 1)
        t = given - x[place]
        found: Floats = y[place] + at[place] * t + square[place] * (t * t) + cubic[place] * (t * t * t)
        return found

    return curve


def _inner_slopes(step: Floats, slope: Floats) -> Floats:
    """At each point between two others the weighted harmonic mean of both slopes; 0 where they turn."""
    before, after = slope[:-1], slope[1:]
    turns = (np.sign(before) != np.sign(after)) | (before == 0) | (after == 0)
    left, right = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (left / before + right / after) / (left + right)
        return np.where(turns, 0.0, 1.0 / mean)


def _outer_slope(step: float, next_step: float, slope: float, next_slope: float) -> float:
    """At an end the slope of a parabola through three points, if it keeps the shape (Moler, pchiptx)."""
    found = ((2 * step + next_step) * slope - step * next_slope) / (step + next_step)
    if np.sign(found) != np.sign(slope):
        return 0.0
    if np.sign(slope) != np.sign(next_slope) and abs(found) > 3.0 * abs(slope):
        return 3.0 * slope
    return found


def left_out(sizes: Floats, times: Floats, line: Floats) -> Floats:
    """[K] how far the curve misses each size when that is left out, as a logarithm; NaN at both ends.

    Every other size is left out at once, then the others: PCHIP depends on near neighbours, and each is left
    out with both of its own there.

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
    """[K] how fast a curve's error grows around each size with the distance from it, per factor e in bytes.

    Args:
        sizes: [K] bytes, ascending.
        missed: [K] as from `left_out`.
    """
    if sizes.size < 3:
        return np.full(sizes.size, np.nan)
    gaps = np.diff(np.log(sizes))
    rate = np.empty(sizes.size)
    rate[1:-1] = missed[1:-1] / np.maximum(np.minimum(gaps[:-1], gaps[1:]), NEAR)
    rate[0], rate[-1] = rate[1], rate[-2]
    return rate


def scale(sizes: Floats, rate: Floats, at: Floats) -> Floats:
    """[T] how far times may be off in logarithm, up to a factor that `calibrated` finds.

    Args:
        sizes: [K] bytes, ascending.
        rate: [K] as from `growth`.
        at: [T] bytes.
    """
    where, known = np.log(at), np.log(sizes)
    right = np.clip(np.searchsorted(sizes, at), 1, max(sizes.size - 1, 1))
    left = right - 1
    right = np.minimum(right, sizes.size - 1)
    distance = np.minimum(np.abs(where - known[left]), np.abs(where - known[right]))
    return np.asarray(NOISE + np.maximum(distance, NEAR) * (rate[left] + rate[right]) / 2, np.float64)


def scores(sizes: Floats, missed: Floats) -> Floats:
    """How many times their scale the errors of sizes that were left out are, judged by their neighbours.

    Args:
        sizes: [K] bytes, ascending.
        missed: [K] as from `left_out`.
    """
    if sizes.size < 4:
        return np.empty(0)
    rate, gaps = growth(sizes, missed), np.diff(np.log(sizes))
    distance = np.maximum(np.minimum(gaps[:-1], gaps[1:]), NEAR)
    inner = rate[1:-1]
    before, after = np.append(inner[1], inner[:-1]), np.append(inner[1:], inner[-2])
    around = (before + after) / 2
    return np.asarray(missed[1:-1] / (NOISE + distance * around), np.float64)
