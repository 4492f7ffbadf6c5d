"""What held a GPU's memory when most of it was allocated, and what grows from step to step.

In: a `DeviceMemory`. Out: bytes and blocks by origin. Of equal peaks the first counts; what was allocated and
freed before the history is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.extensions.memory.snapshot import DeviceMemory, Origin

MIN_UPDATES = 4  # what grows three times in a row does so once in 24 by chance
MIN_GROWTH = 1 << 20  # bytes in the history: less fills no memory


class Held(DocumentPart, frozen=True):
    """What one origin holds.

    Attributes:
        origin: of it.
        bytes: that tensors asked for.
        blocks: how many allocations.
    """

    origin: Origin
    bytes: int
    blocks: int


@dataclass(frozen=True)
class Peak:
    """When most was allocated.

    Attributes:
        event: of the history; -1 where that is what was there before it.
        bytes: allocated then.
        end_bytes: allocated at the end.
        held: by origin, largest first.
    """

    event: int
    bytes: int
    end_bytes: int
    held: Sequence[Held]


class GrowingOrigin(DocumentPart, frozen=True):
    """What one origin holds more of after each step.

    Attributes:
        origin: of it.
        bytes_per_step: by which it grows, the mean.
        steps: over which it was seen to grow.
    """

    origin: Origin
    bytes_per_step: float
    steps: int


def find_peak(memory: DeviceMemory) -> Peak:
    """When most was allocated, and what held it."""
    first, until, sizes = (memory.allocations[name].to_numpy() for name in ("first", "until", "bytes"))
    changes = np.zeros(memory.num_events + 2, np.int64)  # before the history, by its events, after it
    np.add.at(changes, first + 1, sizes)
    np.subtract.at(changes, until + 1, sizes)
    changes[-1] = 0  # what is there at the end stays
    allocated = np.cumsum(changes)
    event = int(allocated.argmax()) - 1
    return Peak(event, int(allocated[event + 1]), int(allocated[-1]), held_at(memory, event))


def held_at(memory: DeviceMemory, event: int) -> list[Held]:
    """What is allocated right after an event, by origin, largest first.

    Args:
        event: -1 before all of them.
    """
    by_origin = memory.allocated_after(event).group_by("origin").agg(pl.col("bytes").sum(), pl.len())
    rows = by_origin.sort("bytes", "origin", descending=[True, False]).iter_rows()
    return [Held(memory.origins[origin], size, blocks) for origin, size, blocks in rows]


def find_growth(memory: DeviceMemory) -> list[GrowingOrigin]:
    """Origins that hold more after each update of the optimizer than after the one before; fastest first.

    None where fewer than four updates are in the history.
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
