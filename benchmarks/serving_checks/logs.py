"""Request logs of real servers: fitted to the first half of the requests, tried on the second.

In: a folder with `serving_vllm_requests.csv` and `serving_vllm_runs.csv`. Out: the relative errors of
latency, first token and time per token of the second half, and whether the intervals contain the measured
figures of the whole log. Arrivals and lengths of all requests are given, other times only of the first half.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import Server
from dpro.extensions.serving.engine import Engine
from dpro.extensions.serving.fit import engine_of, fit_requests
from dpro.extensions.serving.predict import figures_of, predict, served_requests
from dpro.schema import ITERATIONS
from dpro.units import NS_PER_S

MOMENTS = {
    "arrival_ns": "arrival_s",
    "scheduled_ns": "scheduled_s",
    "first_token_ns": "first_token_s",
    "end_ns": "last_token_s",
}


def second_halves(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray], list[bool]]]:
    """Yield each server's name, relative errors by figure, and whether intervals of the whole log hold."""
    for run, requests in logged(folder):
        yield f"{run['model']} on {run['device']}", *_tried(requests, run)


def logged(folder: Path) -> Iterator[tuple[dict[str, Any], pl.DataFrame]]:
    """Yield for each server its known facts, and its requests as rows of table `requests`."""
    paths = (folder / f"serving_vllm_{name}.csv" for name in ("requests", "runs"))
    log, runs = (pl.read_csv(path, infer_schema_length=None) for path in paths)
    for run in runs.iter_rows(named=True):
        mine = log.filter(pl.col("device") == run["device"], pl.col("model") == run["model"])
        if not mine.is_empty():
            yield run, _requests(mine)


def _requests(log: pl.DataFrame) -> pl.DataFrame:
    moments = {ns: (pl.col(s) * NS_PER_S).round().cast(pl.Int64) for ns, s in MOMENTS.items()}
    return log.sort("arrival_s").select(
        **moments, prompt_tokens="input_tokens", output_tokens="output_tokens"
    )


def hidden(requests: pl.DataFrame, shown: pl.Series) -> pl.DataFrame:
    """Hide the times of requests that are not shown, except for arrivals: they become -1."""
    moments = (name for name in MOMENTS if name != "arrival_ns")
    return requests.with_columns(
        pl.when(shown).then(pl.col(name)).otherwise(-1).alias(name) for name in moments
    )


def engine_given(requests: pl.DataFrame, run: dict[str, Any]) -> Engine:
    """Return the engine of a log, with its known limits, else with those that its requests show."""
    shown = engine_of(requests, ITERATIONS.empty())
    budget, most = run["max_num_batched_tokens"], run["max_num_seqs"]
    return Engine(
        budget or shown.token_budget,
        most or shown.max_requests,
        run["kv_tokens"] or 0,
        replicas=run["dp"] or 1,
    )


def _tried(requests: pl.DataFrame, run: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Compute errors of the second half, without refused figures, and whether each interval holds."""
    half = pl.Series(np.arange(requests.height) < requests.height // 2)
    seen, measured = hidden(requests, half), figures_of(requests)
    nothing = dict.fromkeys(FIGURES, np.zeros(0))
    try:
        fitted = fit_requests(seen, engine_given(requests.filter(half), run), half)
        figures = predict(seen, fitted, [])
    except Unanswerable:
        return nothing, []
    said = served_requests(Server(requests, fitted.engine, fitted.cost), fitted.delay_s)
    refused = {each.name.partition("_")[0] for each in figures if each.predicted is None}
    errors = {
        name: (figure(said) / figure(requests) - 1).to_numpy()[~half.to_numpy()]
        for name, figure in FIGURES.items()
        if CALLED[name] not in refused
    }
    return nothing | errors, [each.low <= measured[each.name] <= each.high for each in figures]


CALLED = {"latency": "latency", "first token": "ttft", "time per token": "tpot"}
FIGURES = {
    "latency": lambda requests: requests["end_ns"] - requests["arrival_ns"],
    "first token": lambda requests: requests["first_token_ns"] - requests["arrival_ns"],
    "time per token": lambda requests: requests["end_ns"] - requests["first_token_ns"],
}
