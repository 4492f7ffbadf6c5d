"""The timeline view: a toolbar, the canvas of `assets/timeline*.js`, and the facts of the chosen span.

Takes a run; returns panels. Its state is in the link: `time`, `span`, `area`, `find`, `colour`, `order`,
`show`, `tracks`, `pin`, `open` (unfolded lanes, and after a minus folded ones), and beside another run
`align`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import polars as pl
from dash import Dash, Input, dcc, html
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import (
    BY_NUMBER,
    KEY,
    View,
    choices,
    csv_link,
    in_browser,
    orders_of,
    panel,
    section,
    table,
)
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import SPAN_LOOKS, css_name, kind_words
from dpro.dashboards.timeline.beside import (
    IN_NO_OPERATOR,
    LANE_COLUMNS,
    NO_STEP,
    Beside,
    beside,
    lane_difference,
)
from dpro.dashboards.timeline.detail import PIXELS, segments
from dpro.dashboards.timeline.lanes import KINDS, MEASURED, OTHER, REPLAYED, SIDES, RankLanes
from dpro.dashboards.timeline.measured import MeasuredLanes
from dpro.dashboards.timeline.routes import register
from dpro.errors import DproError, UsageError
from dpro.units import NS_PER_MS, format_duration

NAME = "timeline"
COLOURS = {"kind": "by kind", "phase": "forward / backward", "micro": "by micro-batch", "name": "by name"}
_MAX_WINDOWS = 12  # as links; more are a list
_LISTED = 13  # rows: the step, and those that differ most; others are folded
ALONE = (
    f"Rows “{IN_NO_OPERATOR}” are time that a range has for itself: its host waits, or runs code without "
    "operators."
)
_REPLAYED = ("gap", "delay")  # kinds of replayed lanes only
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
    sides = {OTHER: f"with {link.against}", **SIDES} if link.against else SIDES
    return html.Div(
        [
            _windows(of.steps, link),
            choices(link, "show", sides, OTHER if link.against else MEASURED),
            *_alignment(loaded, link),
            choices(link, "colour", COLOURS, "kind"),
            *([choices(link, KEY, orders, BY_NUMBER)] if len(of.parts) > 1 else []),
            csv_link(NAME, "segments", link),
        ],
        className="tools",
    )


def _windows(steps: pl.DataFrame, link: Link) -> Component:
    """Return a link to each deep window, which selects its steps."""
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


def _beside(loaded: Loaded, link: Link) -> Beside | None:
    """Return the other run beside this one; None if none is shown.

    Raises:
        DproError: it cannot be opened, or a run has no such step.
    """
    other = loaded.against(link) if link.options.get("show", OTHER) == OTHER else None
    if other is None:
        return None
    return beside(loaded.measured, link.against, other.measured, link.options.get("align", ""))


def _alignment(loaded: Loaded, link: Link) -> list[Component]:
    """Return menus for the steps that begin together; the script changes the link."""
    try:
        other = _beside(loaded, link)
    except DproError:
        return []  # the timeline reports the error
    if other is None or NO_STEP in (other.here.step, other.there.step):
        return []
    here, there = _steps(loaded.measured, other.here.step), _steps(other.measured, other.there.step)
    return [html.Label([here, "begins with", there, f"of {other.name}"], className="align")]


def _steps(measured: MeasuredLanes, chosen: int) -> Component:
    steps = measured.clocks.steps["step"].unique(maintain_order=True).to_list()
    options = [html.Option(f"step {step}", value=str(step), selected=step == chosen) for step in steps]
    return html.Select(options, title="The step that begins when the other does")


def _lane_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    other = _beside(loaded, link)
    if other is None:
        raise UsageError("no other run is shown beside this one")
    times = [pl.col(name).alias(name.replace("_ns", "_ms")) / NS_PER_MS for name in LANE_COLUMNS[2:]]
    return lane_difference(loaded.measured, other).select("rank", "lane", *times)


def _differences(loaded: Loaded, link: Link) -> Any:
    """Return the busy time of lanes in the steps that begin together; empty without another run."""
    other = _beside(loaded, link)
    if other is None:
        return html.Div()
    header = ["lane", f"in {other.name}", "in this run", "difference"]
    total = other.there.end - other.there.begin, other.here.end - other.here.begin
    lines = [["the step", *map(format_duration, total), _signed(total[1] - total[0])]]
    for rank, lane, before, after, delta in lane_difference(loaded.measured, other).iter_rows():
        busy = ["" if ns is None else format_duration(ns) for ns in (before, after)]
        lines.append([f"rank {rank} {lane}", *busy, _signed(delta)])
    words = (
        f"Busy time of each lane in step {other.here.step}, and in step {other.there.step} of {other.name}"
    )
    if NO_STEP in (other.here.step, other.there.step):
        words = f"Busy time of each lane in all of this run, and in all of {other.name}"
    tables = [table(header, lines[:_LISTED])]
    if len(lines) > _LISTED:
        summary = html.Summary(f"{len(lines) - _LISTED} rows that differ less")
        tables.append(html.Details([summary, table(header, lines[_LISTED:])]))
    if any(IN_NO_OPERATOR in line[0] for line in lines):
        tables.append(html.P(ALONE, className="note"))
    return panel(words, html.Div([*tables, csv_link(NAME, "lanes", link)], className="section"))


def _signed(ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{format_duration(abs(ns))}" if ns else "0"


def shown_info(
    ranks: Sequence[RankLanes], names: Sequence[str], begin_ms: float, end_ms: float
) -> pl.DataFrame:
    """Return the segments between two times as a table.

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
            "lane": labels.gather(places), "row": depth,
            "kind": pl.Series(kind_words(KINDS)).gather(visible.kind),
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


def _occurring_kinds(loaded: Loaded, link: Link) -> set[str]:
    """Return the kinds of bars that the lanes of a run, and of one beside it, may have."""
    occurring = set(_REPLAYED) if link.options.get("show", MEASURED) in ("both", REPLAYED) else set()
    with suppress(DproError):  # the timeline reports the error
        occurring |= loaded.measured.clocks.kinds
        other = loaded.against(link)
        occurring |= other.measured.clocks.kinds if other else set()
    return occurring


def _legend(loaded: Loaded, link: Link) -> list[Component]:
    occurring = _occurring_kinds(loaded, link)
    kinds = {kind: look for kind, look in SPAN_LOOKS.items() if kind in occurring}
    entries = PHASE_LEGEND if link.options.get("colour") == "phase" else kinds
    if link.options.get("colour") in ("name", "micro"):
        return [html.Span("each its own colour")]
    return [
        html.Span([html.I(style={"background": f"var(--{css_name(what)})"}), words])
        for what, words in entries.values()
    ]


def _keyed(loaded: Loaded, link: Link) -> Any:
    path = html.Span([html.I(style={"background": "var(--ink)", "height": "3px"}), "on the critical path"])
    return html.Div([*_legend(loaded, link), path], className="keyed")


def _layout() -> Component:
    return html.Div(
        [
            panel(
                "",
                section("timeline-tools", "reading steps and clocks"),
                html.Div(id="timeline", className="timeline"),
                html.Div(id="timeline-legend"),
            ),
            html.Div(id="timeline-beside"),
        ],
        className="stack",
    )


def _register(app: Dash, runs: Runs) -> None:
    register(app.server, runs)
    version = [Input("version", "data")] if runs.change else []
    in_browser(app, "timeline", Input("url", "search"), *version)


VIEW = View(
    NAME,
    "Timeline",
    needs.windows,
    _layout,
    {"timeline-tools": _tools, "timeline-legend": _keyed, "timeline-beside": _differences},
    {"segments": _segments, "lanes": _lane_table},
    _register,
)
