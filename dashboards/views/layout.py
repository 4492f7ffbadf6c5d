"""Ranks on the axes of parallelism: slow rows, columns and blocks of the layout stand out.

Takes the layout of a run, the breakdown of its steps, and findings; returns one cell per rank, in rows and
columns of coordinates. It always shows the whole job; a clicked cell becomes the selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Input, State, html
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from dpro.analysis.mean_step import mean_steps
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, choices, csv_link, graph, in_browser, message, view
from dpro.dashboards.theme import colour, ink_of, styled, time_unit
from dpro.dashboards.views.heatmap import SCALE, colour_bar
from dpro.detect.findings import Finding
from dpro.errors import DproError
from dpro.replay.mesh import Mesh, mesh_in_words
from dpro.units import NS_PER_MS

NAME = "layout"
METRICS = {"own": "own time", "wait": "waiting for others", "finding": "cost of findings"}
MAX_NAMED = 512  # cells with room for the number of their rank
MAX_AXES_ACROSS = 2
_ROW, _COLUMN, _AROUND, _MAX_HEIGHT = 26, 26, 130, 1200  # pixels


def place_info(mesh: Mesh) -> pl.DataFrame:
    """Return the cell of each rank whose coordinates are known.

    Returns:
        `rank`, `row`, `column` (numbers from 0), `row_name`, `column_name` (such as `dp 3`), sorted by rank.
        The innermost axis is horizontal; of three or more axes, the innermost two.
    """
    across = min(len(mesh.axes) // 2 + len(mesh.axes) % 2, MAX_AXES_ACROSS)
    down = len(mesh.axes) - across
    rows = []
    for rank, place in sorted(mesh.coordinates.items()):
        if min(place, default=-1) < 0:
            continue
        named = [f"{axis.name or 'axis'} {coordinate}" for axis, coordinate in zip(mesh.axes, place)]
        cell = [_number(mesh, place, part) for part in (slice(0, down), slice(down, None))]
        rows.append((rank, *cell, ", ".join(named[:down]), ", ".join(named[down:])))
    schema = {"rank": pl.Int64, "row": pl.Int64, "column": pl.Int64}
    return pl.DataFrame(rows, schema=schema | {"row_name": pl.String, "column_name": pl.String}, orient="row")


def _number(mesh: Mesh, place: Sequence[int], axes: slice) -> int:
    """Return the index of a rank's coordinates among all of some axes; the last axis varies fastest."""
    sizes = [axis.size for axis in mesh.axes[axes]]
    return int(np.ravel_multi_index(place[axes], sizes)) if sizes else 0


def value_info(breakdown: pl.DataFrame | None, findings: Sequence[Finding], metric: str) -> pl.DataFrame:
    """Return the value that colours each rank.

    Args:
        breakdown: as from `dpro.replay.steps.step_breakdown`; None if there is none.
        metric: key of `METRICS`; the first two need a breakdown.

    Returns:
        `rank`, `value_ms` per step; for findings, only the ranks that they name.
    """
    if metric == "finding" or breakdown is None:
        costs = [(rank, finding.cost_ns / NS_PER_MS) for finding in findings for rank in finding.ranks]
        frame = pl.DataFrame(costs, schema={"rank": pl.Int64, "value_ms": pl.Float64}, orient="row")
        return frame.group_by("rank").agg(pl.col("value_ms").sum()).sort("rank")
    means = mean_steps(breakdown, "rank")
    wait = pl.col("exposed_wait_ns")
    value = wait if metric == "wait" else pl.col("duration_ns") - wait
    return means.select(pl.col("rank").cast(pl.Int64), value_ms=value / NS_PER_MS)


def layout_figure(
    places: pl.DataFrame,
    values: pl.DataFrame,
    title: str,
    link: Link,
    *,
    at_fault: bool = False,
    least: bool = False,
) -> go.Figure:
    """Draw one cell per rank; cells without a value are empty, and the selected ones outlined.

    Args:
        at_fault: whether values only mark ranks at fault, in a job that hangs.
        least: whether the smallest values stand out: the others wait for the rank that waits least.
    """
    cells = places.join(values, on="rank", how="left").sort("rank")
    scale, unit = time_unit(float(cells["value_ms"].max() or 0.0))  # type: ignore[arg-type]
    shape = int(places["row"].to_numpy().max()) + 1, int(places["column"].to_numpy().max()) + 1
    colours, ranks = np.full(shape, np.nan), np.full(shape, -1)
    facts = np.full(shape, "", object)
    for entry in cells.iter_rows(named=True):
        cell = entry["row"], entry["column"]
        has_value = entry["value_ms"] is not None
        ranks[cell], colours[cell] = entry["rank"], entry["value_ms"] / scale if has_value else np.nan
        place = ", ".join(filter(None, (entry["row_name"], entry["column_name"])))
        said = "at fault" if at_fault else f"{colours[cell]:.3f} {unit}"
        facts[cell] = f"rank {entry['rank']} ({place}): {said if has_value else 'none'}"
    figure, highest = go.Figure(), float(np.nanmax(colours, initial=0.0)) or 1.0
    has_room, bare = ranks.size <= MAX_NAMED, np.isnan(colours) & (ranks >= 0)
    scale_name = f"{SCALE}_r" if least else SCALE
    figure.add_heatmap(
        z=colours, customdata=facts, colorscale=scale_name, xgap=2, ygap=2,
        zmin=0, zmax=highest, hoverongaps=True,
        hovertemplate=f"%{{customdata}}<extra>{title}</extra>",
        colorbar=colour_bar(unit, (0.0, highest), link.theme), showscale=not at_fault,
    )  # fmt: skip
    for cells_of, inks in ((bare, None), (~bare & (ranks >= 0), scale_name)):  # Plotly's own ink can be faint
        rows, columns = np.nonzero(cells_of & has_room)
        coloured = {} if inks is None else {"textfont_color": _inks(colours[rows, columns] / highest, inks)}
        figure.add_scatter(
            x=columns, y=rows, text=ranks[rows, columns].astype(str), mode="text", hoverinfo="skip",
            showlegend=False, **coloured,
        )  # fmt: skip
    for row, column in places.filter(pl.col("rank").is_in(link.ranks)).select("row", "column").iter_rows():
        corners = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        figure.add_shape(type="rect", line={"color": colour("bad", link.theme), "width": 2}, **corners)
    height = min(_ROW * shape[0] + _AROUND, _MAX_HEIGHT)
    styled(figure, link.theme, height=height).update_layout(hovermode="closest", margin_t=48)
    for axis, name in ((figure.update_xaxes, "column"), (figure.update_yaxes, "row")):
        known_names = places.select(name, f"{name}_name").unique(name).sort(name)
        ticks = {"tickvals": known_names[name].to_list(), "ticktext": known_names[f"{name}_name"].to_list()}
        axis(showgrid=False, zeroline=False, **ticks)
    figure.update_yaxes(autorange="reversed")
    return figure.update_layout(meta={"ranks": ranks.tolist(), "least_width": _COLUMN * shape[1] + _AROUND})


def _inks(places: NDArray[np.float64], scale: str) -> list[str]:
    """Return black or white for each position on a colour scale, whichever is legible.

    Args:
        places: [N] 0 to 1.
    """
    if not places.size:
        return []
    sampled = sample_colorscale(scale, places.clip(0, 1).tolist(), colortype="tuple")
    return [ink_of(f"#{''.join(f'{round(255 * part):02x}' for part in rgb)}") for rgb in sampled]


def _metrics(loaded: Loaded) -> Mapping[str, str]:
    """Return the metrics with values in the run."""
    try:
        has = not loaded.usual_breakdown.is_empty()
    except DproError:
        has = False
    return METRICS if has else {"finding": METRICS["finding"]}


def _values(loaded: Loaded, metric: str) -> pl.DataFrame:
    """Return the values of a metric in `_metrics`, as from `value_info`."""
    if metric == "finding":
        return value_info(None, loaded.verdict[0], metric)
    return value_info(loaded.usual_breakdown, (), metric)


def _chosen(loaded: Loaded, link: Link) -> str:
    there = _metrics(loaded)
    chosen = link.options.get("metric", "own")
    return chosen if chosen in there else next(iter(there))


def _layout_of(loaded: Loaded, link: Link) -> Any:
    mesh, metric = loaded.mesh, _chosen(loaded, link)
    places = place_info(mesh)
    if places.is_empty():
        return message(needs.NO_LAYOUT)
    said: list[Any] = [
        html.P(mesh_in_words(mesh)),
        choices(link, "metric", _metrics(loaded), next(iter(_metrics(loaded)))),
    ]
    try:
        values = _values(loaded, metric)
    except DproError as error:
        return [*said, message(str(error))]
    said_of_ranks = filter(None, [needs.missing_ranks(loaded), *mesh.ambiguity])
    open_questions = [html.P(line, className="note") for line in said_of_ranks]
    note = "Times are of the usual step, as in Breakdown."
    hangs = metric == "finding" and any(finding.of_hang for finding in loaded.verdict[0])
    if metric == "finding":
        note = "Ranks at fault." if hangs else "What the findings of a rank cost per step."
        note = "No finding names a rank." if values.is_empty() else note
    waits = metric == "wait"
    note += " The brightest wait least: others wait for them." if waits else ""
    figure = layout_figure(places, values, METRICS[metric], link, at_fault=hangs, least=waits)
    return [
        *said,
        graph("layout-figure", figure),
        csv_link(NAME, "ranks", link),
        html.P(f"{note} Click a cell to select its rank in all views.", className="note"),
        *open_questions,
    ]


def _table(loaded: Loaded, link: Link) -> pl.DataFrame:
    values = _values(loaded, _chosen(loaded, link))
    return place_info(loaded.mesh).join(values, on="rank", how="left").drop("row", "column")


VIEW = view(
    NAME,
    "Layout",
    needs.layout,
    Panel("Where each rank stands", "layout-ranks", "finding the axes of the job", _layout_of),
    tables={"ranks": _table},
    register=lambda app, _: in_browser(
        app, "place", Input("layout-figure", "clickData"), State("layout-figure", "figure")
    ),
)
