"""The slices of a replayed graph in arrays, for the timeline as a figure.

In: slices as viewers of timelines get them. Out: `Tracks`, and what of them to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.dashboards.timeline.detail import DetailLevel, Segments, chosen, levels, segments
from dpro.dashboards.timeline.lanes import KINDS

MAX_SEGMENTS = 16_000  # of a figure


@dataclass(frozen=True)
class Tracks:
    """All slices, track by track; those of a track never overlap.

    Attributes:
        tracks: `group`, `track`, `rank`, in the order in which they are shown.
        first: [T + 1] slices of track i are first[i]:first[i + 1].
        start, end: [N] ns, ascending within a track.
        kind: [N] index into `KINDS`.
        later: [N] ns by which the replay begins it later than it was measured.
        whole, path: all slices, and those on the critical path, the coarsest level first.
    """

    tracks: pl.DataFrame
    first: Ints
    start: Ints
    end: Ints
    kind: Ints
    later: Ints
    whole: Sequence[DetailLevel] = ()
    path: Sequence[DetailLevel] = ()

    @cached_property
    def kinds(self) -> list[int]:
        """Which kinds there are."""
        return [int(kind) for kind in np.unique(self.kind)]


def make_tracks(rows: pl.DataFrame, origin_ns: int) -> Tracks:
    """Put slices into arrays.

    Args:
        rows: as from `dpro.export.slices.slices`.
    """
    tracks = rows.group_by("group", "track", maintain_order=True).agg(pl.col("rank").first(), pl.len())
    first = np.concatenate([[0], np.cumsum(tracks["len"].to_numpy())]).astype(np.int64)
    kind = pl.col("kind").replace_strict(KINDS, range(len(KINDS)), default=0, return_dtype=pl.Int64)
    start, end = (rows[name].to_numpy() - origin_ns for name in ("start_ns", "end_ns"))
    kinds = rows.select(kind).to_series().to_numpy()
    critical: NDArray[np.bool_] = rows["critical"].to_numpy()
    everything = DetailLevel(0.0, first, start, end, kinds)
    length = int(end.max() - start.min()) if start.size else 0
    whole, path = levels(everything, length), levels(chosen(everything, critical), length)
    return Tracks(tracks.drop("len"), first, start, end, kinds, rows["later_ns"].to_numpy(), whole, path)


def segments_of(
    tracks: Tracks, rows: Sequence[int], begin: int, end: int, pixel_ns: float, *, critical: bool = False
) -> Segments:
    """Compute the segments of some tracks between two times.

    Args:
        begin, end: ns.
        critical: only what is on the critical path.
    """
    known = tracks.path if critical else tracks.whole
    return segments(known, rows, begin, end, pixel_ns, MAX_SEGMENTS)
