"""The timeline as a figure, for reports and notebooks: measured, replayed, and the critical path.

Takes a replayed graph; returns the rows and segments of a time range, and a Plotly figure of them with one
trace per kind of work, whose segments are separated by gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.dashboards.links import Link
from dpro.dashboards.theme import SPAN_LOOKS, colour, plain, styled
from dpro.dashboards.timeline.detail import PIXELS, DetailLevel, Segments, levels, segments, select_spans
from dpro.dashboards.timeline.lanes import KINDS, SIDES
from dpro.timelines.slices import CRITICAL, MEASURED, PATHS, REPLAYED
from dpro.units import NS_PER_MS

BESIDE = 0.3  # share of the visible range drawn on either side of it, for panning
MAX_ROWS = 160  # in one figure
_STEP_LABELS = 60
_ROW, _BAR, _PATH = 17, 10, 3  # pixels: distance of rows, height of a bar, height of the critical path's mark
_BETWEEN_RANKS = 0.5  # rows
_HAIRLINE = 3  # pixels: from this length on, segments end a little before the next one


class FigureRows(NamedTuple):
    """The rows of the figure, from top to bottom.

    Attributes:
        tracks: [R] index into the tracks.
        height: [R] position on the y axis, from 0 downwards.
        labels: [R] text beside the row, escaped.
        left_out: number of tracks without room.
    """

    tracks: list[int]
    height: list[float]
    labels: list[str]
    left_out: int


def row_info(tracks: Tracks, link: Link) -> FigureRows:
    """Return the tracks that a link selects: the critical path at measured times, then rank by rank."""
    asked = link.options.get("show", MEASURED)
    side = asked if asked in SIDES else MEASURED
    selected: list[int] = []
    height: list[float] = []
    labels: list[str] = []
    before, y = None, 0.0
    for number, (group, track, rank) in enumerate(tracks.tracks.iter_rows()):
        path = group in PATHS.values()
        of_side = REPLAYED if group == PATHS[REPLAYED] or group.endswith(REPLAYED) else MEASURED
        wanted = side in ("both", of_side)
        if not wanted or not (path or not link.ranks or rank in link.ranks):
            continue
        lane = (path, -1 if path else rank)
        y -= 1 + (_BETWEEN_RANKS if before is not None and lane != before else 0)
        replayed = f" ({REPLAYED})" if side == "both" and of_side == REPLAYED else ""
        selected.append(number)
        height.append(y)
        labels.append(plain(f"{track if path else f'rank {rank} {track}'}{replayed}"))
        before = lane
    shown = MAX_ROWS
    return FigureRows(selected[:shown], height[:shown], labels[:shown], max(len(selected) - shown, 0))


def extent_info(steps: pl.DataFrame, link: Link, everything: tuple[int, int]) -> tuple[float, float]:
    """Return from and to, in ms: the link's extent with some margin, else the extent of all slices.

    Args:
        steps: as from `step_info`.
        everything: first start and last end of all slices, ns.
    """
    begin, end = link.extent_ms(steps) or tuple(ns / NS_PER_MS for ns in everything)
    room = 0.0 if link.time_ms is not None else max(end - begin, 1e-3) / 100
    return begin - room, end + room


def timeline_info(
    tracks: Tracks, rows: FigureRows, begin_ms: float, end_ms: float
) -> tuple[Segments, Segments]:
    """Return segments of all work, and of the critical path, between two times and a little beyond.

    Args:
        begin_ms, end_ms: the visible range, ms since the first span.
    """
    beside = (end_ms - begin_ms) * BESIDE
    low, high = (round(ms * NS_PER_MS) for ms in (begin_ms - beside, end_ms + beside))
    pixel_ns = max((end_ms - begin_ms) * NS_PER_MS / PIXELS, 1.0)
    everything = segments_of(tracks, rows.tracks, low, high, pixel_ns)
    return everything, segments_of(tracks, rows.tracks, low, high, pixel_ns, critical=True)


def timeline_figure(
    rows: FigureRows,
    drawn: tuple[Segments, Segments],
    steps: pl.DataFrame,
    extent: tuple[float, float],
    link: Link,
) -> go.Figure:
    """Draw bars for segments, a thin line below those on the critical path, and steps.

    Args:
        drawn: as from `timeline_info`.
        steps: as from `step_info`.
        extent: from and to, ms.
    """
    everything, path = drawn
    heights = np.array(rows.height)
    pixel_ns = (extent[1] - extent[0]) * NS_PER_MS / PIXELS
    figure = go.Figure()
    line = {"mode": "lines", "hoverinfo": "skip", "connectgaps": False}
    for kind, (what, title) in SPAN_LOOKS.items():
        of_kind = everything.kind == KINDS.index(kind)
        if of_kind.any():
            x, y = _lines(everything, heights, of_kind, 0.0, pixel_ns)
            style = {"color": colour(what, link.theme), "width": _BAR}
            figure.add_scattergl(x=x, y=y, name=title, line=style, **line)
    x, y = _lines(path, heights, np.ones(path.row.size, bool), -(_BAR + _PATH) / 2 / _ROW, pixel_ns)
    figure.add_scattergl(
        x=x, y=y, name=CRITICAL, line={"color": colour("ink", link.theme), "width": _PATH}, **line
    )
    _mark_steps(figure, steps, extent, link.theme)
    height = round(_ROW * (1 - (rows.height[-1] if rows.height else 0))) + 90
    styled(figure, link.theme, height=max(height, 200))
    figure.update_xaxes(
        title_text="ms since the first span", range=list(extent), autorange=False, zeroline=False
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=rows.height,
        ticktext=rows.labels,
        range=[(rows.height[-1] if rows.height else 0) - 1, 0],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    return figure.update_layout(uirevision=link.query(), dragmode="zoom", hovermode=False, showlegend=False)


def _lines(drawn: Segments, heights: Any, which: Any, below: float, pixel_ns: float) -> tuple[Any, Any]:
    """Return x (ms) and y of segments as begin, end, gap; long ones end a hairline before the next begins."""
    start, end = drawn.start[which], drawn.end[which]
    x = np.full((start.size, 3), np.nan)
    x[:, 0] = start / NS_PER_MS
    x[:, 1] = np.where(end - start >= _HAIRLINE * pixel_ns, end - pixel_ns / 2, end) / NS_PER_MS
    y = np.repeat((heights[drawn.row[which]] + below).astype(np.float32), 3)
    return x.ravel(), y


def _mark_steps(figure: go.Figure, steps: pl.DataFrame, extent: tuple[float, float], theme: str) -> None:
    """Draw a line where each step begins and ends, with its number above."""
    seen = steps.filter((pl.col("end_ms") > extent[0]) & (pl.col("begin_ms") < extent[1]))
    if seen.height > _STEP_LABELS:
        return
    edge = {"color": colour("soft", theme), "width": 1, "dash": "dot"}
    lines: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for _, step, begin, end in seen.select("window", "step", "begin_ms", "end_ms").iter_rows():
        line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": edge, "layer": "below"}
        lines += [line | {"x0": x, "x1": x} for x in (begin, end)]
        middle = (max(begin, extent[0]) + min(end, extent[1])) / 2
        above = {"x": middle, "yref": "paper", "y": 1, "yanchor": "bottom", "text": f"step {step}"}
        labels.append(above | {"showarrow": False, "font": {"size": 11, "color": edge["color"]}})
    figure.update_layout(shapes=lines, annotations=labels)  # each single addition would copy all others


def drawn_timeline(tracks: Tracks, steps: pl.DataFrame, link: Link) -> go.Figure:
    """Draw the figure of a selection."""
    everything = (int(tracks.start.min()), int(tracks.end.max())) if tracks.start.size else (0, NS_PER_MS)
    rows, extent = row_info(tracks, link), extent_info(steps, link, everything)
    return timeline_figure(rows, timeline_info(tracks, rows, *extent), steps, extent, link)


# Slices of a replayed graph as arrays.

MAX_SEGMENTS = 16_000  # in a figure


@dataclass(frozen=True)
class Tracks:
    """All slices, track by track; those of a track never overlap.

    Attributes:
        tracks: `group`, `track`, `rank`, in display order.
        first: [T + 1] slices of track i are first[i]:first[i + 1].
        start, end: [N] ns, ascending within a track.
        kind: [N] index into `KINDS`.
        whole, path: levels of all slices, and of those on the critical path, the coarsest first.
    """

    tracks: pl.DataFrame
    first: Ints
    start: Ints
    end: Ints
    kind: Ints
    whole: Sequence[DetailLevel] = ()
    path: Sequence[DetailLevel] = ()


def make_tracks(rows: pl.DataFrame, origin_ns: int) -> Tracks:
    """Put slices into arrays.

    Args:
        rows: as from `dpro.timelines.slices.slices`.
    """
    tracks = rows.group_by("group", "track", maintain_order=True).agg(pl.col("rank").first(), pl.len())
    first = np.concatenate([[0], np.cumsum(tracks["len"].to_numpy())]).astype(np.int64)
    kind = pl.col("kind").replace_strict(KINDS, range(len(KINDS)), default=0, return_dtype=pl.Int64)
    start, end = (rows[name].to_numpy() - origin_ns for name in ("start_ns", "end_ns"))
    kinds = rows.select(kind).to_series().to_numpy()
    critical: NDArray[np.bool_] = rows["critical"].to_numpy()
    everything = DetailLevel(0.0, first, start, end, kinds)
    length = int(end.max() - start.min()) if start.size else 0
    whole, path = levels(everything, length), levels(select_spans(everything, critical), length)
    return Tracks(tracks.drop("len"), first, start, end, kinds, whole, path)


def segments_of(
    tracks: Tracks, rows: Sequence[int], begin: int, end: int, pixel_ns: float, *, critical: bool = False
) -> Segments:
    """Compute the segments of some tracks between two times.

    Args:
        begin, end: ns.
    """
    detail = tracks.path if critical else tracks.whole
    return segments(detail, rows, begin, end, pixel_ns, MAX_SEGMENTS)
