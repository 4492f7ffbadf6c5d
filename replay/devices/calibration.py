"""Numbers of a device from a few operations of the user's own trace.

In: some measured operations of one kind and precision, and what is known without them. Out:
`KnownCoefficients` for that device: the ten numbers moved from those of other devices as far as the
measured ones ask for.
"""

from __future__ import annotations

import numpy as np

from dpro.errors import Unanswerable
from dpro.replay.devices.bands import bands_of
from dpro.replay.devices.coefficients import KnownCoefficients
from dpro.replay.devices.fitting import DeviceSample, fit
from dpro.replay.devices.tiles import formula_us, sizes_of

MIN_OPERATIONS = 5
WEIGHT = 0.1  # of what is assumed of a number, against one operation: 30 operations outweigh it
ENOUGH = 100  # operations, with which bands are those of their own misses


def calibrated(known: KnownCoefficients, own: DeviceSample) -> KnownCoefficients:
    """Fit the numbers of a device to a few operations, beginning at what is known.

    Raises:
        Unanswerable: there are too few.
    """
    if own.us.size < MIN_OPERATIONS:
        raise Unanswerable(f"{own.us.size} measured operations: {MIN_OPERATIONS} are needed to fit a device")
    found = fit([own], known.fit, WEIGHT)
    predicted = formula_us(found.numbers, sizes_of(own.operations), own.gpu, own.dtype)
    missed = float(np.std(np.log(own.us / predicted)))
    bands = bands_of(predicted, own.us) if own.us.size >= ENOUGH else known.bands
    # What is left of the device's bias is known as well as a mean of this many misses.
    bias = min(known.bias or np.inf, missed) / np.sqrt(own.us.size)
    return KnownCoefficients(found, bands, float(bias), known.largest)
