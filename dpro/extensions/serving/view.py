"""View of a server: what limits it, the latency of its requests, and what they wait for.

Takes requests and iterations of the run; returns the three sentences and the findings, a bar of waits for
each of the slowest requests, and percentiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import plotly.graph_objects as go
import polars as pl

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, graph, message, table, view
from dpro.dashboards.theme import series, styled, time_unit
from dpro.errors import Unanswerable
from dpro.extensions.serving.document import serving_document
from dpro.extensions.serving.latency import MEASURES, PARTS, number
from dpro.schema import ITERATIONS, REQUESTS

NAME = "serving"
_ROW, _MIN_HEIGHT = 28, 220  # pixels
_NO_WAITS = "What requests waited for is not known: none of them lies within recorded iterations."


def nothing_served(loaded: Loaded, _link: Link) -> str:
    """Return the message for a run without requests and iterations of a server; empty otherwise."""
    if any(loaded.num_rows[table.name] for table in (REQUESTS, ITERATIONS)):
        return ""
    return (
        "No request and no iteration of a server was recorded: "
        "`dpro import --requests FILE` reads a log of requests."
    )


def waits_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the slowest requests: `request`, `name`, `latency_ms`, and ms by what each waited for."""
    schema = {"request": pl.Int64, "name": pl.String, **dict.fromkeys(("latency_ms", *PARTS), pl.Float64)}
    if nothing_served(loaded, link):
        return pl.DataFrame(schema=schema)
    rows = [
        {"request": request.request, "name": request.name, "latency_ms": request.latency_ms, **request.waited}
        for request in serving_document(loaded.run).slowest
    ]
    return pl.DataFrame(rows, schema=schema)


def waits_figure(rows: pl.DataFrame, theme: str) -> go.Figure:
    """Draw a bar for each request, the slowest at the top.

    Args:
        rows: as `waits_info` returns them, with what each waited for.
    """
    figure = go.Figure()
    scale, unit = time_unit(max(rows["latency_ms"]))
    for place, part in enumerate(PARTS):
        figure.add_bar(
            x=rows[part] / scale,
            y=[f"request {request}" for request in rows["request"]],
            orientation="h",
            name=part.removesuffix("_ms"),
            marker={"color": series(place, theme), "line": {"width": 0}},
            hovertemplate=f"%{{y}}: %{{x:.3g}} {unit}",
        )
    figure.update_xaxes(title_text=f"of its latency, {unit}")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * rows.height + 130))
    return figure.update_layout(barmode="stack", showlegend=True, hovermode="closest")


def latency_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return percentiles of each measure: `measure`, `requests`, `mean`, `p50`, `p90`, `p99` in ms."""
    columns = ("mean", "p50", "p90", "p99")
    schema = {"measure": pl.String, "requests": pl.Int64, **dict.fromkeys(columns, pl.Float64)}
    if nothing_served(loaded, link):
        return pl.DataFrame(schema=schema)
    latency = serving_document(loaded.run).latency
    rows = [
        (
            name.removesuffix("_ms"),
            latency[name].requests,
            *(getattr(latency[name], column) for column in columns),
        )
        for name in MEASURES
        if name in latency
    ]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _limits(loaded: Loaded, _link: Link) -> Any:
    document = serving_document(loaded.run)
    evidence = [f"{finding.class_}: {line}" for finding in document.findings for line in finding.evidence]
    unknown = [f"Not known: {line}." for line in document.unknown]
    return [message(line) for line in (*document.sentences, *evidence, *unknown)]


def _waits(loaded: Loaded, link: Link) -> Any:
    rows = waits_info(loaded, link).drop_nulls(PARTS)
    if rows.is_empty():
        return message(_NO_WAITS)
    return [graph("serving-waits-figure", waits_figure(rows, link.theme)), csv_link(NAME, "waits", link)]


def _latency(loaded: Loaded, link: Link) -> Any:
    rows = latency_info(loaded, link)
    if rows.is_empty():
        return message("No log of requests: their latency is not known.")
    cells = [
        [name, f"{count:,}", *(number(ms) for ms in values)] for name, count, *values in rows.iter_rows()
    ]
    header = ["ms", "requests", "mean", "p50", "p90", "p99"]
    return [table(header, cells), csv_link(NAME, "latency", link)]


VIEW = view(
    NAME,
    "Serving",
    nothing_served,
    Panel("What limits the server", "serving-limits", "reading requests", _limits, wide=True),
    Panel("The slowest requests", "serving-waits", "finding what they waited for", _waits),
    Panel("Latency", "serving-latency", "sorting requests", _latency),
    tables={"waits": waits_info, "latency": latency_info},
)


def figures_of_report(loaded: Loaded, _ranks: list[int]) -> Iterator[tuple[str, Callable[[], go.Figure]]]:
    """Yield the title of the figure of a report about a server, and a function that draws it."""

    def draw() -> go.Figure:
        rows = waits_info(loaded, Link()).drop_nulls(PARTS)
        if rows.is_empty():
            raise Unanswerable("no request lies within iterations")
        return waits_figure(rows, "light")

    if not nothing_served(loaded, Link()):
        yield "The slowest requests of the server, and what they waited for", draw
