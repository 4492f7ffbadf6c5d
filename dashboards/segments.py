"""What of a timeline a screen can show: spans as wide as a pixel or wider, and the rest merged per lane.

In: slices, a stretch of time, and how many pixels it has. Out: segments. Wherever one looks there are at most
as many as a browser draws at once; a closer look at a shorter stretch shows what was merged. What a look at
all of a run needs is worked out once, from coarse to fine, so that it does not take longer than a close look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints

# Kinds of slices, as `dpro.export.slices` has them; what else there may be is drawn like operators.
KINDS = ("cpu", "runtime", "host", "gap", "kernel", "copy", "transfer", "wait", "delay")
MAX_SEGMENTS = 16_000
PIXELS = 1600  # of the width of a large window
FINER = 4  # grains to a pixel, at least: so exact is what is seen of a coarser level
COARSEST = 10  # grains to a pixel of a look at all: shorter looks can still do with them
COARSER, LEVELS = 8, 3  # grains of a level to one of the next coarser; how many levels beside all slices
_HAIRLINE, _GAP = 3, 0.5  # spans of so many pixels keep a gap before the next one; how much of a pixel


@dataclass(frozen=True)
class Level:
    """Slices of all tracks, those that are narrower than a grain merged per track; none overlap.

    Attributes:
        grain_ns: what is shorter is merged; 0 where nothing is.
        first, start, end, kind: as of `Tracks`.
        count: [N] how many slices each stands for.
    """

    grain_ns: float
    first: Ints
    start: Ints
    end: Ints
    kind: Ints
    count: Ints


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
        later: [N] ns by which the replay begins it later than it was measured.
        whole, path: all slices, and those on the critical path, the coarsest level first.
    """

    tracks: pl.DataFrame
    first: Ints
    start: Ints
    end: Ints
    kind: Ints
    node: Ints
    critical: NDArray[np.bool_]
    later: Ints
    whole: Sequence[Level] = ()
    path: Sequence[Level] = ()

    def seen(self, track: int, begin: int, end: int) -> slice:
        """Which slices of a track touch a stretch of time."""
        return _seen(self.first, self.start, self.end, track, begin, end)

    @cached_property
    def kinds(self) -> list[int]:
        """Which kinds there are."""
        return [int(kind) for kind in np.unique(self.kind)]

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
        count: [S] how many slices each stands for.
        merged: how many slices are not drawn by themselves.
    """

    row: Ints
    start: Ints
    end: Ints
    kind: Ints
    count: Ints
    merged: int


def _seen(first: Ints, start: Ints, end: Ints, track: int, begin: int, stop: int) -> slice:
    low, high = int(first[track]), int(first[track + 1])
    return slice(
        low + int(np.searchsorted(end[low:high], begin, "right")),
        low + int(np.searchsorted(start[low:high], stop, "left")),
    )


def make_tracks(rows: pl.DataFrame, origin_ns: int) -> Tracks:
    """Put slices into arrays.

    Args:
        rows: as from `dpro.export.slices.slices`.
        origin_ns: subtracted from all times.
    """
    tracks = rows.group_by("group", "track", maintain_order=True).agg(pl.col("rank").first(), pl.len())
    first = np.concatenate([[0], np.cumsum(tracks["len"].to_numpy())]).astype(np.int64)
    kind = pl.col("kind").replace_strict(KINDS, range(len(KINDS)), default=0, return_dtype=pl.Int64)
    start, end = (rows[name].to_numpy() - origin_ns for name in ("start_ns", "end_ns"))
    kinds, critical = rows.select(kind).to_series().to_numpy(), rows["critical"].to_numpy()
    all_of_them = Level(0.0, first, start, end, kinds, np.ones(start.size, np.int64))
    node, later = rows["node"].to_numpy(), rows["later_ns"].to_numpy()
    whole, path = levels(all_of_them), levels(_chosen(all_of_them, critical))
    return Tracks(tracks.drop("len"), first, start, end, kinds, node, critical, later, whole, path)


def _chosen(level: Level, chosen: NDArray[np.bool_]) -> Level:
    """Some slices of a level."""
    before = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
    kept = (each[chosen] for each in (level.start, level.end, level.kind, level.count))
    return Level(level.grain_ns, before[level.first], *kept)


def levels(finest: Level) -> list[Level]:
    """Ever coarser levels, the coarsest first; only such as have far fewer slices than the next finer one."""
    found = [finest]
    length = int(finest.end.max() - finest.start.min()) if finest.start.size else 0
    for grain_ns in (length / PIXELS / COARSEST / COARSER**power for power in range(LEVELS - 1, -1, -1)):
        level = _coarser(found[0], grain_ns) if grain_ns >= 1 else finest
        if 2 * level.start.size < found[0].start.size:
            found.insert(0, level)
    return found


def _coarser(level: Level, grain_ns: float) -> Level:
    row = np.repeat(np.arange(level.first.size - 1), np.diff(level.first))
    drawn = _at_scale(row, level.start, level.end, level.kind, level.count, 0, grain_ns, 0.0)
    order = np.lexsort((drawn.start, drawn.row))
    first = np.concatenate([[0], np.cumsum(np.bincount(drawn.row, minlength=level.first.size - 1))])
    columns = (each[order] for each in (drawn.start, drawn.end, drawn.kind, drawn.count))
    return Level(grain_ns, first.astype(np.int64), *columns)


def segments(
    tracks: Tracks,
    rows: Sequence[int],
    begin: int,
    end: int,
    pixel_ns: float,
    *,
    critical: bool = False,
    most: int = MAX_SEGMENTS,
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
    known = tracks.path if critical else tracks.whole
    level = next((each for each in known if each.grain_ns * FINER <= pixel_ns), known[-1])
    seen = [_seen(level.first, level.start, level.end, track, begin, end) for track in rows]
    row = np.repeat(np.arange(len(rows)), [each.stop - each.start for each in seen])
    start, stop, kind, count = (
        np.concatenate([of[each] for each in seen] or [np.empty(0, np.int64)])
        for of in (level.start, level.end, level.kind, level.count)
    )
    while True:
        drawn = _at_scale(row, start, stop, kind, count, begin, pixel_ns, _GAP)
        if drawn.row.size <= most:
            return drawn
        pixel_ns *= 2


def _at_scale(
    row: Ints, start: Ints, end: Ints, kind: Ints, count: Ints, begin: int, pixel_ns: float, gap: float
) -> Segments:
    """What is as wide as a pixel, less a gap where there is room for one, and the rest merged."""
    wide = end - start >= pixel_ns
    shown_end = np.where(end - start >= _HAIRLINE * pixel_ns, end - gap * pixel_ns, end).astype(np.int64)
    small = _merged(row[~wide], start[~wide], end[~wide], kind[~wide], count[~wide], begin, pixel_ns)
    return Segments(
        np.concatenate([row[wide], small.row]),
        np.concatenate([start[wide], small.start]),
        np.concatenate([shown_end[wide], small.end]),
        np.concatenate([kind[wide], small.kind]),
        np.concatenate([count[wide], small.count]),
        small.merged + int(count[wide & (count > 1)].sum()),
    )


def _merged(
    row: Ints, start: Ints, end: Ints, kind: Ints, count: Ints, begin: int, pixel_ns: float
) -> Segments:
    """Slices that begin on the same pixel of a row as one, and neighbouring pixels of one kind as one."""
    if not row.size:
        return Segments(row, start, end, kind, count, 0)
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
    counts = np.add.reduceat(count, new[joined])
    return Segments(row[joined], begins, ends, most[joined], counts, int(count.sum()))
