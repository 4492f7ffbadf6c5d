"""Steps × ranks: a heatmap in which slow ranks, slow steps and slow periods stand out.

Takes steps, host counters and the breakdown of each step; returns one value per rank and step, and a heatmap
of them. It always shows the whole run; clicked cells or a dragged rectangle become the selection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Dash, Input, State, html
from numpy.typing import NDArray

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import (
    NUMBERED,
    Panel,
    RankOrder,
    choices,
    csv_link,
    draw_groups,
    graph,
    in_browser,
    message,
    order_choice,
    order_of,
    view,
)
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import FEW_TICKS, colour, styled, time_unit
from dpro.detect.findings import NETWORK
from dpro.detect.stragglers.causes import INPUT_PIPELINE
from dpro.errors import DproError
from dpro.units import NS_PER_MS

NAME = "heatmap"
COLUMNS = 1200  # more than a figure of this width can resolve
SCALE = "Cividis"  # its lightness rises evenly, also for people with colour vision deficiencies
_CLIPPED = 99  # percentile that the colours cover, so that one outlier does not flatten the others
_BEYOND = 2.0  # most times that percentile; longer values have the last colour
_NOTABLE = 0.05  # share of the usual value; ranks that differ by less look the same
TWO = 2  # ranks: their median is equally far from both, so the faster one is the reference
_ROW, _MIN_HEIGHT, _MAX_HEIGHT = 16, 170, 900  # pixels


class StepMetric(NamedTuple):
    """A metric with one value per rank and step.

    Attributes:
        source: the frame of `Loaded` that has it.
        column: ns.
    """

    title: str
    source: str
    column: str


METRICS = {
    "step": StepMetric("step time", "timed_steps", "time_ns"),
    "data": StepMetric("waiting for data", "host", "data_wait_ns"),
    "gc": StepMetric("collecting garbage", "host", "gc_ns"),
    "core": StepMetric("waiting for a core", "host", "run_queue_ns"),
    "cpu": StepMetric("CPU time", "host", "cpu_ns"),
    "compute": StepMetric("compute", "breakdown", "compute_ns"),
    "exposed": StepMetric("exposed communication", "breakdown", "exposed_comm_ns"),
    "wait": StepMetric("waiting for others", "breakdown", "exposed_wait_ns"),
    "transfer": StepMetric("exposed transfer", "breakdown", "exposed_transfer_ns"),
    "host": StepMetric("host bound", "breakdown", "host_bound_ns"),
    "idle": StepMetric("idle", "breakdown", "idle_ns"),
}


# Metrics that show a finding of a class; the one in which it stands out most is chosen.
_SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "slow.compute": ("compute",),
    "slow.host": ("data", "gc", "core", "host"),
    **dict.fromkeys(NETWORK, ("transfer",)),
}


def metrics_of(loaded: Loaded) -> dict[str, str]:
    """Return the metrics with values in the run, and their titles."""
    return {name: metric.title for name, metric in METRICS.items() if _has(loaded, metric)}


def _has(loaded: Loaded, metric: StepMetric) -> bool:
    try:
        values = getattr(loaded, metric.source)[metric.column]
    except DproError:
        return False
    return bool((values > 0).any())


def first_metric(loaded: Loaded, there: Collection[str]) -> str:
    """Return the metric that shows the strongest finding; of several, where its ranks exceed others most.

    Args:
        there: the metrics with values in the run.
    """
    with suppress(DproError):  # the verdict reports the error
        for finding in loaded.verdict[0]:
            loads = INPUT_PIPELINE in (finding.component_id, finding.cause)
            shows = ("data",) if loads else _SHOWN_BY.get(finding.class_, ())
            shown = [name for name in shows if name in there]
            if shown:
                return max(shown, key=lambda name: _excess_ms(heat_info(loaded, name), finding.ranks))
    return "step" if "step" in there else next(iter(there), "step")


def _excess_ms(values: pl.DataFrame, ranks: Collection[int]) -> float:
    """Return by how much the mean of some ranks exceeds the others' median; their mean without others."""
    means = values.group_by("rank").agg(pl.col("value_ms").mean())
    concerned = pl.col("rank").is_in(list(ranks))
    mean, others = means.select(
        pl.col("value_ms").filter(concerned).mean(),
        others=pl.col("value_ms").filter(~concerned).median(),
    ).row(0)
    return float((mean or 0.0) - (others or 0.0))


def heat_info(loaded: Loaded, metric: str = "step") -> pl.DataFrame:
    """Return one value per rank and step.

    Returns:
        `rank`, `step`, `value_ms`, sorted; rows outside of steps (-1) are left out.
    """
    chosen = METRICS[metric]
    frame: pl.DataFrame = getattr(loaded, chosen.source)
    frame = frame.filter((pl.col("step") >= 0) & (pl.col(chosen.column) >= 0))
    value = (pl.col(chosen.column) / NS_PER_MS).max().alias("value_ms")
    return frame.group_by("rank", "step").agg(value).sort("rank", "step")


def heat_figure(
    values: pl.DataFrame, title: str, link: Link, order: RankOrder = NUMBERED, deep: Collection[int] = ()
) -> go.Figure:
    """Draw a heatmap of recorded steps; with many steps, a column shows the largest value of several.

    If ranks differ within steps, the colour is the deviation from the median of the ranks, or with two ranks
    the excess over the faster one; else it is the value.

    Args:
        deep: steps that were recorded in depth, which are marked.
    """
    scale, unit = time_unit(float(values["value_ms"].to_numpy().max()))
    steps, place = np.unique(values["step"].to_numpy(), return_inverse=True)
    every = 1 + (steps.size - 1) // COLUMNS
    firsts = steps[::every]
    lasts = np.append(steps[every - 1 :: every], steps[-1:])[: firsts.size]
    ranks, row = _rows(values["rank"].to_numpy(), order)
    cells = np.full((ranks.size, firsts.size), -np.inf)
    np.maximum.at(cells, (row, place // every), values["value_ms"].to_numpy() / scale)
    cells[np.isinf(cells)] = np.nan
    two = ranks.size == TWO
    beside = cells - (np.nanmin if two else np.nanmedian)(cells, axis=0)
    usual = "the faster rank" if two else "the step's median"
    compared = ranks.size > 1 and float(np.nanmax(np.abs(beside), initial=0.0)) > 0
    colours = beside if compared else cells
    names = [str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts)]
    finer, fine = (
        time_unit(float(np.nanmax(np.abs(colours), initial=0.0)) * scale) if compared else (scale, unit)
    )
    colours = colours * (scale / finer)
    more = f", %{{z:+.3f}} {fine} from {usual}" if compared else ""
    facts = np.empty((*cells.shape, 3), object)
    facts[..., 0], facts[..., 1], facts[..., 2] = cells, names, ranks[:, None]
    notable = _NOTABLE * float(np.nanmedian(cells)) * (scale / finer) if compared else None
    figure, scaled = go.Figure(), _colours(colours, notable, link.theme, one_sided=two)
    ends = scaled["zmin"], scaled["zmax"]
    figure.add_heatmap(
        **{"x": np.arange(firsts.size), "y": np.arange(ranks.size), "z": colours, "customdata": facts},
        **scaled,
        colorbar=colour_bar(f"{fine} from {usual}" if compared else unit, ends, link.theme),
        hovertemplate=f"rank %{{customdata[2]}}, step %{{customdata[1]}}: %{{customdata[0]:.3f}} {unit}"
        f"{more}<extra>{title}</extra>",
    )
    _mark_deep(figure, firsts, lasts, deep, link.theme)
    for corners in _outline(link, firsts, lasts, ranks):
        figure.add_shape(type="rect", line={"color": colour("bad", link.theme), "width": 2}, **corners)
    draw_groups(figure, ranks.tolist(), order, link.theme)
    # Plotly would draw this axis' title across the numbers if there are few columns.
    steps_across = _ticks([f"step {names[0]}", *names[1:]])
    figure.update_xaxes(showgrid=False, range=[-0.5, firsts.size - 0.5], **steps_across)
    labels = _ticks([order.label(rank) for rank in ranks.tolist()])
    figure.update_yaxes(title_text="rank", showgrid=False, autorange="reversed", **labels)
    height = int(np.clip(_ROW * ranks.size + 100, _MIN_HEIGHT, _MAX_HEIGHT))
    styled(figure, link.theme, height=height + 20).update_layout(margin_t=48)
    return figure.update_layout(
        dragmode="select",
        meta={"firsts": firsts.tolist(), "lasts": lasts.tolist(), "ranks": ranks.tolist()},
        selectionrevision=link.query(),
        clickmode="event",
    )


def _mark_deep(
    figure: go.Figure,
    firsts: NDArray[np.int64],
    lasts: NDArray[np.int64],
    deep: Collection[int],
    theme: str,
) -> None:
    """Mark the columns of steps that were recorded in depth, above the cells."""
    steps = np.array(sorted(deep), np.int64)
    inside = np.searchsorted(steps, lasts, "right") > np.searchsorted(steps, firsts, "left")
    if inside.any():
        places = np.flatnonzero(inside)
        figure.add_scatter(
            x=places, y=np.full(places.size, -0.5), mode="markers", name="recorded in depth",
            marker={"symbol": "triangle-down", "size": 7, "color": colour("host_bound", theme)},
            hoverinfo="skip", cliponaxis=False, showlegend=False,
        )  # fmt: skip


def _rows(ranks: NDArray[np.int64], order: RankOrder) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [R] the rank of each row, and [N] the row of each value."""
    distinct, number = np.unique(ranks, return_inverse=True)
    shown = np.array(order.ordered(distinct.tolist()), np.int64)
    return shown, np.argsort(shown)[number]


def colour_bar(title: str, ends: tuple[float, float], theme: str) -> dict[str, Any]:
    """Return a colour bar above the cells: beside few rows, its numbers would overlap.

    Args:
        ends: values of the first and the last colour.
    """
    return {
        **{"tickvals": np.linspace(*ends, 3).tolist(), "tickformat": ".3~g"},
        "title": {"text": title, "font": {"color": colour("soft", theme)}, "side": "top"},
        **{"orientation": "h", "thickness": 8, "len": 200, "lenmode": "pixels"},
        **{"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "outlinewidth": 0},
    }


def _colours(
    values: NDArray[np.float64], notable: float | None, theme: str, *, one_sided: bool = False
) -> dict[str, Any]:
    """Return a colour scale from 0; for deviations, one with the panel's colour at 0.

    Args:
        notable: least deviation that has the last colour; None if the values are not deviations.
        one_sided: whether no deviation is below 0.
    """
    usual = float(np.nanpercentile(np.abs(values), _CLIPPED))
    if notable is None:
        most = min(float(np.nanmax(values)), _BEYOND * usual) or float(np.nanmax(values)) or 1.0
        return {"zmin": 0.0, "zmax": most, "colorscale": SCALE}
    most = max(usual, notable) or 1.0
    ends = ("compute", "panel", "exposed_comm")
    if one_sided:
        tints = [[0, colour("line", theme)], [1, colour("exposed_comm", theme)]]
        return {"zmin": 0.0, "zmax": most, "colorscale": tints}
    tints = [[place, colour(name, theme)] for place, name in zip((0, 0.5, 1), ends)]
    return {"zmin": -most, "zmax": most, "colorscale": tints}


def _ticks(names: Sequence[str]) -> dict[str, Any]:
    """Return tick settings: a tick for each cell, or for every n-th of many."""
    every = 1 + (len(names) - 1) // FEW_TICKS
    return {"tickvals": list(range(len(names)))[::every], "ticktext": list(names)[::every]}


def _outline(
    link: Link, firsts: NDArray[np.int64], lasts: NDArray[np.int64], ranks: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    """Yield rectangles around the selected cells, in data or page coordinates."""
    if not link.steps and not link.ranks:
        return
    across: list[dict[str, Any]] = [] if link.steps else [{"xref": "paper", "x0": 0, "x1": 1}]
    for first, last in link.steps:
        inside = np.flatnonzero((lasts >= first) & (firsts <= last))
        if inside.size:
            across.append({"x0": float(inside[0]) - 0.5, "x1": float(inside[-1]) + 0.5})
    down: list[dict[str, Any]] = [] if link.ranks else [{"yref": "paper", "y0": 0, "y1": 1}]
    rows = np.flatnonzero(np.isin(ranks, link.ranks)).astype(float)
    down += [{"y0": row - 0.5, "y1": row + 0.5} for row in rows.tolist()]
    for width in across:
        for height in down:
            yield width | height


def _metric(loaded: Loaded, link: Link) -> str:
    there = metrics_of(loaded)
    chosen = link.options.get("metric", "")
    return chosen if chosen in there else first_metric(loaded, there)


def _heat(loaded: Loaded, link: Link) -> Any:
    there, metric = metrics_of(loaded), _metric(loaded, link)
    values = heat_info(loaded, metric)
    if values.is_empty():
        return message("No step was recorded, so there are no step times to show.")
    deep = loaded.steps.filter(pl.col("window") >= 0)["step"].unique().to_list()
    note = "Click a cell, or drag over some, to select steps and ranks in all views."
    note += " ▾ marks steps that were recorded in depth." if deep else ""
    note += f" {needs.untimed_steps(loaded.timed_steps)}" if metric == "step" else ""
    return [
        choices(link, "metric", there, first_metric(loaded, there)),
        *order_choice(loaded, link),
        graph("heat-figure", heat_figure(values, METRICS[metric].title, link, order_of(loaded, link), deep)),
        csv_link(NAME, "values", link),
        html.P(note, className="note"),
    ]


def _register(app: Dash, _runs: Runs) -> None:
    figure = State("heat-figure", "figure")
    in_browser(app, "cell", Input("heat-figure", "clickData"), figure)
    in_browser(app, "cells", Input("heat-figure", "relayoutData"), figure)


VIEW = view(
    NAME,
    "Steps × ranks",
    needs.steps,
    Panel("Steps × ranks", "heatmap-values", "reading the steps", _heat),
    tables={"values": lambda loaded, link: heat_info(loaded, _metric(loaded, link))},
    register=_register,
)
