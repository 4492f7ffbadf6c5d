"""Numbers of a Kineto trace as arrays: exact times, and ids however they are written.

In: values as decoded: numbers, texts, JSON text, or nothing. Out: int64 arrays. No value stops it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Raw

from dpro.arrays import Floats, Ints

LAST_NS = 1 << 62  # no clock shows a later time
MISSING_NS = -LAST_NS
FLOAT_LOSES_NS = float(1 << 43)  # µs: from here on a float no longer distinguishes neighbouring nanoseconds
_PLAIN_US = float(1 << 42)  # µs: below, a product in ns is off by less than half of one
_LARGEST_US = float(1 << 53)  # beyond, a float skips whole microseconds, and no clock shows such a time
_NS_PER_US = 1000
_MAX_CHARACTERS = 21  # of a whole number: what is longer does not fit


def nanoseconds(times: Sequence[int | float | Raw | None]) -> Ints:
    """Microseconds in ns, to the last digit that is written. What one becomes depends on no other.

    Returns:
        `[N]`, `MISSING_NS` where there is no number.
    """
    values = _floats(times)
    if values.size and values.min() > -_PLAIN_US and values.max() < _PLAIN_US:  # not so if one is nan
        values *= _NS_PER_US
        return np.rint(values, out=values).astype(np.int64)
    sound = np.abs(values) < _LARGEST_US  # not so for nan either
    values = np.where(sound, values, 0)
    # In two parts, since the product of a late time would lose its last digits.
    whole = np.floor(values)
    ns = whole.astype(np.int64) * _NS_PER_US + np.rint((values - whole) * _NS_PER_US).astype(np.int64)
    late = [row for row in np.flatnonzero(values >= FLOAT_LOSES_NS).tolist() if isinstance(times[row], Raw)]
    ns[late] = _from_texts([times[row] for row in late])
    return np.where(sound, ns, MISSING_NS)


def _floats(times: Sequence[int | float | Raw | None]) -> Floats:
    """As floats, nan where there is no number."""
    try:
        return np.fromiter(times, np.float64, len(times))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_float, times), np.float64, len(times))


def _float(time: int | float | Raw | None) -> float:
    try:
        return float(msgspec.json.decode(time) if isinstance(time, Raw) else time)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, msgspec.DecodeError):
        return math.nan


def whole_numbers(values: Sequence[Any]) -> Ints:
    """Whole numbers, also those written as text (`"7"`, `stream 7`); -1 where there is none.

    Args:
        values: `[N]` of any type.
    """
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_whole_number, values), np.int64, len(values))


def _whole_number(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        match = re.search(r"-?\d+", value) if isinstance(value, str) else None
        if not match:
            return -1
        number = int(match[0][:_MAX_CHARACTERS])
    return number if -(1 << 63) <= number < 1 << 63 else -1


def _from_texts(times: Sequence[Any]) -> Ints:
    """JSON texts through decimals: exact, and slower."""
    written = (
        pl.Series(map(bytes, times), dtype=pl.Binary).cast(pl.String, strict=False).str.strip_chars(' "')
    )
    exact = (written.cast(pl.Decimal(38, 3), strict=False) * _NS_PER_US).cast(pl.Int64, strict=False)
    return exact.fill_null(MISSING_NS).to_numpy()
