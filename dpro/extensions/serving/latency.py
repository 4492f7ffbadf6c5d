"""The iterations of engines over time, the durations of requests, and what each request waited for.

Takes rows of `iterations` and of `requests`; returns the iterations of one rank of each replica, whose clock
its requests are on, with the time of decoding by batch size; and a row for each request with its durations in
ms, null where a time is unknown, and what it waited for. Time per output token is the time from the first
token to the last, over the tokens after the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.documents import DocumentPart
from dpro.units import NS_PER_MS

Times = NDArray[np.int64]
FEW = 5  # minimum number of iterations for a typical one
WITH_PROMPTS = ("prefill", "mixed")


@dataclass(frozen=True)
class RecordedEngine:
    """The iterations of one replica, by one of its ranks.

    Attributes:
        iterations: rows of `iterations` in order.
    """

    iterations: pl.DataFrame

    @cached_property
    def starts(self) -> Times:
        """Start of each iteration, ns."""
        return self.iterations["start_ns"].to_numpy()

    @cached_property
    def durations(self) -> Times:
        """Duration of each iteration, ns."""
        return self.iterations["duration_ns"].clip(0).to_numpy()

    @cached_property
    def decode_ns(self) -> float:
        """The typical iteration that only decodes, ns; NaN where there are few."""
        decodes = self.durations[self.is_kind("decode")]
        return float(np.median(decodes)) if decodes.size >= FEW else float("nan")

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Return whether each iteration is of one of these kinds."""
        return self.iterations["kind"].cast(pl.String).is_in(kinds).to_numpy()

    @cached_property
    def stalls(self) -> NDArray[np.float64]:
        """Time of each iteration beyond one that only decodes, caused by its prompts, ns."""
        stalls = np.zeros(self.durations.size)
        alone, mixed = self.is_kind("prefill"), self.is_kind("mixed")
        stalls[alone] = self.durations[alone]
        if np.isfinite(self.decode_ns):
            stalls[mixed] = np.maximum(self.durations[mixed] - self.decode_ns, 0.0)
        return stalls

    def until(self, amounts: NDArray[np.float64] | Times, moments: Times) -> NDArray[np.float64]:
        """Return the sum of amounts of iterations up to each moment, with a share of the current one.

        Args:
            amounts: [K] of each iteration.
            moments: [N] ns.
        """
        if not self.starts.size:
            return np.zeros(moments.size)
        after = np.cumsum(amounts, dtype=np.float64)
        edges = np.column_stack([self.starts, self.starts + self.durations]).ravel()
        values = np.column_stack([after - amounts, after]).ravel()
        return np.interp(moments, np.maximum.accumulate(edges), values)

    @cached_property
    def lacks_blocks(self) -> NDArray[np.bool_]:
        """Whether requests waited for free blocks of the KV cache in each iteration."""
        return self.iterations["kv_waiting"].to_numpy() > 0

    @cached_property
    def limit(self) -> int:
        """The largest recorded number of requests in a batch; -1 where none is recorded."""
        return max(self.iterations["num_requests"].to_list(), default=-1)

    def growth(self) -> tuple[float, float] | None:
        """Return the fixed time of an iteration that decodes, and its time per request, in ms.

        A line through the medians of batches of equal size; None where there are fewer than three sizes.
        """
        decodes = self.iterations.filter((pl.col("kind") == "decode") & (pl.col("num_requests") > 0))
        sizes = (
            decodes.group_by("num_requests")
            .agg(ns=pl.col("duration_ns").median(), count=pl.len())
            .filter(pl.col("count") >= FEW)
            .sort("num_requests")
        )
        if sizes.height < 3:
            return None
        weights = np.sqrt(sizes["count"].to_numpy())
        slope, base = np.polyfit(sizes["num_requests"].to_numpy(), sizes["ns"].to_numpy(), 1, w=weights)
        return float(base) / NS_PER_MS, float(slope) / NS_PER_MS


def engines(iterations: pl.DataFrame) -> dict[int, RecordedEngine]:
    """Return the engine of each replica, by its first rank."""
    first = iterations.group_by("replica").agg(pl.col("rank").min())
    of_rank = iterations.join(first, on=["replica", "rank"]).sort("replica", "start_ns", "iteration")
    return {
        int(replica[0]): RecordedEngine(rows)
        for replica, rows in of_rank.partition_by("replica", as_dict=True, maintain_order=True).items()
    }


# Durations of requests.

PERCENTILES = (0.5, 0.9, 0.99)
MEASURES = ("ttft_ms", "tpot_ms", "queue_ms", "latency_ms")


class PercentilesDocument(DocumentPart, frozen=True):
    """One measure over the requests that have it.

    Attributes:
        requests: number of requests that have it.
        mean, p50, p90, p99: in ms.
    """

    requests: int
    mean: float
    p50: float
    p90: float
    p99: float


def durations(requests: pl.DataFrame) -> pl.DataFrame:
    """Add `ttft_ms`, `tpot_ms`, `queue_ms` and `latency_ms` to requests."""

    def between(first: str, last: str) -> pl.Expr:
        has_moments = (pl.col(first) >= 0) & (pl.col(last) >= 0)
        return pl.when(has_moments).then((pl.col(last) - pl.col(first)) / NS_PER_MS)

    after_first = pl.col("output_tokens") - 1
    return requests.with_columns(
        ttft_ms=between("arrival_ns", "first_token_ns"),
        tpot_ms=pl.when(after_first > 0).then(between("first_token_ns", "end_ns") / after_first),
        queue_ms=between("arrival_ns", "scheduled_ns"),
        latency_ms=between("arrival_ns", "end_ns"),
    )


def percentiles(timed: pl.DataFrame) -> dict[str, PercentilesDocument]:
    """Return percentiles of each measure that some request has.

    Args:
        timed: as `durations` returns it.
    """
    documents = {}
    for measure in MEASURES:
        values = timed[measure].drop_nulls()
        if values.len():
            values_at = [float(values.quantile(q, "linear") or 0.0) for q in PERCENTILES]
            documents[measure] = PercentilesDocument(
                values.len(), float(values.to_numpy().mean()), *values_at
            )
    return documents


def mean(values: pl.Series) -> float:
    """Return the mean of the values that are not null; 0 for none."""
    present = values.drop_nulls()
    return float(present.sum()) / present.len() if present.len() else 0.0


# Format of numbers in answers on servers.


def number(value: float) -> str:
    """Format a number: `0.0213`, `16.4`, `581`, `17,570`; large ones keep all digits before the point."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.6f}".rstrip("0").rstrip(".")


def counted(count: int, noun: str) -> str:
    """Format a count: `1 request`, `1,200 requests`.

    Args:
        noun: in the singular; the plural ends in s.
    """
    return f"{count:,} {noun}" + "s" * (count != 1)


# Waits of each request, where its engine's iterations are on its clock.

PARTS = ("place_ms", "kv_ms", "running_ms", "prompt_ms", "decode_ms", "stall_ms", "idle_ms")
_MOMENTS = ("arrival_ns", "first_token_ns", "end_ns")


def waits(timed: pl.DataFrame, by_replica: Mapping[int, RecordedEngine]) -> pl.DataFrame:
    """Return the requests within their engine's iterations, with `PARTS`, `stalled_by` and `evicted_ms`.

    `evicted_ms` is the part of `kv_ms` after a request had lost its blocks.

    Args:
        by_replica: engines; requests of a replica without one are left out.
    """
    by_engine = [
        _of_engine(timed.filter(pl.col("replica") == replica), engine)
        for replica, engine in by_replica.items()
        if engine.starts.size
    ]
    rows = [waited for waited in by_engine if waited.height]
    return pl.concat(rows) if rows else timed.clear().with_columns(_NO_PARTS)


_NO_PARTS = [pl.lit(None, pl.Float64).alias(name) for name in (*PARTS, "evicted_ms")] + [
    pl.lit(-1, pl.Int64).alias("stalled_by")
]


def _of_engine(requests: pl.DataFrame, engine: RecordedEngine) -> pl.DataFrame:
    begin, end = int(engine.starts[0]), int((engine.starts + engine.durations).max())
    within = pl.all_horizontal(pl.col(name) >= 0 for name in _MOMENTS)
    inside = requests.filter(
        within & (pl.col("first_token_ns") > begin) & (pl.col("end_ns") <= end + NS_PER_MS)
    )
    if inside.is_empty():
        return inside
    arrival, first, last = (inside[name].to_numpy() for name in _MOMENTS)
    scheduled = np.where(inside["scheduled_ns"] >= 0, inside["scheduled_ns"].to_numpy(), arrival)
    lacks = engine.durations * engine.lacks_blocks
    full = (engine.durations - lacks) * (engine.iterations["num_requests"].to_numpy() >= max(engine.limit, 1))
    place, blocks = (engine.until(step, scheduled) - engine.until(step, arrival) for step in (full, lacks))
    busy = engine.until(engine.durations, last) - engine.until(engine.durations, first)
    stall = engine.until(engine.stalls, last) - engine.until(engine.stalls, first)
    evicted = inside["evicted_ns"].clip(0).to_numpy()
    late = np.minimum(evicted, last - first)  # of tokens after the first
    early = np.minimum(evicted - late, first - scheduled)
    rest = 1.0 - late / np.maximum(last - first, 1)
    parts = {
        "place_ms": place,
        "kv_ms": blocks + late + early,
        "running_ms": scheduled - arrival - place - blocks,
        "prompt_ms": first - scheduled - early,
        "decode_ms": (busy - stall) * rest,
        "stall_ms": stall * rest,
        "idle_ms": (last - first - busy) * rest,
        "evicted_ms": late + early,
    }
    columns = [pl.Series(name, values / NS_PER_MS) for name, values in parts.items()]
    return inside.with_columns(*columns, pl.Series("stalled_by", _stalled_by(inside, engine), pl.Int64))


def _stalled_by(requests: pl.DataFrame, engine: RecordedEngine) -> list[int]:
    """Return the request begun in the iteration that stalled each request most; -1 for none."""
    stalling_iterations = np.flatnonzero(engine.is_kind(*WITH_PROMPTS) & (engine.stalls > 0))
    starts, stalls = engine.starts[stalling_iterations], engine.stalls[stalling_iterations]
    begun = requests.filter(pl.col("scheduled_ns") >= 0).sort("scheduled_ns")
    moments, numbers = begun["scheduled_ns"].to_numpy(), begun["request"].to_numpy()
    stalling = []
    for first, last in requests.select("first_token_ns", "end_ns").iter_rows():
        low, high = np.searchsorted(starts, (first, last))
        if low == high or not moments.size:
            stalling.append(-1)
            continue
        worst = int(starts[low + int(np.argmax(stalls[low:high]))])
        place = int(np.searchsorted(moments, worst, side="right")) - 1
        stalling.append(int(numbers[place]) if place >= 0 else -1)
    return stalling
