"""Ten numbers that say how long an operation takes on one device, at one precision.

In: operations, the data sheet, ten coefficients. Out: microseconds. A kernel is cut into tiles, and the sum
over k into as many as 16 parts; the multiprocessors work on them in waves; what it reads and writes goes
through memory, or through the last cache where it fits. Time is the launch, and the p-norm of arithmetic and
memory for the best cut: with an exponent of infinity that is the roofline (Williams, Waterman and Patterson,
CACM 2009). Waves per multiprocessor are as in NVIDIA's "Matrix Multiplication Background User's Guide".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.replay.models.roofline import GpuModel

TILES = np.array([(256, 128), (128, 256), (128, 128), (64, 128), (64, 64), (16, 64)], np.float64)
SPLITS = np.array([1, 2, 4, 8, 16], np.float64)
PARTIAL_BYTES = 4  # sums of a part are kept in fp32
USUAL_SMS, USUAL_L2_MB = 100, 40.0  # where a sheet does not have them
ROWS_AT_ONCE = 20_000

# Name, prior, standard deviation of its logarithm.
NUMBERS = (
    ("launch_us", 3.0, 1.0),  # of an operation that does nothing
    ("compute", 0.85, 0.2),  # share of the sheet's peak that the best tile reaches
    ("memory", 0.85, 0.3),  # share of the sheet's bandwidth
    ("cache", 1.5, 1.0),  # how much faster than memory the last cache is, beyond 1
    ("sharpness", 1.5, 0.5),  # exponent of the p-norm, beyond 1
    ("half_edge", 30.0, 0.5),  # m·n/(m+n) of a tile that reaches half
    ("wave_us", 0.5, 1.0),  # of each wave, beside its arithmetic
    ("split", 1.0, 1.0),  # traffic of partial sums, of what is written and read once
    ("ramp", 64.0, 1.0),  # length of k that the start of a tile costs
    ("throttle", 0.05, 1.0),  # by how much a long operation is slower: clocks fall
)
NAMES = tuple(name for name, _, _ in NUMBERS)
PRIOR = np.log([value for _, value, _ in NUMBERS])
SPREAD = np.array([spread for _, _, spread in NUMBERS])
LONG_US = 1000.0  # from about here on clocks fall


@dataclass(frozen=True)
class OperationSizes:
    """Operations as arrays, each [N]: products of m × k by k × n, and bytes."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    moved: Floats
    written: Floats

    def __getitem__(self, rows: slice) -> OperationSizes:
        """Some of them."""
        return OperationSizes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def sizes_of(operations: pl.DataFrame) -> OperationSizes:
    """Operations as products. Attention is two products per head of keys and values; memory work is none.

    Args:
        operations: as `operations.COLUMNS` has them.
    """
    batch, m, n, k, heads, kv_heads, read, written = (
        operations[name].to_numpy()
        for name in ("batch", "m", "n", "k", "heads", "kv_heads", "read_bytes", "written_bytes")
    )
    attends = operations["kind"].is_in(["prefill", "decode"]).to_numpy()
    return OperationSizes(
        np.where(attends, batch * kv_heads, batch),
        np.where(attends, m * heads / kv_heads, m),
        n,
        np.where(attends, 2 * k, k),
        read + written,
        written,
    )


def formula_us(numbers: Floats, sizes: OperationSizes, gpu: GpuModel, dtype: str) -> Floats:
    """[N] microseconds.

    Args:
        numbers: [10] logarithms of the coefficients, in the order of `NAMES`.
        dtype: of what is multiplied, a key of `gpu.tflops`.
    """
    parts = [
        _formula_us(np.exp(numbers), sizes[begin : begin + ROWS_AT_ONCE], gpu, dtype)
        for begin in range(0, len(sizes.m), ROWS_AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def _formula_us(numbers: Floats, sizes: OperationSizes, gpu: GpuModel, dtype: str) -> Floats:
    launch, compute, memory, cache, sharpness, half_edge, wave, split_cost, ramp, throttle = numbers
    power = 1 + sharpness
    sms = gpu.sms or USUAL_SMS
    batch, m, n, k = (column[:, None, None] for column in (sizes.batch, sizes.m, sizes.n, sizes.k))
    rows, columns, parts = TILES[None, :, 0, None], TILES[None, :, 1, None], SPLITS[None, None, :]
    waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) * batch * parts / sms)
    edge = rows * columns / (rows + columns)
    per_sm = gpu.tflops[dtype] * 1e6 / sms * compute * edge / (edge + half_edge)  # operations per us
    arithmetic = waves * (2 * rows * columns * (k / parts + ramp) / per_sm + wave)
    arithmetic = np.where(k > 0, arithmetic, 0)
    partial = np.where(parts > 1, split_cost * (parts + 1) * PARTIAL_BYTES * m * n * batch, 0)
    moved = sizes.moved[:, None, None] + partial
    resident = 1 / (1 + (sizes.moved / ((gpu.l2_mb or USUAL_L2_MB) * 1e6)) ** 2)[:, None, None]
    moving = moved / (gpu.gbps * 1e3 * memory * (1 + cache * resident))
    larger = np.maximum(arithmetic, moving)
    ratio = np.minimum(arithmetic, moving) / np.maximum(larger, 1e-12)
    work: Floats = (larger * (1 + ratio**power) ** (1 / power)).reshape(len(sizes.m), -1).min(1)
    time: Floats = launch + work * (1 + throttle * work / (work + LONG_US))
    return time
