"""Shared names of array types, and constants of robust statistics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAD_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation, for normally distributed values
