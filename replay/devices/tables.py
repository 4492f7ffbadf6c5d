"""Measured tables of operations that a user has: one `DeviceTable` per device, software, kind and precision.

In: a folder with `gemm.parquet`, `context_attention.parquet` or `generation_attention.parquet`, with the
columns of ai-dynamo/aiconfigurator's tables: device, backend, kernel, dtype, sizes, latency_us. Out: tables
whose operations have the columns of `operations.COLUMNS`. Devices that `gpus.py` does not know are left out,
and named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import DproError
from dpro.replay.devices.fitting import DeviceSample
from dpro.replay.devices.operations import attention, matmuls
from dpro.replay.models.roofline import GPUS, model_named

# Names in such tables that are no names of products.
DEVICES = {
    "a100_sxm": "A100-SXM4-80GB",
    "a100_pcie": "A100 80GB PCIe",
    "h100_pcie": "H100 PCIe",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server Edition",
}
# Products in block-scaled fp8 (fp8_block) are left out: those kernels quantise, too, and differ between
# libraries by tens of microseconds.
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
FILES = {"gemm": "matmul", "context_attention": "prefill", "generation_attention": "decode"}
SIZES = {
    "gemm": ["m", "n", "k"],
    "context_attention": [*("batch_size", "input_len", "heads", "kv_heads", "head_dim", "window_size")],
    "generation_attention": [
        *("batch_size", "input_len", "heads", "kv_heads", "head_dim", "step", "window_size")
    ],
}


@dataclass(frozen=True)
class DeviceTable:
    """Operations that were measured on one device, with one software.

    Attributes:
        device: a key of `gpus.GPUS`.
        software: library and kernel that ran them, with the precision as its makers call it.
        kind: of the operations.
        dtype: a key of `roofline.BYTES`.
        shapes: [N] what two tables must have in common for the same operation.
        operations: [N] rows as `operations.COLUMNS` has them.
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
        """Whose kernels, at which precision: what tables of two devices have in common."""
        whose, *rest = self.software.split("/")
        return "/".join((whose, *rest[1:]))

    def sample(self) -> DeviceSample:
        """Its operations, to fit."""
        return DeviceSample(self.operations, self.us, GPUS[self.device], self.dtype)

    def rows(self, mask: Bools | Ints) -> DeviceTable:
        """Some of its rows.

        Args:
            mask: [N] which; or their numbers.
        """
        at = np.flatnonzero(mask) if mask.dtype == np.bool_ else mask
        return DeviceTable(
            *(self.device, self.software, self.kind, self.dtype),
            *(self.shapes[at], self.operations[at], self.us[at]),
        )


def device_named(name: str) -> str:
    """The key of `gpus.GPUS` for a device of a table, such as `h100_sxm`; empty where it is not known."""
    plain = name.replace("_", " ").upper()
    return DEVICES.get(name, "") or model_named(plain.removesuffix(" SXM")) or model_named(plain)


def read_tables(
    folder: Path, kinds: Collection[str] = tuple(FILES.values()), most: int = 20_000
) -> list[DeviceTable]:
    """All tables in a folder, sorted by device, software, kind and precision.

    Args:
        folder: where the files lie.

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
    """Names of devices in a folder's tables that `gpus.py` does not know."""
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
