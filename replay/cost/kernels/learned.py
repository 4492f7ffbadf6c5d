"""Regression trees on the errors of the ten numbers, for shapes that a measured table lacks.

Takes a `DeviceTable` of one device, software and precision; returns `LearnedTrees`, which predict
microseconds of other shapes, with bands from their errors on shapes kept out of the fit. The trees are
scikit-learn's histogram gradient boosting (after Ke et al., "LightGBM", NeurIPS 2017) on log(measured ÷
formula); they do not extrapolate beyond the sizes of their table, where the formula alone applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats
from dpro.errors import DproError
from dpro.replay.cost.kernels.formula import (
    ASSUMED,
    TILES,
    USUAL_L2_MB,
    USUAL_SMS,
    Bands,
    DeviceFit,
    DeviceTable,
    bands_of,
    fit,
    formula_us,
    sizes_of,
)
from dpro.replay.cost.kernels.roofline import GPUS, GpuModel

KEPT_OUT = 6  # parts of the shapes, one of which is kept out of the fit to estimate bands
MAX_ROWS = 12_000
BEYOND = 2.0  # factor outside a table's sizes up to which its trees still count
TREES: dict[str, Any] = {
    **{"max_iter": 200, "learning_rate": 0.1, "max_leaf_nodes": 31},
    **{"min_samples_leaf": 10, "l2_regularization": 1.0, "random_state": 0},
}
# Shapes that differ in other columns only are one group: either all are in the fit, or none.
GROUPS = {
    "matmul": ["n", "k"],
    "prefill": ["heads", "kv_heads", "head_dim", "window_size"],
    "decode": ["heads", "kv_heads", "head_dim", "window_size"],
}


@dataclass(frozen=True)
class LearnedTrees:
    """Trees learned from one table.

    Attributes:
        device: a key of `roofline.GPUS`.
        software, kind, dtype: of the table.
        numbers: the ten numbers of this table.
        trees: fitted regressor of log(measured ÷ formula).
        least, most: [F] range of its features.
        bands: of its errors.
    """

    device: str
    software: str
    kind: str
    dtype: str
    numbers: DeviceFit
    trees: Any
    least: Floats
    most: Floats
    bands: Bands


def learn(table: DeviceTable) -> LearnedTrees:
    """Fit formula and trees to a table, and measure both on shapes that are kept out.

    Raises:
        DproError: scikit-learn is not installed.
    """
    out = kept_out(table)
    inside = np.flatnonzero(~out)
    if inside.size > MAX_ROWS:
        inside = np.sort(np.random.default_rng(0).choice(inside, MAX_ROWS, replace=False))
    fitted_to = table.rows(inside)
    numbers = fit([fitted_to.sample()], ASSUMED)
    gpu = GPUS[table.device]
    predicted = formula_us(numbers.numbers, sizes_of(fitted_to.operations), gpu, table.dtype)
    columns = features(fitted_to.operations, gpu, predicted)
    trees = _grown(columns, np.log(fitted_to.us / predicted))
    without_bands = LearnedTrees(
        *(table.device, table.software, table.kind, table.dtype, numbers, trees),
        *(columns[:, :RANGED].min(0), columns[:, :RANGED].max(0), bands_of(np.ones(0), np.ones(0))),
    )
    others = table.rows(out)
    bands = bands_of(predicted_us(without_bands, others.operations), others.us)
    return LearnedTrees(**{**without_bands.__dict__, "bands": bands})


def predicted_us(trees: LearnedTrees, operations: pl.DataFrame) -> Floats:
    """Predict [N] microseconds by formula and trees.

    Args:
        operations: with the columns of `operations.COLUMNS`.
    """
    gpu = GPUS[trees.device]
    predicted = formula_us(trees.numbers.numbers, sizes_of(operations), gpu, trees.dtype)
    if not predicted.size:
        return predicted
    from threadpoolctl import threadpool_limits

    columns = features(operations, gpu, predicted)
    with threadpool_limits(1):
        values: Floats = trees.trees.predict(columns)
    missed = np.where(_inside(trees, columns), values, 0.0)
    return predicted * np.exp(missed)


def covers(trees: LearnedTrees, operations: pl.DataFrame) -> Bools:
    """Return [N] whether sizes are within those of the table, or at most a factor `BEYOND` outside.

    Args:
        operations: with the columns of `operations.COLUMNS`.
    """
    return _inside(trees, features(operations, GPUS[trees.device], np.ones(operations.height)))


def _inside(trees: LearnedTrees, columns: Floats) -> Bools:
    margin, sizes = np.log2(BEYOND), columns[:, :RANGED]
    fits: Bools = ((sizes >= trees.least - margin) & (sizes <= trees.most + margin)).all(1)
    return fits


RANGED = 6  # the first features, which are sizes


def features(operations: pl.DataFrame, gpu: GpuModel, formula: Floats) -> Floats:
    """Return [N, F] features: sizes in powers of two, limiting factors, and the fill of the last wave.

    Args:
        operations: with the columns of `operations.COLUMNS`.
        formula: [N] microseconds by the formula.
    """
    sizes = sizes_of(operations)
    raw = [_log2(operations[name].to_numpy()) for name in ("batch", "m", "n", "k", "heads", "kv_heads")]
    counted = operations["operations"].to_numpy()
    columns = [*raw, np.log(formula), _log2(counted / np.maximum(sizes.moved, 1)), _log2(sizes.moved)]
    sms = gpu.sms or USUAL_SMS
    for rows, width in TILES[[2, 0, 4]]:
        waves = np.maximum(np.ceil(sizes.m / rows) * np.ceil(sizes.n / width) * sizes.batch / sms, 1e-6)
        columns += [np.ceil(waves) / waves, np.log2(waves)]
    columns += [
        sizes.m % 2,
        sizes.n % 128 == 0,
        sizes.n % 256 == 0,
        sizes.k % 128 == 0,
        _log2(sizes.m * sizes.n),
    ]
    columns += [np.log2(np.maximum(sizes.moved, 1) / ((gpu.l2_mb or USUAL_L2_MB) * 1e6))]
    # Of attention, queries that share keys, and the fill of the last wave of blocks: a tree would treat heads
    # and sequences as unrelated numbers, and a device sees only blocks.
    batch, heads, kv_heads = (operations[name].to_numpy() for name in ("batch", "heads", "kv_heads"))
    shared, blocks = batch * kv_heads, batch * heads
    columns += [_log2(heads / np.maximum(kv_heads, 1)), _log2(shared), _log2(blocks)]
    for count in (shared, blocks):
        waves = np.maximum(count / sms, 1e-6)
        columns += [np.ceil(waves) / waves]
    columns += [np.log2(np.maximum(shared / sms, 1e-6))]
    return np.stack([np.asarray(column, np.float64) for column in columns], 1)


def _log2(values: Floats) -> Floats:
    return np.log2(np.maximum(values, 1.0))


def kept_out(table: DeviceTable, part: int = 0) -> Bools:
    """Return [N] a mask of one part of a table's shapes; operations of one group are in one part."""
    group = table.shapes.select(pl.struct(GROUPS[table.kind]).rank("dense").cast(pl.Int64) - 1).to_series()
    number = group.to_numpy()
    turn = np.random.default_rng(7).permutation(int(number.max(initial=0)) + 1)
    chosen: Bools = turn[number] % KEPT_OUT == part
    return chosen


def _grown(columns: Floats, missed: Floats) -> Any:
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError as error:
        raise DproError("trees need scikit-learn: pip install 'dpro-toolkit[devices]'") from error
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # its threads wait for each other where other processes run
        return HistGradientBoostingRegressor(**TREES).fit(columns, missed)
