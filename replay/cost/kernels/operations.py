"""Frames of operations, one row each: their arithmetic and the bytes that they move.

Takes shapes; returns frames with the columns of `COLUMNS`, the input of every method of this package.
Pointwise work and reductions are bytes and operations. Operations do not depend on a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from dpro.arrays import Floats
from dpro.errors import UsageError
from dpro.replay.cost.kernels.roofline import BYTES

COLUMNS = {
    "kind": pl.String,  # matmul, prefill, decode, memory
    "dtype": pl.String,  # of the factors or of what is read, a key of `roofline.BYTES`
    "batch": pl.Float64,  # products, or sequences, of these sizes
    "m": pl.Float64,  # rows of the result; queries of a sequence
    "n": pl.Float64,  # columns of the result; size of a head
    "k": pl.Float64,  # length of the sum; mean number of keys that a query sees
    "heads": pl.Float64,  # of attention; else 1
    "kv_heads": pl.Float64,
    "read_bytes": pl.Float64,
    "written_bytes": pl.Float64,
    "operations": pl.Float64,  # floating-point, a multiplication and an addition are two
}
# Bytes per element written: the results of fp8 products have 16 bits.
WRITTEN_BYTES = {"fp8": 2}


def size_of(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        UsageError: there is no such type.
    """
    if dtype not in BYTES:
        raise UsageError(f"no element type {dtype!r}; there are {', '.join(BYTES)}")
    return BYTES[dtype]


def matmuls(dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1) -> pl.DataFrame:
    """Return matrix products of m × k by k × n.

    Args:
        m, n, k: [N] sizes.
        batch: [N] products per kernel.
    """
    m, n, k, batch = _floats(m, n, k, batch)
    size = size_of(dtype)
    return _frame(
        kind="matmul",
        dtype=dtype,
        batch=batch,
        m=m,
        n=n,
        k=k,
        read_bytes=size * batch * (m * k + k * n),
        written_bytes=WRITTEN_BYTES.get(dtype, size) * batch * m * n,
        operations=2 * batch * m * n * k,
    )


def attention(
    dtype: str,
    sequences: ArrayLike,
    queries: ArrayLike,
    past: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_size: ArrayLike,
    window: ArrayLike = 0,
    kv_bytes: int | None = None,
) -> pl.DataFrame:
    """Return fused causal attention: prefill where a sequence has several queries, else decode.

    Args:
        sequences: [N] in the batch.
        queries: [N] new tokens of each.
        past: [N] earlier tokens, whose keys and values are in memory.
        heads, kv_heads: [N] of queries; of keys and values.
        head_size: [N] elements of a head.
        window: [N] most tokens that a query sees; 0 for all.
        kv_bytes: of an element of keys and values in memory, where that differs.
    """
    sequences, queries, past, heads, kv_heads, head_size, window = _floats(
        sequences, queries, past, heads, kv_heads, head_size, window
    )
    size = size_of(dtype)
    seen = np.where(window > 0, window, np.inf)
    # Mean number of keys that a query sees: past + 1 … past + queries, none above the window.
    ramp = np.clip(seen - past, 0, queries)
    keys = (ramp * (past + (ramp + 1) / 2) + (queries - ramp) * np.where(window > 0, window, 0)) / queries
    held = np.minimum(past + queries, np.where(queries > 1, past + queries, seen))
    stored = 2 * sequences * held * kv_heads * head_size * (kv_bytes or size)
    query_bytes = sequences * queries * heads * head_size * size
    return _frame(
        kind=np.where(queries > 1, "prefill", "decode"),
        dtype=dtype,
        batch=sequences,
        m=queries,
        n=head_size,
        k=keys,
        heads=heads,
        kv_heads=kv_heads,
        read_bytes=stored + query_bytes,
        written_bytes=query_bytes,
        operations=4 * sequences * queries * heads * head_size * keys,
    )


def moves(
    dtype: str, read_bytes: ArrayLike, written_bytes: ArrayLike, operations: ArrayLike = 0
) -> pl.DataFrame:
    """Return pointwise work and reductions, whose time is that of memory.

    Args:
        read_bytes, written_bytes: [N] moved.
        operations: [N] floating-point operations.
    """
    read, written, counted = _floats(read_bytes, written_bytes, operations)
    size_of(dtype)
    return _frame(kind="memory", dtype=dtype, read_bytes=read, written_bytes=written, operations=counted)


def _floats(*values: ArrayLike) -> list[Floats]:
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, np.float64)) for value in values))
    if any((array < 0).any() or not np.isfinite(array).all() for array in arrays):
        raise UsageError("an operation has a size that is negative or not a number")
    return list(arrays)


def _frame(**columns: Any) -> pl.DataFrame:
    length = next(len(value) for value in columns.values() if not isinstance(value, str))
    default = {"batch": 1.0, "m": 0.0, "n": 0.0, "k": 0.0, "heads": 1.0, "kv_heads": 1.0}
    filled = {name: columns.get(name, default.get(name)) for name in COLUMNS}
    return pl.DataFrame(
        {
            name: pl.Series(name, [value] * length, COLUMNS[name])
            if isinstance(value, str | float)
            else pl.Series(name, value).cast(COLUMNS[name])
            for name, value in filled.items()
        }
    )
