"""Sampled counters beside the lanes: clocks, power and memory of GPUs, and bytes of ports.

Takes tables `counters` and `workers`, and the clock of the lanes; returns one `CounterTrack` per series.
Other counters are in the telemetry view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.dashboards.timeline.measured import Clocked
from dpro.timelines.counters import readable_unit, sampled_counters

_SHOWN = r"clock_mhz$|^power_w$|^memory_used_bytes$|^(nvlink_)?[tr]x_bytes/s$"


@dataclass(frozen=True)
class CounterTrack:
    """One series; a value is valid until the next one.

    Attributes:
        rank: the first rank on the sampled GPU; -1 for a host's counter.
        label: such as `power`, `vm eth0 sent`.
        unit: of the values.
        start: [N] ns since the timeline's origin, ascending.
        value: [N].
    """

    rank: int
    label: str
    unit: str
    start: Ints
    value: NDArray[np.float64]

    def within(self, begin: int, end: int) -> tuple[Ints, NDArray[np.float64]]:
        """Return times and values between two times; the value valid at `begin` comes first, at that time."""
        low = max(int(np.searchsorted(self.start, begin, "right")) - 1, 0)
        part = slice(low, max(int(np.searchsorted(self.start, end, "left")), low))
        return np.maximum(self.start[part], begin), self.value[part]

    def totals(self, begin: int, end: int) -> tuple[float, float, float] | None:
        """Return mean over time, minimum and maximum between two times; None before the first value."""
        start, value = self.within(begin, end)
        if not value.size:
            return None
        lasts = np.diff(np.append(start, end))
        return float(np.average(value, weights=lasts)), float(value.min()), float(value.max())

    def drawn(self, begin: int, end: int, pixels: int) -> tuple[list[int], list[float]]:
        """Return times and values to draw: the first, least and largest value of each pixel."""
        start, value = self.within(begin, end)
        if value.size <= 2 * pixels:
            return start.tolist(), value.tolist()
        pixel = (start - begin) * pixels // (end - begin)
        order = np.lexsort((value, pixel))
        edges = np.flatnonzero(np.diff(pixel[order], prepend=-1))
        last = np.append(edges[1:], order.size) - 1
        kept = np.unique(
            np.concatenate([order[edges], order[last], np.flatnonzero(np.diff(pixel, prepend=-1))])
        )
        return start[kept].tolist(), value[kept].tolist()


def counter_tracks(counters: pl.DataFrame, workers: pl.DataFrame, of: Clocked) -> list[CounterTrack]:
    """Return the tracks of a run, by rank; those of hosts come last."""
    values = sampled_counters(counters, workers, of.alignment.ahead(workers))
    values = values.filter(pl.col("counter").str.contains(_SHOWN)).with_columns(
        rank=pl.col("series").str.extract(r"\brank (\d+)").cast(pl.Int64)  # the name of a series has its rank
    )
    tracks = [
        _track(rows, of.origin_ns) for rows in values.partition_by("counter", "series", maintain_order=True)
    ]
    return sorted(tracks, key=lambda track: (track.rank < 0, track.rank))


def _track(rows: pl.DataFrame, origin_ns: int) -> CounterTrack:
    first: dict[str, Any] = rows.row(0, named=True)
    scale, unit = readable_unit(float(rows["value"].abs().to_numpy().max()), first["unit"])
    rank, label = first["rank"], first["label"]
    return CounterTrack(
        -1 if rank is None else rank, label if rank is not None else f"{first['series']} {label}", unit,
        rows["time_ns"].to_numpy() - origin_ns, rows["value"].to_numpy() / scale,
    )  # fmt: skip
