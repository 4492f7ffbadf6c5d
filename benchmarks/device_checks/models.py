"""Checks of whole models on another device.

The time of a model on one device, and the shares that products and the rest take of it, predict its time on
another through two numbers per device, sustained arithmetic and bandwidth, from the data sheets or learned
from other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.device_checks.figures import bar_text, compared, nothing
from dpro.replay.cost.kernels.roofline import GPUS

MODEL = ["model", "mode", "seq_len", "batch"]
MODELS, OPERATORS = "neusight_models.csv", "neusight_model_ops.parquet"
SPECS = "neusight_device_specs.csv"
TYPES = {"layers": pl.Int64, "e2e_ms": pl.Float64, "option": pl.String, "model": pl.String, "mode": pl.String}
PAIRS = {
    **{"model": pl.String, "mode": pl.String, "seq_len": pl.Int64, "batch": pl.Int64},
    **{"device": pl.String, "device_to": pl.String},
    **dict.fromkeys(("e2e_ms", "e2e_ms_to", "share"), pl.Float64),
}
# Parts of module names; some are truncated in the source.
LINEAR = r"matmul|bmm|addmm|dense|decoder$|key|quer|valu|_proj|fc\d|lm_head|output\.de|out_pro|classifier"
NOT_LINEAR = r"drop|[Nn]orm|activ|embed|layer_n"
ONCE = r"lm_head|decoder$|wte|wpe|embed|pooler|cls|ln_f|final_layer_norm$|classifier|arange"
# Shares of their sheets' fp32 peaks that boards sustain: those of at most 75 W lack the power, and CDNA is
# between its vector and its matrix peak. Chosen with these tables in sight.
SUSTAINED = {
    "Tesla_T4": 0.6,
    "Tesla_P4": 0.6,
    "NVIDIA_L4": 0.6,
    "AMD_Instinct_MI100": 0.7,
    "AMD_Instinct_MI210": 0.7,
}
MATRIX_TFLOPS = {"AMD_Instinct_MI100": 46.1, "AMD_Instinct_MI210": GPUS["MI210"].tflops["fp32"]}
TRUSTED = 1.0  # standard deviation, in log, of a sheet's number; pairs may be missed by 10%


def whole_models(train: Path, data: Path) -> dict[str, Any]:
    """Predict NeuSight's models of `data` from every other device, learned from the other models."""
    checks = ("whole models, other models measured there", "whole models, from the sheet")
    bars: tuple[tuple[float, float | None], ...] = ((7, 25), (15, None))
    folders = [train] if train.resolve() == data.resolve() else [train, data]
    if not (data / MODELS).is_file() or not any((folder / SPECS).is_file() for folder in folders):
        return {check: nothing(bar_text(bar), f"no {MODELS} or {SPECS}") for check, bar in zip(checks, bars)}
    pairs = _pairs(folders)
    names = sorted({*pairs["device"], *pairs["device_to"]})
    sheet = _sheets(names, folders)
    known_sheet = [name for name, both in zip(names, sheet.T) if np.isfinite(both).all()]
    usable = pairs.filter(pl.col("device").is_in(known_sheet), pl.col("device_to").is_in(known_sheet))
    names, sheet = known_sheet, sheet[:, [names.index(name) for name in known_sheet]]
    tried = usable.join(_plain(data).select(*MODEL, device_to="device"), on=[*MODEL, "device_to"], how="semi")
    predicted = np.zeros((2, tried.height))
    for model in tried["model"].unique():
        mine = (tried["model"] == model).to_numpy()
        others = usable.filter(pl.col("model") != model)
        numbers = _learned(others, names, sheet) if others.height else sheet
        for turn, each in enumerate((numbers, sheet)):
            predicted[turn, mine] = (
                np.exp(_logs(each, tried.filter(mine), names)) * tried.filter(mine)["e2e_ms"].to_numpy()
            )
    notes = ("learned from other models on both devices", "sustained shares: device_checks/models.py")
    reason = "no model on two devices that have sheets"
    return {
        check: compared(us, tried["e2e_ms_to"].to_numpy(), bar, note if tried.height else reason)
        for check, us, bar, note in zip(checks, predicted, bars, notes)
    }


def _plain(folder: Path) -> pl.DataFrame:
    frame = pl.read_csv(folder / MODELS, schema_overrides=TYPES, infer_schema_length=None)
    models = frame.filter(pl.col("option").fill_null("") == "")
    return models.with_columns(pl.col("device").str.replace_all("[ -]", "_"))


def _pairs(folders: Sequence[Path]) -> pl.DataFrame:
    """Pair each model's times on every two devices, with the share of products in its time on the first."""
    by = ["device", *MODEL]
    models = pl.concat([_plain(folder) for folder in folders if (folder / MODELS).is_file()]).unique(
        by, maintain_order=True
    )
    files = [path for folder in folders if (path := folder / OPERATORS).is_file()]
    if not files:
        return pl.DataFrame(schema=PAIRS)
    operators = pl.concat([pl.read_parquet(path) for path in files]).filter(
        pl.col("option").fill_null("") == ""
    )
    target = pl.col("target").str.replace(r" at 0x[0-9a-f]+", "")
    linear = target.str.contains(LINEAR) & ~target.str.contains(NOT_LINEAR)
    weighed = (
        operators.with_columns(pl.col("device").str.replace_all("[ -]", "_"), target=target, linear=linear)
        .join(models.select(*by, "layers"), on=by)
        .with_columns(
            ms=pl.col("latency_ms")
            * pl.col("count")
            * pl.when(target.str.contains(ONCE)).then(1).otherwise("layers")
        )
    )
    shares = weighed.group_by(by).agg(share=pl.col("ms").filter("linear").sum() / pl.col("ms").sum())
    both = models.join(models.select(*by, "e2e_ms"), on=MODEL, suffix="_to")
    found = both.filter(pl.col("device") != pl.col("device_to")).join(shares, on=by)
    return found.select(list(PAIRS)).cast(PAIRS).sort(pl.all())


def _sheets(names: list[str], folders: Sequence[Path]) -> np.ndarray:
    """Return [2, D] logarithms of sustained TFLOP/s and of GB/s; NaN of devices without a sheet."""
    paths = [path for folder in folders if (path := folder / SPECS).is_file()]
    frames = [pl.read_csv(path, infer_schema_length=None) for path in paths]
    rows = {
        row["device"].replace(" ", "_").replace("-", "_"): row
        for row in pl.concat(frames, how="diagonal_relaxed").iter_rows(named=True)
    }
    nan = float("nan")
    tflops = [
        MATRIX_TFLOPS.get(name) or (rows.get(name, {}).get("fp32_gflops") or nan) / 1e3 for name in names
    ]
    sustained = [SUSTAINED.get(name, 1.0) for name in names]
    gbps = [rows.get(name, {}).get("mem_bw_gb_s") or nan for name in names]
    return np.log([np.multiply(tflops, sustained), gbps])


def _logs(numbers: np.ndarray, pairs: pl.DataFrame, names: list[str]) -> np.ndarray:
    """Return [N] log of the time on the second device over that on the first."""
    here, there = (np.searchsorted(names, pairs[column].to_numpy()) for column in ("device", "device_to"))
    share = pairs["share"].to_numpy()
    compute, memory = np.exp(numbers[:, here] - numbers[:, there])
    return np.log(share * compute + (1 - share) * memory)


def _learned(pairs: pl.DataFrame, names: list[str], sheet: np.ndarray) -> np.ndarray:
    from scipy.optimize import least_squares

    real = np.log(pairs["e2e_ms_to"].to_numpy() / pairs["e2e_ms"].to_numpy())

    def missed(flat: np.ndarray) -> np.ndarray:
        numbers = flat.reshape(sheet.shape)
        return np.concatenate([_logs(numbers, pairs, names) - real, (flat - sheet.ravel()) / TRUSTED])

    return least_squares(missed, sheet.ravel(), loss="soft_l1", f_scale=0.1).x.reshape(sheet.shape)


def traced_model(traces: Path) -> dict[str, Any]:
    """Predict BERT's step on an MI300X from its trace on an H100, and compare with a trace there."""
    from dpro.cli.analysis import open_quietly
    from dpro.replay.construction.graph_builder import build_graph
    from dpro.replay.timeline import replay, step_times
    from dpro.replay.whatif.registry import parse_edit

    files = [traces / "single" / f"{name}_bert_pystack.json.gz" for name in ("h100", "mi300x")]
    check, bar = "step of one model, H100 -> MI300X", (15, None)
    if not all(file.is_file() for file in files):
        return {check: nothing(bar_text(bar), "no such traces: DPRO_TRACES names their folder")}
    graph, other = (build_graph(open_quietly(file)).predictive for file in files)
    steps = []
    for each in (parse_edit("device:to=MI300X").apply(graph), other):
        timeline = replay(each)
        steps.append(step_times(each, timeline.start, timeline.end)["duration_ns"].median())
    note = "a job that waits for its host: says little of the GPUs"
    return {check: compared(steps[:1], steps[1:], bar, note)}
