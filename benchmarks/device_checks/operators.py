"""Checks of single operations: unseen shapes, other devices, and devices that were never measured.

`train` is learned from, `data` is tried. If they are one folder, parts of it are left out: some shapes of
each table, and the devices of one generation at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.device_checks.figures import compared, covered
from benchmarks.device_checks.shipped import half_pairs, joined, known_of_any
from dpro.replay.cost.kernels.estimate import HOLDS_80, MeasuredOperations, Sources, estimate
from dpro.replay.cost.kernels.formula import (
    DeviceSample,
    DeviceTable,
    KnownCoefficients,
    bands_of,
    formula_us,
    sizes_of,
    sum_of,
)
from dpro.replay.cost.kernels.learned import kept_out, learn
from dpro.replay.cost.kernels.products import calibrated
from dpro.replay.cost.kernels.roofline import GPUS

MAX_TRIED = 3000  # operations of one table
SHORT_US, LONG_US = 20.0, 100.0
GENERATIONS = {
    "A": "Ampere",
    "H": "Hopper",
    "L": "Ada",
    "R": "Blackwell RTX",
    "B": "Blackwell",
    "G": "Blackwell",
}
OWN = 30  # operations from a new device's trace
TURNS = 3  # draws of these operations
SUMMED = 8  # operations of a sum


def unseen_shapes(
    train: Sequence[DeviceTable], data: Sequence[DeviceTable], same: bool, bar: tuple[float, float], name: str
) -> dict[str, Any]:
    """Predict shapes that a known device's table lacks, with intervals of single operations and of sums."""
    predicted, low, high, measured, of = [], [], [], [], []
    sums: list[tuple[float, float, float, float]] = []
    for mine, tried in _known_pairs(train, data, same):
        known = learn(mine)
        sources = Sources(learned=[known])
        answer = estimate(tried.operations, tried.device, sources)
        columns = [answer[name].to_numpy() for name in ("us", "low_us", "high_us")]
        predicted.append(columns[0]), low.append(columns[1]), high.append(columns[2])
        measured.append(tried.us), of.extend([f"{tried.device} {tried.software}"] * tried.us.size)
        order = np.random.default_rng(3).permutation(tried.us.size)
        sums += [
            (*sum_of(*(column[rows] for column in columns)), float(tried.us[rows].sum()))
            for rows in order[: order.size // SUMMED * SUMMED].reshape(-1, SUMMED)[:100]
        ]
    one = [np.concatenate([*each, np.ones(0)]) for each in (predicted, low, high, measured)]
    total = np.array(sums).T if sums else np.ones((4, 0))
    return {
        f"{name} unseen shape": compared(one[0], one[3], bar),
        f"{name} unseen shape, interval": covered(one[1], one[2], one[3], of),
        f"{name} unseen shape, sums of {SUMMED}": compared(total[0], total[3], None),
        f"{name} unseen shape, sums of {SUMMED}, interval": covered(total[1], total[2], total[3]),
    }


def _known_pairs(
    train: Sequence[DeviceTable], data: Sequence[DeviceTable], same: bool
) -> Iterator[tuple[DeviceTable, DeviceTable]]:
    """Yield the tables to learn from and to try, for each software of each known device."""
    if same:
        for table in train:
            out = kept_out(table, 1)
            if out.any() and not out.all():
                yield table.rows(~out), _some(table.rows(out))
        return
    mine = {(table.kind, table.device, table.software): table for table in train}
    for table in data:
        known = mine.get((table.kind, table.device, table.software))
        if known is None:
            continue
        names = table.shapes.columns
        new = (
            table.shapes.with_row_index("row")
            .join(known.shapes, on=names, how="anti")["row"]
            .sort()
            .to_numpy()
        )
        if new.size:
            yield known, _some(table.rows(new))


def other_device(train: Sequence[DeviceTable], data: Sequence[DeviceTable]) -> dict[str, Any]:
    """Predict operations measured on one device for another, for which there are tables of other software."""
    merged = {(each.device, each.software): each for each in (*train, *data)}  # `data` wins
    predicted, measured, of = [np.ones(0)], [np.ones(0)], []
    tried = {(each.device, each.software) for each in data}
    for source, target, source_table, target_table in half_pairs(list(merged.values())):
        if (target.device, target.software) not in tried:
            continue
        rows = joined((source, target, source_table, target_table))
        long = np.flatnonzero(target.us[rows[1]] > SHORT_US)
        long = np.sort(np.random.default_rng(0).permutation(long)[:MAX_TRIED])
        four = [each.rows(at[long]) for each, at in zip((source, target, source_table, target_table), rows)]
        ours = Sources(tables=four[2:])
        given = MeasuredOperations(source.device, four[0].operations, four[0].us)
        predicted.append(estimate(four[1].operations, target.device, ours, given)["us"].to_numpy())
        measured.append(four[1].us)
        of += [f"{source.device} {source.library} -> {target.device}"] * long.size
    us, real, names = np.concatenate(predicted), np.concatenate(measured), np.array(of)
    low, high = us.copy(), us.copy()
    for name in np.unique(names):  # bands of all other pairs
        mine = names == name
        if (~mine).any():
            low[mine], high[mine] = bands_of(us[~mine], real[~mine]).interval(us[mine])
    return {
        "measured on another device, with tables": compared(us, real, (5, 15)),
        "measured on another device, interval": covered(low, high, real, names)
        if names.size
        else covered([], [], []),
    }


def never_measured(
    train: Sequence[DeviceTable], data: Sequence[DeviceTable], same: bool, label: str, bars: tuple[Any, Any]
) -> dict[str, Any]:
    """Predict a device from its sheet alone, and then with a few of its own operations."""
    from_sheet: list[tuple[np.ndarray, ...]] = []
    with_own: list[tuple[np.ndarray, ...]] = []
    of, own_of = [], []
    for others, targets in _left_out(train, data, same):
        known = known_of_any(others)
        for target in targets:
            long = _some(target.rows(target.us > LONG_US))
            if not long.us.size:
                continue
            from_sheet.append((*_predicted(known, long), long.us))
            of += [f"{target.device} {target.software}"] * long.us.size
            for turn in range(TURNS):
                own = _drawn(target, turn)
                rest = _some(target.rows(target.us > LONG_US), MAX_TRIED // TURNS, turn)
                with_own.append((*_predicted(calibrated(known, own), rest), rest.us))
                own_of += [target.device] * rest.us.size
    sheet, own_ = (
        [np.concatenate([part[i] for part in parts] or [np.ones(0)]) for i in range(4)]
        for parts in (from_sheet, with_own)
    )
    return {
        f"{label} never measured, sheet": compared(sheet[0], sheet[3], bars[0]) | {"by": _medians(sheet, of)},
        f"{label} never measured, sheet, interval": covered(*sheet[1:], of),
        f"{label} never measured, {OWN} operations": compared(own_[0], own_[3], bars[1])
        | {"by": _medians(own_, own_of)},
        f"{label} never measured, {OWN} operations, interval": covered(*own_[1:], own_of),
    }


def _left_out(
    train: Sequence[DeviceTable], data: Sequence[DeviceTable], same: bool
) -> Iterator[tuple[list[DeviceTable], list[DeviceTable]]]:
    """Yield devices to learn from, and those to try; by generation where both are of one folder."""
    known = {table.device for table in train}
    new = [table for table in data if table.device not in known]
    if not same and new:
        if train:
            yield list(train), new
        return
    for generation in sorted({_generation(table) for table in data}):
        mine = [table for table in data if _generation(table) == generation]
        others = [table for table in train if _generation(table) != generation]
        if others:
            yield others, mine


def _generation(table: DeviceTable) -> str:
    return GENERATIONS.get(table.device[0], table.device)


def _predicted(known: KnownCoefficients, table: DeviceTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    us = formula_us(known.fit.numbers, sizes_of(table.operations), GPUS[table.device], table.dtype)
    return us, *known.bands.interval(us, HOLDS_80 * known.bias)


def _drawn(table: DeviceTable, turn: int) -> DeviceSample:
    """Draw operations as a trace would have them: `OWN` of those longer than `SHORT_US`."""
    long = np.flatnonzero(table.us > SHORT_US)
    return table.rows(np.sort(np.random.default_rng(turn).permutation(long)[:OWN])).sample()


def _some(table: DeviceTable, most: int = MAX_TRIED, seed: int = 0) -> DeviceTable:
    rows = np.random.default_rng(seed).permutation(table.us.size)[:most]
    return table.rows(np.sort(rows))


def _medians(parts: Sequence[np.ndarray], of: Sequence[str]) -> dict[str, float]:
    wrong, names = 100 * np.abs(parts[0] / parts[3] - 1), np.array(of)
    return {str(name): round(float(np.median(wrong[names == name])), 1) for name in np.unique(names)}
