"""Values of loosely typed files (JSON, pickles) converted to the types of their columns, or to unknown.

Takes any parsed value; returns numbers that fit their column, texts, containers, and peers as global ranks.
Never raises an exception.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import polars as pl

from dpro.limits import MAX_DIMENSIONS
from dpro.members import members_text
from dpro.schema.members import GROUP_RANKS

_INT32 = 1 << 31
_INT64 = 1 << 63


def int64(value: Any) -> int:
    """Return a number that fits int64, also one written as text; -1 for anything else."""
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -_INT64 <= number < _INT64 else -1


def int32(value: Any) -> int:
    """Return a number that fits int32, also one written as text; -1 for anything else."""
    number = int64(value)
    return number if -_INT32 <= number < _INT32 else -1


def rounded(value: Any, factor: int) -> int:
    """Return a measured value in ns as int64; -1 where it is negative or not a number.

    Args:
        factor: its unit in ns.
    """
    try:
        scaled = -1 if isinstance(value, bool) else round(float(value) * factor)
    except (TypeError, ValueError, OverflowError):
        return -1
    return scaled if 0 <= scaled < _INT64 else -1


def text(value: Any) -> str:
    """Return a text, with characters that UTF-8 cannot encode replaced; empty for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping; empty for anything else."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """Return a list or tuple; empty for anything else."""
    return value if isinstance(value, list | tuple) else ()


def elements(shape: Any) -> int:
    """Return the number of elements of a tensor by its shape; -1 for an invalid shape, or more than int64."""
    sizes = sequence(shape)
    is_shape = shape is sizes and len(sizes) <= MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 <= size < _INT64 for size in sizes):
        return -1
    return int64(math.prod(sizes))


# Element types by their names in profilers.

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
    """Return torch's name of an element type; empty where the recorded one is unknown."""
    lower = recorded.strip().lower()
    return _NAMES.get(lower) or _NAMES.get(lower.rsplit("::", 1)[-1], "")


def dtype_bytes(recorded: str) -> int:
    """Return the size of an element in bytes; -1 where the type is unknown."""
    name = dtype_name(recorded)
    return _TYPES[name][0] if name else -1


# Sends and receives in the form of the tables: sources may number ranks within the group or across the job
# (PyTorch does both), and give sizes for both directions.

Array = np.ndarray[Any, np.dtype[np.int64]]


def ranks_of(listed: Sequence[Any]) -> Sequence[int]:
    """Return the ranks of a group, recorded as numbers or texts; empty where one of them is invalid."""
    ranks = tuple(map(int32, listed))
    return ranks if min(ranks, default=0) >= 0 else ()


@lru_cache(maxsize=64)
def ranks_in(listed: str) -> Sequence[int]:
    """Return the ranks in a text such as "[0, 1]"; cached, since all calls of a group have the same text."""
    return ranks_of(re.findall(r"\d+", listed))


def of_each_call(ranks: Sequence[Sequence[int]], of_call: Array) -> pl.Series:
    """Return the ranks of the group of each call, as text.

    Args:
        ranks: ranks of each group.
        of_call: [N] index of each call's group.
    """
    return pl.Series(GROUP_RANKS, list(map(members_text, ranks)), pl.String)[of_call]


def global_peer(own_number: int, peer: int, rank: int, ranks: Sequence[int]) -> int:
    """Return the peer as a global rank.

    Args:
        own_number: this rank's number as recorded; -1 where only the peer is.
        peer: the peer's number as recorded; -1 unknown.
        ranks: global ranks of the group, in order; empty unknown.

    Returns:
        The global rank; the number as recorded where the group is unknown.
    """
    if peer < 0 or not ranks:
        return peer
    within_group = (own_number >= 0 and own_number != rank) or peer not in ranks or peer == rank
    return ranks[peer] if within_group and peer < len(ranks) else peer


def directed_bytes(op: str, bytes_in: int, bytes_out: int) -> tuple[int, int]:
    """Return bytes in and out of an operation: a send has no output, and a receive no input.

    Args:
        bytes_in, bytes_out: as recorded; -1 unknown.
    """
    if op == "send":
        return bytes_in, 0 if bytes_in >= 0 else -1
    if op == "recv":
        return 0 if bytes_out >= 0 else -1, bytes_out
    return bytes_in, bytes_out
