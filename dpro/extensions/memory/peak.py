"""Memory of a GPU at its peak, by origin, and origins that grow from step to step.

Takes a `DeviceMemory`; returns bytes and blocks by origin. Of equal peaks, the first counts. Memory that was
freed before the history began is unknown, and never counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.extensions.memory.snapshot import DeviceMemory, Origin

MIN_UPDATES = 4  # three increases in a row happen by chance once in 24 times
MIN_GROWTH = 1 << 20  # bytes over the history: less does not fill a GPU


class Held(DocumentPart, frozen=True):
    """Memory of one origin.

    Attributes:
        origin: the origin.
        bytes: bytes requested for tensors.
        blocks: number of allocations.
    """

    origin: Origin
    bytes: int
    blocks: int


@dataclass(frozen=True)
class Peak:
    """The peak of allocated memory.

    Attributes:
        event: event of the history that reached the peak; -1 if it was before the history.
        bytes: bytes allocated at the peak.
        end_bytes: bytes allocated at the end.
        held: memory at the peak by origin, the largest first.
    """

    event: int
    bytes: int
    end_bytes: int
    held: Sequence[Held]


class GrowingOrigin(DocumentPart, frozen=True):
    """An origin whose memory grows with each step.

    Attributes:
        origin: the origin.
        bytes_per_step: mean growth per step.
        steps: number of steps over which it grew.
    """

    origin: Origin
    bytes_per_step: float
    steps: int


def find_peak(memory: DeviceMemory) -> Peak:
    """Return the peak of allocated memory, with its memory by origin."""
    first, until, sizes = (memory.allocations[name].to_numpy() for name in ("first", "until", "bytes"))
    changes = np.zeros(memory.num_events + 2, np.int64)  # before the history, by its events, after it
    np.add.at(changes, first + 1, sizes)
    np.subtract.at(changes, until + 1, sizes)
    changes[-1] = 0  # blocks live at the end are not freed
    allocated = np.cumsum(changes)
    event = int(allocated.argmax()) - 1
    return Peak(event, int(allocated[event + 1]), int(allocated[-1]), held_at(memory, event))


def held_at(memory: DeviceMemory, event: int) -> list[Held]:
    """Return memory right after an event by origin, the largest first.

    Args:
        event: number of the event; -1 for the time before the first.
    """
    by_origin = memory.allocated_after(event).group_by("origin").agg(pl.col("bytes").sum(), pl.len())
    rows = by_origin.sort("bytes", "origin", descending=[True, False]).iter_rows()
    return [Held(memory.origins[origin], size, blocks) for origin, size, blocks in rows]


def find_growth(memory: DeviceMemory) -> list[GrowingOrigin]:
    """Return the origins whose memory grows from each optimizer update to the next, the fastest first.

    Empty if the history has fewer than `MIN_UPDATES` updates.
    """
    updates = memory.updates
    if len(updates) < MIN_UPDATES:
        return []
    held = [{one.origin: one.bytes for one in held_at(memory, event)} for event in updates]
    steps = len(updates) - 1
    growing = []
    for origin, last in held[-1].items():
        sizes = [by_origin.get(origin, 0) for by_origin in held]
        if all(before < after for before, after in pairwise(sizes)) and last - sizes[0] >= MIN_GROWTH:
            growing.append(GrowingOrigin(origin, (last - sizes[0]) / steps, steps))
    return sorted(growing, key=lambda one: -one.bytes_per_step)
