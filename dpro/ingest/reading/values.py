"""Values of loosely typed files (JSON, pickles) in the types of their columns, or as unknown.

In: any parsed value. Out: numbers that fit their column, texts, containers; never an exception.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from dpro.limits import MAX_DIMENSIONS

_INT32 = 1 << 31
_INT64 = 1 << 63


def int64(value: Any) -> int:
    """A number that fits int64, also one written as text; -1 for anything else."""
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -_INT64 <= number < _INT64 else -1


def int32(value: Any) -> int:
    """A number that fits int32, also one written as text; -1 for anything else."""
    number = int64(value)
    return number if -_INT32 <= number < _INT32 else -1


def rounded(value: Any, factor: int) -> int:
    """A measured value in ns as int64; -1 where it is no number or negative.

    Args:
        factor: its unit in ns.
    """
    try:
        scaled = -1 if isinstance(value, bool) else round(float(value) * factor)
    except (TypeError, ValueError, OverflowError):
        return -1
    return scaled if 0 <= scaled < _INT64 else -1


def text(value: Any) -> str:
    """A text that UTF-8 can hold; empty for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping; empty for anything else."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """A list or tuple; empty for anything else."""
    return value if isinstance(value, list | tuple) else ()


def elements(shape: Any) -> int:
    """Number of elements of a tensor by its shape; -1 for what is none, or more than int64 holds."""
    sizes = sequence(shape)
    is_shape = shape is sizes and len(sizes) <= MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 <= size < _INT64 for size in sizes):
        return -1
    return int64(math.prod(sizes))


# Element types by the names that profilers give them.

_TYPES = {
    "float64": (8, ("double",)),
    "float32": (4, ("float",)),
    "float16": (2, ("half",)),
    "bfloat16": (2, ()),
    "float8_e4m3fn": (1, ()),
    "float8_e5m2": (1, ()),
    "float8_e4m3fnuz": (1, ()),
    "float8_e5m2fnuz": (1, ()),
    "int64": (8, ("long", "long int", "long long")),
    "int32": (4, ("int",)),
    "int16": (2, ("short", "short int")),
    "int8": (1, ("char", "signed char")),
    "uint8": (1, ("byte", "unsigned char")),
    "uint16": (2, ()),
    "uint32": (4, ("unsigned int",)),
    "uint64": (8, ("unsigned long",)),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
}
_NAMES = {alias: name for name, (_, aliases) in _TYPES.items() for alias in (name, *aliases)}


@cache
def dtype_name(recorded: str) -> str:
    """Torch's name of an element type, empty where the recorded one is not known."""
    lower = recorded.strip().lower()
    return _NAMES.get(lower) or _NAMES.get(lower.rsplit("::", 1)[-1], "")


def dtype_bytes(recorded: str) -> int:
    """Size of an element in bytes, -1 where the type is not known."""
    name = dtype_name(recorded)
    return _TYPES[name][0] if name else -1
