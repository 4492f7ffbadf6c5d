"""Stages of a pipeline in one step, micro-batch by micro-batch, and how long they are idle.

Takes the operations of the run, whether it has nothing else or they were recorded beside kernels and CPU
work; returns forward and backward of each micro-batch of one step, a row per rank, and the bubble of each
stage.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash import html

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, graph, message, view
from dpro.dashboards.theme import colour, ink_on, styled, time_unit
from dpro.replay.pipeline.operations import INPUTS_NAME, Role
from dpro.selection import Selection
from dpro.units import NS_PER_MS, format_duration
from dpro.words import counted

NAME = "pipeline"
_NONE = "No step of this selection has all operations of its ranks."
FEW = 400  # operations; more have no room for their numbers
_ROW, _MIN_HEIGHT = 26, 240  # pixels
KINDS = {  # label of an operation -> colour of the palette
    "forward": "compute",
    "backward": "overlapped_comm",
    "backward of inputs": "overlapped_comm",
    "backward of weights": "host_bound",
    "reduction": "exposed_comm",
    "other work": "idle",
}
_ROLES = {
    Role.FORWARD: "forward",
    Role.BACKWARD: "backward",
    Role.WEIGHTS: "backward of weights",
    Role.GATHER: "reduction",
    Role.REDUCE: "reduction",
    Role.WORK: "other work",
}


def operation_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return the operations of the selected step with the median duration.

    Returns:
        `rank`, `stage`, `step`, `what`, `chunk`, `micro_batch`, `begin_ms` since the step began, `lasts_ms`.
    """
    pipeline = loaded.pipeline
    columns = ("rank", "stage", "step", "what", "chunk", "micro_batch", "begin_ms", "lasts_ms")
    if pipeline is None:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.Int64))
    rows = link.chosen(pipeline.rows).filter(pl.col("role").is_in([int(role) for role in _ROLES]))
    lasts = pl.col("finish") - pl.col("begin")
    steps = pipeline.steps.filter(pl.col("step").is_in(rows["step"].unique().implode())).sort(lasts, "step")
    rows = rows.join(steps.slice(steps.height // 2, 1).select("step", "begin"), on="step")
    names = {int(role): name for role, name in _ROLES.items()}
    named = pl.col("role").replace_strict(names, return_dtype=pl.String)
    what = pl.when(pl.col("name") == INPUTS_NAME).then(pl.lit("backward of inputs")).otherwise(named)
    operations = rows.with_columns(
        what=what,
        begin_ms=(pl.col("start") - pl.col("begin")) / NS_PER_MS,
        lasts_ms=(pl.col("end") - pl.col("start")) / NS_PER_MS,
    )
    return operations.select(columns).sort("stage", "rank", "begin_ms")


def operation_figure(rows: pl.DataFrame, theme: str) -> go.Figure:
    """Draw a row of bars for each rank, the first stage on top."""
    figure = go.Figure()
    scale, unit = time_unit(float((rows["begin_ms"] + rows["lasts_ms"]).to_numpy().max()))
    several = int(rows["chunk"].to_numpy().max()) > 0
    label = pl.format("stage {}, rank {}", "stage", "rank")
    for (what,), of_kind in rows.with_columns(label=label).group_by("what", maintain_order=True):
        batch = pl.when(pl.col("micro_batch") >= 0).then(pl.col("micro_batch").cast(pl.String))
        number = of_kind.select(batch.fill_null("")).to_series()
        chunk = of_kind["chunk"].cast(pl.String) if several else pl.repeat("", of_kind.height, eager=True)
        figure.add_bar(
            x=of_kind["lasts_ms"] / scale,
            base=of_kind["begin_ms"] / scale,
            y=of_kind["label"],
            orientation="h",
            name=str(what),
            marker={"color": colour(KINDS[str(what)], theme), "line": {"width": 1}},
            opacity=0.7 if what == "backward of inputs" else 1.0,
            text=number if rows.height <= FEW else None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"size": 11, "color": ink_on(KINDS[str(what)], theme)},
            customdata=[
                [name, f", chunk {part}" if part and part != "-1" else "", format_duration(ms * NS_PER_MS)]
                for name, part, ms in zip(number, chunk, of_kind["lasts_ms"])
            ],
            hovertemplate=f"%{{y}}: {what} %{{customdata[0]}}%{{customdata[1]}}, %{{customdata[2]}}"
            "<extra></extra>",
        )
    ranks = rows["rank"].n_unique()
    figure.update_xaxes(title_text=f"since the step began, {unit}")
    order = rows.select("stage", "rank").unique().sort("stage", "rank").select(label).to_series().to_list()
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], showgrid=False)
    styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * ranks + 120))
    figure.update_layout(barmode="overlay", bargap=0.15, showlegend=True, hovermode="closest")
    return figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"})


def bubble_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """Return how long each stage is idle in the selected steps, else in the usual ones, on average, in ms."""
    selection = Selection(steps=tuple(link.steps), ranks=tuple((rank, rank) for rank in link.ranks))
    bubbles = loaded.bubbles(selection)
    times = [
        (pl.col(f"{name}_ns") / NS_PER_MS).alias(f"{name}_ms") for name in ("pipeline", "compute", "bubble")
    ]
    return bubbles.select("stage", "ranks", "steps", *times, "bubble_share")


def bubble_figure(bubbles: pl.DataFrame, theme: str) -> go.Figure:
    """Draw the share of the pipeline's time in which each stage computes nothing."""
    share = 100 * bubbles["bubble_share"]
    figure = go.Figure()
    figure.add_bar(
        x=bubbles["stage"].cast(pl.String),
        y=share,
        marker={"color": colour("idle", theme), "line": {"width": 0}},
        text=[f"{percent:.1f}%" for percent in share],
        customdata=[format_duration(ms * NS_PER_MS) for ms in bubbles["bubble_ms"]],
        hovertemplate="stage %{x}: %{y:.1f} %, %{customdata}<extra></extra>",
    )
    figure.update_xaxes(title_text="stage", type="category", showgrid=False)
    figure.update_yaxes(title_text="bubble, % of the pipeline's time", rangemode="tozero")
    return styled(figure, theme, height=300)


def _operations(loaded: Loaded, link: Link) -> Any:
    rows = operation_info(loaded, link)
    if rows.is_empty():
        return message(_NONE)
    figure = graph("pipeline-operations-figure", operation_figure(rows, link.theme))
    return [message(f"Step {rows['step'][0]}."), figure, csv_link(NAME, "operations", link)]


def _bubbles(loaded: Loaded, link: Link) -> Any:
    bubbles = bubble_info(loaded, link)
    if bubbles.is_empty():
        return message(_NONE)
    absent = needs.missing_ranks(loaded)
    step = "step" if link.steps or not loaded.usual_steps else "usual step"
    note = f"Mean of {counted(int(bubbles['steps'].to_numpy().max()), step)}."
    return [
        graph("pipeline-bubbles-figure", bubble_figure(bubbles, link.theme)),
        html.P(note, className="note"),
        csv_link(NAME, "bubbles", link),
        *(
            [message(f"{absent} Lengths of steps and bubbles are those of the recorded ranks.")]
            if absent
            else []
        ),
    ]


VIEW = view(
    NAME,
    "Pipeline",
    needs.operations,
    Panel("Micro-batches", "pipeline-operations", "finding the operations", _operations, wide=True),
    Panel("Bubbles", "pipeline-bubbles", "adding up where stages wait", _bubbles, wide=True),
    tables={"operations": operation_info, "bubbles": bubble_info},
)
