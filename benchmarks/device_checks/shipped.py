"""Fits the numbers that ship, from tables that a user has fetched; the tables themselves are not kept.

For every kind and precision: ten numbers per device, ten shared by all devices, and the bands of their
residuals. For half credit: its residuals between every two devices, by the tables' ratio and the formula's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpro.replay.cost.kernels.estimate import HALF
from dpro.replay.cost.kernels.formula import (
    ANY,
    ASSUMED,
    DeviceFit,
    DeviceTable,
    Key,
    KnownCoefficients,
    bands_of,
    fit,
    formula_us,
    known_of,
    largest_of,
    predicted_and_measured,
    sizes_of,
)
from dpro.replay.cost.kernels.roofline import GPUS

SOURCE = "fitted to the operation tables of ai-dynamo/aiconfigurator (Apache-2.0)"

LONG_US = 50.0  # shorter operations depend more on software than on the device
SAME = 0.7  # least width of the shared numbers, as a share of the widths assumed for one device


def fitted(tables: Sequence[DeviceTable]) -> dict[Key, KnownCoefficients]:
    """Fit the numbers of every device, and of all devices together, by kind and precision."""
    found: dict[Key, KnownCoefficients] = {}
    for kind, dtype in sorted({(table.kind, table.dtype) for table in tables}):
        mine = [table for table in tables if (table.kind, table.dtype) == (kind, dtype)]
        for device in sorted({table.device for table in mine}):
            found[kind, dtype, device] = known_of([table for table in mine if table.device == device])
        found[kind, dtype, ANY] = known_of_any(mine)
    return found


def known_of_any(tables: Sequence[DeviceTable]) -> KnownCoefficients:
    """Fit numbers that all devices share, and the deviation of each device from a fit to the others."""
    long = [table.rows(table.us > LONG_US) for table in tables if (table.us > LONG_US).any()]
    devices = sorted({table.device for table in long})
    predicted, measured, biases = [], [], []
    for device in devices if len(devices) > 1 else []:
        others = fit([table.sample() for table in long if table.device != device])
        one, real = predicted_and_measured(others, [table for table in tables if table.device == device])
        biases.append(float(np.median(np.log(real / one)[real > LONG_US])))
        predicted.append(one * np.exp(biases[-1]))
        measured.append(real)
    found = fit([table.sample() for table in long])
    widths = np.maximum(found.widths, SAME * ASSUMED.widths)
    apart = float(np.sqrt(np.mean(np.square(biases)))) if biases else 0.5
    bands = bands_of(np.concatenate([*predicted, np.ones(0)]), np.concatenate([*measured, np.ones(0)]))
    return KnownCoefficients(DeviceFit(found.numbers, widths), bands, apart, largest_of(tables))


def encoded(known: KnownCoefficients) -> dict[str, object]:
    """Encode numbers for the file as logarithms rounded to 1e-4; natural units would lose digits."""
    return {
        "numbers": _rounded(known.fit.numbers),
        "widths": _rounded(known.fit.widths),
        "bands": _rounded(known.bands.quantiles),
        "bias": round(known.bias, 4),
        "largest": [float(f"{value:.3g}") for value in known.largest],
    }


def half_pairs(
    tables: Sequence[DeviceTable],
) -> Iterator[tuple[DeviceTable, DeviceTable, DeviceTable, DeviceTable]]:
    """Yield tables of one software on two devices, and the tables of both devices with another software."""
    place = {(table.device, table.library, table.kind, table.dtype): table for table in tables}
    for (device, library, kind, dtype), source in place.items():
        for (to, same, *rest), target in place.items():
            if to == device or same != library or rest != [kind, dtype]:
                continue
            for (where, other, *of), table in place.items():
                there = place.get((to, other, kind, dtype))
                if where == device and other != library and of == [kind, dtype] and there is not None:
                    yield source, target, table, there


def joined(tables: Sequence[DeviceTable]) -> list[np.ndarray]:
    """Return [N] rows of each table, matched so that all are of one operation."""
    names = tables[0].shapes.columns
    frame = tables[0].shapes.with_row_index("row0")
    for number, table in enumerate(tables[1:], 1):
        frame = frame.join(table.shapes.with_row_index(f"row{number}"), on=names)
    frame = frame.sort(names)
    return [frame[f"row{number}"].to_numpy().astype(np.int64) for number in range(len(tables))]


def half_by_tables(tables: Sequence[DeviceTable]) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and measured us of all pairs' operations, by half credit from the tables' ratio."""
    predicted, measured = [np.ones(0)], [np.ones(0)]
    for four in half_pairs(tables):
        source, target, source_table, target_table = (each.us[at] for each, at in zip(four, joined(four)))
        predicted.append(target_table * (source / source_table) ** HALF)
        measured.append(target)
    return np.concatenate(predicted), np.concatenate(measured)


def half_by_formula(
    tables: Sequence[DeviceTable], known: Mapping[Key, KnownCoefficients], shared: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Predict pairs by half credit from the formula, with each device's numbers or the shared ones."""
    predicted, measured = [np.ones(0)], [np.ones(0)]
    for source in tables:
        for target in tables:
            same = (source.library, source.kind, source.dtype) == (target.library, target.kind, target.dtype)
            if source.device == target.device or not same:
                continue
            us = []
            for table, at in zip((source, target), joined((source, target))):
                fit = known[table.kind, table.dtype, ANY if shared else table.device].fit
                rows = sizes_of(table.operations[at])
                us.append((table.us[at], formula_us(fit.numbers, rows, GPUS[table.device], table.dtype)))
            (there, there_predicted), (here, here_predicted) = us
            predicted.append(here_predicted * (there / there_predicted) ** HALF)
            measured.append(here)
    return np.concatenate(predicted), np.concatenate(measured)


def halves(
    tables: Sequence[DeviceTable], known: Mapping[Key, KnownCoefficients]
) -> dict[str, list[list[float]]]:
    """Return the bands of half credit by each method, for tables of one kind and precision."""
    return {
        "tables": _rounded(bands_of(*half_by_tables(tables)).quantiles),
        "fitted": _rounded(bands_of(*half_by_formula(tables, known, shared=False)).quantiles),
        "sheet": _rounded(bands_of(*half_by_formula(tables, known, shared=True)).quantiles),
    }


def write(path: Path, tables: Sequence[DeviceTable]) -> None:
    """Write the file that ships."""
    known = fitted(tables)
    document: dict = {"source": SOURCE, "known": {}, "half": {}}
    for kind, dtype in sorted({(table.kind, table.dtype) for table in tables}):
        mine = [table for table in tables if (table.kind, table.dtype) == (kind, dtype)]
        document["half"].setdefault(kind, {})[dtype] = halves(mine, known)
    for (kind, dtype, device), entry in known.items():
        document["known"].setdefault(kind, {}).setdefault(dtype, {})[device] = encoded(entry)
    lines = json.dumps(document, indent=1)
    path.write_text(_compact(lines) + "\n", encoding="utf-8")


def _rounded(values: np.ndarray) -> list[Any]:
    return np.round(values, 4).tolist()


def _compact(text: str) -> str:
    """Put each list of numbers on one line."""
    import re

    return re.sub(r"\[[-\s\d.,e+\[\]]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
