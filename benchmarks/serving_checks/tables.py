"""Published tables of servers: from one row, another one of the same software.

In: a folder with `serving_silicon.parquet` and `splitwise_perf.csv`. Out: errors of the time per token and
until the first token, with twice the clients, another tensor parallelism, another device; how often the
faster one is named. The ratio of two rows is computed (`sized.cost_of`, `steady.token_s`); models are given
by their published configurations, and an unknown one is assumed from the size in its name.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.serving_checks.steady import first_token_s, prompt_s, token_s
from dpro.errors import DproError
from dpro.extensions.plan.model import Model
from dpro.extensions.serving.changes import TIMES_NEEDED
from dpro.extensions.serving.engine import IterationCost
from dpro.extensions.serving.fit import seconds
from dpro.extensions.serving.sized import cost_of
from dpro.replay.cost.machine import machine_of

Row = dict[str, Any]
Errors = dict[str, np.ndarray]
# Published: layers, hidden size, heads, heads of keys and values, head size, width, vocabulary, sequence.
MODELS = {
    "llama-3.1-70b": Model(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-8b": Model(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama2-70b": Model(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "qwen3-32b": Model(64, 5120, 64, 8, 128, 25600, 151936, 8192),
    "deepseek": Model(
        61, 7168, 128, 128, 128, 18432, 129280, 8192, experts=256, experts_per_token=8, expert_ffn=2048,
        shared_experts=1, dense_layers=3, q_rank=1536, kv_rank=512, rope_size=64, value_size=128,
    ),
}  # fmt: skip
DEVICES = {
    "a100-80gb": "A100-SXM4-80GB", "a100_sxm": "A100-SXM4-80GB", "h100-80gb": "H100", "h100_sxm": "H100",
    "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300", "gb200": "GB200", "gb300": "GB300",
    "l40s": "L40S",
}  # fmt: skip
SETTING = [
    "model", "device", "backend", "precision", "input_len", "output_len", "tp_size", "pp_size", "moe_ep_size",
    "attention_dp_size", "concurrency",
]  # fmt: skip
MS_PER_S = 1e3
MAX_TP = 8  # of a layer: beyond a host, attention is cut over data instead


def of_silicon(folder: Path) -> dict[str, Errors]:
    """Return, by question, errors of `token` and `first`, and whether the faster of two was named (`order`).

    Args:
        folder: of the tables.
    """
    table = pl.read_parquet(folder / "serving_silicon.parquet").filter(
        (pl.col("mode") == "agg") & pl.col("concurrency").is_not_null() & (pl.col("tpot_ms") > 0)
    )
    known = table.filter(pl.col("device").is_in(list(DEVICES)))
    rows = known.group_by(SETTING).agg(pl.col("tpot_ms", "ttft_ms").median())
    found = {}
    for question, column in (
        ("clients x 2", "concurrency"),
        ("parallelism", "tp_size"),
        ("device", "device"),
    ):
        keys = [name for name in SETTING if name != column]
        pairs = rows.join(rows, on=keys, nulls_equal=True, suffix="_to")
        other = pl.col(f"{column}_to")
        pairs = pairs.filter(
            other == 2 * pl.col(column) if column == "concurrency" else other != pl.col(column)
        )
        found[question] = _errors(pairs, column)
    return found


def _errors(pairs: pl.DataFrame, column: str) -> Errors:
    token, first, order = [], [], []
    for row in pairs.iter_rows(named=True):
        try:
            here, there = _steady_s(row), _steady_s(row | {column: row[f"{column}_to"]})
            if column == "tp_size" and row["tpot_ms"] > TIMES_NEEDED * here[0] * MS_PER_S:
                continue  # refused: its GPUs are not the limit
        except DproError:
            continue  # a layout that the model cannot be cut into, or a precision that the device lacks
        token.append(row["tpot_ms"] * there[0] / here[0] / row["tpot_ms_to"] - 1)
        said_s = first_token_s((row["tpot_ms"] / MS_PER_S, row["ttft_ms"] / MS_PER_S), here, there)
        first.append(said_s * MS_PER_S / row["ttft_ms_to"] - 1)
        order.append((there[0] < here[0]) == (row["tpot_ms_to"] < row["tpot_ms"]))
    return {"token": np.array(token), "first": np.array(first), "order": np.array(order)}


def _steady_s(row: Row) -> tuple[float, float]:
    """Compute the seconds per token, and of a prompt alone."""
    tp = int(min(max(row["tp_size"] or 1, 1), MAX_TP))
    dtype = "fp8" if row["precision"] in ("fp8", "fp4") else "bf16"
    cost = _cost(row["model"], DEVICES[row["device"]], tp, dtype, int(row["concurrency"]))
    per_token = token_s(cost, row["concurrency"], row["input_len"], row["output_len"])
    return per_token, prompt_s(cost, float(row["input_len"]))


def of_splitwise(folder: Path) -> dict[str, Errors]:
    """Return, by question, errors of `token` and `first`, the prompt alone, and `order`.

    Args:
        folder: of the tables.
    """
    table = pl.read_csv(folder / "splitwise_perf.csv", infer_schema_length=None)
    table = table.filter(pl.col("device").is_in(list(DEVICES)))
    keys = ["model", "device", "tp", "prompt_tokens", "batch_size", "output_tokens"]
    rows = table.group_by(keys).agg(pl.col("prompt_ms", "token_ms").median())
    computed = [_alone_s(row) for row in rows.iter_rows(named=True)]
    rows = rows.with_columns(
        prompt_s=pl.Series([each[0] for each in computed]), token_s=pl.Series([each[1] for each in computed])
    )
    found = {}
    for question, column in (("device", "device"), ("parallelism", "tp")):
        pairs = rows.join(rows, on=[name for name in keys if name != column], suffix="_to")
        pairs = pairs.filter(pl.col(f"{column}_to") != pl.col(column))
        if column == "tp":  # refused: its GPUs are not the limit
            pairs = pairs.filter(pl.col("token_ms") <= TIMES_NEEDED * MS_PER_S * pl.col("token_s"))
        errors = {}
        for name, part in (("token", "token"), ("first", "prompt")):
            ratio = pl.col(f"{part}_s_to") / pl.col(f"{part}_s")
            errors[name] = (
                pairs.select(pl.col(f"{part}_ms") * ratio / pl.col(f"{part}_ms_to") - 1)
                .to_series()
                .to_numpy()
            )
        faster = (pl.col("token_s_to") < pl.col("token_s")) == (pl.col("token_ms_to") < pl.col("token_ms"))
        found[question] = errors | {"order": pairs.select(faster).to_series().to_numpy()}
    return found


def _alone_s(row: Row) -> tuple[float, float]:
    """Compute the seconds of a batch of prompts, and of a batch of decodes in the middle of their outputs."""
    cost = _cost(row["model"], DEVICES[row["device"]], row["tp"], "bf16", row["batch_size"])
    batch, prompt = float(row["batch_size"]), float(row["prompt_tokens"])
    context = batch * (prompt + row["output_tokens"] / 2)

    def one(*held: float) -> float:
        return float(seconds(cost, *(np.array([each]) for each in held))[0])

    return one(batch * prompt, 0.0, 0.0, batch * prompt * prompt / 2), one(0.0, batch, context, 0.0)


@cache
def _cost(model: str, device: str, tp: int, dtype: str, decodes: int) -> IterationCost:
    return cost_of(_model(model), machine_of(device), tp, dtype, decodes)


def _model(name: str) -> Model:
    known = next((model for key, model in MODELS.items() if key in name.lower()), None)
    if known is not None:
        return known
    size = re.search(r"(\d+(?:\.\d+)?)b", name.lower())
    if size is None:
        raise DproError(f"no configuration of {name!r}, and no size in its name")
    return _of_size(float(size[1]))


def _of_size(billions: float) -> Model:
    """Make a dense model of a size, with the usual hidden = 128 x layers, and 12 x hidden^2 weights each."""
    layers = round((billions * 1e9 / (12 * 128**2)) ** (1 / 3))
    hidden = 128 * layers
    return Model(
        layers, hidden, max(hidden // 128 // 8, 1) * 8, 8, 128, 4 * hidden, 128000, 8192, gated=False
    )
