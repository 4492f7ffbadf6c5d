"""The life of a job: its picture, what each class of time takes, and its attempts.

In: the life of the run's job. Out: the picture, bars of what each class takes, a table of attempts.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.goodput.life import (
    JOB,
    MAX_RANKS,
    OF,
    RUN,
    attempt_info,
    chosen_life,
    life_figure,
    life_info,
    markers_of,
    progress_info,
)
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, choices, csv_link, graph, grid, message, panel, section, table
from dpro.dashboards.theme import styled
from dpro.goodput.account import totals
from dpro.goodput.document import goodput_document, in_words
from dpro.units import NS_PER_H, NS_PER_MS, format_duration

NAME = "goodput"
_ROW, _MIN_HEIGHT = 22, 220  # pixels
_NONE = "No time of these ranks is known."


def class_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """The time of each class on the selected ranks: `class`, `rank_hours`, `hours_each`, `share`."""
    pieces = chosen_life(loaded, link).pieces
    chosen = pieces.filter(pl.col("rank").is_in(link.ranks)) if link.ranks else pieces
    hours = pl.col("duration_ns") / NS_PER_H
    each = hours / max(chosen["rank"].n_unique(), 1)
    found = totals(chosen).sort("duration_ns", descending=True)
    return found.select("class", rank_hours=hours, hours_each=each, share="share")


def class_figure(classes: pl.DataFrame, theme: str) -> go.Figure:
    """Draw the share of each class, the largest on top.

    Args:
        classes: as from `class_info`.
    """
    share = 100 * classes["share"]
    lasting = [f"{format_duration(hours * NS_PER_H)} a rank" for hours in classes["hours_each"]]
    figure = go.Figure()
    figure.add_bar(
        x=share,
        y=[name.replace("_", " ") for name in classes["class"]],
        orientation="h",
        marker=markers_of(classes["class"].to_list(), theme),
        text=[f"{each:.2g} %, {lasts}" for each, lasts in zip(share, lasting, strict=True)],
        textposition="outside",
        cliponaxis=False,
        customdata=lasting,
        hovertemplate="%{y}: %{x:.2f} %, %{customdata}<extra></extra>",
    )
    figure.update_xaxes(title_text="share of the time of all ranks, %", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * classes.height + 110))


def _life(loaded: Loaded, link: Link) -> Any:
    offered = len(loaded.of_same_job)
    which = {RUN: "this run", JOB: f"all {offered + 1} runs of this command, as one job"}
    chosen = [choices(link, OF, which, RUN)] if offered else []
    rows = life_info(loaded, link)
    if rows.is_empty():
        return [*chosen, message(_NONE)]
    more = rows["rank"].n_unique() - MAX_RANKS
    figure = life_figure(rows, attempt_info(loaded, link), progress_info(loaded, link), link.theme)
    return [
        *chosen,
        message(in_words(goodput_document(chosen_life(loaded, link), [loaded.run.label]))),
        *([message(f"{more} more ranks are not drawn: select some.")] if more > 0 else []),
        graph("goodput-life-figure", figure),
        csv_link(NAME, "life", link),
    ]


def _classes(loaded: Loaded, link: Link) -> Any:
    classes = class_info(loaded, link)
    if classes.is_empty():
        return message(_NONE)
    return [
        graph("goodput-classes-figure", class_figure(classes, link.theme)),
        csv_link(NAME, "classes", link),
    ]


def _attempts(loaded: Loaded, link: Link) -> Any:
    document = goodput_document(chosen_life(loaded, link), [loaded.run.label])
    rows = [
        [
            row["attempt"], format_duration(row["begin_ms"] * NS_PER_MS) if row["begin_ms"] else "0",
            format_duration((row["end_ms"] - row["begin_ms"]) * NS_PER_MS),
            f"{row['first_step']:,}" if row["steps"] else "–", f"{row['steps']:,}",
            f"{row['repeated']:,}", f"{row['lost']:,}", row["words"],
        ]
        for row in attempt_info(loaded, link).iter_rows(named=True)
    ]  # fmt: skip
    header = ["attempt", "began at", "lasted", "from step", "steps", "done again", "lost", "how it ended"]
    said = f"Goodput {document.goodput:.1%}, effective training time ratio (ETTR) {document.ettr:.1%}."
    return [
        message(said),
        table(header, rows, numbers_to=len(header) - 1),
        csv_link(NAME, "attempts", link),
        *map(message, document.notes),
    ]


def _layout() -> Component:
    return grid(
        panel("Life of the job", section("goodput-life", "accounting for its time"), wide=True),
        panel("Attempts", section("goodput-attempts", "finding what each resumed from"), wide=True),
        panel("Where the time went", section("goodput-classes", "adding up its time"), wide=True),
    )


VIEW = View(
    NAME,
    "Goodput",
    needs.moments,
    _layout,
    {"goodput-life": _life, "goodput-classes": _classes, "goodput-attempts": _attempts},
    {"life": life_info, "classes": class_info, "attempts": attempt_info, "progress": progress_info},
)
