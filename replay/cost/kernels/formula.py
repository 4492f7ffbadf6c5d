"""Ten numbers per device and precision that predict the time of an operation: fitting, and the shipped ones.

Takes operations, the data sheet and ten coefficients; returns microseconds. A kernel is cut into tiles, and
the sum over k into up to 16 parts; the multiprocessors work on them in waves; its reads and writes go through
memory, or through the last cache where they fit. Time is the launch, plus the p-norm of arithmetic and memory
for the best cut: with an infinite exponent that is the roofline (Williams, Waterman and Patterson, CACM
2009). Waves per multiprocessor are as in NVIDIA's "Matrix Multiplication Background User's Guide".

`fit` fits the numbers to measured operations; several devices may share one fit, and the fit of one device
may start from that of others. `coefficients.json`, written by `python benchmarks/devices.py --fit` from
tables that a user has fetched, has the numbers of measured devices, and of all of them together. The latter
predict devices that were never measured, with a bias for how much devices differed. Intervals come from
earlier errors, `Bands`: quantiles of log(measured ÷ predicted) of operations that were not in the fit. Short
operations have larger errors. In a sum of operations, a share of the errors is common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.cost import HOLDS
from dpro.replay.cost.kernels.roofline import GPUS, GpuModel, model_named

TILES = np.array([(256, 128), (128, 256), (128, 128), (64, 128), (64, 64), (16, 64)], np.float64)
SPLITS = np.array([1, 2, 4, 8, 16], np.float64)
PARTIAL_BYTES = 4  # partial sums are kept in fp32
USUAL_SMS, USUAL_L2_MB = 100, 40.0  # where a sheet lacks them
ROWS_AT_ONCE = 20_000

# Name, prior, standard deviation of its logarithm.
NUMBERS = (
    ("launch_us", 3.0, 1.0),  # of an operation without work
    ("compute", 0.85, 0.2),  # share of the sheet's peak that the best tile reaches
    ("memory", 0.85, 0.3),  # share of the sheet's bandwidth
    ("cache", 1.5, 1.0),  # speed-up of the last cache over memory, beyond 1
    ("sharpness", 1.5, 0.5),  # exponent of the p-norm, beyond 1
    ("half_edge", 30.0, 0.5),  # m·n/(m+n) of a tile that reaches half of the peak
    ("wave_us", 0.5, 1.0),  # of each wave, in addition to its arithmetic
    ("split", 1.0, 1.0),  # traffic of partial sums, relative to writing and reading them once
    ("ramp", 64.0, 1.0),  # length of k that the start of a tile costs
    ("throttle", 0.05, 1.0),  # slowdown of a long operation, as clocks fall
)
NAMES = tuple(name for name, _, _ in NUMBERS)
PRIOR = np.log([value for _, value, _ in NUMBERS])
SPREAD = np.array([spread for _, _, spread in NUMBERS])
LONG_US = 1000.0  # clocks fall from about here on


@dataclass(frozen=True)
class OperationSizes:
    """Operations as arrays, each [N]: products of m × k by k × n, and bytes moved."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    moved: Floats

    def __getitem__(self, rows: slice) -> OperationSizes:
        """Return a slice of the operations."""
        return OperationSizes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def sizes_of(operations: pl.DataFrame) -> OperationSizes:
    """Convert operations to products: attention is two per head of keys and values; memory work is none.

    Args:
        operations: with the columns of `operations.COLUMNS`.
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
    )


def formula_us(numbers: Floats, sizes: OperationSizes, gpu: GpuModel, dtype: str) -> Floats:
    """Return [N] microseconds by the formula.

    Args:
        numbers: [10] logarithms of the coefficients, in the order of `NAMES`.
        dtype: of the factors, a key of `gpu.tflops`.
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


# Fits.

MAX_ROWS = 1200  # enough for ten numbers
OUTLIER = 0.1  # larger residuals, in log, count less
STEPS = 60
WEIGHT = 0.3  # of the prior of a number, against one measured operation at OUTLIER


@dataclass(frozen=True)
class DeviceSample:
    """Measured operations of one device, at one precision.

    Attributes:
        operations: with the columns of `operations.COLUMNS`.
        us: [N] measured.
        gpu: on which they ran.
        dtype: of their factors.
    """

    operations: pl.DataFrame
    us: Floats
    gpu: GpuModel
    dtype: str


@dataclass(frozen=True)
class DeviceFit:
    """Ten numbers and their uncertainty.

    Attributes:
        numbers: [10] logarithms of the coefficients.
        widths: [10] standard deviations of `numbers`.
    """

    numbers: Floats
    widths: Floats


ASSUMED = DeviceFit(PRIOR, SPREAD)


def fit(samples: Sequence[DeviceSample], start: DeviceFit = ASSUMED, weight: float = WEIGHT) -> DeviceFit:
    """Fit one set of numbers to all samples: least squares of log ratios, robust to outliers."""
    from scipy.optimize import least_squares

    drawn = [_sampled(sample, max(MAX_ROWS // len(samples), 1)) for sample in samples]
    sizes = [sizes_of(sample.operations) for sample in drawn]
    logs = [np.log(sample.us) for sample in drawn]

    def residuals(numbers: Floats) -> Floats:
        predicted = [
            np.log(formula_us(numbers, size, sample.gpu, sample.dtype)) - log
            for sample, size, log in zip(drawn, sizes, logs)
        ]
        return np.concatenate([*predicted, weight * (numbers - start.numbers) / start.widths])

    solution = least_squares(residuals, start.numbers, loss="soft_l1", f_scale=OUTLIER, max_nfev=STEPS)
    variance = np.mean(np.minimum(solution.fun[: -len(PRIOR)] ** 2, 1.0))
    widths = np.sqrt(np.diag(np.linalg.pinv(solution.jac.T @ solution.jac)) * variance)
    return DeviceFit(solution.x, np.clip(widths, 1e-3, start.widths))


def _sampled(sample: DeviceSample, most: int) -> DeviceSample:
    """Return at most `most` operations, sampled with a fixed seed."""
    if sample.operations.height <= most:
        return sample
    rows = np.sort(np.random.default_rng(0).choice(sample.operations.height, most, replace=False))
    return DeviceSample(sample.operations[rows], sample.us[rows], sample.gpu, sample.dtype)


# Intervals.

EDGES_US = (20.0, 100.0)
COMMON = 0.3  # share of an error that all operations of one step have in common
MIN_ROWS = 8  # of a band; with fewer, all bands together are used
UNKNOWN = (-0.7, 0.7)  # where no operation was measured: a factor of two either way


@dataclass(frozen=True)
class Bands:
    """Quantiles of log(measured ÷ predicted), [3, 2]: one row per band, low and high."""

    quantiles: Floats

    def interval(self, predicted_us: Floats, bias: float = 0.0) -> tuple[Floats, Floats]:
        """Return the ends of the interval of each prediction.

        Args:
            predicted_us: [N] microseconds.
            bias: possible error of the device as a whole, in log, one way.
        """
        low, high = self.quantiles[band_of(predicted_us)].T
        return predicted_us * np.exp(low - bias), predicted_us * np.exp(high + bias)


def band_of(us: Floats) -> Ints:
    """Return [N] the band of each duration."""
    return np.digitize(us, EDGES_US).astype(np.int64)


def bands_of(predicted_us: Floats, measured_us: Floats, share: float = HOLDS) -> Bands:
    """Return the bands of a method, from operations that were not in its fit.

    Args:
        predicted_us, measured_us: [N] microseconds.
        share: of errors that a band contains.
    """
    misses = np.log(measured_us / predicted_us)
    bands, tails = band_of(predicted_us), ((1 - share) / 2, (1 + share) / 2)
    whole = np.quantile(misses, tails) if misses.size >= MIN_ROWS else np.array(UNKNOWN)
    by_band = [misses[bands == band] for band in range(len(EDGES_US) + 1)]
    return Bands(
        np.array([np.quantile(of_band, tails) if of_band.size >= MIN_ROWS else whole for of_band in by_band])
    )


UNKNOWN_BANDS = Bands(np.array([UNKNOWN] * (len(EDGES_US) + 1)))


def sum_of(us: Floats, low_us: Floats, high_us: Floats, bias: float = 0.0) -> tuple[float, float, float]:
    """Return the sum of operations of one step, with its interval.

    The share `COMMON` of each error adds linearly, the rest in quadrature; the bias of a device adds in full.

    Args:
        us, low_us, high_us: [N] of each operation, without the device's bias.
    """
    total = float(us.sum())
    ends = []
    for end in (us - low_us, high_us - us):
        apart = float(np.sqrt((end**2).sum()))
        ends.append(COMMON * float(end.sum()) + (1 - COMMON) * apart + total * np.expm1(bias))
    return total, max(total - ends[0], 0.0), total + ends[1]


# Measured operations of one device, software, kind and precision.

# Names in such tables that are not product names.
DEVICES = {
    "a100_sxm": "A100-SXM4-80GB",
    "a100_pcie": "A100 80GB PCIe",
    "h100_pcie": "H100 PCIe",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server Edition",
}
# Products in block-scaled fp8 (fp8_block) are left out: those kernels also quantise, and differ between
# libraries by tens of microseconds.
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True)
class DeviceTable:
    """Operations measured on one device, with one software.

    Attributes:
        device: a key of `roofline.GPUS`.
        software: library and kernel that ran them, with the precision as its makers call it.
        kind: of the operations.
        dtype: a key of `roofline.BYTES`.
        shapes: [N] sizes that identify an operation across tables.
        operations: [N] rows with the columns of `operations.COLUMNS`.
        us: [N] measured.
    """

    device: str
    software: str
    kind: str
    dtype: str
    shapes: pl.DataFrame
    operations: pl.DataFrame
    us: Floats

    @property
    def library(self) -> str:
        """Library and precision, which tables of two devices can have in common."""
        whose, *rest = self.software.split("/")
        return "/".join((whose, *rest[1:]))

    def sample(self) -> DeviceSample:
        """Return the operations as a sample for `fit`."""
        return DeviceSample(self.operations, self.us, GPUS[self.device], self.dtype)

    def rows(self, mask: Bools | Ints) -> DeviceTable:
        """Return a subset of the rows.

        Args:
            mask: [N] mask of the rows, or their numbers.
        """
        numbers = np.flatnonzero(mask) if mask.dtype == np.bool_ else mask
        return DeviceTable(
            *(self.device, self.software, self.kind, self.dtype),
            *(self.shapes[numbers], self.operations[numbers], self.us[numbers]),
        )


def device_named(name: str) -> str:
    """Return the key of `roofline.GPUS` of a device in a table, such as `h100_sxm`; empty where unknown."""
    plain = name.replace("_", " ").upper()
    return DEVICES.get(name, "") or model_named(plain.removesuffix(" SXM")) or model_named(plain)


# Shipped numbers.

FILE = Path(__file__).with_name("coefficients.json")
ANY = ""  # all devices together


@dataclass(frozen=True)
class KnownCoefficients:
    """Numbers of one device, or of all, for one kind of operation at one precision.

    Attributes:
        fit: ten numbers with their widths.
        bands: of errors on operations; of `ANY`, around the device's own bias.
        bias: standard deviation of the biases of devices, in log; 0 where the device itself was measured.
        largest: most floating-point operations, and most bytes, of an operation in the fit.
    """

    fit: DeviceFit
    bands: Bands
    bias: float
    largest: tuple[float, float]


Key = tuple[str, str, str]  # kind, dtype, device


@cache
def shipped() -> Mapping[Key, KnownCoefficients]:
    """Read the shipped numbers, by kind, dtype and device."""
    return {
        (kind, dtype, device): _decoded(entry)
        for kind, dtypes in json.loads(FILE.read_text(encoding="utf-8"))["known"].items()
        for dtype, devices in dtypes.items()
        for device, entry in devices.items()
    }


@cache
def half_bands(kind: str, dtype: str, method: str) -> Bands:
    """Return the bands of predictions corrected by half the error on another device.

    Args:
        kind, dtype: of the operations; matmuls in bf16 stand in for those not measured.
        method: of the other half: tables, fitted or sheet.
    """
    half = json.loads(FILE.read_text(encoding="utf-8"))["half"]
    by_dtype = half.get(kind, half["matmul"])
    return Bands(np.array(by_dtype.get(dtype, by_dtype["bf16"])[method], np.float64))


def known_of(tables: Sequence[DeviceTable]) -> KnownCoefficients:
    """Fit one device's numbers at one precision to all its tables."""
    numbers = fit([table.sample() for table in tables])
    predicted, measured = predicted_and_measured(numbers, tables)
    return KnownCoefficients(numbers, bands_of(predicted, measured), 0.0, largest_of(tables))


def _decoded(entry: dict[str, Any]) -> KnownCoefficients:
    numbers, widths, bands, largest = (
        np.array(entry[name], np.float64) for name in ("numbers", "widths", "bands", "largest")
    )
    return KnownCoefficients(
        DeviceFit(numbers, widths), Bands(bands), entry["bias"], (float(largest[0]), float(largest[1]))
    )


def predicted_and_measured(numbers: DeviceFit, tables: Sequence[DeviceTable]) -> tuple[Floats, Floats]:
    """Return microseconds of all operations of tables, by ten numbers and as measured, [N] each."""
    samples: list[DeviceSample] = [table.sample() for table in tables]
    predicted = [
        formula_us(numbers.numbers, sizes_of(sample.operations), sample.gpu, sample.dtype)
        for sample in samples
    ]
    return np.concatenate(predicted), np.concatenate([sample.us for sample in samples])


def largest_of(tables: Sequence[DeviceTable]) -> tuple[float, float]:
    """Return the most floating-point operations, and the most bytes, of an operation of tables."""
    frames = [table.operations for table in tables]
    return (
        max(float(frame["operations"].max() or 0) for frame in frames),  # type: ignore[arg-type]
        max(float((frame["read_bytes"] + frame["written_bytes"]).max() or 0) for frame in frames),  # type: ignore[arg-type]
    )
