"""`Sources` for `estimate` from a user's own measured matrix products.

Reads products from a table, or from a trace on that device; returns `Sources`. Many products of a device
yield ten fitted numbers, and trees where scikit-learn is installed; a few products move the numbers that are
known without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl

from dpro.errors import InputError, Unanswerable
from dpro.replay.cost.kernels.estimate import Sources, numbers_of
from dpro.replay.cost.kernels.formula import (
    DTYPES,
    DeviceSample,
    DeviceTable,
    Key,
    KnownCoefficients,
    bands_of,
    device_named,
    fit,
    formula_us,
    known_of,
    shipped,
    sizes_of,
)
from dpro.replay.cost.kernels.learned import KEPT_OUT, learn
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.cost.kernels.roofline import BYTES, GPUS
from dpro.replay.cost.tables import read_measured
from dpro.words import first_few

# Columns of a user's measured products; `device` is a key of `roofline.GPUS`.
PRODUCTS = {
    **{"device": pl.String, "software": pl.String, "dtype": pl.String},
    **dict.fromkeys(("batch", "m", "n", "k", "us"), pl.Float64),
}
FILE = "gemm.parquet"
NEEDED = ("device", "dtype", "m", "n", "k")
TIMES = {"us": 1.0, "latency_us": 1.0, "time_us": 1.0, "latency_ms": 1e3, "time_ms": 1e3}
SOFTWARE = ("backend", "kernel", "software")
FOR_TREES = 500  # products of a device and software needed for trees
FASTEST, SLOWEST = 1 / 3, 100  # times the limit by the data sheet: outside, a column is in another unit
LONG_US = 10.0  # below, launch time dominates
MAX_ROWS = 20_000  # of one device, software and precision; larger tables are sampled, with a fixed seed


def is_table(path: Path | str) -> bool:
    """Return whether a path is, by its name, that of a table of products rather than of a run."""
    path = Path(path)
    return path.suffix in (".csv", ".parquet") or (path / FILE).is_file()


def read_products(path: Path | str) -> pl.DataFrame:
    """Read the products of a Parquet or CSV file, or of `gemm.parquet` in a folder, as `PRODUCTS` columns.

    Raises:
        InputError: it cannot be read, lacks a column, or has no product of a known device.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    frame = read_measured(file, (*"mnk", "batch", *TIMES), ("device", "dtype", *SOFTWARE))
    time = next((name for name in TIMES if name in frame.columns), "")
    missing = [name for name in NEEDED if name not in frame.columns] + ([] if time else ["latency_us"])
    if missing:
        raise InputError(f"{file}: no column {', '.join(missing)}; docs/devices.md lists those of a table")
    named = {name: device_named(name) for name in frame["device"].unique().drop_nulls()}
    types = {**DTYPES, **{dtype: dtype for dtype in GPUS["H100"].tflops}}
    words = [pl.col(name) for name in SOFTWARE if name in frame.columns]
    rows = frame.select(
        device=pl.col("device").replace_strict(named, default="", return_dtype=pl.String),
        software=pl.concat_str(words, separator="/", ignore_nulls=True) if words else pl.lit(""),
        dtype=pl.col("dtype").replace_strict(types, default="", return_dtype=pl.String),
        batch=pl.col("batch") if "batch" in frame.columns else pl.lit(1.0),
        **{name: pl.col(name) for name in ("m", "n", "k")},
        us=pl.col(time) * TIMES[time],
    ).cast(PRODUCTS)  # type: ignore[arg-type]
    sizes = pl.all_horizontal(
        (pl.col(name) > 0) & pl.col(name).is_finite() for name in (*"mnk", "batch", "us")
    )
    devices, dtypes = (
        first_few(frame[name].drop_nulls().unique().sort().to_list(), 4) for name in NEEDED[:2]
    )
    for fits, what in (
        (pl.col("device") != "", f"of a device with a data sheet in dpro ({devices or 'none'})"),
        (pl.col("dtype") != "", f"in an element type that dpro knows ({dtypes or 'none'})"),
        (sizes, f"whose sizes and {time} are above 0"),
    ):
        rows = rows.filter(fits)
        if rows.is_empty():
            raise InputError(f"{file}: holds no product {what}")
    _refuse_other_unit(rows, f"{file}: column {time}")
    return rows


def _refuse_other_unit(rows: pl.DataFrame, column: str) -> None:
    """Raise if times are so short or long for their devices that they must be in another unit.

    Args:
        rows: with the columns of `PRODUCTS`.

    Raises:
        InputError: the median ratio to the limit by the data sheets is out of range.
    """
    peaks = [(name, dtype, float(peak)) for name in GPUS for dtype, peak in GPUS[name].tflops.items()]
    sheets = pl.DataFrame(peaks, {"device": pl.String, "dtype": pl.String, "peak": pl.Float64}, orient="row")
    bandwidth = pl.col("device").replace_strict({name: float(gpu.gbps) for name, gpu in GPUS.items()})
    elements = pl.col("m") * pl.col("k") + pl.col("k") * pl.col("n") + pl.col("m") * pl.col("n")
    computes = 2 * pl.col("m") * pl.col("n") * pl.col("k") / (pl.col("peak") * 1e6)
    moves = elements * pl.col("dtype").replace_strict(BYTES, return_dtype=pl.Float64) / (bandwidth * 1e3)
    at_least = pl.col("batch") * pl.max_horizontal(computes, moves)
    times = rows.join(sheets, on=["device", "dtype"]).select(us="us", least=at_least)
    ratio = (times["us"] / times["least"]).median()
    long = times.filter(pl.col("least") > LONG_US)
    most = (long["us"] / long["least"]).median()
    if isinstance(ratio, float) and ratio < FASTEST:
        raise InputError(f"{column}: wrong unit: products take {ratio:.2g} of the time that the peak allows")
    if isinstance(most, float) and most > SLOWEST:
        raise InputError(f"{column}: wrong unit: products take {most:.2g} times what the peak allows")


def sources_of(products: pl.DataFrame | None, *devices: str) -> Sources:
    """Return the shipped sources, extended by a user's products on some devices.

    Args:
        products: as `read_products` returns them; None without any.
    """
    if products is None:
        return Sources()
    tables = list(_tables(products.filter(pl.col("device").is_in(devices))))
    coefficients: dict[Key, KnownCoefficients] = dict(shipped())
    for device, dtype in dict.fromkeys((table.device, table.dtype) for table in tables):
        of_device = [table for table in tables if (table.device, table.dtype) == (device, dtype)]
        if (numbers := _numbers(of_device, device, dtype, coefficients)) is not None:
            coefficients["matmul", dtype, device] = numbers
    large: list[DeviceTable] = []
    if find_spec("sklearn") is not None:
        large = [
            table
            for table in tables
            if table.us.size >= FOR_TREES and table.shapes.select("n", "k").n_unique() >= 2 * KEPT_OUT
        ]
    return Sources(tables, [*map(learn, large)], coefficients)


def _tables(products: pl.DataFrame) -> Iterator[DeviceTable]:
    by = ["device", "software", "dtype"]
    for key, group in sorted(products.partition_by(by, as_dict=True).items()):
        device, software, dtype = map(str, key)
        if dtype not in GPUS[device].tflops:
            continue
        sizes = ["m", "n", "k", "batch"]
        rows = group.group_by(sizes).agg(pl.col("us").median()).sort(sizes)
        if rows.height > MAX_ROWS:
            rows = rows.sample(MAX_ROWS, seed=0).sort(sizes)
        made = matmuls(dtype, *(rows[name] for name in sizes))
        us = rows["us"].to_numpy()
        yield DeviceTable(device, software, "matmul", dtype, rows.select(sizes), made, us)


def _numbers(
    tables: list[DeviceTable], device: str, dtype: str, coefficients: Mapping[Key, KnownCoefficients]
) -> KnownCoefficients | None:
    """Return ten numbers of a device, fitted to many products or moved to a few; None with too few."""
    count = sum(table.us.size for table in tables)
    if count >= ENOUGH:
        return known_of(tables)
    if count < MIN_OPERATIONS:
        return None
    sample = DeviceSample(
        pl.concat([table.operations for table in tables]),
        pl.concat([pl.Series(table.us) for table in tables]).to_numpy(),
        GPUS[device],
        dtype,
    )
    try:
        return calibrated(numbers_of("matmul", dtype, device, coefficients)[0], sample)
    except Unanswerable:
        return None


# Numbers of a device from a few operations of the user's trace.

MIN_OPERATIONS = 5
WEIGHT = 0.1  # of the prior of a number, against one operation: 30 operations outweigh it
ENOUGH = 100  # operations, from which on bands come from their own errors


def calibrated(usual: KnownCoefficients, sample: DeviceSample) -> KnownCoefficients:
    """Fit the numbers of a device to a few operations, starting from the known ones.

    Raises:
        Unanswerable: there are too few operations.
    """
    if sample.us.size < MIN_OPERATIONS:
        raise Unanswerable(
            f"{sample.us.size} measured operations: {MIN_OPERATIONS} are needed to fit a device"
        )
    numbers = fit([sample], usual.fit, WEIGHT)
    predicted = formula_us(numbers.numbers, sizes_of(sample.operations), sample.gpu, sample.dtype)
    missed = float(np.std(np.log(sample.us / predicted)))
    bands = bands_of(predicted, sample.us) if sample.us.size >= ENOUGH else usual.bands
    # The rest of the device's bias is known as well as a mean of this many errors.
    bias = min(usual.bias or np.inf, missed) / np.sqrt(sample.us.size)
    return KnownCoefficients(numbers, bands, float(bias), usual.largest)
