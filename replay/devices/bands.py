"""Intervals from earlier errors: quantiles of log(measured ÷ predicted), by how long an operation takes.

In: microseconds predicted and measured, of operations that the method had not seen. Out: `Bands`, and from
those the low and high ends of new predictions. Short operations have larger errors. Of a sum of operations a
share of the errors is common; of a device that was never measured, its own bias is common to all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.arrays import Floats, Ints

EDGES_US = (20.0, 100.0)
SHARE = 0.8  # of what happens, that an interval is meant to hold
COMMON = 0.3  # share of a miss that all operations of one step have in common
MIN_ROWS = 8  # of a band; with fewer, all bands together
UNKNOWN = (-0.7, 0.7)  # where nothing was ever measured: a factor of two either way


@dataclass(frozen=True)
class Bands:
    """Quantiles of log(measured ÷ predicted), [3, 2]: a band a row, low and high."""

    quantiles: Floats

    def interval(self, predicted_us: Floats, bias: float = 0.0) -> tuple[Floats, Floats]:
        """The ends of the interval of each statement.

        Args:
            predicted_us: [N] microseconds.
            bias: by how much a device as a whole may be off, in log, one way.
        """
        low, high = self.quantiles[band_of(predicted_us)].T
        return predicted_us * np.exp(low - bias), predicted_us * np.exp(high + bias)


def band_of(us: Floats) -> Ints:
    """[N] which band each duration is in."""
    return np.digitize(us, EDGES_US).astype(np.int64)


def bands_of(predicted_us: Floats, measured_us: Floats, share: float = SHARE) -> Bands:
    """The bands of a method, from operations that it had not seen.

    Args:
        predicted_us, measured_us: [N] microseconds.
    """
    misses = np.log(measured_us / predicted_us)
    bands, tails = band_of(predicted_us), ((1 - share) / 2, (1 + share) / 2)
    whole = np.quantile(misses, tails) if misses.size >= MIN_ROWS else np.array(UNKNOWN)
    own = [misses[bands == band] for band in range(len(EDGES_US) + 1)]
    return Bands(np.array([np.quantile(each, tails) if each.size >= MIN_ROWS else whole for each in own]))


UNKNOWN_BANDS = Bands(np.array([UNKNOWN] * (len(EDGES_US) + 1)))


def sum_of(us: Floats, low_us: Floats, high_us: Floats, bias: float = 0.0) -> tuple[float, float, float]:
    """The sum of operations of one step, with its interval.

    Of each miss the share `COMMON` adds up, the rest adds in quadrature; the bias of a device adds up whole.

    Args:
        us, low_us, high_us: [N] of each operation, without the device's bias.
    """
    total = float(us.sum())
    ends = []
    for end in (us - low_us, high_us - us):
        apart = float(np.sqrt((end**2).sum()))
        ends.append(COMMON * float(end.sum()) + (1 - COMMON) * apart + total * np.expm1(bias))
    return total, max(total - ends[0], 0.0), total + ends[1]
