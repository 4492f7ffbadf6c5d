"""Where the time of each step goes: compute, communication, the host, or idle.

Takes the usual steps of a run, or the recorded ones; returns ms per part, by rank and by step, and stacked
bars of them. The parts add up to the step. Figures are those of `dpro report`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash import Dash, Input, State, html
from dash.development.base_component import Component

from dpro.analysis.mean_step import mean_steps
from dpro.analysis.summary import NO_FIT
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded, steps_in_words
from dpro.dashboards.page import Panel, choices, csv_link, graph, grid, in_browser, message, view
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import colour, css_name, ink_on, styled, time_unit
from dpro.dashboards.timeline.measured import MAX_UNASKED
from dpro.errors import DproError
from dpro.schema import SPANS
from dpro.selection import Selection, ranges_of
from dpro.units import NS_PER_MS, format_duration
from dpro.words import capitalised

NAME = "breakdown"
_DOING = "adding up where the time went"
_NONE = "No step of this selection was recorded in depth."
UNMARKED = "no steps marked: all of the window"
FEW_BARS = 16  # more bars than this have no room for their values
SIDES = {"": "usual steps", "recorded": "as recorded"}
MIN_NAMED = 4  # percent of a bar; smaller parts have no room for a label
FEW_WHOLES = 9  # on a phone, more bars than this have no room for their totals above
_TOP = 52  # pixels, for a legend inside the figure, below its buttons
_MIN_WIDTH = 560  # pixels; in a narrower figure the legend would cover the bars
_HEADROOM = 1.1  # length of the axis, relative to the longest step
_GAP, _WIDEST = 0.15, 0.12  # between bars, as a share of one; widest bar, as a share of the figure
PARTS = {  # column of the data -> label; from the bottom of a bar to its top
    "compute_ms": "compute alone",
    "copy_ms": "copies",
    "overlapped_comm_ms": "compute and communication",
    "exposed_transfer_ms": "transfer",
    "exposed_wait_ms": "waiting for others",
    "unsplit_comm_ms": "communication, wait not known",
    "host_bound_ms": "host bound",
    "idle_ms": "idle",
}


def part_info(breakdown: pl.DataFrame, by: str, link: Link) -> pl.DataFrame:
    """Average the parts of the step, by rank or by step.

    Args:
        breakdown: as from `dpro.replay.steps.step_breakdown`.
        by: `rank` or `step`.

    Returns:
        `by`, one column per part, and `duration_ms`, which is their sum.
    """
    means = mean_steps(link.chosen(breakdown), by)
    alone = means.with_columns(compute_ns=pl.col("compute_ns") - pl.col("overlapped_comm_ns"))
    names = [*PARTS, "duration_ms"]
    return alone.select(by, *(pl.col(name.replace("_ms", "_ns")).alias(name) / NS_PER_MS for name in names))


def part_figure(parts: pl.DataFrame, by: str, theme: str, longest_ms: float = 0.0) -> go.Figure:
    """Draw stacked bars of the parts, without a legend.

    Args:
        longest_ms: step time that the axis must at least contain.
    """
    figure = go.Figure()
    longest_ms = max(longest_ms, float(parts["duration_ms"].to_numpy().max()))
    scale, unit = time_unit(longest_ms)
    places = parts[by].cast(pl.String).replace("-1", UNMARKED)
    few = parts.height <= FEW_BARS
    for column, title in PARTS.items():
        if not (parts[column] > 0).any():
            continue
        share = 100 * parts[column].to_numpy() / parts["duration_ms"].to_numpy()
        value = parts[column].to_numpy() / scale
        named = [
            f"{format_duration(part_ms * NS_PER_MS)}, {of:.0f}%" if of >= MIN_NAMED else ""
            for part_ms, of in zip(parts[column], share)
        ]
        figure.add_bar(
            x=places,
            y=value,
            name=title,
            marker={"color": colour(column.removesuffix("_ms"), theme), "line": {"width": 0}},
            customdata=share,
            text=named if few else None,
            textposition="inside",
            insidetextanchor="middle",
            insidetextfont={"size": 11, "color": ink_on(column.removesuffix("_ms"), theme)},
            textangle=0,
            hovertemplate=f"{by} %{{x}}: %{{y:.3f}} {unit}, %{{customdata:.1f}}%<extra>{title}</extra>",
        )
    wholes = parts["duration_ms"] / scale if parts.height <= FEW_WHOLES else ()
    for place, whole in enumerate(wholes):  # annotations address a category by its index
        figure.add_annotation(x=place, y=whole, text=f"{whole:.3g}", showarrow=False, yshift=8)
    figure.update_xaxes(title_text=by, type="category", showgrid=False)
    figure.update_yaxes(
        title_text=f"mean step, {unit}",
        range=[0, _HEADROOM * longest_ms / scale],
    )
    styled(figure, theme, height=340)
    gap = max(_GAP, 1 - _WIDEST * parts.height)
    figure.update_layout(hovermode="closest", showlegend=False, meta={"by": by})
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return figure.update_layout(barmode="stack", bargap=gap)


def with_legend(figure: go.Figure) -> go.Figure:
    """Add a legend inside a figure of `part_figure`, for pages without one beside it."""
    figure.update_layout(showlegend=True, legend_traceorder="normal", margin_t=_TOP)
    return figure.update_layout(meta=figure.layout.meta | {"least_width": _MIN_WIDTH})


def _legend(*drawn: pl.DataFrame) -> Component:
    """Return the legend of the drawn parts; it wraps on a narrow page."""
    named = [
        html.Li([html.I(style={"background": f"var(--{css_name(column.removesuffix('_ms'))})"}), title])
        for column, title in PARTS.items()
        if any((parts[column] > 0).any() for parts in drawn)
    ]
    return html.Ul(named, className="legend")


def shown_steps(loaded: Loaded, link: Link) -> tuple[pl.DataFrame, bool]:
    """Return the shown steps, and whether they are usual ones without recording's cost.

    Those of a run with many spans are as recorded: its graph would take too long for this view.
    """
    selection = Selection(link.steps, ranges_of(link.ranks))
    if link.options.get("shown") == "recorded" or loaded.num_rows[SPANS.name] > MAX_UNASKED:
        return selection.keep(loaded.breakdown), False
    return loaded.breakdown_of(selection)


def _bars(by: str) -> Any:
    def fill(loaded: Loaded, link: Link) -> Any:
        (steps, are_usual), other = shown_steps(loaded, link), loaded.against(link)
        parts = part_info(steps, by, link)
        if parts.is_empty():
            return message(_NONE)
        if other is None:
            figure = part_figure(parts, by, link.theme)
            drawn: list[Any] = [_legend(parts), graph(f"breakdown-{by}-figure", figure)]
        else:
            drawn = _both(parts, other, by, link)
        can_choose = by == "rank" and (are_usual or "shown" in link.options)
        chosen = [choices(link, "shown", SIDES, "")] if can_choose else []
        basis = html.P(_basis(loaded, steps, are_usual, by), className="note")
        return [*chosen, *drawn, basis, csv_link(NAME, f"by_{by}", link)]

    return fill


def _basis(loaded: Loaded, steps: pl.DataFrame, are_usual: bool, by: str) -> str:
    """Return a sentence about the steps in the bars, and what each bar is a mean of."""
    recorded = loaded.breakdown["step"].n_unique()
    how = "without recording's cost, as in `dpro report`" if are_usual else "as recorded"
    over = "its steps" if by == "rank" else "the ranks"
    said = f"{capitalised(steps_in_words(steps['step'], recorded))}, {how}; each bar is a mean over {over}."
    with suppress(DproError):  # the run has no graph
        if loaded.num_rows[SPANS.name] <= MAX_UNASKED and not loaded.trust.answerable:
            said += f" {NO_FIT}."
    return said


def _both(parts: pl.DataFrame, other: Loaded, by: str, link: Link) -> list[Component]:
    """Return the bars of this run and of the other, side by side on one scale, and their legend."""
    try:
        others = part_info(shown_steps(other, link)[0], by, link)
        why = "" if others.height else _NONE
    except DproError as error:
        others, why = parts.clear(), str(error)
    longest = max(float(frame["duration_ms"].to_numpy().max(initial=0)) for frame in (parts, others))
    here = graph(f"breakdown-{by}-figure", part_figure(parts, by, link.theme, longest))
    there: Component = message(why)
    if not why:
        there = graph(f"breakdown-{by}-other", part_figure(others, by, link.theme, longest))
    sides = (("this run", here), (link.against, there))
    return [
        _legend(parts, others),
        grid(*(html.Div([html.H3(html.Strong(name)), drawn]) for name, drawn in sides)),
    ]


def _register(app: Dash, _runs: Runs) -> None:
    for by in ("rank", "step"):
        name = f"breakdown-{by}-figure"
        in_browser(app, "bar", Input(name, "clickData"), State(name, "figure"))


VIEW = view(
    NAME,
    "Breakdown",
    needs.windows,
    Panel("By rank", "breakdown-rank", _DOING, _bars("rank"), wide=True),
    Panel("By step", "breakdown-step", _DOING, _bars("step"), wide=True),
    tables={
        "by_rank": lambda loaded, link: part_info(shown_steps(loaded, link)[0], "rank", link),
        "by_step": lambda loaded, link: part_info(shown_steps(loaded, link)[0], "step", link),
    },
    register=_register,
)
