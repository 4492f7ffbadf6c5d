"""Controlled pairs of recorded servers: from one run, the figures of the other.

In: a folder with runs and `pairs.json`, a list of {before, after, edit}, as `benchmarks.serving_server.pairs`
makes it. Out: errors of each figure, and how often its interval held it.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from dpro.replay.serving.predict import figures_of, predict
from dpro.replay.serving.recorded import fit_run
from dpro.schema import ITERATIONS, REQUESTS
from dpro.store import open_run

WARM_UP = "warm"  # name of the request before those that count
CHECKED = {"tpot_p50_ms": "time per token", "tokens_per_s": "throughput", "ttft_p50_ms": "first token"}


def of_pairs(folder: Path) -> pl.DataFrame:
    """A row per pair and figure: `edit`, `figure`, `error`, `change` (both relative) and `held`.

    Args:
        folder: of the runs.
    """
    rows = []
    for pair in json.loads((folder / "pairs.json").read_text(encoding="utf-8")):
        requests, iterations = _tables(folder / pair["before"])
        measured = figures_of(_tables(folder / pair["after"])[0])
        for figure in predict(requests, fit_run(requests, iterations), [pair["edit"]]):
            if figure.name in CHECKED:
                actual = measured[figure.name]
                rows.append({
                    "edit": f"{pair['before']}: {pair['edit']}", "figure": CHECKED[figure.name],
                    "error": figure.predicted / actual - 1, "change": actual / figure.measured - 1,
                    "held": bool(figure.low <= actual <= figure.high),
                })  # fmt: skip
    return pl.DataFrame(rows)


def _tables(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    run = open_run(str(path))
    requests = run.table(REQUESTS).filter(pl.col("name") != WARM_UP, pl.col("end_ns") >= 0).sort("arrival_ns")
    iterations = run.table(ITERATIONS).filter(pl.col("start_ns") >= requests["arrival_ns"].min())
    return requests, iterations.sort("start_ns")
