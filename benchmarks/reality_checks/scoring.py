"""Judgement of predictions from one measured row: pairs of rows, each predicted from the other.

In: layouts with uncalibrated predictions, and measured steps. Out: the error of the second of a pair, and how
often the faster one is named and the interval contains the measured step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import polars as pl

from dpro.extensions.plan.layout import layouts
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.plan import HOLDS_90, calibrate, sensitivities
from dpro.extensions.plan.step import job_of, step_times
from dpro.replay.cost.machine import Machine

APART = 0.02  # relative difference below which neither of a pair is faster
MAX_PAIRS = 40_000  # of one check; of more, a fixed sample is drawn
NOTHING, BUBBLE = "nothing changes", "pipeline bubble alone"


@dataclass(frozen=True)
class Table:
    """Measured steps of layouts.

    Attributes:
        rows: columns of `layout.COLUMNS`, `step_ms`, and `group`: pairs are within one.
        models, machines: [N] of each row.
        software: the framework.
        skipped: number of rows left out, by reason.
    """

    rows: pl.DataFrame
    models: Sequence[Model]
    machines: Sequence[Machine]
    software: Software
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelAnswers:
    """[N] uncalibrated predictions of a table's rows, and their [N, K] sensitivities."""

    step_ms: np.ndarray[Any, np.dtype[np.float64]]
    slopes: np.ndarray[Any, np.dtype[np.float64]]


def predict(table: Table) -> ModelAnswers:
    """Predict every row, uncalibrated."""
    steps = np.zeros(table.rows.height)
    parts: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    equals: dict[tuple[Model, str, int], list[int]] = {}
    for index, (model, machine) in enumerate(zip(table.models, table.machines)):
        equals.setdefault((model, machine.gpu, machine.per_host), []).append(index)
    for (model, *_), at in equals.items():
        machine = table.machines[at[0]]
        job = job_of(model, layouts(table.rows[at]), machine, table.software)
        steps[at] = step_times(job, machine)["step_ms"].to_numpy()
        parts.append((np.array(at), sensitivities(job, machine)))
    slopes = np.zeros((table.rows.height, parts[0][1].shape[1] if parts else 0))
    for numbers, found in parts:
        slopes[numbers] = found
    return ModelAnswers(steps, slopes)


def pairs_of(rows: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [P, 2] all ordered pairs within groups: the measured row, the row to predict."""
    found = [
        pair
        for group in rows.with_row_index("row").partition_by("group", maintain_order=True)
        for pair in permutations(group["row"].to_list(), 2)
    ]
    pairs = np.array(found, np.int64).reshape(-1, 2)
    if len(pairs) > MAX_PAIRS:
        pairs = pairs[np.sort(np.random.default_rng(0).choice(len(pairs), MAX_PAIRS, replace=False))]
    return pairs


def figures(
    predicted: Any, measured: Any, calibration: Any, low: Any = None, high: Any = None
) -> dict[str, Any]:
    """Compute errors of predictions, share of right signs against the calibration row, and interval coverage.

    Args:
        predicted, measured, calibration: [P] ms; the last of the row that was given.
        low, high: [P] ms; intervals, if any.
    """
    predicted, measured, calibration = (
        np.asarray(each, float) for each in (predicted, measured, calibration)
    )
    if not measured.size:
        return {
            "n": 0,
            "median_pct": None,
            "p90_pct": None,
            "order_pct": None,
            "reason": "no two rows compare",
        }
    wrong = 100 * np.abs(predicted / measured - 1)
    apart = np.abs(measured / calibration - 1) > APART
    same = np.sign(predicted - calibration)[apart] == np.sign(measured - calibration)[apart]
    found = {
        "n": int(measured.size),
        "median_pct": round(float(np.median(wrong)), 2),
        "p90_pct": round(float(np.quantile(wrong, 0.9)), 2),
        "order_pct": round(100 * float(same.mean()), 1) if apart.any() else None,
    }
    if low is not None:
        inside = (np.asarray(low) <= measured) & (measured <= np.asarray(high))
        found["interval_held_pct"] = round(100 * float(inside.mean()), 1)
    return found


def of_pairs(table: Table, said: ModelAnswers) -> dict[str, Any]:
    """Compute the figures of all pairs, each row calibrated with one other.

    Args:
        table: measured rows.
        said: uncalibrated predictions.
    """
    measured = table.rows["step_ms"].to_numpy()
    missed = np.log(measured / said.step_ms)
    columns = layouts(table.rows)
    pairs = pairs_of(table.rows)
    factors, widths = np.ones(len(pairs)), np.ones(len(pairs))
    order = np.argsort(pairs[:, 0], kind="stable")
    for chunk in np.split(order, np.flatnonzero(np.diff(pairs[order, 0])) + 1) if len(pairs) else []:
        given, wanted = int(pairs[chunk[0], 0]), pairs[chunk, 1]
        at = np.concatenate([[given], wanted])
        found = calibrate(columns[at], said.slopes[at], {0: float(missed[given])})
        factors[chunk], widths[chunk] = found.factor[1:], HOLDS_90 * found.deviation[1:]
    predicted = said.step_ms[pairs[:, 1]] * factors
    low, high = predicted * np.exp(-widths), predicted * np.exp(widths)
    return figures(predicted, measured[pairs[:, 1]], measured[pairs[:, 0]], low, high)


def yardstick(table: Table, rule: Callable[[pl.DataFrame], pl.Series] | None) -> dict[str, Any]:
    """Compute the figures of a rule that predicts a step up to a factor, or of "nothing changes".

    Args:
        table: measured rows.
        rule: proportional to the step; None where it stays.
    """
    measured = table.rows["step_ms"].to_numpy()
    ratio = np.ones(len(measured)) if rule is None else rule(table.rows).to_numpy().astype(float)
    pairs = pairs_of(table.rows)
    predicted = measured[pairs[:, 0]] * ratio[pairs[:, 1]] / ratio[pairs[:, 0]]
    found = figures(predicted, measured[pairs[:, 1]], measured[pairs[:, 0]])
    return found | ({"order_pct": 50.0} if rule is None and found["n"] else {})


def bubble_alone(rows: pl.DataFrame) -> pl.Series:
    """Return a step in proportion to (m + p - 1) / m: the rule of thumb."""
    return (rows["micro_batches"] + rows["pp"] - 1) / rows["micro_batches"]


def judged(
    found: dict[str, Any], bar: tuple[float | None, ...], yardsticks: dict[str, Any]
) -> dict[str, Any]:
    """Make a check: figures, yardsticks, the bar and whether it holds.

    Args:
        found: figures.
        bar: largest median and 90th percentile, smallest order and interval coverage; None for no bar.
        yardsticks: figures of rules, by name.
    """
    keys = ("median_pct", "p90_pct", "order_pct", "interval_held_pct")
    text = ", ".join(
        f"{key.removesuffix('_pct').replace('_', ' ')} {'<=' if index < 2 else '>='} {value:g}%"
        for index, (key, value) in enumerate(zip(keys, bar))
        if value is not None
    )
    row = {key: found.get(key) for key in ("n", *keys)}
    if not row["n"]:
        return row | {"yardstick": {}, "bar": text, "holds": None, "reason": found.get("reason", "no data")}
    held = [
        row[key] is not None and (row[key] <= value if index < 2 else row[key] >= value)
        for index, (key, value) in enumerate(zip(keys, bar))
        if value is not None
    ]
    return row | {"yardstick": yardsticks, "bar": text, "holds": all(held) if held else None}
