"""Durations of requests, and their percentiles.

In: rows of `requests`. Out: a row for each request with its durations in ms, null where a moment is unknown.
Time per output token is that between the first token and the last, over the tokens after the first.
"""

from __future__ import annotations

import polars as pl

from dpro.documents import DocumentPart
from dpro.units import NS_PER_MS

PERCENTILES = (0.5, 0.9, 0.99)
MEASURES = ("ttft_ms", "tpot_ms", "queue_ms", "latency_ms")


class PercentilesDocument(DocumentPart, frozen=True):
    """One measure over the requests that have it.

    Attributes:
        requests: how many have it.
        mean, p50, p90, p99: in ms.
    """

    requests: int
    mean: float
    p50: float
    p90: float
    p99: float


def durations(requests: pl.DataFrame) -> pl.DataFrame:
    """The requests with `ttft_ms`, `tpot_ms`, `queue_ms` and `latency_ms`.

    Args:
        requests: rows of `requests`.
    """

    def between(first: str, last: str) -> pl.Expr:
        known = (pl.col(first) >= 0) & (pl.col(last) >= 0)
        return pl.when(known).then((pl.col(last) - pl.col(first)) / NS_PER_MS)

    after_first = pl.col("output_tokens") - 1
    return requests.with_columns(
        ttft_ms=between("arrival_ns", "first_token_ns"),
        tpot_ms=pl.when(after_first > 0).then(between("first_token_ns", "end_ns") / after_first),
        queue_ms=between("arrival_ns", "scheduled_ns"),
        latency_ms=between("arrival_ns", "end_ns"),
    )


def percentiles(timed: pl.DataFrame) -> dict[str, PercentilesDocument]:
    """Percentiles of each measure that some request has.

    Args:
        timed: what `durations` returns.
    """
    found = {}
    for measure in MEASURES:
        values = timed[measure].drop_nulls()
        if values.len():
            at = [float(values.quantile(q, "linear") or 0.0) for q in PERCENTILES]
            found[measure] = PercentilesDocument(values.len(), float(values.to_numpy().mean()), *at)
    return found


def mean(values: pl.Series) -> float:
    """The mean of what is known of some values; 0 for none."""
    known = values.drop_nulls()
    return float(known.sum()) / known.len() if known.len() else 0.0
