"""Kernels, or operators of a run without a GPU, by their total time.

Takes spans of the selected ranks and steps; returns totals by name, sorted and filtered as the link says, and
the roofline of matmuls.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Input, dcc, html
from dash.development.base_component import Component

from dpro.classify import COMMUNICATION, OTHER, classify
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded, steps_in_words
from dpro.dashboards.page import View, csv_link, graph, in_browser, message, panel, section, table
from dpro.dashboards.theme import FEW_POWERS, colour, log_ticks, plain, series, styled
from dpro.dashboards.timeline.measured import MAX_UNASKED
from dpro.dashboards.timeline.search import exactly
from dpro.errors import Unanswerable
from dpro.recorders import SHAPES, how_to_record
from dpro.replay.cost.kernels.roofline import BYTES, MATMULS, GpuModel, gpu_named, matmul_of, stored_as
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.steps import kernel_totals, recorded_steps, spans_of_steps
from dpro.replay.whatif.graph_ops.scope import matmuls_of_kernels
from dpro.schema import SPANS
from dpro.selection import Ranges, Selection, quoted
from dpro.units import NS_PER_MS, NS_PER_US, format_duration
from dpro.words import short_name

NAME = "kernels"
COLUMNS = {  # column -> header
    "name": "name",
    "total_ms": "total",
    "share": "share",
    "per_step_ms": "per step and rank",
    "count": "count",
    "mean_us": "mean",
    "class": "class",
}
_ORDER = "-total_ms"
_PAUSE_S = 0.3  # in typing, after which the filter applies


def _class_of(name: str) -> str:
    kind = COMMUNICATION if name.startswith("c10d::") else classify(name).kind
    return "gemm" if kind == OTHER and name in MATMULS else kind


def kernel_info(spans: pl.DataFrame, stretches: pl.DataFrame, link: Link) -> pl.DataFrame:
    """Sum durations by name.

    Args:
        spans: of the steps that are shown, or of a run without steps.
        stretches: these steps, as from `recorded_steps`.
        link: selected ranks, `filter` (part of a name or class), and `sort` (a column; a leading - means
            descending).

    Returns:
        The columns of `COLUMNS`; `per_step_ms` is the total divided by the number of steps over all ranks,
        null if there are none; `share` is relative to the whole selection, before the filter.
    """
    num_steps = link.chosen(stretches).filter(pl.col("step") >= 0).select("rank", "step").n_unique()
    totals = kernel_totals(link.chosen(spans))
    total = pl.col("total_ns")
    named = totals.with_columns(
        **{"class": pl.col("name").map_elements(_class_of, return_dtype=pl.String)},
        total_ms=total / NS_PER_MS,
        per_step_ms=total / NS_PER_MS / (num_steps or None),
        share=total / total.sum(),
        mean_us=total / pl.col("count") / NS_PER_US,
    ).select(list(COLUMNS))
    word = link.options.get("filter", "").lower()
    if word:
        fits = [
            pl.col(name).str.to_lowercase().str.contains(word, literal=True) for name in ("name", "class")
        ]
        named = named.filter(fits[0] | fits[1])
    order = link.options.get("sort", _ORDER)
    column = order.removeprefix("-")
    column = column if column in COLUMNS else "total_ms"
    return named.sort([column, "name"], descending=[order.startswith("-"), False])


def steps_shown(loaded: Loaded, link: Link) -> Ranges:
    """Return the selected steps, or else those of which the usual step is the mean; empty for all."""
    if link.steps or loaded.num_rows[SPANS.name] > MAX_UNASKED:
        return link.steps
    return loaded.usual_steps


def _stretches(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the recorded steps that are shown, as from `recorded_steps`."""
    recorded = recorded_steps(loaded.spans, loaded.steps)
    chosen = Selection(steps_shown(loaded, link)).keep(recorded)
    return chosen if link.steps or chosen.height else recorded


def _kernels(loaded: Loaded, link: Link) -> pl.DataFrame:
    def select() -> tuple[pl.DataFrame, pl.DataFrame]:
        stretches = _stretches(loaded, link)
        return spans_of_steps(loaded.spans, stretches), stretches

    return kernel_info(*loaded.once("spans of steps", select, inputs=link.steps), link)


def _basis(loaded: Loaded, link: Link) -> str:
    """Return a sentence about the steps of a table."""
    if link.steps:
        return "Work of the selected steps."
    every = recorded_steps(loaded.spans, loaded.steps).filter(pl.col("step") >= 0)["step"].n_unique()
    shown = _stretches(loaded, link).filter(pl.col("step") >= 0)["step"].unique()
    if shown.len() in (0, every):
        return "Work of all recorded steps." if every else "Work of the whole recording, which has no steps."
    return f"Work of the usual {steps_in_words(shown, every)}. Select others to see theirs."


def _table(loaded: Loaded, link: Link) -> Any:
    rows = _kernels(loaded, link)
    word = link.options.get("filter", "")
    if rows.is_empty() and word and not _kernels(loaded, replace(link, options={})).is_empty():
        return message(f"No name or class contains {quoted(word)}.")
    if rows.is_empty():
        return message("Nothing of this selection was recorded in depth.")
    largest = float(rows["total_ms"].to_numpy().max()) or 1.0
    body = [
        [
            _barred(row["total_ms"] / largest, _named(row["name"], link)),
            format_duration(row["total_ms"] * NS_PER_MS),
            f"{row['share']:.1%}",
            "–" if row["per_step_ms"] is None else format_duration(row["per_step_ms"] * NS_PER_MS),
            f"{row['count']:,}",
            format_duration(row["mean_us"] * NS_PER_US),
            row["class"],
        ]
        for row in rows.iter_rows(named=True)
    ]
    named = "kernel" if (loaded.spans["kind"] == "kernel").any() else "operator, by its own time"
    header = [_header(link, column, title) for column, title in (COLUMNS | {"name": named}).items()]
    basis = html.P(_basis(loaded, link), className="note")
    return [table(header, body, numbers_to=6), basis, csv_link(NAME, "kernels", link)]


def _barred(share: float, name: Component) -> Component:
    """Return a name beside a bar with a length of `share`, 0 to 1, relative to the longest."""
    filled = html.I(style={"width": f"{share:.0%}"})
    return html.Div([html.Span(filled, className="bar"), name], className="barred")


def _named(name: str, link: Link) -> Component:
    """Return a name with a link to its spans in the timeline."""
    address = link.query(view="timeline", options={"find": exactly(name)})
    return dcc.Link(short_name(name), href=address, className="name", title=f"{name}: show its spans")


def _header(link: Link, column: str, title: str) -> Component:
    """Return a header that sorts by its column when clicked: first numbers descending, names ascending."""
    order = link.options.get("sort", _ORDER)
    text = column in ("name", "class")
    flipped = {column: f"-{column}", f"-{column}": column}.get(order, column if text else f"-{column}")
    mark = {column: " ▲", f"-{column}": " ▼"}.get(order, "")
    return dcc.Link(title + mark, href=link.with_options(sort="" if flipped == _ORDER else flipped))


def _roofline(loaded: Loaded, link: Link) -> Any:
    reached, gpu = _reached(loaded, link), gpu_of(loaded.built.predictive)
    if reached.is_empty():
        how = how_to_record(SHAPES, loaded.run)
        return message(f"No matmul of this selection has shapes: record with {how}.")
    compute = pl.col("limit") == "compute"
    share = reached.select(pl.col("total_ms").filter(compute).sum() / pl.col("total_ms").sum()).item()
    mean = reached.select((pl.col("of_limit") * pl.col("total_ms")).sum() / pl.col("total_ms").sum()).item()
    note = (
        f"Compute limits {share:.0%} of this time, memory the rest; kernels reach {mean:.0%} of the limits."
    )
    return [
        graph("roofline-figure", roofline_figure(reached, gpu, link.theme)),
        html.P(note, className="note"),
        csv_link(NAME, "roofline", link),
    ]


def _reached(loaded: Loaded, link: Link) -> pl.DataFrame:
    whole = loaded.built.predictive
    return roofline_info(whole, gpu_of(whole), replace(link, steps=steps_shown(loaded, link)))


def _filter(_loaded: Loaded, link: Link) -> Any:
    return dcc.Input(
        id="filter",
        type="text",
        placeholder="part of a name or class",
        debounce=_PAUSE_S,
        value=link.options.get("filter", ""),
        autoComplete="off",
    )


def _layout() -> Component:
    return html.Div(
        [
            panel(
                "",
                section("kernels-filter", "filter"),
                section("kernels-table", "adding up"),
            ),
            panel("Roofline", section("kernels-roofline", "building the graph")),
        ],
        className="stack",
    )


VIEW = View(
    NAME,
    "Kernels",
    needs.windows,
    _layout,
    {"kernels-filter": _filter, "kernels-table": _table, "kernels-roofline": _roofline},
    {"roofline": _reached, "kernels": _kernels},
    lambda app, _: in_browser(app, "filter", Input("filter", "value")),
    whole=frozenset({"kernels-filter"}),  # filling it again would overwrite what is typed meanwhile
)


# Roofline of matmuls and convolutions: achieved throughput against the limits of the GPU.

MAX_POINTS = 300
TERA = 1e12
_BEYOND = 2.0  # factor by which the roof extends beyond the outermost points
_SCHEMA = {
    "name": pl.String(),
    "shapes": pl.String(),
    "dtype": pl.String(),
    "count": pl.Int64(),
    "total_ms": pl.Float64(),
    "intensity": pl.Float64(),
    "tflops": pl.Float64(),
    "of_limit": pl.Float64(),
    "limit": pl.String(),
}


def roofline_info(graph: Graph, gpu: GpuModel, link: Link) -> pl.DataFrame:
    """Return the achieved throughput of matmuls and convolutions, the largest total time first.

    Returns:
        `name`, `shapes`, `dtype` (inferred from the kernel's name), `count`, `total_ms`, `intensity`
        (operations per byte moved), `tflops` (1e12 operations per second), `of_limit` (achieved share of the
        roof) and `limit` (compute or memory). Leaves out operators of unknown type or unexpected shapes, and
        those above the roof, which do less work than their shapes imply, such as convolutions with a stride.
    """
    nodes = graph.nodes
    kernels = nodes.kind == NodeKind.KERNEL
    operators = matmuls_of_kernels(graph, kernels).filter(pl.col("shapes") != "")
    operator_nodes = operators["node"].to_numpy()
    measured = nodes.measured_end[operator_nodes] - nodes.measured_start[operator_nodes]
    timed = link.chosen(
        operators.with_columns(ns=pl.Series(measured), step=pl.Series(nodes.step[operator_nodes]))
    )
    names = pl.Series(graph.names, dtype=pl.String).gather(nodes.name[timed["node"].to_numpy()])
    longest = pl.col("kernel").sort_by("ns").last()
    calls = (
        timed.with_columns(kernel=names)
        .group_by("rank", "span_id", "name", "shapes")
        .agg(pl.col("ns").sum(), kernel=longest)
    )
    kinds = calls.with_columns(dtype=pl.col("kernel").map_elements(stored_as, return_dtype=pl.String))
    rows = []
    grouped = kinds.group_by("name", "shapes", "dtype").agg(pl.len(), pl.col("ns").sum())
    for name, shapes, dtype, count, total_ns in grouped.iter_rows():
        asked = matmul_of(name, shapes)
        mean_ns = total_ns / count
        if asked is None or dtype not in gpu.tflops or mean_ns < asked.least_ns(gpu, dtype):
            continue
        least_ns = asked.least_ns(gpu, dtype)
        limit = "compute" if asked.compute_ns(gpu, dtype) >= least_ns else "memory"
        intensity = asked.operations / ((asked.read + asked.written) * BYTES[dtype])
        reached = asked.operations / mean_ns / 1e3
        rows.append(
            (name, shapes, dtype, count, total_ns / 1e6, intensity, reached, least_ns / mean_ns, limit)
        )
    frame = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    return frame.sort(["total_ms", "name", "shapes"], descending=[True, False, False])


def gpu_of(graph: Graph) -> GpuModel:
    """Return the model of a run's GPUs.

    Raises:
        Unanswerable: the model is unknown, or the run has several.
    """
    if graph.run is None or not graph.run.manifest.gpus:
        raise Unanswerable("No GPU was used, or its model is not known.")
    return gpu_named(graph.run.manifest.gpus)


def roofline_figure(reached: pl.DataFrame, gpu: GpuModel, theme: str) -> go.Figure:
    """Draw operations per second against operations per byte, below the roof of each element type."""
    shown = reached.head(MAX_POINTS)
    figure = go.Figure()
    intensity, total_ms = shown["intensity"].to_numpy(), shown["total_ms"].to_numpy()
    low, high = intensity.min() / _BEYOND, intensity.max() * _BEYOND
    for number, ((dtype,), of_type) in enumerate(shown.group_by("dtype", maintain_order=True)):
        ink, peak = series(number, theme), gpu.tflops[str(dtype)]
        ridge = peak / gpu.gbps * 1e3
        x = np.unique([low, np.clip(ridge, low, high), high])
        figure.add_scatter(
            x=x, y=np.minimum(peak, x * gpu.gbps / 1e3) * TERA, mode="lines",
            line={"color": ink, "width": 1.5}, name=f"roof of {dtype}", hoverinfo="skip",
        )  # fmt: skip
        columns = ("name", "shapes", "count", "total_ms", "of_limit", "limit")
        hover = [
            f"{plain(name)} {plain(shapes)}<br>{count:,} calls, {ms:.3f} ms; {share:.0%} of its {limit} limit"
            for name, shapes, count, ms, share, limit in of_type.select(columns).iter_rows()
        ]
        size = 6 + 16 * np.sqrt(of_type["total_ms"].to_numpy() / total_ms.max())
        figure.add_scatter(
            x=of_type["intensity"], y=of_type["tflops"] * TERA, mode="markers", name=str(dtype),
            customdata=hover,
            marker={"size": size, "color": ink, "opacity": 0.6, "line": {"color": colour("panel", theme)}},
            hovertemplate="%{customdata}<br>%{y:.3s}FLOP/s at %{x:.3g} FLOP per byte<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(
        title_text="FLOP per byte", type="log", exponentformat="none", **log_ticks((low, high))
    )
    peaks = gpu.tflops.values()
    least, most = (math.log10(TERA * tflops) for tflops in (shown["tflops"].min(), max(peaks)))  # type: ignore
    powers = range(max(math.floor(least), 0), math.ceil(most) + 1, 1 + int(most - least) // FEW_POWERS)
    words = [f"{10 ** (power % 3)} {' kMGTPE'[power // 3]}FLOP/s" for power in powers]
    figure.update_yaxes(type="log", tickvals=[10**power for power in powers], ticktext=words)
    return styled(figure, theme, height=380)
