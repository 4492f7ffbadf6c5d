"""What an engine did from when to when.

In: rows of `iterations`. Out: those of one rank of each replica, whose clock its requests are on; how much
time of each kind there is between two moments; what decoding takes by the size of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.units import NS_PER_MS

Times = NDArray[np.int64]
FEW = 5  # iterations that a typical one needs
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
        """When each began."""
        return self.iterations["start_ns"].to_numpy()

    @cached_property
    def durations(self) -> Times:
        """How long each took."""
        return self.iterations["duration_ns"].clip(0).to_numpy()

    @cached_property
    def decode_ns(self) -> float:
        """A typical iteration that only decodes; NaN where there are few."""
        decodes = self.durations[self.is_kind("decode")]
        return float(np.median(decodes)) if decodes.size >= FEW else float("nan")

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Which iterations are of one of these kinds."""
        return self.iterations["kind"].cast(pl.String).is_in(kinds).to_numpy()

    @cached_property
    def stalls(self) -> NDArray[np.float64]:
        """How much longer each took, for prompts in it, than an iteration that only decodes; ns."""
        stalls = np.zeros(self.durations.size)
        alone, mixed = self.is_kind("prefill"), self.is_kind("mixed")
        stalls[alone] = self.durations[alone]
        if np.isfinite(self.decode_ns):
            stalls[mixed] = np.maximum(self.durations[mixed] - self.decode_ns, 0.0)
        return stalls

    def until(self, amounts: NDArray[np.float64] | Times, moments: Times) -> NDArray[np.float64]:
        """The sum of what iterations hold until some moments; a part of one counts in proportion.

        Args:
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
        """In which iterations requests waited since no blocks of the KV cache were free."""
        return self.iterations["kv_waiting"].to_numpy() > 0

    @cached_property
    def limit(self) -> int:
        """The most requests that a batch held; -1 where no batch says."""
        return max(self.iterations["num_requests"].to_list(), default=-1)

    def growth(self) -> tuple[float, float] | None:
        """What an iteration that decodes takes by itself, and for each request more, in ms.

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
    """The engine of each replica, by its first rank.

    Args:
        iterations: rows of `iterations`.
    """
    first = iterations.group_by("replica").agg(pl.col("rank").min())
    own = iterations.join(first, on=["replica", "rank"]).sort("replica", "start_ns", "iteration")
    return {
        int(replica[0]): RecordedEngine(rows)
        for replica, rows in own.partition_by("replica", as_dict=True, maintain_order=True).items()
    }
