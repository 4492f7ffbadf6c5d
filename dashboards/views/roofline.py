"""Roofline of matmuls and convolutions: achieved throughput against the limits of the GPU.

In: a graph whose operators have shapes, of a known GPU model. Out: one row per operator, shapes and element
type, and a figure of them below the roof. The model: Williams, Waterman and Patterson, CACM 2009; peaks are
from the vendors' data sheets.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl

from dpro.dashboards.links import Link
from dpro.dashboards.names import plain
from dpro.dashboards.theme import colour, log_ticks, series, styled
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.models.gpus import GpuModel, gpu_named
from dpro.replay.models.roofline import BYTES, matmul_of, stored_as
from dpro.replay.whatif.graph_ops.spans.scope import matmuls_of_kernels

MAX_POINTS = 300
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
    """Tabulate the achieved throughput of matmuls and convolutions, those that take longest first.

    Returns:
        `name`, `shapes`, `dtype` (inferred from the kernel's name), `count`, `total_ms`, `intensity`
        (operations per byte that has to be moved), `tflops` (1e12 operations per second), `of_limit`
        (achieved share of the roof) and `limit` (compute or memory). Operators of unknown type or unexpected
        shapes are left out, and those above the roof: they do less than their shapes imply, as convolutions
        with a stride.
    """
    nodes = graph.nodes
    kernels = nodes.kind == NodeKind.KERNEL
    operators = matmuls_of_kernels(graph, kernels).filter(pl.col("shapes") != "")
    at = operators["node"].to_numpy()
    measured = nodes.measured_end[at] - nodes.measured_start[at]
    timed = link.chosen(operators.with_columns(ns=pl.Series(measured), step=pl.Series(nodes.step[at])))
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
        Unanswerable: the model is not known, or the run has several.
    """
    if graph.run is None or not graph.run.manifest.gpus:
        raise Unanswerable("no GPU was used, or its model is not known")
    return gpu_named(graph.run.manifest.gpus)


def roofline_figure(reached: pl.DataFrame, gpu: GpuModel, theme: str) -> go.Figure:
    """Draw operations per second against operations per byte, below the roof of each element type.

    Args:
        reached: as from `roofline_info`.
    """
    shown = reached.head(MAX_POINTS)
    figure = go.Figure()
    intensity, total_ms = shown["intensity"].to_numpy(), shown["total_ms"].to_numpy()
    low, high = intensity.min() / _BEYOND, intensity.max() * _BEYOND
    for number, ((dtype,), own) in enumerate(shown.group_by("dtype", maintain_order=True)):
        ink, peak = series(number, theme), gpu.tflops[str(dtype)]
        ridge = peak / gpu.gbps * 1e3
        x = np.unique([low, np.clip(ridge, low, high), high])
        figure.add_scatter(
            x=x, y=np.minimum(peak, x * gpu.gbps / 1e3), mode="lines", line={"color": ink, "width": 1.5},
            name=f"roof of {dtype}", hoverinfo="skip",
        )  # fmt: skip
        columns = ("name", "shapes", "count", "total_ms", "of_limit", "limit")
        hover = [
            f"{plain(name)} {plain(shapes)}<br>{count:,} calls, {ms:.3f} ms; {share:.0%} of its {limit} limit"
            for name, shapes, count, ms, share, limit in own.select(columns).iter_rows()
        ]
        size = 6 + 16 * np.sqrt(own["total_ms"].to_numpy() / total_ms.max())
        figure.add_scatter(
            x=own["intensity"], y=own["tflops"], mode="markers", name=str(dtype), customdata=hover,
            marker={"size": size, "color": ink, "opacity": 0.6, "line": {"color": colour("panel", theme)}},
            hovertemplate="%{customdata}<br>%{y:.3g} TFLOP/s at %{x:.3g} FLOP per byte<extra></extra>",
        )  # fmt: skip
    log = {"type": "log", "exponentformat": "none"}
    figure.update_xaxes(title_text="operations per byte", **log, **log_ticks((low, high)))
    figure.update_yaxes(title_text="1e12 operations per second", **log, **log_ticks(shown["tflops"]))
    return styled(figure, theme, height=380)
