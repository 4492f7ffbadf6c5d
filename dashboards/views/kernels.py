"""Kernels, or operators where no GPU was used, by their total time.

In: spans of the selected ranks and steps. Out: totals by name, ordered and filtered as the link says, and the
roofline of matmuls.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import Dash, Input, dcc, html
from dash.development.base_component import Component

from dpro.classify import classify
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, csv_link, graph, in_browser, message, panel, section, table
from dpro.dashboards.runs import Runs
from dpro.dashboards.timeline.search import exactly
from dpro.dashboards.views.roofline import gpu_of, roofline_figure, roofline_info
from dpro.replay.steps.breakdown import kernel_totals
from dpro.units import NS_PER_MS, NS_PER_US, format_duration

NAME = "kernels"
MAX_ROWS = 200
COLUMNS = {  # column -> header
    "name": "name",
    "class": "class",
    "count": "count",
    "total_ms": "total",
    "per_step_ms": "per step and rank",
    "share": "share",
    "mean_us": "mean",
}
_ORDER = "-total_ms"


def kernel_info(spans: pl.DataFrame, steps: pl.DataFrame, link: Link) -> pl.DataFrame:
    """Sum durations by name.

    Args:
        spans: table `spans`.
        steps: table `steps`, for the time ranges of the selected steps: a span belongs to the step it began
            in.
        link: selection, `filter` (part of a name or class), and `sort` (a column; a leading - means from
            large to small).

    Returns:
        The columns of `COLUMNS`; `per_step_ms` is the total divided by how many steps of ranks are selected,
        null where none is; `share` is relative to the whole selection, before the filter.
    """
    totals = kernel_totals(_selected(spans, steps, link))
    total = pl.col("total_ns")
    named = totals.with_columns(
        **{"class": pl.col("name").map_elements(lambda name: classify(name).kind, return_dtype=pl.String)},
        total_ms=total / NS_PER_MS,
        per_step_ms=total / NS_PER_MS / (_num_steps(steps, link) or None),
        share=total / total.sum(),
        mean_us=total / pl.col("count") / NS_PER_US,
    ).select(list(COLUMNS))
    word = link.own.get("filter", "").lower()
    if word:
        fits = [
            pl.col(name).str.to_lowercase().str.contains(word, literal=True) for name in ("name", "class")
        ]
        named = named.filter(fits[0] | fits[1])
    order = link.own.get("sort", _ORDER)
    column = order.removeprefix("-")
    column = column if column in COLUMNS else "total_ms"
    return named.sort([column, "name"], descending=[order.startswith("-"), False])


def _num_steps(steps: pl.DataFrame, link: Link) -> int:
    """Count the selected steps in deep windows, each on each rank."""
    return link.chosen(steps).filter(pl.col("window") >= 0).select("rank", "step").n_unique()


def _selected(spans: pl.DataFrame, steps: pl.DataFrame, link: Link) -> pl.DataFrame:
    """Return spans of the selected ranks that began within the selected steps of their rank."""
    spans = link.chosen(spans)
    if not link.steps:
        return spans
    times = link.chosen(steps).select(
        "rank", "start_ns", step_end=pl.col("start_ns") + pl.col("duration_ns"), in_step=pl.lit(True)
    )
    found = spans.sort("start_ns").join_asof(
        times.sort("start_ns").with_columns(step_start="start_ns"),
        on="start_ns",
        by="rank",
        check_sortedness=False,
    )
    return found.filter(pl.col("start_ns") < pl.col("step_end"))


def _table(loaded: Loaded, link: Link) -> Any:
    rows = kernel_info(loaded.spans, loaded.steps, link)
    if rows.is_empty():
        return message("Nothing of this selection and filter was recorded in depth.")
    largest = float(rows["total_ms"].to_numpy().max()) or 1.0
    body = [
        [
            [_bar(row["total_ms"] / largest), _named(row["name"], link)],
            row["class"],
            f"{row['count']:,}",
            format_duration(row["total_ms"] * NS_PER_MS),
            "–" if row["per_step_ms"] is None else format_duration(row["per_step_ms"] * NS_PER_MS),
            f"{row['share']:.1%}",
            format_duration(row["mean_us"] * NS_PER_US),
        ]
        for row in rows.head(MAX_ROWS).iter_rows(named=True)
    ]
    more = f"{rows.height - MAX_ROWS} more: filter, or take the CSV." if rows.height > MAX_ROWS else ""
    header = [_header(link, column, title) for column, title in COLUMNS.items()]
    return [
        table(header, body, numbers_from=2),
        html.P(more, className="note"),
        csv_link(NAME, "kernels", link),
    ]


def _named(name: str, link: Link) -> Component:
    """Return a name with a link to its spans in the timeline."""
    address = link.query(view="timeline", own={"find": exactly(name)})
    return dcc.Link(name, href=address, className="name", title=f"{name}: show its spans")


def _bar(share: float) -> Component:
    return html.Span(className="bar", style={"width": f"{100 * share:.0f}%"})


def _header(link: Link, column: str, title: str) -> Component:
    """Return a header that sorts by its column: numbers from large to small first, names from a to z."""
    order = link.own.get("sort", _ORDER)
    text = column in ("name", "class")
    flipped = {column: f"-{column}", f"-{column}": column}.get(order, column if text else f"-{column}")
    mark = {column: " ▲", f"-{column}": " ▼"}.get(order, "")
    return dcc.Link(title + mark, href=link.with_own(sort="" if flipped == _ORDER else flipped))


def _roofline(loaded: Loaded, link: Link) -> Any:
    reached, gpu = _reached(loaded, link), gpu_of(loaded.built.predictive)
    if reached.is_empty():
        return message("No matmul of this selection has shapes: `dpro record --shapes` records them.")
    compute = pl.col("limit") == "compute"
    share = reached.select(pl.col("total_ms").filter(compute).sum() / pl.col("total_ms").sum()).item()
    mean = reached.select((pl.col("of_limit") * pl.col("total_ms")).sum() / pl.col("total_ms").sum()).item()
    note = (
        f"Arithmetic limits {share:.0%} of this time, memory the rest; {mean:.0%} of the limits is reached."
    )
    return [
        graph("roofline-figure", roofline_figure(reached, gpu, link.theme)),
        html.P(note, className="note"),
        csv_link(NAME, "roofline", link),
    ]


def _reached(loaded: Loaded, link: Link) -> pl.DataFrame:
    whole = loaded.built.predictive
    return roofline_info(whole, gpu_of(whole), link)


def _filter(_loaded: Loaded, link: Link) -> Any:
    return dcc.Input(
        id="filter",
        type="text",
        placeholder="part of a name or class",
        debounce=True,
        value=link.own.get("filter", ""),
        autoComplete="off",
    )


def _layout() -> Component:
    return html.Div(
        [
            panel(
                "Kernels; operators by their own time where no GPU was used",
                section("kernels-filter", "filter"),
                section("kernels-table", "adding up"),
            ),
            panel(
                "Matmuls and convolutions below the roof", section("kernels-roofline", "building the graph")
            ),
        ],
        className="stack",
    )


def _register(app: Dash, _runs: Runs) -> None:
    in_browser(app, "filter", Input("filter", "value"))


VIEW = View(
    NAME,
    "Kernels",
    needs.windows,
    _layout,
    {"kernels-filter": _filter, "kernels-table": _table, "kernels-roofline": _roofline},
    {"roofline": _reached, "kernels": lambda loaded, link: kernel_info(loaded.spans, loaded.steps, link)},
    _register,
)
