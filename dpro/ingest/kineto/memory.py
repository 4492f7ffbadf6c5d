"""Memory events of a Kineto trace: how much its allocator had given out, and held, after each call of it.

In: decoded events, chunk by chunk. Out: rows of `counters`. Peaks are exact, since every allocation is an
event; as PyTorch counts, what was allocated before the trace began is in the totals of a GPU and not in those
of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.ingest.kineto.events import NO_ARGS, TraceEvent
from dpro.ingest.kineto.numbers import MISSING_NS, nanoseconds, whole_numbers

ALLOCATED, RESERVED = "memory_allocated_bytes", "memory_reserved_bytes"
INSTANT = "i"
NAME = "[memory]"
_CPU = 0  # PyTorch's number for that type of device
_COLUMNS = {"device": pl.String, "counter": pl.String, "time_ns": pl.Int64, "value": pl.Float64}


class Memory:
    """Memory events that were added.

    Attributes:
        without_total: number of events that state an allocation, but not the total in use: PyTorch before
            2022.
    """

    def __init__(self) -> None:
        """Begin without events."""
        self.without_total = 0
        self._parts: list[tuple[Ints, ...]] = []

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Take the memory events of a chunk."""
        mine = [event for event in events if event.phase == INSTANT and event.name == NAME]
        if not mine:
            return
        args = [event.args or NO_ARGS for event in mine]
        columns = [nanoseconds([event.time for event in mine])]
        columns += [
            whole_numbers(each)
            for each in (
                [a.device_type for a in args],
                [a.device_id for a in args],
                [a.allocated for a in args],
                [a.reserved for a in args],
            )
        ]
        self.add_arrays(*columns)

    def add_arrays(
        self,
        time_ns: Ints,
        kind: Ints,
        number: Ints,
        allocated: Ints,
        reserved: Ints,
    ) -> None:
        """Take memory events by columns.

        Args:
            time_ns: `[N]`, `MISSING_NS` where there is none.
            kind: `[N]` PyTorch's number of the type of device.
            number: `[N]` of the device among those of its type.
            allocated: `[N]` bytes in use; negative where the event does not say.
            reserved: `[N]` bytes that the allocator holds.
        """
        columns = time_ns, kind, number, allocated, reserved
        known = (time_ns != MISSING_NS) & (allocated >= 0)
        self.without_total += int((~known).sum())
        self._parts.append(tuple(column[known] for column in columns))

    def rows(self, base_ns: int) -> pl.DataFrame:
        """Rows of `counters`, without those that repeat the value before.

        Args:
            base_ns: what is added to every time, ns.
        """
        if not self._parts:
            return pl.DataFrame(schema=_COLUMNS)
        time, kind, number, allocated, reserved = map(np.concatenate, zip(*self._parts, strict=True))
        wide = pl.DataFrame(
            {
                "time_ns": time + base_ns,
                "kind": kind,
                "number": number,
                ALLOCATED: allocated,
                RESERVED: reserved,
            }
        ).with_columns(
            device=pl.when(pl.col("kind") == _CPU)
            .then(pl.lit(""))
            .otherwise(pl.format("gpu {}", pl.col("number")))
        )
        rows = (
            wide.unpivot([ALLOCATED, RESERVED], index=["device", "time_ns"], variable_name="counter")
            .filter((pl.col("counter") == ALLOCATED) | (pl.col("device") != ""))  # a CPU's has none
            .sort("device", "counter", "time_ns", maintain_order=True)
        )
        repeats = pl.col("value") == pl.col("value").shift(1).over("device", "counter")
        return rows.filter(~repeats.fill_null(False)).select(
            "device", "counter", "time_ns", pl.col("value").cast(pl.Float64)
        )
