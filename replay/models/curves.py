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
    from scipy.interpolate import PchipInterpolator

    bend = PchipInterpolator(np.log(sizes), ratio)

    def curve(at: Floats, line_at: Floats) -> Floats:
        inside = np.clip(at, sizes[0], sizes[-1])
        bent = line_at * np.exp(bend(np.log(inside)))
        right = np.clip(np.searchsorted(sizes, inside), 1, sizes.size - 1)
        least = np.minimum(times[right - 1], times[right])
        most = np.maximum(times[right - 1], times[right])
        return np.asarray(np.where(inside == at, np.clip(bent, least, most), bent), np.float64)

    return curve


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
