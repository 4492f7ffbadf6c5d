"""Telemetry on the time axis of the timeline: GPUs, ports, hosts and processes.

Takes the sampled values of `counters`; returns one small figure per counter that changed, with a readable
name and unit. Counts that only grow are shown as growth per second. Times are on the timeline's clock if a
rank of the host was aligned to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html
from plotly.subplots import make_subplots

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, graph, message, view
from dpro.dashboards.theme import plain, series, styled, time_unit
from dpro.timelines.counters import Quantity, readable_unit, sampled_counters
from dpro.units import NS_PER_MS
from dpro.words import counted

NAME = "telemetry"
MAX_COUNTERS = 14
FLAT = 0.02  # share of a counter's largest value; a counter that changes by no more is listed, not drawn
# Units whose axes need no 0.
_FROM_LEAST = ("°C", *(f", {unit}" for unit in ("bytes", "kB", "MB", "GB", "TB")))
POINTS = 1500  # of a series; a figure of this width shows no more
_ROW, _LEGEND = 92, 56  # pixels of a counter, and of the room above all


def telemetry_info(
    counters: pl.DataFrame, workers: pl.DataFrame, ahead: dict[str, int], origin_ns: int, link: Link
) -> pl.DataFrame:
    """Return the sampled counters that changed; GPUs that no chosen rank uses are left out.

    Args:
        ahead: ns by which each host's clock is ahead of the timeline's.
        origin_ns: begin of the timeline, on its clock.

    Returns:
        `counter` (with `/s` if it is growth per second), `label`, `unit`, `series` (which device, host or
        rank), `time_ms`, `value` (in `unit`); counters in order of interest.
    """
    values = sampled_counters(counters, workers, ahead, link.ranks)
    time = (pl.col("time_ns") - origin_ns) / NS_PER_MS
    return values.select("counter", "label", "unit", "series", time.alias("time_ms"), "value")


def telemetry_figure(values: pl.DataFrame, extent: tuple[float, float] | None, theme: str) -> go.Figure:
    """Draw one row per counter, titled with its unit, on one time axis; a value is valid until the next one.

    Args:
        extent: from and to, ms; None for everything since the first span.
    """
    names = values["counter"].unique(maintain_order=True).to_list()[:MAX_COUNTERS]
    last_ms = float(values["time_ms"].to_numpy().max())
    extent = (0.0, last_ms) if extent is None and last_ms > 0 else extent
    figure = make_subplots(rows=len(names), shared_xaxes=True, vertical_spacing=0.25 / max(len(names), 1))
    moments = values["time_ms"].to_numpy() if extent is None else np.array(extent)
    per_unit, clock = time_unit(float(np.abs(moments).max(initial=0.0)))
    lines = values["series"].unique().sort().to_list()
    lasts = dict(values.group_by("series").agg(pl.col("time_ms").max()).iter_rows())
    named: set[str] = set()
    titles = []
    for row, name in enumerate(names, start=1):
        rows = values.filter(counter=name)
        scale, unit = readable_unit(float(rows["value"].abs().to_numpy().max()), rows["unit"][0])
        titles.append(plain(Quantity(rows["label"][0], unit).title))
        for (which,), of_series in rows.group_by("series", maintain_order=True):
            thin = _held(_thinned(of_series), lasts[which])
            figure.add_scatter(
                x=thin["time_ms"] / per_unit,
                y=thin["value"] / scale,
                mode="lines" if thin.height > 1 else "markers",
                marker={"size": 5, "color": series(lines.index(which), theme)},
                line={"shape": "hv", "width": 1.2, "color": series(lines.index(which), theme)},
                name=plain(which),
                legendgroup=plain(which),
                showlegend=which not in named,
                hovertemplate="%{x:.4~f} "
                + clock
                + ": %{y:.4~g} "
                + plain(unit)
                + "<extra>%{fullData.name}</extra>",
                row=row,
                col=1,
            )
            named.add(str(which))
    styled(figure, theme, height=90 + _ROW * len(names))
    for row, title in enumerate(titles, start=1):
        from_zero = {} if title.endswith(_FROM_LEAST) else {"rangemode": "tozero"}
        figure.update_yaxes(title={"text": "", "standoff": 0}, nticks=3, row=row, col=1, **from_zero)
        axis = "" if row == 1 else str(row)
        corner = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": f"y{axis} domain"}
        corner |= {"yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
        figure.add_annotation(text=title, **corner)
    figure.update_layout(margin_t=_LEGEND, legend_y=1 + 0.4 * _LEGEND / (_ROW * len(names)))
    figure.update_xaxes(range=None if extent is None else [time_ms / per_unit for time_ms in extent])
    figure.update_xaxes(title_text=f"{clock} since the first span", row=len(names), col=1)
    return figure


def held_from(values: pl.DataFrame, begin_ms: float) -> pl.DataFrame:
    """Return the values valid at a time or later; all values of a series that ends before it."""
    until = pl.col("time_ms").shift(-1).over("counter", "series")
    return values.filter(until.is_null() | (until > begin_ms))


def flat_counters(values: pl.DataFrame) -> pl.DataFrame:
    """Return the counters that hardly change.

    Returns:
        `counter`, `label`, `unit`, `least` and `most` over all series, in the order of `values`.
    """
    of_series = values.group_by("counter", "series", maintain_order=True).agg(
        pl.col("label", "unit").first(), least=pl.col("value").min(), most=pl.col("value").max()
    )
    still = pl.col("most") - pl.col("least") <= FLAT * pl.max_horizontal(pl.col("most", "least").abs())
    return (
        of_series.group_by("counter", maintain_order=True)
        .agg(pl.col("label", "unit").first(), still.all().alias("still"), pl.min("least"), pl.max("most"))
        .filter("still")
        .drop("still")
    )


def _flat_in_words(flat: pl.DataFrame) -> str:
    """Word flat counters with their values, in one line."""
    said = []
    for _, label, unit, least, most in flat.iter_rows():
        scale, shown_unit = readable_unit(max(abs(least), abs(most)), unit)
        ends = dict.fromkeys(f"{end / scale:.4g}" for end in (least, most))
        said.append(f"{label} {' to '.join(ends)} {shown_unit}".strip())
    return f"Flat: {'; '.join(said)}."


def _held(line: pl.DataFrame, last_ms: float) -> pl.DataFrame:
    """Extend a series to the last sample of its device, since only changes are recorded."""
    if line["time_ms"][-1] >= last_ms:
        return line
    return pl.concat([line, line.tail(1).with_columns(time_ms=pl.lit(last_ms))])


def _thinned(line: pl.DataFrame) -> pl.DataFrame:
    """Reduce a series to about `POINTS` values; keep the least and the largest of each group."""
    every = 1 + 2 * line.height // POINTS
    if every <= 2:
        return line
    values = line["value"].to_numpy()
    whole = values[: values.size // every * every].reshape(-1, every)
    first = np.arange(whole.shape[0]) * every
    kept = np.unique(
        np.concatenate([first + whole.argmin(axis=1), first + whole.argmax(axis=1), [values.size - 1]])
    )
    return line.with_row_index("place").filter(pl.col("place").is_in(kept.tolist()))


def _values(loaded: Loaded, link: Link) -> pl.DataFrame:
    ahead, origin = loaded.clocks
    return telemetry_info(loaded.counters, loaded.workers, ahead, origin, link)


def _shown(loaded: Loaded, link: Link) -> Any:
    # A single sample would be a lone dot.
    sampled_again = (pl.len().over("counter", "series") > 1).any().over("counter")
    values = _values(loaded, link).filter(sampled_again)
    if values.is_empty():
        return message(needs.telemetry(loaded, link) or "No counter of this selection changed.")
    extent = _extent(loaded, link)
    flat = flat_counters(held_from(values, extent[0] if extent else 0.0))
    values = values.join(flat, on="counter", how="anti", maintain_order="left")
    folded = [html.P(_flat_in_words(flat), className="note")] if flat.height else []
    if values.is_empty():
        return [*folded, csv_link(NAME, "values", link)]
    names = values["counter"].n_unique()
    left = names - MAX_COUNTERS
    more = f" {counted(left, 'more counter')} changed: see the CSV." if left > 0 else ""
    return [
        message(f"Counters that changed, of {values['series'].n_unique()} devices, hosts and ranks.{more}"),
        graph("telemetry-figure", telemetry_figure(values, extent, link.theme)),
        *folded,
        csv_link(NAME, "values", link),
    ]


def _extent(loaded: Loaded, link: Link) -> tuple[float, float] | None:
    """Return from and to in ms: of the link, else of its steps; None for everything."""
    if link.time_ms is not None or not link.steps:
        return link.time_ms
    timed = link.chosen(loaded.steps).filter(pl.col("duration_ns") > 0)
    if timed.is_empty():
        return None
    begin, end = timed["start_ns"].to_numpy(), (timed["start_ns"] + timed["duration_ns"]).to_numpy()
    origin = loaded.clocks[1]
    return float(begin.min() - origin) / NS_PER_MS, float(end.max() - origin) / NS_PER_MS


VIEW = view(
    NAME,
    "Telemetry",
    needs.telemetry,
    Panel("Telemetry", "telemetry-values", "reading what was sampled", _shown),
    tables={"values": _values},
)
