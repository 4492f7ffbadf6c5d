"""Controlled pairs of recorded servers: from one run, the figures of the other.

In: a folder with runs and `pairs.json`, a list of {before, after, edit}, as `benchmarks.serving_server.pairs`
makes it. Out: errors of each figure, and whether its interval contains the measurement.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from dpro.extensions.serving.fit import fit_run
from dpro.extensions.serving.predict import figures_of, predict
from dpro.schema import ITERATIONS, REQUESTS
from dpro.store import open_run

WARM_UP = "warm"  # prefix of the names of requests that do not count
CHECKED = {"tpot_p50_ms": "time per token", "tokens_per_s": "throughput", "ttft_p50_ms": "first token"}


def of_pairs(folder: Path) -> pl.DataFrame:
    """Return a row per pair and figure: `edit`, `figure`, `error` (null without a predicted point), `change`
    (both relative) and `held`.

    Args:
        folder: of the runs.
    """
    rows = []
    for pair in json.loads((folder / "pairs.json").read_text(encoding="utf-8")):
        requests, iterations = served_in(folder / pair["before"])
        measured = figures_of(served_in(folder / pair["after"])[0])
        for figure in predict(requests, fit_run(requests, iterations), [pair["edit"]]):
            if figure.name in CHECKED:
                actual = measured[figure.name]
                rows.append({
                    "edit": f"{pair['before']}: {pair['edit']}", "figure": CHECKED[figure.name],
                    "error": None if figure.predicted is None else figure.predicted / actual - 1,
                    "change": actual / figure.measured - 1,
                    "held": bool(figure.low <= actual <= figure.high),
                })  # fmt: skip
    return pl.DataFrame(rows)


def served_in(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the requests of a run that count, and the iterations meanwhile.

    Args:
        path: of the run.
    """
    run = open_run(str(path))
    counted = ~pl.col("name").str.starts_with(WARM_UP) & (pl.col("end_ns") >= 0)
    parts = run.table(REQUESTS).filter(counted)
    requests = parts.group_by("name").agg(  # each of two pools has a row of the request
        pl.col("arrival_ns", "scheduled_ns", "first_token_ns", "prompt_tokens", "cached_tokens").min(),
        pl.col("end_ns").max(),
        pl.col("output_tokens").sum(),
    )
    within = pl.col("start_ns").is_between(requests["arrival_ns"].min(), requests["end_ns"].max())
    return requests.sort("arrival_ns"), run.table(ITERATIONS).filter(within).sort("start_ns")
