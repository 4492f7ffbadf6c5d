"""The ten numbers of devices that were measured, which ship with dpro: `coefficients.json`.

In: the file that `python benchmarks/devices.py --fit` writes, from tables that a user has fetched. Out:
`KnownCoefficients` per kind, precision and device. The entry without a device is fitted to all devices
together: it is what is predicted of one that was never measured, with a bias that says by how much such
devices differed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dpro.arrays import Floats
from dpro.replay.devices.bands import Bands, bands_of
from dpro.replay.devices.fitting import DeviceFit, DeviceSample, fit
from dpro.replay.devices.tables import DeviceTable
from dpro.replay.devices.tiles import formula_us, sizes_of

FILE = Path(__file__).with_name("coefficients.json")
ANY = ""  # of all devices together


@dataclass(frozen=True)
class KnownCoefficients:
    """What is known of one device, or of all, for one kind of operation at one precision.

    Attributes:
        fit: ten numbers with their widths.
        bands: of misses on operations; of `ANY`, around the device's own bias.
        bias: standard deviation of the biases of devices, in log; 0 where the device itself was measured.
        largest: most floating-point operations, and most bytes, of what was fitted.
    """

    fit: DeviceFit
    bands: Bands
    bias: float
    largest: tuple[float, float]


Key = tuple[str, str, str]  # kind, dtype, device


@cache
def shipped() -> Mapping[Key, KnownCoefficients]:
    """What ships, by kind, dtype and device."""
    return {
        (kind, dtype, device): _decoded(entry)
        for kind, dtypes in json.loads(FILE.read_text(encoding="utf-8"))["known"].items()
        for dtype, devices in dtypes.items()
        for device, entry in devices.items()
    }


@cache
def half_bands(kind: str, dtype: str, method: str) -> Bands:
    """The bands of half credit.

    Args:
        kind, dtype: of the operations; matmuls in bf16 stand in for what was not measured.
        method: by which the other half is predicted: tables, fitted or sheet.
    """
    half = json.loads(FILE.read_text(encoding="utf-8"))["half"]
    by_dtype = half.get(kind, half["matmul"])
    return Bands(np.array(by_dtype.get(dtype, by_dtype["bf16"])[method], np.float64))


def known_of(tables: Sequence[DeviceTable]) -> KnownCoefficients:
    """Fit one device's numbers at one precision, to all its tables."""
    found = fit([table.sample() for table in tables])
    predicted, measured = said_and_measured(found, tables)
    return KnownCoefficients(found, bands_of(predicted, measured), 0.0, largest_of(tables))


def _decoded(entry: dict[str, Any]) -> KnownCoefficients:
    numbers, widths, bands, largest = (
        np.array(entry[name], np.float64) for name in ("numbers", "widths", "bands", "largest")
    )
    return KnownCoefficients(
        DeviceFit(numbers, widths), Bands(bands), entry["bias"], (float(largest[0]), float(largest[1]))
    )


def said_and_measured(found: DeviceFit, tables: Sequence[DeviceTable]) -> tuple[Floats, Floats]:
    """Microseconds of all operations of tables, by ten numbers and as measured, [N] each."""
    samples: list[DeviceSample] = [table.sample() for table in tables]
    predicted = [
        formula_us(found.numbers, sizes_of(each.operations), each.gpu, each.dtype) for each in samples
    ]
    return np.concatenate(predicted), np.concatenate([each.us for each in samples])


def largest_of(tables: Sequence[DeviceTable]) -> tuple[float, float]:
    """The most floating-point operations, and the most bytes, of an operation of tables."""
    frames = [table.operations for table in tables]
    return (
        max(float(frame["operations"].max() or 0) for frame in frames),  # type: ignore[arg-type]
        max(float((frame["read_bytes"] + frame["written_bytes"]).max() or 0) for frame in frames),  # type: ignore[arg-type]
    )
