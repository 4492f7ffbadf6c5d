"""Collectives: transfer times by operation and size, the fitted cost model, and which rank arrives last.

Takes the members of collectives, and the transfers of a graph; returns frames and figures of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html

from dpro.analysis.selected import SelectedRun
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, graph, message, table, view
from dpro.dashboards.theme import colour, log_ticks, plain, series, styled, time_unit
from dpro.errors import Unanswerable, UsageError
from dpro.replay.cost.curves import UNCLEAR_FIT, LinkCost
from dpro.replay.cost.transfers import CollectiveKind
from dpro.replay.graph import Graph, NodeKind
from dpro.selection import Selection, ranges_of
from dpro.units import NS_PER_MS, NS_PER_S, NS_PER_US, distinct_sizes, format_duration

NAME = "collectives"
MAX_POINTS = 1000  # drawn as SVG: without a GPU, creating a WebGL context takes longer
_LINE_POINTS = 40
S_PER_US = 1e-6
_SI = {"exponentformat": "SI", "minexponent": 0}  # 10 ms, not 0.01 s
ONCE = (
    "A rank that waits in several calls at once is counted once here; in Verdict's share of all waiting, and "
    "by operation and size, once for each call."
)
EACH_CALL = "Wait ends when the last rank arrives; transfer is the rest. Calls that wait at once count each."
_NONE = "No collective of this selection was recorded in depth."


def transfer_info(graph: Graph, link: Link) -> pl.DataFrame:
    """List transfers of known size: `rank`, `step`, `op`, `group`, `bytes`, `transfer_us`, `payload_gbps`."""
    nodes = graph.nodes
    sized = (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0) & (nodes.message >= 0)
    chosen = np.flatnonzero(sized & (nodes.duration > 0))
    sorts = [graph.messages[message] for message in nodes.message[chosen]]
    frame = pl.DataFrame(
        {
            "rank": nodes.rank[chosen],
            "step": nodes.step[chosen],
            "op": pl.Series([message.op for message in sorts], dtype=pl.String),
            "group": pl.Series([message.group for message in sorts], dtype=pl.String),
            "bytes": nodes.bytes[chosen],
            "transfer_us": nodes.duration[chosen] / NS_PER_US,
            "payload_gbps": nodes.bytes[chosen] / nodes.duration[chosen],
        }
    )
    return link.chosen(frame)


def transfer_figure(transfers: pl.DataFrame, lines: dict[CollectiveKind, LinkCost], theme: str) -> go.Figure:
    """Draw time against bytes, both logarithmic, with the line fitted to each operation and group.

    A diamond is the median of a size: predictions pass through it, and follow the line in between. A line is
    drawn only where the transfers show one.

    Args:
        lines: as from `dpro.replay.cost.transfers.fit_costs`.
    """
    figure = go.Figure()
    few = transfers.gather_every(1 + transfers.height // MAX_POINTS)
    are_several = few["group"].n_unique() > 1
    for number, ((op, group), rows) in enumerate(few.group_by("op", "group", maintain_order=True)):
        ink, line = series(number, theme), lines.get((str(op), str(group)))
        figure.add_scatter(
            x=rows["bytes"],
            y=rows["transfer_us"] * S_PER_US,
            mode="markers",
            marker={"size": 5, "color": ink, "opacity": 0.55},
            name=plain(f"{op} {group}" if are_several else op) + _fit_in_words(line),
            legendgroup=number,
            customdata=np.stack([rows["rank"], rows["step"], rows["payload_gbps"]], axis=1),
            hovertemplate="%{x:.3s}B in %{y:.3s}s, %{customdata[2]:.3g} GB/s of payload<br>"
            "rank %{customdata[0]}, step %{customdata[1]}",
        )
        if line is not None:
            ends = rows["bytes"].to_numpy().min(), rows["bytes"].to_numpy().max()
            x = np.geomspace(*ends, _LINE_POINTS) if ends[0] < ends[1] else np.array(ends)
            drawn = {"hoverinfo": "skip", "showlegend": False, "legendgroup": number}
            if line.is_line:
                y = line.line_ns(x) / NS_PER_S
                figure.add_scatter(x=x, y=y, mode="lines", line={"color": ink, "width": 1.5}, **drawn)
            sizes, times = line.knots
            open_diamond = {"symbol": "diamond-open", "size": 9, "color": ink}
            figure.add_scatter(x=sizes, y=times / NS_PER_S, mode="markers", marker=open_diamond, **drawn)
    across, up = log_ticks(few["bytes"]), log_ticks(few["transfer_us"])
    figure.update_xaxes(title_text="payload", type="log", ticksuffix="B", **_SI, **across)
    figure.update_yaxes(title_text="transfer", type="log", ticksuffix="s", **_SI, **up)
    below = {"y": -0.25, "yanchor": "top"}  # above the figure, a phone has no room for it beside the buttons
    return styled(figure, theme, height=380).update_layout(legend=below)


def _fit_in_words(line: LinkCost | None) -> str:
    """Word the clear parts of a fit for the legend, with half of their 95% intervals; empty without a fit."""
    if line is None:
        return ""
    parts = []
    if line.clear_latency_ns is not None:
        error = format_duration(line.latency_error_ns)
        parts.append(f"latency {format_duration(line.clear_latency_ns)} ± {error}")
    if line.clear_gbps is not None:
        then = "then " if parts else ""
        parts.append(f"{then}{line.clear_gbps:.3g} GB/s ± {line.gbps_error:.2g}")
    return f"<br>{', '.join(parts) or UNCLEAR_FIT}"


def arrivals(loaded: Loaded, link: Link) -> pl.DataFrame:
    """List selected members of collectives with all members recorded.

    Returns:
        `collective`, `rank`, `last` (the rank that arrived last), `wait` (ns; time in which the rank waits in
        several calls at once counts in the first of them), `others` (the waiting of all members, ns).
    """
    last = pl.col("rank").sort_by("wait_ns", "rank").first().over("instance")
    until = pl.col("start_ns") + pl.col("wait_ns")
    before = until.cum_max().shift(1).over("rank", order_by="start_ns")
    begin = pl.max_horizontal("start_ns", before)
    came = (
        loaded.members.filter("complete")
        .with_columns(last=last, wait=(until - begin).clip(0))
        .with_columns(others=pl.col("wait").sum().over("instance"))
        .rename({"instance": "collective"})
    )
    chosen = Selection(link.steps, ranges_of(link.ranks))
    if chosen:
        try:
            came = SelectedRun(loaded, chosen).ran_inside(came)
        except UsageError:  # nothing of the selection was recorded in depth
            came = came.clear()
    return came.select("collective", "rank", "last", "wait", "others")


def last_info(came: pl.DataFrame) -> pl.DataFrame:
    """Count how often each rank arrives last at collectives, and sum how long the others wait for it.

    Args:
        came: as from `arrivals`.

    Returns:
        `rank`, `collectives` (that it took part in), `last` (at which it arrived last), `waited_ms` (its own
        waiting, summed), `kept_waiting_ms` (the waiting of all others for it, summed).
    """
    is_last = pl.col("rank") == pl.col("last")
    return (
        came.group_by("rank")
        .agg(
            collectives=pl.len(),
            last=is_last.sum(),
            waited_ms=pl.col("wait").sum() / NS_PER_MS,
            kept_waiting_ms=pl.col("others").filter(is_last).sum() / NS_PER_MS,
        )
        .sort("rank")
    )


def last_figure(ranks: pl.DataFrame, theme: str) -> go.Figure:
    """Draw bars by rank: how long it waited, and how long others waited for it."""
    figure = go.Figure()
    scale, unit = time_unit(float(ranks.select("kept_waiting_ms", "waited_ms").to_numpy().max()))
    looks = {
        "kept_waiting_ms": ("others waited for it", "exposed_comm"),
        "waited_ms": ("it waited for others", "wait"),
    }
    for column, (title, what) in looks.items():
        figure.add_bar(
            x=ranks["rank"].cast(pl.String),
            y=ranks[column] / scale,
            name=title,
            marker={"color": colour(what, theme), "line": {"width": 0}},
            customdata=np.stack([ranks["last"], ranks["collectives"]], axis=1),
            hovertemplate=f"rank %{{x}}: %{{y:.3f}} {unit}<br>"
            "last in %{customdata[0]} of %{customdata[1]} collectives",
        )
    figure.update_xaxes(title_text="rank", type="category", showgrid=False)
    figure.update_yaxes(title_text=f"waiting, {unit} in all")
    return styled(figure, theme, height=300).update_layout(barmode="group")


def _transfers(loaded: Loaded, link: Link) -> Any:
    transfers = transfer_info(loaded.outline.graph, link)
    if transfers.is_empty():
        return message("No transfer of this selection is of known size.")
    figure = transfer_figure(transfers, loaded.costs, link.theme)
    return [graph("transfers-figure", figure), csv_link(NAME, "transfers", link)]


def _last(loaded: Loaded, link: Link) -> Any:
    ranks = last_info(arrivals(loaded, link))
    if ranks.is_empty():
        return message("No collective of this selection is known on all of its ranks.")
    figure, note = graph("last-figure", last_figure(ranks, link.theme)), html.P(ONCE, className="note")
    return [figure, note, csv_link(NAME, "last", link)]


def _sizes(loaded: Loaded, link: Link) -> Any:
    try:
        sizes, note = _sizes_of(loaded, link), []
    except Unanswerable:  # dumps have calls but no steps
        sizes, note = loaded.sizes, [html.P("Of the whole run: its calls have no steps.", className="note")]
    except UsageError:  # the page says which steps were recorded in depth
        return message(_NONE)
    if sizes.is_empty():
        return message(_NONE)
    header = ["op", "bytes", "hosts", "count", "total", "wait", "transfer", "bus bandwidth, GB/s"]
    rows = [
        [
            row["op"] or "?",
            size,
            "?" if row["hosts"] is None else str(row["hosts"]),
            f"{row['count']:,}",
            *(_duration(row[name]) for name in ("total_ns", "wait_ns", "transfer_ns")),
            "?" if row["busbw_gbps"] is None else f"{row['busbw_gbps']:.3g}",
        ]
        for size, row in zip(distinct_sizes(sizes["bytes"].to_list()), sizes.iter_rows(named=True))
    ]
    unmatched = int((sizes["count"] - sizes["matched"]).sum())
    if 0 < unmatched < sizes["count"].sum():
        text = f"Total alone includes the {unmatched:,} not found on all ranks of their group."
        note.append(html.P(text, className="note"))
    shown = [place for place, column in enumerate(zip(*rows)) if set(column) != {"?"}]
    rows = [[row[place] for place in shown] for row in rows]
    if not sizes["wait_ns"].is_null().all():
        note.append(html.P(EACH_CALL, className="note"))
    return [*note, table([header[place] for place in shown], rows), csv_link(NAME, "sizes", link)]


def _sizes_of(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return collectives of the selection by operation and size.

    Raises:
        UsageError: no step of the selection was recorded in depth.
        Unanswerable: the run has no spans to select from.
    """
    chosen = Selection(link.steps, ranges_of(link.ranks))
    return (
        loaded.once("sizes", lambda: SelectedRun(loaded, chosen).sizes, inputs=chosen)
        if chosen
        else loaded.sizes
    )


def _duration(ns: int | None) -> str:
    return "?" if ns is None else format_duration(ns)


VIEW = view(
    NAME,
    "Collectives",
    needs.calls,
    Panel(
        "Transfers by size, and the fitted lines", "collectives-transfers", "building the graph", _transfers
    ),
    Panel("Which rank comes last", "collectives-last", "matching collectives", _last),
    Panel("By operation and size", "collectives-sizes", "matching collectives", _sizes, wide=True),
    tables={
        "transfers": lambda loaded, link: transfer_info(loaded.outline.graph, link),
        "last": lambda loaded, link: last_info(arrivals(loaded, link)),
        "sizes": _sizes_of,
    },
)
