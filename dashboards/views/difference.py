"""Two runs: why a step of this run takes longer, or shorter, than a step of the other.

Takes the contribution of each kind of work, as from `dpro diff`; returns a table, and a waterfall that adds
up to the difference. Covers whole runs, whatever is selected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import html

from dpro.analysis.comparison import how_known
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, facts, graph, table, view
from dpro.dashboards.theme import colour, plain, styled, time_unit
from dpro.errors import UsageError
from dpro.replay.difference import DifferenceDocument
from dpro.units import format_ms, signed_ms
from dpro.words import distinct_names, short_name

NAME, TITLE = "difference", "Difference"
_DOING = "replaying both runs with each other's work"
BARS = 15  # of single kinds of work
MIN_SHARE = 0.002  # share of the step; smaller contributions are drawn as one bar
MIN_OF_LARGEST = 0.02  # share of the largest contribution; smaller ones are drawn as one bar
OTHERS, UNEXPLAINED = "others, each less", "not explained by any kind of work"


def difference_info(difference: DifferenceDocument) -> pl.DataFrame:
    """Return the contributions to the difference, the largest first; they add up to the difference.

    Args:
        difference: as from `dpro.replay.difference.explain`, the other run first.

    Returns:
        `name`, `kind`, `delta_ms` (by how much it lengthens this run's step), `before_ms` and `after_ms` (its
        time per rank and step, null where unknown); the last rows are the remainder.
    """
    largest = max((abs(contributor.delta_ms) for contributor in difference.contributors), default=0.0)
    least = max(MIN_SHARE * difference.a_ms, MIN_OF_LARGEST * largest)
    listed = [contributor for contributor in difference.contributors if abs(contributor.delta_ms) >= least][
        :BARS
    ]
    less = sum(contributor.delta_ms for contributor in difference.contributors) - sum(
        contributor.delta_ms for contributor in listed
    )
    rows: list[tuple[str, str, float, float | None, float | None]] = [
        (contributor.name, contributor.kind, contributor.delta_ms, contributor.a_ms, contributor.b_ms)
        for contributor in listed
    ]
    others = len(difference.contributors) - len(listed)
    rows += [(f"{others} {OTHERS}", "", less, None, None)] if others else []
    rows += [(UNEXPLAINED, "", difference.unexplained_ms, None, None)]
    numbers = ("delta_ms", "before_ms", "after_ms")
    schema = {"name": pl.String, "kind": pl.String} | dict.fromkeys(numbers, pl.Float64)
    return pl.DataFrame(rows, schema=schema, orient="row")


def difference_figure(contributions: pl.DataFrame, theme: str, other: str = "the other run") -> go.Figure:
    """Draw a waterfall from the step of the other run to that of this one."""
    named = other.replace("{", "{{").replace("}", "}}")
    return waterfall_figure(contributions, f"{{}} per step more than in {named}", theme)


def rank_figure(by_rank: dict[int, float], theme: str) -> go.Figure:
    """Draw what the work of each rank contributes by itself.

    Args:
        by_rank: ms per step, by rank.
    """
    delta_ms = np.array(list(by_rank.values()))
    scale, unit = time_unit(float(np.abs(delta_ms).max(initial=0.0)))
    delta = delta_ms / scale
    ink = [colour("bad" if change > 0 else "good", theme) for change in delta]
    figure = go.Figure()
    figure.add_bar(
        x=list(map(str, by_rank)), y=delta, marker={"color": ink, "line": {"width": 0}},
        hovertemplate=f"rank %{{x}}: %{{y:+.4~g}} {unit} per step<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="rank", type="category", showgrid=False)
    figure.update_yaxes(title_text=f"{unit} per step", zeroline=True)
    return styled(figure, theme, height=260).update_layout(bargap=max(0.15, 1 - 0.08 * delta.size))


def _difference(loaded: Loaded, link: Link) -> tuple[DifferenceDocument, Loaded]:
    """Return the difference of the runs, and the other run.

    Raises:
        UsageError: the link names no other run, or one that is not offered.
    """
    other = loaded.against(link)
    if other is None:
        raise UsageError(needs.another(loaded, link))
    return loaded.difference_from(other), other


def _summary(loaded: Loaded, link: Link) -> Any:
    difference, other = _difference(loaded, link)
    here, there = _names_of_runs(loaded, other, link)
    a_ms, b_ms, change = difference.known_change
    rows = [
        ("A", f"{format_ms(a_ms)} per step: {other.run.label}"),
        ("B", f"{format_ms(b_ms)} per step: {loaded.run.label}"),
        ("difference", f"{signed_ms(b_ms - a_ms)} ({change:+.1%})"),
        *zip(("pauses", "measured", "replayed")[difference.pauses is None :], how_known(difference)),
        *([("commands", difference.commands)] if difference.commands else []),
    ]
    return [
        html.P(["B ", html.Strong(here), ", compared with A ", html.Strong(there)], className="job"),
        facts(rows),
        html.Ul([html.Li(doubt) for doubt in difference.doubts], className="unknown"),
    ]


def _names_of_runs(loaded: Loaded, other: Loaded, link: Link) -> tuple[str, str]:
    """Return the names of both runs; their whole labels if the names are equal."""
    here, there = (Path(run.run.label).name or run.run.label for run in (loaded, other))
    here, there = link.run or here, link.against or there
    return (here, there) if here != there else (loaded.run.label, other.run.label)


def _waterfall(loaded: Loaded, link: Link) -> Any:
    difference, other = _difference(loaded, link)
    contributions, name = difference_info(difference), plain(_names_of_runs(loaded, other, link)[1])
    rows = [
        [
            row["name"],
            row["kind"],
            signed_ms(row["delta_ms"]),
            *("" if row[side] is None else format_ms(row[side]) for side in ("before_ms", "after_ms")),
        ]
        for row in contributions.iter_rows(named=True)
    ]
    header = ["what", "kind", "contributes", "in the other", "in this run"]
    return [
        graph("difference-figure", difference_figure(contributions, link.theme, name)),
        html.Details([html.Summary("As a table"), table(header, rows, 2)]),
        csv_link(NAME, "contributions", link),
    ]


def _ranks(loaded: Loaded, link: Link) -> Any:
    return [
        graph("difference-ranks-figure", rank_figure(_difference(loaded, link)[0].by_rank, link.theme)),
        csv_link(NAME, "ranks", link),
    ]


def _rank_table(loaded: Loaded, link: Link) -> pl.DataFrame:
    by_rank = _difference(loaded, link)[0].by_rank
    return pl.DataFrame({"rank": list(by_rank), "delta_ms": list(by_rank.values())})


VIEW = view(
    NAME,
    TITLE,
    needs.another,
    Panel(TITLE, "difference-summary", _DOING, _summary, wide=True),
    Panel("What explains it", "difference-waterfall", _DOING, _waterfall, wide=True),
    Panel("Change per rank", "difference-ranks", _DOING, _ranks, wide=True),
    tables={
        "contributions": lambda loaded, link: difference_info(_difference(loaded, link)[0]),
        "ranks": _rank_table,
    },
)


# A waterfall: contributions that add up to a difference.

_LONGEST = 44  # characters of the label beside a bar
_ROW = 24  # pixels
_ROOM = 0.3  # space beside the bars for their values, as a share of their width


def waterfall_figure(parts: pl.DataFrame, title: str, theme: str, total: str = "in all") -> go.Figure:
    """Draw parts from top to bottom, then their sum; increases have the bad colour, decreases the good one.

    Args:
        parts: `name`, `kind` and `delta_ms`.
        title: of the axis, with `{}` for the unit.
        total: label of the sum.
    """
    named = parts.select("name", "kind").rows()
    names, short = ([f"{kind} {word(name)}".strip() for name, kind in named] for word in (str, short_name))
    labels = list(map(plain, distinct_names(short, _LONGEST)))
    rows = list(range(len(labels) + 1))
    deltas = parts["delta_ms"].to_numpy()
    scale, unit = time_unit(float(np.abs(deltas).max(initial=0.0)))
    deltas = deltas / scale
    reached = np.append(np.cumsum(deltas), 0.0)
    room = _ROOM * float(np.ptp(reached))
    low, high = (float(reached.min()) - room * bool((deltas < 0).any()), float(reached.max()) + room)
    figure = go.Figure()
    figure.add_waterfall(
        orientation="h",
        y=rows,
        x=[*deltas, deltas.sum()],
        measure=["relative"] * len(labels) + ["total"],
        increasing={"marker": {"color": colour("bad", theme)}},
        decreasing={"marker": {"color": colour("good", theme)}},
        totals={"marker": {"color": colour("idle", theme)}},
        connector={"line": {"color": colour("soft", theme), "width": 1, "dash": "dot"}},
        texttemplate="%{delta:+.3~g}",
        textposition="outside",
        textfont={"size": 11},
        cliponaxis=False,
        customdata=[*map(plain, names), total],
        hovertemplate=f"%{{customdata}}: %{{delta:+.4~g}} {unit} per step<extra></extra>",
    )
    styled(figure, theme, height=90 + _ROW * len(rows))
    figure.update_xaxes(title_text=title.format(unit), zeroline=True, nticks=6)
    figure.update_xaxes(range=[low, high] if room else None)
    figure.update_yaxes(tickvals=rows, ticktext=[*labels, total], autorange="reversed")
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure.update_layout(showlegend=False, margin_r=70)
