"""Estimates of operation times on a device: the one interface to everything in this package.

Takes operations, a device, and `Sources`: the user's tables, the ten numbers of devices, and perhaps the
operations as measured on another device or at another precision (`MeasuredOperations`). Returns a row per
operation: microseconds, an interval meant to contain 90%, the method, or the reason why there is no
prediction. The first method with an answer decides:

    table     the user's table has this shape on this device
    trees     the user's table has this device; formula and trees predict the shapes that it lacks
    fitted    ten numbers of this device: shipped, or fitted to operations of the user's own trace
    sheet     ten numbers shared by all measured devices, with this device's data sheet

Where an operation was measured elsewhere, half of the method's error there, in log, is expected here
(`HALF`): a part of an error belongs to the operation and its software, and a part to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.formula import (
    ANY,
    UNKNOWN_BANDS,
    Bands,
    DeviceTable,
    Key,
    KnownCoefficients,
    formula_us,
    half_bands,
    shipped,
    sizes_of,
)
from dpro.replay.cost.kernels.learned import LearnedTrees, covers, predicted_us
from dpro.replay.cost.kernels.roofline import GPUS, GpuModel

HALF = 0.5  # share of the error on the other device that is expected here
BEYOND = 4.0  # times the largest measured operation: larger ones are refused
HOLDS_80 = 1.28  # standard deviations on either side that contain 80%
UNMEASURED = 0.25  # standard deviation, in log, where neither kind nor precision was measured
NEAREST = {"fp16": "bf16", "tf32": "bf16", "fp32": "bf16"}  # stand-ins for precisions without numbers
SAME_OPERATION = ["batch", "m", "n", "k", "heads", "kv_heads", "read_bytes"]
TIMES = ("us", "low_us", "high_us")
SCHEMA = pl.Schema({**dict.fromkeys(TIMES, pl.Float64()), "method": pl.String(), "reason": pl.String()})


@dataclass(frozen=True)
class Sources:
    """Measurements and models of devices.

    Attributes:
        tables: measured operations.
        learned: trees learned from the tables, as by `learned.learn`.
        coefficients: ten numbers by kind, dtype and device; the user's own replace the shipped ones.
        sheets: data sheets by device.
    """

    tables: Sequence[DeviceTable] = ()
    learned: Sequence[LearnedTrees] = ()
    coefficients: Mapping[Key, KnownCoefficients] = field(default_factory=shipped)
    sheets: Mapping[str, GpuModel] = field(default_factory=lambda: GPUS)


class MeasuredOperations(NamedTuple):
    """Measured operations, one row for each operation of the request.

    Attributes:
        device: on which they ran.
        operations: as they ran, perhaps at another precision.
        us: [N] measured.
    """

    device: str
    operations: pl.DataFrame
    us: Floats


class _Answer(NamedTuple):
    """[N] microseconds, NaN where a method has no answer; its bands, and the device's bias in log."""

    us: Floats
    bands: Bands
    bias: float
    method: str


def estimate(
    operations: pl.DataFrame,
    device: str,
    sources: Sources | None = None,
    given: MeasuredOperations | None = None,
) -> pl.DataFrame:
    """Estimate the time of each operation.

    Args:
        operations: with the columns of `operations.COLUMNS`.

    Returns:
        A row per operation with the columns of `SCHEMA`; of refused operations `us` is null, with a `reason`.

    Raises:
        Unanswerable: there is no data sheet of the device.
    """
    sources = sources or Sources()
    if device not in sources.sheets:
        raise Unanswerable(f"no data sheet of {device!r}: there are {', '.join(sources.sheets)}")
    parts = []
    numbered = operations.with_row_index("row")
    for (kind, dtype), rows in numbered.partition_by(["kind", "dtype"], as_dict=True).items():
        row_numbers = rows["row"].to_numpy()
        there = given and MeasuredOperations(
            given.device, given.operations[row_numbers], given.us[row_numbers]
        )
        parts.append(
            _of_one_kind(rows.drop("row"), str(kind), str(dtype), device, sources, there).with_columns(
                row=pl.Series(row_numbers)
            )
        )
    if not parts:
        return pl.DataFrame(schema=SCHEMA)
    return pl.concat(parts).sort("row").select(list(SCHEMA))


def _of_one_kind(
    operations: pl.DataFrame,
    kind: str,
    dtype: str,
    device: str,
    sources: Sources,
    given: MeasuredOperations | None,
) -> pl.DataFrame:
    gpu = sources.sheets[device]
    if dtype not in gpu.tflops:
        height = operations.height
        reason = f"{device} does not multiply in {dtype}"
        nothing: dict[str, list[str] | list[None]] = {name: [None] * height for name in TIMES}
        return pl.DataFrame(nothing | {"method": [""] * height, "reason": [reason] * height}, schema=SCHEMA)
    us, low, high = (np.full(operations.height, np.nan) for _ in range(3))
    method = np.full(operations.height, "", dtype=object)
    for predicted in _scaled(operations, kind, dtype, device, sources, given):
        new = np.isnan(us) & np.isfinite(predicted.us)
        if new.any():
            us[new] = predicted.us[new]
            low[new], high[new] = predicted.bands.interval(predicted.us[new], HOLDS_80 * predicted.bias)
            method[new] = predicted.method
        if not np.isnan(us).any():
            break
    frame = pl.DataFrame({"us": us, "low_us": low, "high_us": high, "method": method.tolist()})
    missing = pl.col("us").is_nan()
    why = "more operations or bytes than any that was measured"
    return frame.select(
        *(pl.when(missing).then(None).otherwise(pl.col(name)).alias(name) for name in TIMES),
        "method",
        reason=pl.when(missing).then(pl.lit(why)),
    ).cast(SCHEMA)


def _scaled(
    operations: pl.DataFrame,
    kind: str,
    dtype: str,
    device: str,
    sources: Sources,
    given: MeasuredOperations | None,
) -> Iterator[_Answer]:
    """Yield the answer of each method, best first, scaled by half of its error on the given measurements."""
    if given is None:
        yield from _by_tables(operations, kind, dtype, device, sources)
        yield _by_formula(operations, kind, dtype, device, sources)
        return
    ran = str(given.operations["dtype"][0])
    for software in _common_software(kind, (device, dtype), (given.device, ran), sources):
        here = _by_tables(operations, kind, dtype, device, sources, software[0])
        there_us = np.full(operations.height, np.nan)
        for answer in _by_tables(given.operations, kind, ran, given.device, sources, software[1]):
            there_us = np.where(np.isnan(there_us), answer.us, there_us)
        for one in here:
            yield _half_corrected(one, there_us, given.us, half_bands(kind, dtype, "tables"))
    if given.device in sources.sheets and ran in sources.sheets[given.device].tflops:
        other = _by_formula(given.operations, kind, ran, given.device, sources)
        for one in _by_tables(operations, kind, dtype, device, sources):
            yield _half_corrected(one, other.us, given.us, half_bands(kind, dtype, "fitted"))
        one = _by_formula(operations, kind, dtype, device, sources)
        yield _half_corrected(one, other.us, given.us, half_bands(kind, dtype, one.method))
    yield _by_formula(operations, kind, dtype, device, sources)


def _half_corrected(one: _Answer, other_us: Floats, measured_us: Floats, bands: Bands) -> _Answer:
    """Scale one device's prediction by half of the error, in log, on the other device."""
    return _Answer(one.us * (measured_us / other_us) ** HALF, bands, one.bias, f"measured x {one.method}")


def _common_software(
    kind: str, here: tuple[str, str], there: tuple[str, str], sources: Sources
) -> list[tuple[str, str]]:
    """Return pairs of software with tables of both devices and precisions, largest table first."""
    equal = here[1] == there[1]
    one, other = (
        {
            table.library if equal else table.library.partition("/")[0]: table
            for table in sources.tables
            if (table.kind, table.device, table.dtype) == (kind, *place)
        }
        for place in (here, there)
    )
    shared = sorted(one.keys() & other.keys(), key=lambda name: (-len(one[name].us), name))
    return [(one[name].software, other[name].software) for name in shared]


def _by_tables(
    operations: pl.DataFrame,
    kind: str,
    dtype: str,
    device: str,
    sources: Sources,
    software: str = "",
) -> Iterator[_Answer]:
    """Yield answers of the device's tables, then of trees learned from them; of one software, if given."""

    def fits(measured: DeviceTable | LearnedTrees) -> bool:
        place = (measured.kind, measured.dtype, measured.device) == (kind, dtype, device)
        return place and software in ("", measured.software)

    learned = {trees.software: trees for trees in sources.learned if fits(trees)}
    for table in filter(fits, sources.tables):
        rows = table.operations.select(SAME_OPERATION).with_columns(us=pl.Series(table.us))
        typical = rows.group_by(SAME_OPERATION).agg(pl.col("us").median())
        numbered = operations.select(SAME_OPERATION).with_row_index("row")
        measured = numbered.join(typical, on=SAME_OPERATION, how="left").sort("row")["us"]
        bands = learned[table.software].bands if table.software in learned else UNKNOWN_BANDS
        yield _Answer(measured.fill_null(float("nan")).to_numpy(), bands, 0.0, "table")
    for trees in learned.values():
        us = np.where(covers(trees, operations), predicted_us(trees, operations), np.nan)
        yield _Answer(us, trees.bands, 0.0, "trees")


def _by_formula(operations: pl.DataFrame, kind: str, dtype: str, device: str, sources: Sources) -> _Answer:
    """Answer by the ten numbers of the device, else of all devices, else of another precision."""
    gpu = sources.sheets[device]
    numbers, method, extra = numbers_of(kind, dtype, device, sources.coefficients)
    us = formula_us(numbers.fit.numbers, sizes_of(operations), gpu, dtype)
    moved = operations["read_bytes"] + operations["written_bytes"]
    most, most_moved = numbers.largest
    beyond: Bools = ((operations["operations"] > BEYOND * most) | (moved > BEYOND * most_moved)).to_numpy()
    return _Answer(np.where(beyond, np.nan, us), numbers.bands, float(np.hypot(numbers.bias, extra)), method)


def numbers_of(
    kind: str, dtype: str, device: str, coefficients: Mapping[Key, KnownCoefficients]
) -> tuple[KnownCoefficients, str, float]:
    """Return the nearest known numbers, their method, and the device's additional error, in log.

    Raises:
        Unanswerable: no numbers of matmuls are known.
    """
    near = NEAREST.get(dtype, dtype)
    for of, numbers_of, extra in ((kind, dtype, 0.0), (kind, near, 0.0 if dtype == "fp16" else UNMEASURED)):
        for place, method in ((device, "fitted"), (ANY, "sheet")):
            if (of, numbers_of, place) in coefficients:
                return coefficients[of, numbers_of, place], method, extra
    for place, method in ((device, "fitted"), (ANY, "sheet")):
        for numbers_of in (near, "bf16"):
            if ("matmul", numbers_of, place) in coefficients:
                return coefficients["matmul", numbers_of, place], method, UNMEASURED
    raise Unanswerable("no numbers of any device are known")
