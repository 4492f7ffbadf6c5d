"""Kernels of a trace on another device: products by their shapes, others by the limit of their class.

Takes measured kernels, with the sizes of products where the trace has shapes; returns the time of each on
another device, with an interval and the method. Pointwise kernels, reductions and copies on the device are
assumed to be limited by memory; products without shapes, convolutions and attention by arithmetic: method
`class`. The work of a kernel beyond its class is not known, so its interval is wider.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.replay.cost.kernels.estimate import (
    HOLDS_80,
    TIMES,
    MeasuredOperations,
    Sources,
    estimate,
    numbers_of,
)
from dpro.replay.cost.kernels.formula import sum_of
from dpro.replay.cost.kernels.operations import matmuls, moves

BY_CLASS = 0.2  # standard deviation, in log, of a prediction by class
SHORT_US = 3.0  # time of a kernel with next to no work, on any device
LARGE = 8192  # m, n and k of a product that reaches a device's peak
STEPS_PER_E = 50  # equal kernels whose times are within 2% of each other are one operation
SCHEMA = {
    "kind": pl.String,  # product, computes or moves
    "dtype": pl.String,
    **dict.fromkeys(("batch", "m", "n", "k"), pl.Float64),
    "us": pl.Float64,
}


def on_another_device(kernels: pl.DataFrame, device: str, to: str, sources: Sources) -> pl.DataFrame:
    """Estimate the times of kernels on another device.

    Args:
        kernels: measured, with the columns of `SCHEMA`.

    Returns:
        `us`, `low_us`, `high_us`, `method`, `reason` of each, as from `estimate`.
    """
    by = list(SCHEMA)
    rounded = kernels.with_columns(us=((pl.col("us").log() * STEPS_PER_E).round() / STEPS_PER_E).exp())
    unique = rounded.select(by).unique(maintain_order=True).with_row_index("number")
    number = rounded.join(unique, on=by, how="left", maintain_order="left")["number"]
    parts = [
        _of_one_kind(rows, str(kind), str(dtype), device, to, sources).with_columns(number=rows["number"])
        for (kind, dtype), rows in unique.partition_by("kind", "dtype", as_dict=True).items()
    ]
    predicted = pl.concat(parts).sort("number")[number]
    exact = kernels["us"] / rounded["us"]
    return predicted.select(*(pl.col(name) * exact for name in TIMES), "method", "reason")


def _of_one_kind(
    kernels: pl.DataFrame, kind: str, dtype: str, device: str, to: str, sources: Sources
) -> pl.DataFrame:
    """Estimate products by sizes, others by class; at 16 bits where no name shows the precision.

    By class, times are scaled by a typical operation on both devices; short kernels keep theirs.
    """
    us = kernels["us"].to_numpy()
    if kind == "product":
        products = matmuls(dtype, *(kernels[size] for size in ("m", "n", "k", "batch")))
        return estimate(products, to, sources, MeasuredOperations(device, products, us))
    typical = matmuls(dtype or "fp16", LARGE, LARGE, LARGE) if kind == "computes" else moves("fp16", 1e9, 1e9)
    here, there = (estimate(typical, place, sources) for place in (device, to))
    for answer in (here, there):
        if answer["us"][0] is None:
            nothing = dict.fromkeys(TIMES, pl.lit(None, pl.Float64))
            return pl.DataFrame({"method": [""] * us.size}).select(
                **nothing, method="method", reason=pl.lit(answer["reason"][0], pl.String)
            )
    ratio = there["us"][0] / here["us"][0]
    numbers, _, extra = numbers_of("matmul", "bf16", to, sources.coefficients)
    width = HOLDS_80 * float(np.hypot(np.hypot(numbers.bias, extra), BY_CLASS))
    kept, work = np.minimum(us, SHORT_US), np.maximum(us - SHORT_US, 0) * ratio
    columns = {
        "us": kept + work,
        "low_us": kept + work * np.exp(-width),
        "high_us": kept + work * np.exp(width),
    }
    return pl.DataFrame(columns).with_columns(method=pl.lit("class"), reason=pl.lit(None, pl.String))


def summed(predicted: pl.DataFrame) -> tuple[float, float, float]:
    """Sum all predictions, with an interval; errors by class or data sheet add up, as they may share a sign.

    Args:
        predicted: as `on_another_device` returns it.
    """
    apart = predicted["method"].str.contains("fitted|trees|table").to_numpy()
    us, low, high = (predicted[name].to_numpy() for name in TIMES)
    one = sum_of(us[apart], low[apart], high[apart])
    return (
        one[0] + float(us[~apart].sum()),
        one[1] + float(low[~apart].sum()),
        one[2] + float(high[~apart].sum()),
    )
