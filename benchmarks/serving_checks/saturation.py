"""Predictions of first tokens for servers near and beyond saturation, and whether they hold.

In: the folder of the logs. Out: a row per case and figure, with predictions and measurements. *Logs*: the
times of the first requests of a real log are shown, those of the rest are predicted, with the engine's limits
given and without. *Faster*: requests of public logs are served by an engine that is only similar: its cost
has another form than the fitted one, and each run is some per cent faster or slower. It is recorded at half
of its capacity, and predicted with arrivals up to six times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.serving_checks.logs import engine_given, hidden, logged
from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import Server, changed
from dpro.extensions.serving.engine import Engine, IterationCost
from dpro.extensions.serving.fit import COST_PARTS, FittedCost, fit_requests
from dpro.extensions.serving.outlook import served_per_s
from dpro.extensions.serving.predict import MIN_ERROR, figures_of, moved, predict, served_requests
from dpro.units import NS_PER_S

SHOWN = (50, 100, 150, 200)  # requests of a log
RATES = (1.0, 1.2, 1.5, 2.0, 2.4, 3.0, 6.0)
RECORDED = 0.5  # of the server's capacity
REQUESTS, SERVERS = 120, 8  # of a case; of each trace
FORM, RUN = 0.1, MIN_ERROR / 2**0.5  # standard deviations of logarithms: of parts of the cost, of a run
LIKE = IterationCost(2e-3, 1.6e-2, 6e-5, 4e-5, 1.2e-7, 2e-9, power=4.0)
Row = dict[str, Any]


def of_logs(folder: Path) -> Iterator[Row]:
    """Yield predictions of the rest of each real log, from its beginning."""
    for run, requests in logged(folder):
        for count in SHOWN:
            shown = pl.Series(np.arange(requests.height) < count)
            seen = hidden(requests, shown)
            unknown = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_tokens"))
            for limits, known in (("given", run), ("not given", run | unknown)):
                case = {"case": f"{run['device']}, first {count}, limits {limits}", "rate": 1.0, "load": None}
                fitted = fit_requests(seen, engine_given(requests[:count], known), shown)
                yield from _compared(case, seen, fitted, [], requests)


def of_faster_arrivals(folder: Path, servers: int = SERVERS) -> Iterator[Row]:
    """Yield predictions of engines that are recorded at half of their capacity, with more and more load."""
    trace = pl.read_parquet(folder / "azure_llm_2023.parquet")
    for name, number in ((name, number) for name in ("code", "conv") for number in range(servers)):
        rng = np.random.default_rng([number, name == "conv"])
        at = int(rng.integers(0, trace.filter(pl.col("trace") == name).height - REQUESTS))
        sent = trace.filter(pl.col("trace") == name)[at : at + REQUESTS].select(
            arrival_ns=((pl.col("arrival_s") - pl.col("arrival_s").min()) * NS_PER_S).cast(pl.Int64),
            prompt_tokens="input_tokens",
            output_tokens="output_tokens",
        )
        engine = Engine(max_requests=int(rng.choice([8, 16, 32])))
        truth = Server(sent, engine, moved(LIKE, rng.normal(0, FORM, len(COST_PARTS))))
        offered = REQUESTS / (sent["arrival_ns"].max() / NS_PER_S)
        slower = RECORDED * served_per_s(truth) / offered
        truth = changed(truth, f"arrivals:rate={slower}")
        recorded = served_requests(_run(truth, rng), 0.0)
        fitted = fit_requests(recorded, engine)
        for rate in RATES:
            actual = served_requests(_run(changed(truth, f"arrivals:rate={rate}"), rng), 0.0)
            case = {"case": f"{name} {number}", "rate": rate, "load": RECORDED * rate}
            yield from _compared(case, recorded, fitted, [f"arrivals:rate={rate}"], actual)


def _run(server: Server, rng: np.random.Generator) -> Server:
    return replace(server, cost=moved(server.cost, [float(rng.normal(0, RUN))] * len(COST_PARTS)))


def _compared(
    case: Row, shown: pl.DataFrame, fitted: FittedCost, changes: Sequence[str], actual: pl.DataFrame
) -> Iterator[Row]:
    measured = figures_of(actual)
    try:
        said = predict(shown, fitted, changes)
    except Unanswerable:
        yield case | {"figure": "", "said": None, "low": None, "high": None, "measured": None}
        return
    for each in said:
        yield case | {
            "figure": each.name, "said": each.predicted, "low": each.low, "high": each.high,
            "measured": measured[each.name],
        }  # fmt: skip
