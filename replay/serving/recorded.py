"""The server of a recording: how its engine forms batches, and what an iteration costs.

In: rows of tables `requests` and `iterations`. Out: a `FittedCost`. The limits of an engine are those that
its iterations show: a limit that never bound is not known, and taken as none. Where iterations say what they
held, the cost is fitted to them, else to the moments of the requests.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.replay.serving.engine import Engine
from dpro.replay.serving.fit import SMALLEST, FittedCost, fit_iterations, fit_requests, with_delay
from dpro.units import NS_PER_S

NO_LIMIT = 1 << 20  # tokens or requests
KNOWN = (pl.col("prefill_tokens") >= 0) & (pl.col("decode_tokens") >= 0) & (pl.col("num_requests") > 0)


def engine_of(requests: pl.DataFrame, iterations: pl.DataFrame) -> Engine:
    """How an engine forms batches, as its iterations show it.

    Args:
        requests: rows of table `requests`.
        iterations: rows of table `iterations` of one rank.
    """
    known = iterations.filter(KNOWN)
    if known.height < SMALLEST:
        return _engine_of_requests(requests)
    crowded = known.filter(pl.col("waiting") > 0)
    with_prompts = known.filter(pl.col("prefill_tokens") > 0)
    tokens = known.select((pl.col("prefill_tokens") + pl.col("decode_tokens")).max()).item()
    cut = with_prompts.height > 1.2 * requests.height  # more iterations with prompts than there are prompts
    mixed = (with_prompts["decode_tokens"] > 0).any()
    return Engine(
        token_budget=tokens if cut else NO_LIMIT,
        max_requests=int(known["num_requests"].to_numpy().max()) if crowded.height else NO_LIMIT,
        whole_prompts=not cut,
        prompts_first=not mixed and with_prompts.height > 1,
    )


def _engine_of_requests(requests: pl.DataFrame) -> Engine:
    """The same from moments alone: as many requests at most as there ever were while others waited."""
    seen = requests.filter((pl.col("scheduled_ns") >= 0) & (pl.col("end_ns") >= 0))
    if seen.is_empty():
        return Engine()
    begun, ended = np.sort(seen["scheduled_ns"].to_numpy()), np.sort(seen["end_ns"].to_numpy())
    arrived = np.sort(seen["arrival_ns"].to_numpy())
    running = np.arange(1, begun.size + 1) - np.searchsorted(ended, begun, side="right")
    waiting = np.searchsorted(arrived, begun, side="right") - np.arange(1, begun.size + 1)
    most = int(running.max())
    binds = bool((waiting[running == most] > 0).any()) and int((running == most).sum()) > 1
    return Engine(max_requests=most) if binds else Engine()


def fit_run(requests: pl.DataFrame, iterations: pl.DataFrame, engine: Engine | None = None) -> FittedCost:
    """The server of a recording.

    Args:
        requests: rows of table `requests`.
        iterations: rows of table `iterations`, of one rank.
        engine: with its limits, where they are known; else as the recording shows.

    Raises:
        Unanswerable: too little is known.
    """
    engine = engine or engine_of(requests, iterations)
    if iterations.filter(KNOWN).height < SMALLEST:
        return fit_requests(requests, engine)
    fitted = fit_iterations(_cycles(iterations), engine)
    waited = requests.filter(pl.col("scheduled_ns") >= 0).select(
        pl.col("scheduled_ns") - pl.col("arrival_ns")
    )
    least = waited.to_series().quantile(0.1) if waited.height else 0.0
    return with_delay(fitted, max(least or 0.0, 0.0) / NS_PER_S)


def _cycles(iterations: pl.DataFrame) -> pl.DataFrame:
    """Iterations that last until the next one, where that holds decodes: the engine was not idle."""
    ordered = iterations.sort("start_ns")
    next_start, next_decodes = pl.col("start_ns").shift(-1), pl.col("decode_tokens").shift(-1)
    cycle = pl.when(next_decodes > 0).then(next_start - pl.col("start_ns")).otherwise("duration_ns")
    return ordered.with_columns(duration_ns=pl.max_horizontal(cycle, "duration_ns").cast(pl.Int64))
