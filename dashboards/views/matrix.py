"""Rank × rank and host × host: how long transfers between pairs take, and which rank waits for which.

Takes times of each pair of ranks, from `dpro.detect.network.transfers`, and who arrived last; returns
matrices. A slow sender is a row, a slow receiver a column, a slow link a cell. Transfers in groups of more
than two ranks cannot be attributed to a pair, but the rank that arrived last is known. A matrix without data
has no panel: one sentence at the end says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html
from dash.development.base_component import Component
from numpy.typing import NDArray

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import (
    NUMBERED,
    RankOrder,
    View,
    choices,
    csv_link,
    draw_groups,
    empty,
    graph,
    grid,
    order_choice,
    order_of,
    panel,
    section,
)
from dpro.dashboards.theme import colour, plain, styled, time_unit
from dpro.dashboards.views.collectives import ONCE, arrivals
from dpro.detect.network.traffic import host_of
from dpro.detect.network.transfers import MIN_SLOW, both_ways, delay_matrix, host_matrix
from dpro.selection import is_in_ranges
from dpro.units import NS_PER_MS, format_ms

NAME = "matrix"
MAX_RANKS = 400  # across a square
SCALE = "Cividis"
_FEW = 16  # cells across that have room for a number
_TICKS = 24  # across
_ROOM, _AROUND = 34, 130  # pixels: least size of a cell with a number; axis and colour bar beside
MIN_PX, MAX_PX, _CELL = 260, 760, 26  # pixels
_NAMED = 5  # pairs named in the figure of bandwidths
_NO_PAIRS = (
    "No two ranks of this selection exchange data by themselves, and transfers of larger groups cannot be "
    "attributed to a pair. "
    "`dpro diagnose` compares groups."
)

Shown = list[Component] | str  # the components of a matrix, or why there is none


class PairMetric(NamedTuple):
    """A value that the cells of a square can show.

    Attributes:
        least, most: range that the colours must at least cover.
    """

    title: str
    column: str
    unit: str
    least: float = 0.0
    most: float = 0.0


METRICS = {
    "ratio": PairMetric("times as long as expected", "ratio", "×", 1.0, 2.0),
    "time": PairMetric("time of a transfer", "transfer_ms", "ms"),
    "speed": PairMetric("bandwidth", "payload_gbps", "GB/s"),
}


def pair_info(transfers: pl.DataFrame, hosts: dict[int, str], link: Link) -> pl.DataFrame:
    """Return the transfers of pairs, both ways.

    Args:
        transfers: as from `dpro.detect.network.traffic.transfers_of`.

    Returns:
        Columns of `delay_matrix`, and `transfer_ms` and `payload_gbps` (null where the bytes are unknown).
    """
    within = transfers.filter(is_in_ranges("step", link.steps)) if link.steps else transfers
    square = both_ways(delay_matrix(within, hosts))
    if link.ranks:
        square = square.filter(pl.all_horizontal(pl.col("source", "target").is_in(link.ranks)))
    speed = pl.col("bytes") / pl.col("count") / pl.col("transfer_ns")
    return square.with_columns(
        transfer_ms=pl.col("transfer_ns") / NS_PER_MS,
        payload_gbps=pl.when(pl.col("bytes") > 0).then(speed),
    )


def pair_figure(pairs: pl.DataFrame, metric: str, theme: str, order: RankOrder = NUMBERED) -> go.Figure:
    """Draw a square with senders as rows and receivers as columns; slow ones are outlined."""
    ranks = order.ordered(pl.concat([pairs["source"], pairs["target"]]).unique().to_list())
    place = {rank: number for number, rank in enumerate(ranks)}
    shown = METRICS[metric]
    cells = pairs.group_by("source", "target", maintain_order=True).agg(pl.col(shown.column).mean())
    figure = _by_ranks(square_figure(cells.rows(), ranks, shown, theme), ranks, order, theme)
    for corners in _slow(pairs, place):
        figure.add_shape(type="rect", line={"color": colour("bad", theme), "width": 2}, **corners)
    figure.update_xaxes(title_text="receives: rank")
    return figure.update_yaxes(title_text="sends: rank")


def _by_ranks(figure: go.Figure, ranks: list[int], order: RankOrder, theme: str) -> go.Figure:
    """Label the ranks of a square by their order, and separate its groups."""
    if order.axis:
        draw_groups(figure, ranks, order, theme, "xy")
        shown = [order.label(ranks[place]) for place in figure.layout.xaxis.tickvals]
        figure.update_xaxes(ticktext=shown).update_yaxes(ticktext=shown)
    return figure


def _slow(pairs: pl.DataFrame, place: dict[int, int]) -> list[dict[str, float]]:
    """Return corners around slow transfers: rows of senders, columns of receivers, cells of links."""
    size = len(place)
    senders = pairs.filter(pl.col("sender") >= MIN_SLOW)["source"].unique().sort()
    receivers = pairs.filter(pl.col("receiver") >= MIN_SLOW)["target"].unique().sort()
    links = (
        pairs.filter(pl.col("link") >= MIN_SLOW).select("source", "target").unique().sort("source", "target")
    )
    edge, end = -0.5, size - 0.5
    rows = [{"x0": edge, "x1": end, "y0": place[rank] - 0.5, "y1": place[rank] + 0.5} for rank in senders]
    columns = [
        {"y0": edge, "y1": end, "x0": place[rank] - 0.5, "x1": place[rank] + 0.5} for rank in receivers
    ]
    cells = [
        {"x0": place[to] - 0.5, "x1": place[to] + 0.5, "y0": place[source] - 0.5, "y1": place[source] + 0.5}
        for source, to in links.iter_rows()
    ]
    return [*rows, *columns, *cells]


def slow_in_words(pairs: pl.DataFrame) -> list[str]:
    """Return a line for each outline: senders, receivers and links, each with the slowest first."""
    kinds = [("sender", ["source"], "rank {} sends"), ("receiver", ["target"], "rank {} receives")]
    kinds += [("link", ["source", "target"], "rank {} to rank {} takes")]
    lines = []
    for column, keys, words in kinds:
        worst = pairs.filter(pl.col(column) >= MIN_SLOW).group_by(keys).agg(pl.col(column).max())
        for *ends, factor in worst.sort(column, *keys, descending=[True] + [False] * len(keys)).iter_rows():
            slower = f"{factor:.2f} times as long as expected"
            lines.append(
                f"{words.format(*ends)} {slower}" + ("" if column == "link" else ", with all its peers")
            )
    return lines


def square_figure(
    cells: Sequence[tuple[Any, Any, float | None]], names: Sequence[Any], metric: PairMetric, theme: str
) -> go.Figure:
    """Draw a heatmap of pairs; pairs without a value have no cell.

    Args:
        cells: row, column and value.
    """
    place = {name: number for number, name in enumerate(names)}
    values = np.full((len(names), len(names)), np.nan, np.float32)
    for row, column, value in cells:
        values[place[row], place[column]] = np.nan if value is None else value
    labels, unit, few = list(map(plain, names)), metric.unit, len(names) <= _FEW
    if unit == "ms":
        scale, unit = time_unit(float(np.nanmax(values)))
        values /= scale
    figure = go.Figure()
    figure.add_heatmap(
        x=np.arange(len(names)), y=np.arange(len(names)), z=values, colorscale=SCALE, xgap=1, ygap=1,
        colorbar={"title": {"text": unit}, "thickness": 10, "outlinewidth": 0}, hoverongaps=False,
        zmin=min(metric.least, float(np.nanmin(values))),
        zmax=max(metric.most, float(np.nanmax(values))) or 1.0,
        texttemplate=f"%{{z:,.{_decimals(values)}~f}}" if few else "",
        customdata=np.array([[f"{row} → {column}" for column in labels] for row in labels], object),
        hovertemplate="%{customdata}: %{z:,.4~r} " + unit + f"<extra>{metric.title}</extra>",
    )  # fmt: skip
    if few:  # narrower pages scroll
        figure.update_layout(meta={"least_width": _ROOM * len(names) + _AROUND})
    styled(figure, theme, height=int(np.clip(_CELL * len(names) + 110, MIN_PX, MAX_PX)))
    every = 1 + len(names) // _TICKS
    ticks = {"tickvals": list(range(len(names)))[::every], "ticktext": labels[::every]}
    figure.update_xaxes(**ticks, showgrid=False, zeroline=False, range=[-0.5, len(names) - 0.5])
    return figure.update_yaxes(**ticks, showgrid=False, zeroline=False, range=[len(names) - 0.5, -0.5])


def _decimals(values: NDArray[np.float32]) -> int:
    """Return the decimals with which the largest value has three digits; at least 1."""
    largest = float(np.nanmax(values))
    return max(1, 2 - math.floor(math.log10(largest))) if largest > 0 else 1


def late_info(came: pl.DataFrame) -> pl.DataFrame:
    """Return how long ranks waited in collectives for the rank that arrived last.

    Args:
        came: as from `dpro.dashboards.views.collectives.arrivals`.

    Returns:
        `rank` (waits), `last` (the rank it waits for), `waits` (how often), `waited_ms` (in total).
    """
    return (
        came.filter(pl.col("wait") > 0, pl.col("rank") != pl.col("last"))
        .group_by("rank", "last")
        .agg(waits=pl.len(), waited_ms=pl.col("wait").sum() / NS_PER_MS)
        .sort("rank", "last")
    )


def _pairs_of(loaded: Loaded, link: Link) -> pl.DataFrame:
    return pair_info(loaded.transfers, host_of(loaded.outline.graph), link)


def _metric(link: Link, there: Iterable[str]) -> str:
    """Return the metric that the link names, else the first with values."""
    chosen, available = link.options.get("metric", ""), list(there)
    return chosen if chosen in available else available[0]


def _pairs(loaded: Loaded, link: Link) -> Shown:
    pairs = _pairs_of(loaded, link)
    ranks = pl.concat([pairs["source"], pairs["target"]]).n_unique()
    if pairs.is_empty() or ranks > MAX_RANKS:
        return _NO_PAIRS if pairs.is_empty() else _too_many(ranks)
    there = {name: option.title for name, option in METRICS.items() if pairs[option.column].count()}
    metric = _metric(link, there)
    slow = slow_in_words(pairs)
    few = "" if pairs["ratio"].count() else " An expected time needs three comparable pairs: there are fewer."
    note = f"Outlined: {MIN_SLOW:g} times as long as expected, or more.{few}"
    return [
        choices(link, "metric", there, next(iter(there))),
        graph("pairs-figure", pair_figure(pairs, metric, link.theme, order_of(loaded, link))),
        html.Ul([html.Li(line) for line in slow[: 2 * _NAMED]]),
        html.P(note, className="note"),
        csv_link(NAME, "pairs", link),
    ]


def _too_many(ranks: int) -> str:
    return f"{ranks} ranks are more than a square of {MAX_RANKS} can show: select some, or use the host view."


def _hosts(loaded: Loaded, link: Link) -> Shown:
    between = _between(loaded, link)
    names = pl.concat([between["source_host"], between["target_host"]]).unique().sort().to_list()
    if len(names) < 2:
        if _pairs_of(loaded, link).is_empty():
            return _NO_PAIRS
        return "The pairs of this selection are on one host, or their hosts are not known."
    metric = _metric(link, [name for name in ("ratio", "time") if between[METRICS[name].column].count()])
    cells = between.select("source_host", "target_host", METRICS[metric].column).rows()
    figure = square_figure(cells, names, METRICS[metric], link.theme)
    return [graph("hosts-figure", figure), csv_link(NAME, "hosts", link)]


def _between(loaded: Loaded, link: Link) -> pl.DataFrame:
    steps = link.chosen(loaded.transfers)
    between = host_matrix(delay_matrix(steps, host_of(loaded.outline.graph)))
    return between.with_columns(transfer_ms=pl.col("transfer_ns") / NS_PER_MS)


def _late(loaded: Loaded, link: Link) -> Shown:
    late = late_info(arrivals(loaded, link))
    order = order_of(loaded, link)
    ranks = order.ordered(pl.concat([late["rank"], late["last"]]).unique().to_list())
    if not ranks or len(ranks) > MAX_RANKS:
        return "No rank waits in a collective of this selection." if not ranks else _too_many(len(ranks))
    waited = PairMetric("waited in all", "waited_ms", "ms")
    figure = square_figure(late.select("rank", "last", "waited_ms").rows(), ranks, waited, link.theme)
    _by_ranks(figure, ranks, order, link.theme)
    figure.update_xaxes(title_text="last rank to arrive").update_yaxes(title_text="rank that waits")
    (last, ms), *_ = (
        late.group_by("last").agg(pl.col("waited_ms").sum()).sort("waited_ms", "last").rows()[::-1]
    )
    note = f"Rank {last} is waited for longest: {format_ms(ms)} by all others together. {ONCE}"
    return [graph("late-figure", figure), html.P(note, className="note"), csv_link(NAME, "late", link)]


PANELS: Mapping[str, Callable[[Loaded, Link], Shown]] = {
    "Transfers, rank × rank": _pairs,
    "Waiting in collectives, rank × rank": _late,
    "Transfers, host × host": _hosts,
}


def _panels(loaded: Loaded, link: Link) -> Any:
    """Return a panel for each matrix with data, and one sentence about the others."""
    made = {title: make(loaded, link) for title, make in PANELS.items()}
    why = " ".join(dict.fromkeys(content for content in made.values() if isinstance(content, str)))
    panels = [panel(title, *content) for title, content in made.items() if not isinstance(content, str)]
    by_ranks = any("rank ×" in title for title, content in made.items() if not isinstance(content, str))
    chosen = order_choice(loaded, link) if by_ranks else []
    return [*chosen, *([grid(*panels)] if panels else []), *([empty(why)] if why else [])]


VIEW = View(
    NAME,
    "Matrix",
    needs.pairs,
    lambda: section("matrix-panels", "building the graph"),
    {"matrix-panels": _panels},
    {
        "pairs": _pairs_of,
        "hosts": _between,
        "late": lambda loaded, link: late_info(arrivals(loaded, link)),
    },
)
