"""Request logs of real servers: fitted to the first half of the requests, tried on the second.

In: a folder with `serving_vllm_requests.csv` and `serving_vllm_runs.csv`. Out: the relative errors of
latency, first token and time per token of the second half. Arrivals and lengths of all requests are given,
moments only of the first half.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from dpro.extensions.serving.changes import Server
from dpro.extensions.serving.engine import Engine
from dpro.extensions.serving.fit import engine_of, fit_requests
from dpro.extensions.serving.predict import answered
from dpro.schema import ITERATIONS
from dpro.units import NS_PER_S

MOMENTS = {
    "arrival_ns": "arrival_s",
    "scheduled_ns": "scheduled_s",
    "first_token_ns": "first_token_s",
    "end_ns": "last_token_s",
}


def second_halves(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Of each server: its name, and relative errors by figure."""
    paths = (folder / f"serving_vllm_{name}.csv" for name in ("requests", "runs"))
    log, runs = (pl.read_csv(path, infer_schema_length=None) for path in paths)
    for run in runs.iter_rows(named=True):
        mine = log.filter(pl.col("device") == run["device"], pl.col("model") == run["model"])
        if not mine.is_empty():
            yield f"{run['model']} on {run['device']}", _errors(_requests(mine), run)


def _requests(log: pl.DataFrame) -> pl.DataFrame:
    moments = {ns: (pl.col(s) * NS_PER_S).round().cast(pl.Int64) for ns, s in MOMENTS.items()}
    return log.sort("arrival_s").select(
        **moments, prompt_tokens="input_tokens", output_tokens="output_tokens"
    )


def _errors(requests: pl.DataFrame, run: dict[str, int | None]) -> dict[str, np.ndarray]:
    half = np.arange(requests.height) < requests.height // 2
    shown = engine_of(requests[: requests.height // 2], ITERATIONS.empty())
    budget, most = run["max_num_batched_tokens"], run["max_num_seqs"]
    engine = Engine(budget or shown.token_budget, most or shown.max_requests, run["kv_tokens"] or 0)
    fitted = fit_requests(requests, engine, pl.Series(half))
    said = answered(Server(requests, fitted.engine, fitted.cost), fitted.delay_s)
    return {name: (figure(said) / figure(requests) - 1).to_numpy()[~half] for name, figure in FIGURES.items()}


FIGURES = {
    "latency": lambda requests: requests["end_ns"] - requests["arrival_ns"],
    "first token": lambda requests: requests["first_token_ns"] - requests["arrival_ns"],
    "time per token": lambda requests: requests["end_ns"] - requests["first_token_ns"],
}
