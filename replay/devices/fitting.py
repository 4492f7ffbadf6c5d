"""Fits the ten numbers of `tiles.py` to measured operations.

In: operations with their microseconds, the data sheet of the device they ran on. Out: a `DeviceFit`: ten
numbers, how wide each is. Many devices may share one fit; one device may begin at the fit of others and
have only a few operations of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.replay.devices.tiles import PRIOR, SPREAD, formula_us, sizes_of
from dpro.replay.models.roofline import GpuModel

MAX_ROWS = 1200  # ten numbers need no more
OUTLIER = 0.1  # residuals beyond that, in log, count less
STEPS = 60
WEIGHT = 0.3  # of what is assumed of a number, against one measured operation at OUTLIER


@dataclass(frozen=True)
class DeviceSample:
    """Measured operations of one device, at one precision.

    Attributes:
        operations: as `operations.COLUMNS` has them.
        us: [N] measured.
        gpu: what they ran on.
        dtype: of what they multiply.
    """

    operations: pl.DataFrame
    us: Floats
    gpu: GpuModel
    dtype: str


@dataclass(frozen=True)
class DeviceFit:
    """Ten numbers and how well they are known.

    Attributes:
        numbers: [10] logarithms of the coefficients.
        widths: [10] standard deviations of those.
    """

    numbers: Floats
    widths: Floats


ASSUMED = DeviceFit(PRIOR, SPREAD)


def fit(samples: Sequence[DeviceSample], start: DeviceFit = ASSUMED, weight: float = WEIGHT) -> DeviceFit:
    """Fit one set of numbers to all samples: least squares of log ratios, robust to outliers."""
    from scipy.optimize import least_squares

    drawn = [_drawn(sample, MAX_ROWS // len(samples)) for sample in samples]
    sizes = [sizes_of(each.operations) for each in drawn]
    logs = [np.log(each.us) for each in drawn]

    def residuals(numbers: Floats) -> Floats:
        predicted = [
            np.log(formula_us(numbers, size, each.gpu, each.dtype)) - log
            for each, size, log in zip(drawn, sizes, logs)
        ]
        return np.concatenate([*predicted, weight * (numbers - start.numbers) / start.widths])

    found = least_squares(residuals, start.numbers, loss="soft_l1", f_scale=OUTLIER, max_nfev=STEPS)
    variance = np.mean(np.minimum(found.fun[: -len(PRIOR)] ** 2, 1.0))
    widths = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)) * variance)
    return DeviceFit(found.x, np.clip(widths, 1e-3, start.widths))


def _drawn(sample: DeviceSample, most: int) -> DeviceSample:
    """At most this many operations, the same each time."""
    if sample.operations.height <= most:
        return sample
    rows = np.sort(np.random.default_rng(0).choice(sample.operations.height, most, replace=False))
    return DeviceSample(sample.operations[rows], sample.us[rows], sample.gpu, sample.dtype)
