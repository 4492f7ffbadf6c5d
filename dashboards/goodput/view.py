"""The life of a job: what each rank did in all its time, over all attempts, and what of it was progress.

In: the life of the run's job. Out: a strip for each rank, bars of what each class takes, a table of attempts.
In a strip, pieces that are too short to be seen belong to the one before; bars and table count them all.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash.development.base_component import Component

from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, csv_link, graph, grid, message, panel, section, table
from dpro.dashboards.theme import colour, styled, time_unit
from dpro.goodput.account import totals
from dpro.goodput.document import goodput_document
from dpro.units import NS_PER_H, NS_PER_MS, format_duration

NAME = "goodput"
MAX_RANKS = 64  # strips
SEEN = 1 / 1500  # of the whole time: what is shorter is less than a pixel
_ROW, _MIN_HEIGHT = 22, 220  # pixels
_ENDS = {True: "well", False: "not well", None: "unknown"}
_NONE = "No time of these ranks is known."
KINDS = {  # class -> what it is drawn as, colour of the palette
    "productive": ("training", "compute"),
    "evaluation": ("evaluation", "cpu"),
    "straggler": ("straggler", "wait"),
    "checkpoint": ("checkpoint", "host_bound"),
    "repeated": ("done again", "exposed_comm"),
    "hang": ("hang", "unsplit_comm"),
    "warm_up": ("start", "runtime"),
    "load": ("start", "runtime"),
    "launch": ("start", "runtime"),
    "imports": ("start", "runtime"),
    "process_group": ("start", "runtime"),
    "set_up": ("start", "runtime"),
    "finish": ("finish", "overlapped_comm"),
    "recording": ("recording", "soft"),
    "down": ("down", "idle"),
}


def life_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """What the selected ranks did, in pieces that can be seen.

    Args:
        loaded: the run.
        link: the selection.

    Returns:
        `rank`, `attempt`, `class`, `first_step`, `last_step` (-1 outside steps), `begin_ms` since the job
        began, `lasts_ms`.
    """
    pieces = loaded.life.pieces
    if link.ranks:
        pieces = pieces.filter(pl.col("rank").is_in(link.ranks))
    if pieces.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(_COLUMNS, pl.Int64))
    begin_ns = loaded.life.pieces["start_ns"].min()
    whole_ns = pieces.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"].max()
    assert isinstance(begin_ns, int)
    assert isinstance(whole_ns, int)
    is_seen = (pl.col("duration_ns") >= SEEN * whole_ns) | (pl.int_range(pl.len()).over("rank") == 0)
    seen = pieces.with_columns(pl.when(is_seen).then("class").forward_fill().over("rank"))
    run = pl.struct("rank", "attempt", "class").rle_id()
    step = pl.col("step").filter(pl.col("step") >= 0)
    merged = seen.with_columns(run=run).group_by("run", maintain_order=True).agg(
        pl.col("rank", "attempt", "class", "start_ns").first(), pl.col("duration_ns").sum(),
        first_step=step.min(), last_step=step.max(),
    )  # fmt: skip
    return merged.select(
        "rank", "attempt", "class", pl.col("first_step", "last_step").fill_null(-1),
        begin_ms=(pl.col("start_ns") - begin_ns) / NS_PER_MS, lasts_ms=pl.col("duration_ns") / NS_PER_MS,
    )  # fmt: skip


_COLUMNS = ("rank", "attempt", "class", "first_step", "last_step", "begin_ms", "lasts_ms")


def life_figure(rows: pl.DataFrame, theme: str) -> go.Figure:
    """Draw a strip for each rank, the first on top.

    Args:
        rows: as from `life_info`.
        theme: light or dark.
    """
    figure = go.Figure()
    ranks = rows["rank"].unique().sort().to_list()[:MAX_RANKS]
    shown = rows.filter(pl.col("rank").is_in(ranks))
    scale, unit = time_unit(float((shown["begin_ms"] + shown["lasts_ms"]).to_numpy().max()))
    drawn_as = {name: what for name, (what, _) in KINDS.items()}
    named = shown.with_columns(what=pl.col("class").replace_strict(drawn_as))
    colours = {what: colour(shade, theme) for what, shade in KINDS.values()}
    for what in dict.fromkeys(drawn_as.values()):
        own = named.filter(pl.col("what") == what)
        if own.is_empty():
            continue
        figure.add_bar(
            x=own["lasts_ms"] / scale,
            base=own["begin_ms"] / scale,
            y=[f"rank {rank}" for rank in own["rank"]],
            orientation="h",
            name=what,
            marker={"color": colours[what], "line": {"width": 0}},
            customdata=[
                [row["class"].replace("_", " "), _steps(row), format_duration(row["lasts_ms"] * NS_PER_MS),
                 row["attempt"]]
                for row in own.iter_rows(named=True)
            ],
            hovertemplate="%{y}, attempt %{customdata[3]}: %{customdata[0]}%{customdata[1]}, %{customdata[2]}"
            "<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text=f"since the job began, {unit}")
    order = [f"rank {rank}" for rank in ranks]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], showgrid=False)
    styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * len(ranks) + 130))
    return figure.update_layout(barmode="overlay", bargap=0.2, showlegend=True, hovermode="closest")


def _steps(row: dict[str, Any]) -> str:
    first, last = row["first_step"], row["last_step"]
    return "" if first < 0 else f" (step {first:,})" if first == last else f" (steps {first:,} to {last:,})"


def class_info(loaded: Loaded, link: Link) -> pl.DataFrame:
    """What each class takes of the time of the selected ranks: `class`, `rank_hours`, `share`.

    Args:
        loaded: the run.
        link: the selection.
    """
    pieces = loaded.life.pieces
    found = totals(pieces.filter(pl.col("rank").is_in(link.ranks)) if link.ranks else pieces)
    hours = pl.col("duration_ns") / NS_PER_H
    return found.sort("duration_ns", descending=True).select("class", rank_hours=hours, share="share")


def class_figure(classes: pl.DataFrame, theme: str) -> go.Figure:
    """Draw the share of each class, the largest on top.

    Args:
        classes: as from `class_info`.
        theme: light or dark.
    """
    share = 100 * classes["share"]
    figure = go.Figure()
    figure.add_bar(
        x=share,
        y=[name.replace("_", " ") for name in classes["class"]],
        orientation="h",
        marker={"color": [colour(KINDS[name][1], theme) for name in classes["class"]], "line": {"width": 0}},
        text=[f"{each:.2g} %" for each in share],
        customdata=[format_duration(hours * NS_PER_H) for hours in classes["rank_hours"]],
        hovertemplate="%{y}: %{x:.2f} %, %{customdata} of all ranks<extra></extra>",
    )
    figure.update_xaxes(title_text="share of the time of all ranks, %", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, theme, height=max(_MIN_HEIGHT, _ROW * classes.height + 110))


def _life(loaded: Loaded, link: Link) -> Any:
    rows = life_info(loaded, link)
    if rows.is_empty():
        return message(_NONE)
    more = rows["rank"].n_unique() - MAX_RANKS
    return [
        *([message(f"{more} more ranks are not drawn: select some.")] if more > 0 else []),
        graph("goodput-life-figure", life_figure(rows, link.theme)),
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


def _attempts(loaded: Loaded, _link: Link) -> Any:
    document = goodput_document(loaded.life, [loaded.run.label])
    rows = [
        [
            number, each.ranks, f"{each.first_step:,}", f"{each.steps:,}", f"{each.repeated:,}",
            _ENDS[each.ended_well],
        ]
        for number, each in enumerate(document.attempts)
    ]  # fmt: skip
    header = ["attempt", "ranks", "from step", "steps", "again", "ended"]
    said = f"Goodput {document.goodput:.1%}, effective training time ratio {document.ettr:.1%}."
    return [message(said), table(header, rows), *map(message, document.notes)]


def _layout() -> Component:
    return grid(
        panel("Life of the job", section("goodput-life", "accounting for its time"), wide=True),
        panel("Where the time went", section("goodput-classes", "adding up its time")),
        panel("Attempts", section("goodput-attempts", "finding what each resumed from")),
    )


VIEW = View(
    NAME,
    "Goodput",
    needs.moments,
    _layout,
    {"goodput-life": _life, "goodput-classes": _classes, "goodput-attempts": _attempts},
    {"life": life_info, "classes": class_info},
)
