"""What of a timeline a screen can show: spans as wide as a pixel or wider, and the rest merged per lane.

In: slices, a stretch of time, and how many pixels it has. Out: segments. Wherever one looks there are at most
as many as a browser draws at once; a closer look at a shorter stretch shows what was merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Kinds of slices, as `dpro.export.slices` has them; what else there may be is drawn like operators.
KINDS = ("cpu", "runtime", "host", "gap", "kernel", "copy", "transfer", "wait", "delay")
MOST_SEGMENTS = 16_000
_HAIRLINE = 3  # spans of so many pixels keep a gap before the next one


@dataclass(frozen=True)
class Tracks:
    """All slices, track by track; those of a track never overlap.

    Attributes:
        tracks: `group`, `track`, `rank`, in the order in which they are shown.
        first: [T + 1] slices of track i are first[i]:first[i + 1].
        start, end: [N] ns, ascending within a track.
        kind: [N] index into `KINDS`.
        node: [N] node of the graph.
        critical: [N] on the critical path.
    """

    tracks: pl.DataFrame
    first: Ints
    start: Ints
    end: Ints
    kind: Ints
    node: Ints
    critical: NDArray[np.bool_]

    def seen(self, track: int, begin: int, end: int) -> slice:
        """Which slices of a track touch a stretch of time."""
        low, high = int(self.first[track]), int(self.first[track + 1])
        return slice(
            low + int(np.searchsorted(self.end[low:high], begin, "right")),
            low + int(np.searchsorted(self.start[low:high], end, "left")),
        )

    def at(self, track: int, time: int, near: int) -> int:
        """The slice of a track at a time, else the nearest one that is near, else -1."""
        seen = self.seen(track, time - near, time + near + 1)
        if seen.start >= seen.stop:
            return -1
        away = np.maximum(self.start[seen] - time, time - self.end[seen])
        longest = self.end[seen] - self.start[seen]
        nearest = np.lexsort((-longest, np.maximum(away, 0)))[0]
        return int(seen.start) + int(nearest)


@dataclass(frozen=True)
class Segments:
    """What to draw.

    Attributes:
        row: [S] index into the rows that were asked for.
        start, end: [S] ns.
        kind: [S] index into `KINDS`; of merged slices the one that takes most of their time.
        merged: how many slices are not drawn by themselves.
    """

    row: Ints
    start: Ints
    end: Ints
    kind: Ints
    merged: int


def make_tracks(rows: pl.DataFrame, origin_ns: int) -> Tracks:
    """Put slices into arrays.

    Args:
        rows: as from `dpro.export.slices.slices`.
        origin_ns: subtracted from all times.
    """
    tracks = rows.group_by("group", "track", maintain_order=True).agg(pl.col("rank").first(), pl.len())
    first = np.concatenate([[0], np.cumsum(tracks["len"].to_numpy())]).astype(np.int64)
    kind = pl.col("kind").replace_strict(KINDS, range(len(KINDS)), default=0, return_dtype=pl.Int64)
    return Tracks(
        tracks.drop("len"),
        first,
        rows["start_ns"].to_numpy() - origin_ns,
        rows["end_ns"].to_numpy() - origin_ns,
        rows.select(kind).to_series().to_numpy(),
        rows["node"].to_numpy(),
        rows["critical"].to_numpy(),
    )


def segments(
    tracks: Tracks,
    rows: Sequence[int],
    begin: int,
    end: int,
    pixel_ns: float,
    *,
    critical: bool = False,
    most: int = MOST_SEGMENTS,
) -> Segments:
    """What to draw of some tracks between two times.

    Args:
        tracks: all there are.
        rows: those to draw.
        begin, end: ns.
        pixel_ns: what is shorter is merged with its neighbours on the same pixel.
        critical: only what is on the critical path.
        most: segments; where there are more, pixels are taken to be larger.
    """
    seen = [tracks.seen(track, begin, end) for track in rows]
    row = np.repeat(np.arange(len(rows)), [each.stop - each.start for each in seen])
    chosen = np.concatenate([np.arange(each.start, each.stop) for each in seen] or [np.empty(0, np.int64)])
    if critical:
        on_path = tracks.critical[chosen]
        row, chosen = row[on_path], chosen[on_path]
    start, stop, kind = tracks.start[chosen], tracks.end[chosen], tracks.kind[chosen]
    while True:
        drawn = _at_scale(row, start, stop, kind, begin, pixel_ns)
        if drawn.row.size <= most:
            return drawn
        pixel_ns *= 2


def _at_scale(row: Ints, start: Ints, end: Ints, kind: Ints, begin: int, pixel_ns: float) -> Segments:
    wide = end - start >= pixel_ns
    shown_end = np.where(end - start >= _HAIRLINE * pixel_ns, end - pixel_ns / 2, end).astype(np.int64)
    small = _merged(row[~wide], start[~wide], end[~wide], kind[~wide], begin, pixel_ns)
    return Segments(
        np.concatenate([row[wide], small.row]),
        np.concatenate([start[wide], small.start]),
        np.concatenate([shown_end[wide], small.end]),
        np.concatenate([kind[wide], small.kind]),
        small.merged,
    )


def _merged(row: Ints, start: Ints, end: Ints, kind: Ints, begin: int, pixel_ns: float) -> Segments:
    """Slices that begin on the same pixel of a row as one, and neighbouring pixels of one kind as one."""
    if not row.size:
        return Segments(row, start, end, kind, 0)
    pixel = ((start - begin) // pixel_ns).astype(np.int64)
    new = np.flatnonzero(np.r_[True, (np.diff(row) != 0) | (np.diff(pixel) != 0)])
    length = end - start
    times = [np.add.reduceat(np.where(kind == each, length, 0), new) for each in range(len(KINDS))]
    most = np.argmax(times, axis=0)
    row, pixel, start, end = row[new], pixel[new], start[new], np.maximum.reduceat(end, new)
    apart = (np.diff(row) != 0) | (np.diff(pixel) > 1) | (np.diff(most) != 0)
    joined = np.flatnonzero(np.r_[True, apart])
    last = np.r_[joined[1:], row.size] - 1
    begins = start[joined]
    ends = np.maximum(end[last], begins + int(pixel_ns))  # what is there shows
    return Segments(row[joined], begins, ends, most[joined], int(length.size))
