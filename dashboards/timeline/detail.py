"""Level of detail: merges spans that are narrower than a pixel.

Takes rows of spans that do not overlap, a time range, and the duration of a pixel; returns segments. A span
of at least a pixel stays a segment, and merging preserves total busy time. Coarse levels are merged once in
advance, so that showing a whole window takes no longer than showing a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints

MAX_SEGMENTS = 24_000
PIXELS = 1600  # width of a large window
FINER = 4  # grains per pixel that a coarser level must have
COARSEST = 10  # grains per pixel with a whole window in view; shorter ranges use the level as well
COARSER, LEVELS = 8, 3  # ratio of a level's grain to the next finer one's; levels besides that of all spans
DENSITIES = 4  # shades of merged segments: how busy their pixels are


@dataclass(frozen=True)
class DetailLevel:
    """Spans row by row; in a row, spans do not overlap, and those shorter than a grain are merged.

    Attributes:
        grain_ns: spans shorter than this are merged; 0 for a level without merging.
        first: [R + 1] spans of row i are first[i]:first[i + 1].
        start, end: [N] ns, ascending within a row.
        kind: [N] small numbers.
        count: [N] number of spans merged into each; None without merging.
        busy: [N] total duration of the merged spans, ns; None without merging.
        item: [N] index of the longest merged span among all spans; None in the level of all spans.
    """

    grain_ns: float
    first: Ints
    start: Ints
    end: Ints
    kind: NDArray[Any]
    count: Ints | None = None
    busy: Ints | None = None
    item: Ints | None = None

    def seen(self, row: int, begin: int, stop: int) -> slice:
        """Return the slice of a row's spans that overlap a time range.

        Args:
            begin, stop: the half-open range, ns.
        """
        low, high = int(self.first[row]), int(self.first[row + 1])
        return slice(
            low + int(np.searchsorted(self.end[low:high], begin, "right")),
            low + int(np.searchsorted(self.start[low:high], stop, "left")),
        )


@dataclass(frozen=True)
class Segments:
    """The segments to draw.

    Attributes:
        row: [S] index into the requested rows.
        start, end: [S] ns.
        kind: [S] the kind with the most time among the merged spans.
        count: [S] number of merged spans.
        busy: [S] total duration of the merged spans, ns.
        item: [S] index of the longest merged span.
    """

    row: Ints
    start: Ints
    end: Ints
    kind: Ints
    count: Ints
    busy: Ints
    item: Ints


def select_spans(level: DetailLevel, wanted: Bools) -> DetailLevel:
    """Select spans of a level without merging.

    Args:
        wanted: [N] mask of the spans.
    """
    before = np.concatenate([[0], np.cumsum(wanted)]).astype(np.int64)
    item = np.flatnonzero(wanted)
    return DetailLevel(
        0.0, before[level.first], level.start[item], level.end[item], level.kind[item], item=item
    )


def levels(finest: DetailLevel, length_ns: int) -> list[DetailLevel]:
    """Return levels, the coarsest first, and last `finest`; each has less than half the spans of the next."""
    made = [finest]
    for grain_ns in (length_ns / PIXELS / COARSEST / COARSER**power for power in range(LEVELS - 1, -1, -1)):
        level = _coarser(made[0], grain_ns) if grain_ns >= 1 else finest
        if 2 * level.start.size < made[0].start.size:
            made.insert(0, level)
    return made


def _coarser(level: DetailLevel, grain_ns: float) -> DetailLevel:
    rows = level.first.size - 1
    whole = [slice(*ends) for ends in pairwise(level.first.tolist())]
    drawn = _at_scale(_gathered(level, range(rows), whole), 0, grain_ns)
    order = np.lexsort((drawn.start, drawn.row))
    first = np.concatenate([[0], np.cumsum(np.bincount(drawn.row, minlength=rows))]).astype(np.int64)
    kind = drawn.kind[order].astype(level.kind.dtype)
    columns = (column[order] for column in (drawn.count, drawn.busy, drawn.item))
    return DetailLevel(grain_ns, first, drawn.start[order], drawn.end[order], kind, *columns)


def segments(
    available: Sequence[DetailLevel],
    rows: Sequence[int],
    begin: int,
    end: int,
    pixel_ns: float,
    most: int = MAX_SEGMENTS,
) -> Segments:
    """Compute the segments of some rows between two times.

    Args:
        available: levels, as from `levels`.
        begin, end: ns.
        most: maximum number of segments; beyond it, pixels are made larger.
    """
    level = next((finer for finer in available if finer.grain_ns * FINER <= pixel_ns), available[-1])
    spans = _gathered(level, range(len(rows)), [level.seen(row, begin, end) for row in rows])
    while True:
        drawn = _at_scale(spans, begin, pixel_ns)
        if drawn.row.size <= most:
            return drawn
        pixel_ns *= 2


def _gathered(level: DetailLevel, rows: Sequence[int], seen: Sequence[slice]) -> Segments:
    """Concatenate slices of a level."""

    def of(column: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([column[part] for part in seen] or [column[:0]])

    row = np.repeat(np.array(rows, np.int64), [max(part.stop - part.start, 0) for part in seen])
    start, end = of(level.start), of(level.end)
    places = [np.arange(part.start, part.stop) for part in seen]
    item = np.concatenate(places or [row]) if level.item is None else of(level.item)
    count = np.ones(start.size, np.int64) if level.count is None else of(level.count)
    busy = end - start if level.busy is None else of(level.busy)
    return Segments(row, start, end, of(level.kind).astype(np.int64), count, busy, item)


def _at_scale(spans: Segments, begin: int, pixel_ns: float) -> Segments:
    """Keep spans of at least a pixel, and merge the rest."""
    wide = spans.end - spans.start >= pixel_ns
    if wide.all():
        return spans
    large, small = _picked(spans, wide), _merge(_picked(spans, ~wide), begin, pixel_ns)
    return Segments(*(np.concatenate(pair) for pair in zip(_columns(large), _columns(small), strict=True)))


def _columns(spans: Segments) -> tuple[Ints, ...]:
    return spans.row, spans.start, spans.end, spans.kind, spans.count, spans.busy, spans.item


def _picked(spans: Segments, which: Bools | Ints) -> Segments:
    return Segments(*(column[which] for column in _columns(spans)))


def _merge(spans: Segments, begin: int, pixel_ns: float) -> Segments:
    """Merge spans that begin on the same pixel of a row, then neighbours of the same kind and density."""
    pixel = ((spans.start - begin) // pixel_ns).astype(np.int64)
    new = np.flatnonzero(np.r_[True, (np.diff(spans.row) != 0) | (np.diff(pixel) != 0)])
    kinds = np.unique(spans.kind)
    times = [np.add.reduceat(np.where(spans.kind == candidate, spans.busy, 0), new) for candidate in kinds]
    kind = kinds[np.argmax(times, axis=0)]
    row, pixel, start = spans.row[new], pixel[new], spans.start[new]
    end, busy = np.maximum.reduceat(spans.end, new), np.add.reduceat(spans.busy, new)
    density = np.ceil(np.minimum(busy / pixel_ns, 1) * DENSITIES).astype(np.int64)
    changes = [np.diff(row) != 0, np.diff(pixel) > 1, np.diff(kind) != 0, np.diff(density) != 0]
    joined = np.flatnonzero(np.r_[True, np.logical_or.reduce(changes)])
    last = np.r_[joined[1:], row.size] - 1
    begins = start[joined]
    ends = np.maximum(end[last], begins + int(pixel_ns))  # at least a pixel, so that it is visible
    groups = new[joined]
    longest = spans.item[_largest(spans.busy, groups)]
    count = np.add.reduceat(spans.count, groups)
    return Segments(row[joined], begins, ends, kind[joined], count, np.add.reduceat(busy, joined), longest)


def _largest(values: Ints, groups: Ints) -> Ints:
    """Return [G] the index of each group's first maximum; `groups` has the first index of each group."""
    sizes = np.diff(np.r_[groups, values.size])
    maxima = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, groups), sizes))
    group = np.searchsorted(groups, maxima, "right")
    return maxima[np.r_[True, np.diff(group) != 0]]
