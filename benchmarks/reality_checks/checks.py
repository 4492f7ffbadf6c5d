"""Checks of published tables: for each its table, its bar, and the yardsticks beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.reality_checks import tables
from benchmarks.reality_checks.scoring import (
    BUBBLE,
    NOTHING,
    Table,
    bubble_alone,
    figures,
    judged,
    of_pairs,
    predict,
    yardstick,
)
from dpro.extensions.plan.layout import layouts
from dpro.extensions.plan.memory import GB, memory_of, refusals, verdicts
from dpro.extensions.plan.plan import HOLDS_90, calibrate

HELD = 85.0  # per cent of intervals
UNCALIBRATED = "this model without calibration, of each row"
Bar = tuple[float | None, ...]


def _pairs(folder: Path, name: str, make: Callable[[pl.DataFrame], Table], bar: Bar) -> dict[str, Any]:
    """Check predictions of all pairs of rows within a table's groups."""
    rows = tables.read(folder, name)
    if rows is None:
        return judged({"n": 0, "reason": f"no {name} in {folder}"}, bar, {})
    table = make(rows)
    if table.rows.is_empty():
        return judged({"n": 0, "reason": f"no row of {name} has a model that is known"}, bar, {})
    said, measured = predict(table), table.rows["step_ms"].to_numpy()
    plain = figures(said.step_ms, measured, measured) | {"order_pct": None}
    rules = {NOTHING: yardstick(table, None), BUBBLE: yardstick(table, bubble_alone), UNCALIBRATED: plain}
    found = judged(of_pairs(table, said), bar, rules)
    return found | ({"skipped": table.skipped} if any(table.skipped.values()) else {})


def _simumax(folder: Path) -> dict[str, Any]:
    """Check pairs; add the source's simulator on each row, and on these pairs, as yardsticks."""
    bar = (4.0, 8.0, 99.0, HELD)
    found = _pairs(folder, "simumax_b200", tables.simumax, bar)
    if found["n"]:
        table = tables.simumax(tables.read(folder, "simumax_b200"))  # type: ignore[arg-type]
        said, step = (table.rows[name].to_numpy() for name in ("simumax_step_ms", "step_ms"))
        own = figures(said, step, step) | {"order_pct": None}
        found["yardstick"] |= {
            "its own simulator, of each row": own,
            "its own simulator, from another row": yardstick(table, lambda rows: rows["simumax_step_ms"]),
        }
    return found


def _simumax_memory(folder: Path) -> dict[str, Any]:
    """Compare predicted with allocated memory, without calibration."""
    rows = tables.read(folder, "simumax_b200")
    if rows is None:
        return judged({"n": 0, "reason": f"no simumax_b200 in {folder}"}, (), {})
    table = tables.simumax(rows)
    said = np.zeros(table.rows.height)
    for index, model in enumerate(table.models):
        said[index] = (
            memory_of(model, layouts(table.rows[index]), table.software)["memory_gb"][0] * GB / 2**30
        )
    measured = table.rows["peak_alloc_gib"].to_numpy()
    own = figures(table.rows["simumax_alloc_gib"].to_numpy(), measured, measured) | {"order_pct": None}
    found = figures(said, measured, measured) | {"order_pct": None}
    return judged(found, (), {"its own simulator, of each row": own})


def _ultrascale_fits(folder: Path) -> dict[str, Any]:
    """Check whether a configuration would run: the share of right answers, as `order_pct`."""
    bar = (None, None, 96.0, None)
    rows = tables.read(folder, "ultrascale_nanotron")
    if rows is None:
        return judged({"n": 0, "reason": f"no ultrascale_nanotron in {folder}"}, bar, {})
    table = tables.ultrascale_tried(rows)
    right = []
    for model in dict.fromkeys(table.models):
        at = [index for index, each in enumerate(table.models) if each == model]
        chosen = layouts(table.rows[at])
        parts = memory_of(model, chosen, table.software)
        refused = refusals(model, chosen, table.software)
        words = [word for word, _ in verdicts(parts, table.machines[at[0]])]
        said = np.array([word != "no" and not why for word, why in zip(words, refused)])
        right.append(said != table.rows[at]["failed"].to_numpy())
    share = 100 * float(np.concatenate(right).mean())
    always = 100 * float((~table.rows["failed"]).to_numpy().mean())
    found = {"n": table.rows.height, "order_pct": round(share, 1)}
    rule = {"n": table.rows.height, "order_pct": round(always, 1)}
    return judged(found, bar, {"it always runs": rule})


def _larger_clusters(folder: Path) -> dict[str, Any]:
    """Check MLPerf: the smallest system of each accelerator calibrates, and all larger ones are predicted."""
    bar = (1.5, 2.5, None, HELD)
    rows = tables.read(folder, "mlperf_training_runs")
    if rows is None:
        return judged({"n": 0, "reason": f"no mlperf_training_runs in {folder}"}, bar, {})
    table = tables.mlperf(rows)
    if table.rows.is_empty():
        return judged({"n": 0, "reason": "no layout of Llama-3.1 405 B is known"}, bar, {})
    said, columns = predict(table), layouts(table.rows)
    measured, gpus, batch = (table.rows[name].to_numpy() for name in ("step_ms", "gpus", "global_batch"))
    bubbles = bubble_alone(table.rows.with_columns(pp=(pl.col("pp") - 1) / pl.col("vpp") + 1)).to_numpy()
    result: dict[str, list[float]] = {name: [] for name in ("said", "low", "high", "plain", "bubble", "real")}
    for group in table.rows.with_row_index("row").partition_by("group", maintain_order=True):
        at = group["row"].to_numpy()
        first, later = at[0], at[gpus[at] > gpus[at[0]]]
        known = calibrate(
            columns[at], said.slopes[at], {0: float(np.log(measured[first] / said.step_ms[first]))}
        )
        for row in later:
            inside = int(np.flatnonzero(at == row)[0])
            predicted = said.step_ms[row] * known.factor[inside]
            width = np.exp(HOLDS_90 * known.deviation[inside])
            perfect = measured[first] * batch[row] / gpus[row] / (batch[first] / gpus[first])
            values = (predicted, predicted / width, predicted * width, perfect)
            for name, value in zip(("said", "low", "high", "plain"), values):
                result[name].append(float(value))
            result["bubble"].append(float(perfect * bubbles[row] / bubbles[first]))
            result["real"].append(float(measured[row]))
    real = result["real"]
    rules = {
        "perfect scaling": figures(result["plain"], real, real) | {"order_pct": None},
        "the interleaved bubble alone": figures(result["bubble"], real, real) | {"order_pct": None},
    }
    found = figures(result["said"], real, real, result["low"], result["high"])
    return judged(found, bar, rules)


CHECKS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "vtrain multi-node": partial(
        _pairs,
        name="vtrain_multi_node",
        make=partial(tables.vtrain, per_micro_batch=False),
        bar=(4.0, 15.0, 88.0, HELD),
    ),
    "vtrain single node": partial(
        _pairs,
        name="vtrain_single_node",
        make=partial(tables.vtrain, per_micro_batch=True),
        bar=(3.0, 18.0, 95.0, HELD),
    ),
    "bloom": partial(_pairs, name="bloom_prequel_a100", make=tables.bloom, bar=(3.0, 12.0, 85.0, HELD)),
    "simumax": _simumax,
    "simumax memory": _simumax_memory,
    "ultrascale": partial(
        _pairs,
        name="ultrascale_nanotron",
        make=partial(tables.ultrascale, with_stalled=False),
        bar=(10.0, 30.0, 95.0, HELD),
    ),
    "ultrascale, stalled rows too": partial(
        _pairs, name="ultrascale_nanotron", make=partial(tables.ultrascale, with_stalled=True), bar=()
    ),
    "ultrascale fits": _ultrascale_fits,
    "mlperf larger cluster": _larger_clusters,
}
