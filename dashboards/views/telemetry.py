"""Telemetry on the time axis of the timeline: GPUs, ports, hosts and processes.

In: `counters`, sampled values. Out: one small figure per counter that changed. Counts that only grow are
shown as growth per second. Times are on the clock that the timeline has, as far as a rank of the host was
aligned to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash.development.base_component import Component
from plotly.subplots import make_subplots

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.names import plain
from dpro.dashboards.page import View, csv_link, graph, message, panel, section
from dpro.dashboards.theme import series, styled
from dpro.detect.machine.devices import gpus_of_ranks, sampled_gpus
from dpro.detect.machine.telemetry import SERIES
from dpro.units import NS_PER_MS, NS_PER_S

NAME = "telemetry"
MAX_COUNTERS = 14
POINTS = 1500  # of a series, that a figure of this width can tell apart
_ROW, _LEGEND = 92, 56  # pixels of a counter, of the room above all
_GROWS = (
    "_s",
    "_bytes",
    "_packets",
    "_errors",
    "_segments",
    "_pages",
    "_faults",
    "_corrected",
    "_uncorrected",
)
_LEVELS = ("memory", "disk", "swap_used", "cgroup_memory")  # bytes that are held, not moved
_OF_STEPS = ("step_", "data_wait_ns", "gc_pause_ns")  # intervals, shown with the steps
_FIRST = ("clock", "power", "temperature", "utilization", "tx_", "rx_", "load", "main_thread", "memory")


def telemetry_info(
    counters: pl.DataFrame, workers: pl.DataFrame, ahead: dict[str, int], origin_ns: int, link: Link
) -> pl.DataFrame:
    """What was sampled and changed meanwhile; GPUs of others are left out.

    Args:
        counters: table `counters`.
        workers: table `workers`, for which rank uses which GPU.
        ahead: by how many ns each host's clock is ahead of the timeline's.
        origin_ns: when the timeline begins, on its clock.
        link: the selection; what is of the host always counts.

    Returns:
        `counter` (with `/s` where it is growth per second), `series` (which device, host or rank), `time_ms`,
        `value`; counters in order of interest.
    """
    owned = gpus_of_ranks(counters, workers)
    chosen = owned.filter(pl.col("rank").is_in(link.ranks)) if link.ranks else owned
    if owned.height:  # else nothing is known of which they are
        others = sampled_gpus(counters).join(chosen, on=["host", "device"], how="anti")
        counters = counters.join(others, on=["host", "device"], how="anti")
    if link.ranks:
        counters = counters.filter((pl.col("rank") < 0) | pl.col("rank").is_in(link.ranks))
    users = pl.col("rank").cast(pl.String).sort().str.join(", ")
    users_of = chosen.group_by("host", "device").agg(used_by=users)
    sampled = counters.filter(
        ~pl.any_horizontal(pl.col("counter").str.starts_with(each) for each in _OF_STEPS)
    )
    sampled = sampled.filter(pl.col("value").n_unique().over(SERIES) > 1).sort(*SERIES, "time_ns")
    name = pl.col("counter")
    held = pl.any_horizontal(name.str.starts_with(each) for each in _LEVELS)
    grows = pl.any_horizontal(name.str.ends_with(each) for each in _GROWS) & ~held
    later, more = (pl.col(column).diff().over(SERIES) for column in ("time_ns", "value"))
    since = pl.col("time_ns") - pl.when(grows).then(later.fill_null(0)).otherwise(
        0
    )  # a rate is that of a stretch
    rate = pl.when(more >= 0).then(more / (later / NS_PER_S))
    moved = pl.col("host").replace_strict(ahead, default=0, return_dtype=pl.Int64)
    rank = (
        pl.when(pl.col("rank") >= 0)
        .then(pl.format("rank {}", "rank"))
        .when(pl.col("used_by").is_not_null())
        .then(pl.format("(rank {})", "used_by"))
        .otherwise(pl.lit(""))
    )
    words = [pl.col("host"), pl.col("device"), rank]
    shown = sampled.join(users_of, on=["host", "device"], how="left", maintain_order="left").select(
        counter=pl.when(grows).then(pl.concat_str(name, pl.lit("/s"))).otherwise(name),
        series=pl.concat_list(words).list.eval(pl.element().filter(pl.element() != "")).list.join(" "),
        time_ms=(since - moved - origin_ns) / NS_PER_MS,
        value=pl.when(grows).then(rate).otherwise("value"),
    )
    interest = pl.min_horizontal(
        pl.when(pl.col("counter").str.contains(word, literal=True)).then(pl.lit(place))
        for place, word in enumerate(_FIRST)
    )
    order = [interest.fill_null(len(_FIRST)), "counter", "series", "time_ms"]
    return shown.drop_nulls("value").sort(order)


def telemetry_figure(values: pl.DataFrame, extent: tuple[float, float] | None, theme: str) -> go.Figure:
    """One row per counter, all on one time axis; a value holds until the next.

    Args:
        values: as from `telemetry_info`.
        extent: from and to, ms; None for all there is.
        theme: light or dark.
    """
    names = values["counter"].unique(maintain_order=True).to_list()[:MAX_COUNTERS]
    figure = make_subplots(rows=len(names), shared_xaxes=True, vertical_spacing=0.25 / max(len(names), 1))
    lines = values["series"].unique().sort().to_list()
    named: set[str] = set()
    for row, name in enumerate(names, start=1):
        for (which,), own in values.filter(counter=name).group_by("series", maintain_order=True):
            thin = _thinned(own)
            figure.add_scatter(
                x=thin["time_ms"],
                y=thin["value"],
                mode="lines",
                line={"shape": "hv", "width": 1.2, "color": series(lines.index(which), theme)},
                name=plain(which),
                legendgroup=plain(which),
                showlegend=which not in named,
                hovertemplate="%{x:.1f} ms: %{y:.4g}<extra>%{fullData.name}</extra>",
                row=row,
                col=1,
            )
            named.add(str(which))
    styled(figure, theme, height=90 + _ROW * len(names))
    for row, name in enumerate(names, start=1):
        figure.update_yaxes(title={"text": "", "standoff": 0}, nticks=3, row=row, col=1)
        axis = "" if row == 1 else str(row)
        corner = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": f"y{axis} domain"}
        corner |= {"yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
        figure.add_annotation(text=plain(name), **corner)
    figure.update_layout(margin_t=_LEGEND, legend_y=1 + 0.4 * _LEGEND / (_ROW * len(names)))
    figure.update_xaxes(range=None if extent is None else list(extent))
    figure.update_xaxes(title_text="ms since the first span", row=len(names), col=1)
    return figure


def _thinned(own: pl.DataFrame) -> pl.DataFrame:
    """A series with at most so many points, and the least and most of each stretch among them."""
    every = 1 + 2 * own.height // POINTS
    if every <= 2:
        return own
    values = own["value"].to_numpy()
    whole = values[: values.size // every * every].reshape(-1, every)
    first = np.arange(whole.shape[0]) * every
    kept = np.unique(
        np.concatenate([first + whole.argmin(axis=1), first + whole.argmax(axis=1), [values.size - 1]])
    )
    return own.with_row_index("place").filter(pl.col("place").is_in(kept.tolist()))


def _values(loaded: Loaded, link: Link) -> pl.DataFrame:
    ahead, origin = loaded.clocks
    return telemetry_info(loaded.counters, loaded.workers, ahead, origin, link)


def _shown(loaded: Loaded, link: Link) -> Any:
    values = _values(loaded, link)
    if values.is_empty():
        return message(
            "Nothing was sampled beside this run: `dpro record` does, imports of traces have none."
        )
    names = values["counter"].n_unique()
    more = f" {names - MAX_COUNTERS} more counters changed: the CSV has them." if names > MAX_COUNTERS else ""
    return [
        message(f"Counters that changed, of {values['series'].n_unique()} devices, hosts and ranks.{more}"),
        graph("telemetry-figure", telemetry_figure(values, _extent(loaded, link), link.theme)),
        csv_link(NAME, "values", link),
    ]


def _extent(loaded: Loaded, link: Link) -> tuple[float, float] | None:
    """The time of the link, else of its steps, else all."""
    if link.time_ms is not None or link.steps is None:
        return link.time_ms
    known = link.chosen(loaded.steps).filter(pl.col("duration_ns") > 0)
    if known.is_empty():
        return None
    begin, end = known["start_ns"].to_numpy(), (known["start_ns"] + known["duration_ns"]).to_numpy()
    origin = loaded.clocks[1]
    return float(begin.min() - origin) / NS_PER_MS, float(end.max() - origin) / NS_PER_MS


def _layout() -> Component:
    return panel("Telemetry", section("telemetry-values", "reading what was sampled"))


VIEW = View(NAME, "Telemetry", _layout, {"telemetry-values": _shown}, {"values": _values})
