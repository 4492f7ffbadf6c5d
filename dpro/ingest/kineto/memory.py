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
        on_cpu = kind == _CPU
        wide = pl.DataFrame(
            {
                "on_cpu": on_cpu,
                "number": np.where(on_cpu, -1, number),
                "time_ns": time + base_ns,
                ALLOCATED: allocated,
                RESERVED: reserved,
            }
        )
        devices = {
            "" if is_cpu else f"gpu {device}": events.sort("time_ns", maintain_order=True)
            for (is_cpu, device), events in wide.partition_by("on_cpu", "number", as_dict=True).items()
        }
        changes = [
            _changes(events, device, counter)
            for device, events in sorted(devices.items())
            for counter in ([ALLOCATED, RESERVED] if device else [ALLOCATED])  # a CPU's allocator holds none
        ]
        return pl.concat([pl.DataFrame(schema=_COLUMNS), *changes])


def _changes(events: pl.DataFrame, device: str, counter: str) -> pl.DataFrame:
    value = pl.col(counter)
    return events.filter(value.ne_missing(value.shift(1))).select(
        device=pl.lit(device),
        counter=pl.lit(counter),
        time_ns="time_ns",
        value=value.cast(pl.Float64),
    )
