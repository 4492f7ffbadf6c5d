"""Measured tables of operations: products and attention, in the format of ai-dynamo/aiconfigurator.

In: a folder with `gemm.parquet`, `context_attention.parquet` or `generation_attention.parquet`, whose columns
are device, backend, kernel, dtype, sizes, latency_us. Out: a `DeviceTable` per device, software, kind and
precision. Devices without a data sheet are left out; `unknown_devices` names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from dpro.errors import DproError
from dpro.replay.cost.kernels.formula import DTYPES, DeviceTable, device_named
from dpro.replay.cost.kernels.operations import attention, matmuls
from dpro.replay.cost.kernels.roofline import GPUS

FILES = {"gemm": "matmul", "context_attention": "prefill", "generation_attention": "decode"}
SIZES = {
    "gemm": ["m", "n", "k"],
    "context_attention": [*("batch_size", "input_len", "heads", "kv_heads", "head_dim", "window_size")],
    "generation_attention": [
        *("batch_size", "input_len", "heads", "kv_heads", "head_dim", "step", "window_size")
    ],
}


def read_tables(
    folder: Path, kinds: Collection[str] = tuple(FILES.values()), most: int = 20_000
) -> list[DeviceTable]:
    """Read all tables in a folder, sorted by kind, device, software and precision.

    Args:
        folder: of the files.
        kinds: to read.
        most: operations of a table; a larger one is sampled.

    Raises:
        DproError: a file lacks a column.
    """
    tables = []
    for file, kind in FILES.items():
        path = folder / f"{file}.parquet"
        if kind in kinds and path.is_file():
            tables += list(_read(path, file, most))
    return tables


def unknown_devices(folder: Path) -> list[str]:
    """Return the names of devices in a folder's tables that `roofline.py` does not have."""
    names: set[str] = set()
    for file in FILES:
        path = folder / f"{file}.parquet"
        if path.is_file():
            names |= set(pl.scan_parquet(path).select("device").unique().collect()["device"])
    return sorted(name for name in names if not device_named(name))


def _read(path: Path, file: str, most: int) -> Iterator[DeviceTable]:
    needed = ["device", "backend", "kernel", "dtype", *SIZES[file], "latency_us"]
    schema = pl.read_parquet_schema(path)
    missing = [name for name in needed if name not in schema]
    if missing:
        raise DproError(f"{path} is no table of operations: it lacks {', '.join(missing)}")
    cache = ["kv_cache_dtype"] if "kv_cache_dtype" in schema else []
    rows = pl.read_parquet(path, columns=[*needed, *cache]).filter(pl.col("latency_us") > 0)
    by = ["device", "backend", "kernel", "dtype", *cache]
    for key, group in sorted(rows.partition_by(by, as_dict=True).items()):
        device, dtype = device_named(str(key[0])), DTYPES.get(str(key[3]), "")
        if not device or dtype not in GPUS[device].tflops:
            continue
        software = "/".join(str(part) for part in key[1:])
        ordered = group.group_by(SIZES[file]).agg(pl.col("latency_us").median()).sort(SIZES[file])
        if ordered.height > most:
            ordered = ordered.sample(most, seed=0).sort(SIZES[file])
        shapes = ordered.select(SIZES[file])
        operations = _operations(file, dtype, shapes, str(key[4]) if cache else "")
        us = ordered["latency_us"].to_numpy().astype(np.float64)
        yield DeviceTable(device, software, FILES[file], dtype, shapes, operations, us)


def _operations(file: str, dtype: str, shapes: pl.DataFrame, cache: str) -> pl.DataFrame:
    columns = {name: shapes[name].to_numpy() for name in shapes.columns}
    if file == "gemm":
        return matmuls(dtype, columns["m"], columns["n"], columns["k"])
    decodes = file == "generation_attention"
    return attention(
        dtype,
        columns["batch_size"],
        1 if decodes else columns["input_len"],
        columns["step"] + columns["input_len"] - 1 if decodes else 0,
        *(columns["heads"], columns["kv_heads"], columns["head_dim"], columns["window_size"]),
        kv_bytes=1 if cache.startswith("fp8") else None,
    ).with_columns(kind=pl.lit(FILES[file]))
