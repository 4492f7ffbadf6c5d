"""Steps × ranks: where a rank, a step or a stretch of steps stands out.

In: steps, what the host did in them, and where their time went. Out: one value per rank and step, and a
heatmap of it. It always shows all of the run; what is clicked or dragged in it becomes the selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Dash, Input, State, html
from dash.development.base_component import Component

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, choices, csv_link, graph, in_browser, message, panel, section
from dpro.dashboards.shown import Shown
from dpro.dashboards.theme import colour, styled, whole_ticks
from dpro.errors import DproError
from dpro.units import NS_PER_MS

NAME = "heatmap"
COLUMNS = 1200  # that a figure of this width can tell apart
SCALE = "Cividis"  # lightness grows evenly, for any sort of colour vision
_CLIPPED = (1, 99)  # percentiles that the colours span: one slow step leaves the others their differences
_ROW, _MIN_HEIGHT, _MAX_HEIGHT = 16, 170, 900  # pixels


class Metric(NamedTuple):
    """Something that every step of every rank has a value of.

    Attributes:
        title: what it is.
        source: the frame of `Loaded` that has it.
        column: ns.
    """

    title: str
    source: str
    column: str


METRICS = {
    "step": Metric("step time", "steps", "time_ns"),
    "data": Metric("waiting for data", "host", "data_wait_ns"),
    "gc": Metric("collecting garbage", "host", "gc_ns"),
    "core": Metric("waiting for a core", "host", "run_queue_ns"),
    "cpu": Metric("CPU time", "host", "cpu_ns"),
    "compute": Metric("compute", "breakdown", "compute_ns"),
    "exposed": Metric("exposed communication", "breakdown", "exposed_comm_ns"),
    "wait": Metric("waiting for others", "breakdown", "exposed_wait_ns"),
    "transfer": Metric("exposed transfer", "breakdown", "exposed_transfer_ns"),
    "host": Metric("host bound", "breakdown", "host_bound_ns"),
    "idle": Metric("idle", "breakdown", "idle_ns"),
}


def metrics_of(loaded: Loaded) -> dict[str, str]:
    """Which metrics a run has values of, with their titles."""
    return {name: metric.title for name, metric in METRICS.items() if _has(loaded, metric)}


def _has(loaded: Loaded, metric: Metric) -> bool:
    try:
        values = getattr(loaded, metric.source)[metric.column]
    except DproError:
        return False
    return bool((values > 0).any())


def heat_info(loaded: Loaded, metric: str = "step") -> pl.DataFrame:
    """One value per rank and step.

    Args:
        loaded: the run.
        metric: key of `METRICS`.

    Returns:
        `rank`, `step`, `value_ms`, sorted; steps that count as none (-1) are left out.
    """
    chosen = METRICS[metric]
    frame: pl.DataFrame = getattr(loaded, chosen.source)
    frame = frame.filter((pl.col("step") >= 0) & (pl.col(chosen.column) >= 0))
    value = (pl.col(chosen.column) / NS_PER_MS).max().alias("value_ms")
    return frame.group_by("rank", "step").agg(value).sort("rank", "step")


def heat_figure(values: pl.DataFrame, title: str, link: Link) -> go.Figure:
    """A heatmap; of many steps each column is a stretch with its largest value.

    Args:
        values: as from `heat_info`.
        title: of the metric.
        link: the selection, which is outlined.
    """
    first = int(values["step"].to_numpy().min())
    every = 1 + int(np.ptp(values["step"].to_numpy())) // COLUMNS
    ranks, row = np.unique(values["rank"].to_numpy(), return_inverse=True)
    column = (values["step"].to_numpy() - first) // every
    cells = np.full((ranks.size, int(column.max()) + 1), -np.inf)
    np.maximum.at(cells, (row, column), values["value_ms"].to_numpy())
    cells[np.isinf(cells)] = np.nan
    low, high = np.percentile(values["value_ms"].to_numpy(), _CLIPPED)
    unit = {"text": "ms", "font": {"color": colour("soft", link.theme)}}
    figure = go.Figure()
    figure.add_heatmap(
        x=first + every * np.arange(cells.shape[1]),
        y=ranks,
        z=cells,
        zmin=low,
        zmax=high if high > low else low + 1,
        colorscale=SCALE,
        colorbar={"title": unit, "thickness": 10, "outlinewidth": 0},
        hovertemplate=f"rank %{{y}}, step %{{x}}: %{{z:.3f}} ms<extra>{title}</extra>",
    )
    for corners in _outline(link, every):
        figure.add_shape(type="rect", line={"color": colour("bad", link.theme), "width": 2}, **corners)
    title = "step" if every == 1 else f"step ({every} to a column)"
    figure.update_xaxes(title_text=title, showgrid=False, **whole_ticks(cells.shape[1]))
    figure.update_yaxes(title_text="rank", showgrid=False, tickformat="d", **whole_ticks(ranks.size))
    height = int(np.clip(_ROW * ranks.size + 100, _MIN_HEIGHT, _MAX_HEIGHT))
    styled(figure, link.theme, height=height)
    return figure.update_layout(
        dragmode="select",
        meta={"every": every, "first": first},
        selectionrevision=link.query(),
        clickmode="event",
    )


def _outline(link: Link, every: int) -> Iterator[dict[str, Any]]:
    """Corners of rectangles around what is selected, in data or page coordinates."""
    if link.steps is None and not link.ranks:
        return
    across: dict[str, Any] = {"xref": "paper", "x0": 0, "x1": 1}
    if link.steps is not None:
        across = {"x0": link.steps[0] - every / 2, "x1": link.steps[1] + every / 2 - (every - 1)}
    for rank in link.ranks or [None]:
        tall = {"yref": "paper", "y0": 0, "y1": 1} if rank is None else {"y0": rank - 0.5, "y1": rank + 0.5}
        yield across | tall


def _metric(loaded: Loaded, link: Link) -> str:
    there = metrics_of(loaded)
    chosen = link.own.get("metric", "step")
    return chosen if chosen in there else next(iter(there), "step")


def _heat(loaded: Loaded, link: Link) -> Any:
    there, metric = metrics_of(loaded), _metric(loaded, link)
    values = heat_info(loaded, metric)
    if values.is_empty():
        return message("No step was recorded: nothing can be told about steps.")
    return [
        choices(link, "metric", there, "step"),
        graph("heat-figure", heat_figure(values, METRICS[metric].title, link)),
        csv_link(NAME, "values", link),
        html.P("Click a cell, or drag over some, to select steps and ranks in all views.", className="note"),
    ]


def _layout() -> Component:
    return panel("Steps × ranks", section("heatmap-values", "reading the steps"))


def _register(app: Dash, _shown: Shown) -> None:
    figure = State("heat-figure", "figure")
    in_browser(app, "cell", Input("heat-figure", "clickData"), figure)
    in_browser(app, "cells", Input("heat-figure", "relayoutData"), figure)


VIEW = View(
    NAME,
    "Steps × ranks",
    _layout,
    {"heatmap-values": _heat},
    {"values": lambda loaded, link: heat_info(loaded, _metric(loaded, link))},
    _register,
)
