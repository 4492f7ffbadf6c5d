"""Names of array types, and constants of robust statistics, that all who compute share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAD_TO_SIGMA = 1.4826  # of normal values: the median absolute deviation times this is the standard deviation
