"""Two runs: what explains that a step of this one takes longer, or shorter, than one of the other.

In: what each kind of work contributes, as `dpro diff` finds it. Out: a table, and a waterfall that adds up to
the difference. It is about whole runs, whatever is selected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html
from dash.development.base_component import Component

from dpro.analysis.analysis import Analysis
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, csv_link, facts, graph, grid, panel, section, table
from dpro.dashboards.theme import colour, styled, time_unit
from dpro.dashboards.whatif.waterfall import waterfall_figure
from dpro.errors import UsageError
from dpro.replay.difference import DifferenceDocument
from dpro.replay.steps.durations import step_series
from dpro.units import format_duration, format_ms

NAME = "difference"
BARS = 15  # of single kinds of work
MIN_SHARE = 0.002  # of the step: what contributes less is taken together
LESS, UNEXPLAINED = "all that contributes less", "not explained by any kind of work"


def difference_info(found: DifferenceDocument) -> pl.DataFrame:
    """What contributes to the difference, largest first; it adds up to that.

    Args:
        found: as from `dpro.replay.difference.explain`, the other run first.

    Returns:
        `name`, `kind`, `delta_ms` (by how much it makes the step of this run longer), `before_ms` and
        `after_ms` (how much of it there is per rank and step, null where that cannot be said); the last rows
        are the rest.
    """
    listed = [each for each in found.contributors if abs(each.delta_ms) >= MIN_SHARE * found.a_ms][:BARS]
    less = sum(each.delta_ms for each in found.contributors) - sum(each.delta_ms for each in listed)
    rows: list[tuple[str, str, float, float | None, float | None]] = [
        (each.name, each.kind, each.delta_ms, each.a_ms, each.b_ms) for each in listed
    ]
    rows += [(LESS, "", less, None, None)] if len(listed) < len(found.contributors) else []
    rows += [(UNEXPLAINED, "", found.unexplained_ms, None, None)]
    numbers = ("delta_ms", "before_ms", "after_ms")
    schema = {"name": pl.String, "kind": pl.String} | dict.fromkeys(numbers, pl.Float64)
    return pl.DataFrame(rows, schema=schema, orient="row")


def difference_figure(contributions: pl.DataFrame, theme: str) -> go.Figure:
    """A waterfall from the step of the other run to that of this one.

    Args:
        contributions: as from `difference_info`.
    """
    return waterfall_figure(contributions, "{} per step more than in the other run", theme)


def rank_figure(by_rank: dict[int, float], theme: str) -> go.Figure:
    """What the work of each rank contributes, taken for itself.

    Args:
        by_rank: ms per step, by rank.
    """
    delta_ms = np.array(list(by_rank.values()))
    scale, unit = time_unit(float(np.abs(delta_ms).max(initial=0.0)))
    delta = delta_ms / scale
    ink = [colour("bad" if each > 0 else "good", theme) for each in delta]
    figure = go.Figure()
    figure.add_bar(
        x=list(map(str, by_rank)), y=delta, marker={"color": ink, "line": {"width": 0}},
        hovertemplate=f"rank %{{x}}: %{{y:+.4~g}} {unit} per step<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="rank", type="category", showgrid=False)
    figure.update_yaxes(title_text=f"{unit} per step", zeroline=True)
    return styled(figure, theme, height=260).update_layout(bargap=max(0.15, 1 - 0.08 * delta.size))


def _difference(loaded: Loaded, link: Link) -> tuple[DifferenceDocument, Loaded]:
    """Return what the runs differ by, and the other run.

    Raises:
        UsageError: the link names no other run, or one that is not offered.
    """
    other = loaded.against(link)
    if other is None:
        raise UsageError(needs.another(loaded, link))
    return loaded.difference_from(other), other


def _summary(loaded: Loaded, link: Link) -> Any:
    found, other = _difference(loaded, link)
    delta = found.delta_ms
    sign = "-" if delta < 0 else "+"
    rows = [
        ("this run", f"{format_ms(found.b_ms)} per step: {loaded.run.label}"),
        ("the other", f"{format_ms(found.a_ms)} per step: {other.run.label}"),
        ("difference", f"{sign}{format_ms(abs(delta))} ({delta / found.a_ms:+.1%})"),
        *_medians(loaded, other),
    ]
    named = (("this run", loaded), ("the other run", other))
    doubts = [f"{name}: {reason}" for name, each in named for reason in each.trust.reasons]
    return [facts(rows), html.Ul([html.Li(doubt) for doubt in doubts], className="unknown")]


def _medians(*runs: Analysis) -> list[tuple[str, str]]:
    """The typical step of each run as measured outside of deep windows, where both have such."""
    timed = [step_series(each.steps) for each in runs]
    typical = [series.typical_ns for series in timed if series is not None and not series.recorded]
    if len(typical) < 2:
        return []
    here, there = map(format_duration, typical)
    return [("measured", f"typical step outside deep windows: {here} here, {there} in the other")]


def _waterfall(loaded: Loaded, link: Link) -> Any:
    found = difference_info(_difference(loaded, link)[0])
    rows = [
        [
            row["name"],
            row["kind"],
            f"{'+' * (row['delta_ms'] > 0)}{format_ms(row['delta_ms'])}",
            *("" if row[side] is None else format_ms(row[side]) for side in ("before_ms", "after_ms")),
        ]
        for row in found.iter_rows(named=True)
    ]
    header = ["what", "kind", "contributes", "in the other", "in this run"]
    return [
        graph("difference-figure", difference_figure(found, link.theme)),
        html.Details([html.Summary("As a table"), table(header, rows, 2)]),
        csv_link(NAME, "contributions", link),
    ]


def _ranks(loaded: Loaded, link: Link) -> Any:
    return [
        graph("difference-ranks-figure", rank_figure(_difference(loaded, link)[0].by_rank, link.theme)),
        csv_link(NAME, "ranks", link),
    ]


def _contributions(loaded: Loaded, link: Link) -> pl.DataFrame:
    return difference_info(_difference(loaded, link)[0])


def _rank_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    by_rank = _difference(loaded, link)[0].by_rank
    return pl.DataFrame({"rank": list(by_rank), "delta_ms": list(by_rank.values())})


def _layout() -> Component:
    doing = "replaying both runs with each other's work"
    return grid(
        panel("This run and the other", section("difference-summary", doing), wide=True),
        panel("What explains it", section("difference-waterfall", doing), wide=True),
        panel("Work of each rank, taken for itself", section("difference-ranks", doing), wide=True),
    )


VIEW = View(
    NAME,
    "Difference",
    needs.another,
    _layout,
    {"difference-summary": _summary, "difference-waterfall": _waterfall, "difference-ranks": _ranks},
    {"contributions": _contributions, "ranks": _rank_table},
)
