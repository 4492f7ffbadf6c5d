"""The view: a toolbar, the canvas that `assets/timeline*.js` draws on, and the facts of the chosen span.

In: a run. Out: panels. Its state is in the link: `time`, `span`, `area`, `find`, `colour`, `order`, `show`,
`pin`, `open` (lanes whose folding differs from the default).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from dash import Dash, dcc, html
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import (
    BY_NUMBER,
    KEY,
    View,
    changes,
    choices,
    csv_link,
    in_browser,
    orders_of,
    panel,
    section,
)
from dpro.dashboards.runs import Runs
from dpro.dashboards.timeline.detail import PIXELS, segments
from dpro.dashboards.timeline.lanes import KINDS, MEASURED, SIDES, RankLanes
from dpro.dashboards.timeline.routes import register
from dpro.units import NS_PER_MS

NAME = "timeline"
COLOURS = {"kind": "by kind", "phase": "forward / backward", "micro": "by micro-batch", "name": "by name"}
_MAX_WINDOWS = 12  # that are links; more are a list
LEGEND = {  # kind -> variable of its colour, what it is called
    "kernel": ("compute", "kernel"),
    "transfer": ("exposed-comm", "transfer of a collective"),
    "wait": ("wait", "wait for others in it"),
    "copy": ("copy", "copy"),
    "cpu": ("cpu", "operator"),
    "runtime": ("runtime", "GPU runtime call"),
    "host": ("host-bound", "range, Python"),
    "gap": ("idle", "in no span (replay)"),
    "delay": ("idle", "late launch (replay)"),
}
PHASE_LEGEND = {
    "forward": ("compute", "forward"),
    "backward": ("copy", "backward"),
    "optimizer": ("host-bound", "optimizer"),
    "unknown": ("idle", "unknown"),
}
_TABLE = {
    "rank": pl.Int64, "lane": pl.String, "row": pl.Int64, "kind": pl.String, "name": pl.String,
    "start_ms": pl.Float64, "end_ms": pl.Float64, "spans": pl.Int64, "busy_ms": pl.Float64,
}  # fmt: skip


def _tools(loaded: Loaded, link: Link) -> Any:
    """Return the choices of steps, side, colours and order; the script makes the canvas's own buttons."""
    of = loaded.measured.clocks
    orders = {BY_NUMBER: "by rank", "late": "latest first", **orders_of(loaded.mesh)}
    return html.Div(
        [
            _windows(of.steps, link),
            choices(link, "show", SIDES, MEASURED),
            choices(link, "colour", COLOURS, "kind"),
            *([choices(link, KEY, orders, BY_NUMBER)] if len(of.parts) > 1 else []),
            csv_link(NAME, "segments", link),
        ],
        className="tools",
    )


def _windows(steps: pl.DataFrame, link: Link) -> Component:
    """A link to each deep window; its steps become the selection."""
    windows = steps.group_by("window", maintain_order=True).agg(
        first=pl.col("step").min(), last=pl.col("step").max()
    )
    links = []
    for _window, first, last in windows.iter_rows():
        chosen = link.steps == ((first, last),)
        words = f"step {first}" if first == last else f"steps {first}–{last}"
        address = link.query(steps=((first, last),), time_ms=None)
        links.append(dcc.Link(words, href=address, className="choice chosen" if chosen else "choice"))
    if len(links) <= _MAX_WINDOWS:
        return html.Div(links, className="choices")
    summary = html.Summary(f"{len(links)} deep windows")
    return html.Details([summary, html.Div(links, className="choices")])


def shown_info(
    ranks: Sequence[RankLanes], names: Sequence[str], begin_ms: float, end_ms: float
) -> pl.DataFrame:
    """Segments between two times as a table.

    Args:
        begin_ms, end_ms: since the timeline's origin.
    """
    low, high = round(begin_ms * NS_PER_MS), round(end_ms * NS_PER_MS)
    frames = [pl.DataFrame(schema=_TABLE)]
    for lanes in ranks:
        rows = range(lanes.all.first.size - 1)
        visible = segments(lanes.levels, rows, low, high, max((high - low) / PIXELS, 1.0))
        lane = [n for n, one_lane in enumerate(lanes.lanes) for _ in range(*one_lane.rows)]
        labels = pl.Series([one_lane.label for one_lane in lanes.lanes], dtype=pl.String)
        places = pl.Series(lane, dtype=pl.Int64).gather(visible.row)
        texts = pl.Series(names, dtype=pl.String).gather(lanes.name[visible.item])
        depth = pl.Series(visible.row) - pl.Series(
            [one_lane.rows[0] for one_lane in lanes.lanes], dtype=pl.Int64
        ).gather(places)
        columns = {
            "rank": pl.Series([lanes.rank]).new_from_index(0, visible.row.size),
            "lane": labels.gather(places), "row": depth, "kind": pl.Series(KINDS).gather(visible.kind),
            "name": texts.set(pl.Series(visible.count > 1), ""),
            "start_ms": visible.start / NS_PER_MS, "end_ms": visible.end / NS_PER_MS, "spans": visible.count,
            "busy_ms": visible.busy / NS_PER_MS,
        }  # fmt: skip
        frames.append(pl.DataFrame(columns, schema=_TABLE))
    return pl.concat(frames)


def _segments(loaded: Loaded, link: Link) -> pl.DataFrame:
    measured, of = loaded.measured, loaded.measured.clocks
    ranks = [lanes for rank, lanes in sorted(measured.all().items()) if not link.ranks or rank in link.ranks]
    extent_ms = link.extent_ms(of.steps) or (0.0, max(of.end_ns / NS_PER_MS, 1e-3))
    return shown_info(ranks, measured.names.texts, *extent_ms)


def _legend(link: Link) -> list[Component]:
    entries = PHASE_LEGEND if link.options.get("colour") == "phase" else LEGEND
    if link.options.get("colour") in ("name", "micro"):
        return [html.Span("each its own colour")]
    return [
        html.Span([html.I(style={"background": f"var(--{what})"}), words]) for what, words in entries.values()
    ]


def _keyed(_loaded: Loaded, link: Link) -> Any:
    path = html.Span([html.I(style={"background": "var(--ink)", "height": "3px"}), "on the critical path"])
    return html.Div([*_legend(link), path], className="keyed")


def _layout() -> Component:
    return html.Div(
        [
            panel(
                "",
                section("timeline-tools", "reading steps and clocks"),
                html.Div(id="timeline", className="timeline"),
                html.Div(id="timeline-legend"),
            ),
            html.Div(id="timeline-facts", className="below"),
        ],
        className="stack",
    )


def _register(app: Dash, runs: Runs) -> None:
    register(app.server, runs)
    in_browser(app, "timeline", *changes(runs))


VIEW = View(
    NAME,
    "Timeline",
    needs.windows,
    _layout,
    {"timeline-tools": _tools, "timeline-legend": _keyed},
    {"segments": _segments},
    _register,
)
