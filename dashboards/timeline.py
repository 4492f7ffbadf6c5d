"""All ranks and streams on one clock: measured, replayed, and the critical path through them.

In: a replayed graph. Out: the rows and segments of a stretch of time, and a figure of them. What a click
shows of a span is in `dpro.dashboards.spans`.

The figure is drawn with WebGL, one trace per kind of work, segments separated by gaps. A zoom changes the
link, and the link is answered with segments for what is then seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Dash, Input, Output, html
from dash.development.base_component import Component
from flask import Response, jsonify, request

from dpro.dashboards import spans
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.names import plain
from dpro.dashboards.page import (
    View,
    answer,
    changes,
    choices,
    csv_link,
    graph,
    in_browser,
    message,
    panel,
    section,
)
from dpro.dashboards.segments import KINDS, PIXELS, Segments, Tracks, segments
from dpro.dashboards.shown import Shown
from dpro.dashboards.theme import colour, styled
from dpro.errors import DproError
from dpro.export.slices import CRITICAL, MEASURED, PATHS, REPLAYED, path_note
from dpro.units import NS_PER_MS

NAME = "timeline"
SIDES = {MEASURED: "measured", REPLAYED: "replayed", "both": "both"}
BESIDE = 0.3  # of what is seen is drawn on each side of it, for panning
MAX_ROWS = 160  # at once
_STEP_LABELS = 60
_ROW, _BAR, _PATH = 17, 10, 3  # pixels: distance of rows, height of a bar, of the mark of the critical path
_BETWEEN_RANKS = 0.5  # rows
_LOOKS = {  # kind -> colour and what the legend calls it
    "kernel": ("compute", "kernel"),
    "transfer": ("exposed_comm", "transfer of a collective"),
    "wait": ("wait", "wait for others in it"),
    "copy": ("copy", "copy"),
    "cpu": ("cpu", "operator"),
    "runtime": ("runtime", "GPU runtime call"),
    "host": ("host_bound", "host, in no operator"),
    "gap": ("idle", "in no span"),
    "delay": ("idle", "late launch"),
}


class Rows(NamedTuple):
    """What is shown, from top to bottom.

    Attributes:
        tracks: [R] index into the tracks.
        height: [R] where each is on the y axis, from 0 downwards.
        labels: [R] text beside it, safe to be shown.
        left_out: how many tracks there is no room for.
    """

    tracks: list[int]
    height: list[float]
    labels: list[str]
    left_out: int


def row_info(tracks: Tracks, link: Link) -> Rows:
    """The tracks that a link selects: the critical path, at the times of the lanes, then rank by rank."""
    asked = link.own.get("show", MEASURED)
    side = asked if asked in SIDES else MEASURED
    found: list[int] = []
    height: list[float] = []
    labels: list[str] = []
    before, at = None, 0.0
    for number, (group, track, rank) in enumerate(tracks.tracks.iter_rows()):
        path = group in PATHS.values()
        of_side = REPLAYED if group == PATHS[REPLAYED] or group.endswith(REPLAYED) else MEASURED
        wanted = side in ("both", of_side)
        if not wanted or not (path or not link.ranks or rank in link.ranks):
            continue
        lane = (path, -1 if path else rank)
        at -= 1 + (_BETWEEN_RANKS if before is not None and lane != before else 0)
        replayed = f" ({REPLAYED})" if side == "both" and of_side == REPLAYED else ""
        found.append(number)
        height.append(at)
        labels.append(plain(f"{track if path else f'rank {rank} {track}'}{replayed}"))
        before = lane
    shown = MAX_ROWS
    return Rows(found[:shown], height[:shown], labels[:shown], max(len(found) - shown, 0))


def offset_info(tracks: Tracks) -> tuple[int, int]:
    """The least and the most by which the replay begins spans of the critical path later than measured, ns.

    Less than 0 is sooner.
    """
    (measured,) = np.nonzero(tracks.tracks["group"].to_numpy() == CRITICAL)
    later = [tracks.later[tracks.first[track] : tracks.first[track + 1]] for track in measured.tolist()]
    of_path = np.concatenate([*later, np.empty(0, np.int64)])
    return (int(of_path.min()), int(of_path.max())) if of_path.size else (0, 0)


def extent_info(steps: pl.DataFrame, link: Link, everything: tuple[int, int]) -> tuple[float, float]:
    """From and to, ms: what the link says, else the selected steps, else the first deep window.

    Args:
        steps: as from `step_info`.
        link: the selection.
        everything: first start and last end of all slices, ns.
    """
    if link.time_ms is not None:
        return link.time_ms
    chosen = link.chosen(steps)
    if link.steps is None and not chosen.is_empty():
        chosen = chosen.filter(pl.col("window") == chosen["window"].min())
    if chosen.is_empty():
        begin, end = (ns / NS_PER_MS for ns in everything)
    else:
        begin, end = float(chosen["begin_ms"].to_numpy().min()), float(chosen["end_ms"].to_numpy().max())
    room = max(end - begin, 1e-3) / 100
    return begin - room, end + room


def timeline_info(tracks: Tracks, rows: Rows, begin_ms: float, end_ms: float) -> tuple[Segments, Segments]:
    """Segments of all, and of the critical path, between two times and a little beyond."""
    beside = (end_ms - begin_ms) * BESIDE
    low, high = (round(ms * NS_PER_MS) for ms in (begin_ms - beside, end_ms + beside))
    pixel_ns = max((end_ms - begin_ms) * NS_PER_MS / PIXELS, 1.0)
    everything = segments(tracks, rows.tracks, low, high, pixel_ns)
    return everything, segments(tracks, rows.tracks, low, high, pixel_ns, critical=True)


def segment_frame(rows: Rows, drawn: Segments) -> pl.DataFrame:
    """Segments as a table: `row`, `kind`, `start_ms`, `end_ms`."""
    return pl.DataFrame(
        {
            "row": pl.Series(rows.labels, dtype=pl.String).gather(drawn.row),
            "kind": pl.Series(KINDS).gather(drawn.kind),
            "start_ms": drawn.start / NS_PER_MS,
            "end_ms": drawn.end / NS_PER_MS,
        }
    )


def timeline_figure(
    rows: Rows,
    drawn: tuple[Segments, Segments],
    steps: pl.DataFrame,
    extent: tuple[float, float],
    link: Link,
    flow: tuple[list[float], list[float]] = ([], []),
) -> go.Figure:
    """Bars for segments, a thin line below those on the critical path, and steps.

    Args:
        rows: what is shown.
        drawn: as from `timeline_info`.
        steps: as from `step_info`.
        extent: from and to, ms.
        link: for the theme.
        flow: x (ms) and y of what the chosen span waited for, and of that span.
    """
    everything, path = drawn
    heights = np.array(rows.height)
    figure = go.Figure()
    line = {"mode": "lines", "hoverinfo": "skip", "connectgaps": False}
    for kind, (what, title) in _LOOKS.items():
        mine = everything.kind == KINDS.index(kind)
        if mine.any():
            x, y = _lines(everything, heights, mine, 0.0)
            style = {"color": colour(what, link.theme), "width": _BAR}
            figure.add_scattergl(x=x, y=y, name=title, line=style, **line)
    x, y = _lines(path, heights, np.ones(path.row.size, bool), -(_BAR + _PATH) / 2 / _ROW)
    figure.add_scattergl(
        x=x, y=y, name=CRITICAL, line={"color": colour("ink", link.theme), "width": _PATH}, **line
    )
    if flow[0]:
        arrow = {"color": colour("bad", link.theme), "width": 1.5}
        marks = {"symbol": ["circle", "diamond"], "size": 7, "color": colour("bad", link.theme)}
        figure.add_scatter(
            x=flow[0],
            y=flow[1],
            mode="lines+markers",
            line=arrow,
            marker=marks,
            hoverinfo="skip",
            name="waited for",
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


def _lines(drawn: Segments, heights: Any, mine: Any, below: float) -> tuple[Any, Any]:
    """x (ms) and y of segments: begin, end, gap."""
    count = int(mine.sum())
    x = np.full((count, 3), np.nan)
    x[:, 0], x[:, 1] = drawn.start[mine] / NS_PER_MS, drawn.end[mine] / NS_PER_MS
    y = np.repeat((heights[drawn.row[mine]] + below).astype(np.float32), 3)
    return x.ravel(), y


def _mark_steps(figure: go.Figure, steps: pl.DataFrame, extent: tuple[float, float], theme: str) -> None:
    """A line where each step ends, its number above it."""
    seen = steps.filter((pl.col("end_ms") > extent[0]) & (pl.col("begin_ms") < extent[1]))
    if seen.height > _STEP_LABELS:
        return
    edge = {"color": colour("soft", theme), "width": 1, "dash": "dot"}
    lines: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for _, step, begin, end in seen.select("window", "step", "begin_ms", "end_ms").iter_rows():
        line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": edge, "layer": "below"}
        lines += [line | {"x0": at, "x1": at} for at in (begin, end)]
        middle = (max(begin, extent[0]) + min(end, extent[1])) / 2
        above = {"x": middle, "yref": "paper", "y": 1, "yanchor": "bottom", "text": f"step {step}"}
        labels.append(above | {"showarrow": False, "font": {"size": 11, "color": edge["color"]}})
    figure.update_layout(shapes=lines, annotations=labels)  # at once: one by one each would copy the others


def _shown(loaded: Loaded, link: Link) -> tuple[Rows, tuple[float, float]]:
    tracks = loaded.tracks
    everything = (int(tracks.start.min()), int(tracks.end.max())) if tracks.start.size else (0, NS_PER_MS)
    return row_info(tracks, link), extent_info(loaded.step_extents, link, everything)


def drawn_timeline(loaded: Loaded, link: Link) -> tuple[go.Figure, Component]:
    """The figure of a selection, and what is to be said below it."""
    rows, extent = _shown(loaded, link)
    drawn = timeline_info(loaded.tracks, rows, *extent)
    node = spans.chosen_node(link, loaded.timeline.graph)
    flow = spans.flow(loaded.timeline, loaded.tracks, rows.tracks, rows.height, node)
    figure = timeline_figure(rows, drawn, loaded.step_extents, extent, link, flow)
    return figure, _note(rows, drawn[0], offset_info(loaded.tracks), link)


def _note(rows: Rows, drawn: Segments, offset: tuple[int, int], link: Link) -> Component:
    said = [f"{path_note(*offset)} "]
    if drawn.merged:
        said.append(f"{drawn.merged:,} spans are narrower than a pixel and merged: zoom in to see them. ")
    if rows.left_out:
        said.append(f"{rows.left_out} more lanes are not shown: select ranks. ")
    return html.Span([*said, csv_link(NAME, "segments", link)])


def _table(loaded: Loaded, link: Link) -> pl.DataFrame:
    rows, extent = _shown(loaded, link)
    return segment_frame(rows, timeline_info(loaded.tracks, rows, *extent)[0])


def _frame(loaded: Loaded, link: Link) -> Any:
    """What belongs to the figure and not into it; once the graph is there, so is the figure."""
    if not loaded.tracks.start.size:
        return message("The run holds no spans.")
    there = {KINDS[kind] for kind in loaded.tracks.kinds}
    legend = [
        html.Span([html.I(style={"background": f"var(--{what.replace('_', '-')})"}), title])
        for kind, (what, title) in _LOOKS.items()
        if kind in there
    ]
    path = html.Span([html.I(style={"background": "var(--ink)", "height": "3px"}), "on the critical path"])
    return [choices(link, "show", SIDES, MEASURED), html.Div([*legend, path], className="keyed")]


def _facts(loaded: Loaded, link: Link) -> Any:
    node = spans.chosen_node(link, loaded.timeline.graph)
    if node < 0:
        return html.P("Click a span to see what it is and what it waited for.", className="note")
    return spans.facts_panel(loaded.timeline, node, link)


def _layout() -> Component:
    empty = styled(go.Figure(), "light", height=300)
    empty.update_xaxes(visible=False)
    empty.update_yaxes(visible=False)
    return html.Div(
        [
            panel(
                "Timeline",
                section("timeline-frame", "building and replaying the graph"),
                graph("timeline-figure", empty, zooms=True),
                html.P(id="timeline-note", className="note"),
            ),
            html.Div(panel("Span", section("timeline-facts", "waiting for the graph")), className="below"),
        ],
        className="stack",
    )


def _register(app: Dash, now: Shown) -> None:
    @app.callback(
        Output("timeline-figure", "figure"),
        Output("timeline-figure", "style"),
        Output("timeline-note", "children"),
        *changes(now),
    )
    def drawn(search: str | None, *_: Any) -> Any:
        def work(link: Link) -> Any:
            figure, note = drawn_timeline(now.loaded, link)
            return figure, {"height": f"{figure.layout.height}px"}, note

        return answer(NAME, search, work, lambda text: (go.Figure(), {"display": "none"}, message(text)))

    in_browser(app, "zoomed", Input("timeline-figure", "relayoutData"))

    @app.server.route("/span")  # type: ignore[untyped-decorator]
    def span() -> Response:
        """What is at a place of the figure: for the pointer, and for a click."""
        try:
            link, loaded = parse_link(request.query_string.decode()), now.loaded
            rows, _ = _shown(loaded, link)
            place = {name: float(request.args[name]) for name in ("x", "y", "near")}
            found = spans.at(loaded.timeline, loaded.tracks, rows.tracks, rows.height, **place)
        except (DproError, KeyError, ValueError, OverflowError):
            return jsonify(None)
        return jsonify(found)


VIEW = View(
    NAME,
    "Timeline",
    _layout,
    {"timeline-frame": _frame, "timeline-facts": _facts},
    {"segments": _table},
    _register,
)
