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
from dpro.replay.devices.fitting import ASSUMED, DeviceFit, DeviceSample, fit
from dpro.replay.devices.tables import DeviceTable
from dpro.replay.devices.tiles import formula_us, sizes_of

FILE = Path(__file__).with_name("coefficients.json")
ANY = ""  # of all devices together
LONG_US = 50.0  # shorter operations say more of their software than of a device
SAME = 0.7  # of how wide the numbers of one device are, those of another are


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
    predicted, measured = _predicted(found, tables)
    return KnownCoefficients(found, bands_of(predicted, measured), 0.0, _largest(tables))


def known_of_any(tables: Sequence[DeviceTable]) -> KnownCoefficients:
    """Fit numbers that all devices share, and how far each device is from what the others say of it."""
    long = [table.rows(table.us > LONG_US) for table in tables if (table.us > LONG_US).any()]
    devices = sorted({table.device for table in long})
    predicted, measured, biases = [], [], []
    for device in devices if len(devices) > 1 else []:
        others = fit([table.sample() for table in long if table.device != device])
        one, real = _predicted(others, [table for table in tables if table.device == device])
        biases.append(float(np.median(np.log(real / one)[real > LONG_US])))
        predicted.append(one * np.exp(biases[-1]))
        measured.append(real)
    found = fit([table.sample() for table in long])
    widths = np.maximum(found.widths, SAME * ASSUMED.widths)
    apart = float(np.sqrt(np.mean(np.square(biases)))) if biases else 0.5
    bands = bands_of(np.concatenate([*predicted, np.ones(0)]), np.concatenate([*measured, np.ones(0)]))
    return KnownCoefficients(DeviceFit(found.numbers, widths), bands, apart, _largest(tables))


def encoded(known: KnownCoefficients) -> dict[str, object]:
    """As the file has it: natural units would lose digits, so logarithms, rounded to 1e-4."""
    return {
        "numbers": _rounded(known.fit.numbers),
        "widths": _rounded(known.fit.widths),
        "bands": _rounded(known.bands.quantiles),
        "bias": round(known.bias, 4),
        "largest": [float(f"{value:.3g}") for value in known.largest],
    }


def _rounded(values: Floats) -> list[object]:
    return list(np.round(values, 4).tolist())


def _decoded(entry: dict[str, Any]) -> KnownCoefficients:
    numbers, widths, bands, largest = (
        np.array(entry[name], np.float64) for name in ("numbers", "widths", "bands", "largest")
    )
    return KnownCoefficients(
        DeviceFit(numbers, widths), Bands(bands), entry["bias"], (float(largest[0]), float(largest[1]))
    )


def _predicted(found: DeviceFit, tables: Sequence[DeviceTable]) -> tuple[Floats, Floats]:
    samples: list[DeviceSample] = [table.sample() for table in tables]
    predicted = [
        formula_us(found.numbers, sizes_of(each.operations), each.gpu, each.dtype) for each in samples
    ]
    return np.concatenate(predicted), np.concatenate([each.us for each in samples])


def _largest(tables: Sequence[DeviceTable]) -> tuple[float, float]:
    frames = [table.operations for table in tables]
    return (
        max(float(frame["operations"].max() or 0) for frame in frames),  # type: ignore[arg-type]
        max(float((frame["read_bytes"] + frame["written_bytes"]).max() or 0) for frame in frames),  # type: ignore[arg-type]
    )
