"""What views are made of: sections that fill by themselves, panels, tables, and words where there is nothing.

In: nothing of a run. Out: components. A view says what it shows as sections; each is filled by a request of
its own, so that what is known at once does not wait for what takes long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash import ClientsideFunction, Dash, Input, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.shown import Shown
from dpro.errors import DproError

log = logging.getLogger(__name__)

Filler = Callable[[Loaded, Link], Any]
Tabler = Callable[[Loaded, Link], pl.DataFrame]


def _nothing_more(_app: Dash, _shown: Shown) -> None:
    """Most views have no callbacks but those of their sections."""


@dataclass(frozen=True)
class View:
    """One view.

    Attributes:
        name: in links.
        title: in the navigation.
        layout: its panels, made at once, from nothing that takes long.
        sections: id -> what fills it, again whenever the link changes.
        tables: name -> the data of a figure, for its CSV.
        register: adds callbacks of its own.
    """

    name: str
    title: str
    layout: Callable[[], Component]
    sections: Mapping[str, Filler]
    tables: Mapping[str, Tabler] = field(default_factory=dict)
    register: Callable[[Dash, Shown], None] = _nothing_more


def changes(shown: Shown) -> list[Input]:
    """What makes a section fill again: the link and, while a run is recorded, that there is more of it."""
    return [Input("url", "search"), *([Input("version", "data")] if shown.lives else [])]


def panel(title: str, *content: Any, wide: bool = False) -> Component:
    """A framed part of a view."""
    return html.Section([html.H2(title), *content], className="panel wide" if wide else "panel")


def grid(*panels: Component) -> Component:
    """Panels side by side, those marked as wide across."""
    return html.Div(list(panels), className="grid")


def section(name: str, doing: str) -> Component:
    """A place that fills by itself; until then it says what is being done."""
    return html.Div(html.P(f"{doing} …", className="pending"), id=name, className="section")


def message(text: str) -> Component:
    """Words in place of a figure: what is missing, and what to do about it."""
    return html.P(text, className="message")


def csv_link(view: str, table: str, link: Link) -> Component:
    """Downloads the data of what is shown, as CSV or Parquet."""
    kinds = (("CSV", "csv"), ("Parquet", "parquet"))
    address = f"{view}/{table}{link.query()}"
    return html.Span(
        [
            html.A(label, href=f"{kind}/{address}", title=f"Download the data as {label}")
            for label, kind in kinds
        ],
        className="csv",
    )


def graph(name: str, figure: go.Figure, *, zooms: bool = False) -> Component:
    """A figure on the page, without what reaches out of it.

    Args:
        name: its id.
        figure: its height is kept.
        zooms: whether a zoom changes the link; else it is the browser's own business.
    """
    config: Any = {
        "displaylogo": False,
        "showTips": False,
        "doubleClick": "autosize" if zooms else "reset",
        # By name, since the buttons there are by default include one that sends the data elsewhere.
        "modeBarButtons": [["toImage"], ["zoom2d", "pan2d", "autoScale2d" if zooms else "resetScale2d"]],
        "plotlyServerURL": "",
        "toImageButtonOptions": {"format": "png", "scale": 2, "filename": f"dpro-{name}"},
    }
    style = {"height": f"{figure.layout.height}px"}
    drawn = dcc.Graph(id=name, figure=figure, config=config, responsive=True, style=style)
    room = {} if zooms else {"minHeight": style["height"]}  # kept while the browser loads what draws it
    return html.Div(drawn, style=room)


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers_from: int = 1) -> Component:
    """A table; columns from `numbers_from` on are numbers."""
    sides = ["number" if column >= numbers_from else "" for column in range(len(header))]
    head = html.Tr([html.Th(cell, className=side) for cell, side in zip(header, sides)])
    body = [html.Tr([html.Td(cell, className=side) for cell, side in zip(row, sides)]) for row in rows]
    return html.Table([html.Thead(head), html.Tbody(body)])


def facts(pairs: Sequence[tuple[str, Any]]) -> Component:
    """Names and values, one below the other."""
    return html.Dl([cell for name, value in pairs for cell in (html.Dt(name), html.Dd(value))])


def choices(link: Link, key: str, options: Mapping[str, str], default: str) -> Component:
    """Links that choose one of several ways to look at a view; the chosen one is marked."""
    chosen = link.own.get(key, default)
    chosen = chosen if chosen in options else default
    return html.Div(
        [
            dcc.Link(
                label,
                href=link.with_own(**{key: "" if value == default else value}),
                className="choice chosen" if value == chosen else "choice",
            )
            for value, label in options.items()
        ],
        className="choices",
    )


def answer(view: str, search: str | None, work: Callable[[Link], Any], say: Callable[[str], Any]) -> Any:
    """What a view answers to a link; words where it cannot.

    Args:
        view: its name; links of other views are none of its business.
        search: the link's query.
        work: makes the answer.
        say: turns words into an answer.
    """
    try:
        link = parse_link(search or "")
        if link.view != view:
            raise PreventUpdate
        return work(link)
    except DproError as error:
        return say(str(error))
    except PreventUpdate:
        raise
    except Exception:  # one view's defect leaves the others alone
        log.exception("dpro dashboard: %s", view)
        return say("dpro has a defect here; the terminal that it runs in says more")


def in_browser(app: Dash, function: str, *inputs: Input | State) -> None:
    """Have a function of `assets/dpro.js` called when something changes; all it can change is the link."""
    call: Any = app.clientside_callback
    call(ClientsideFunction("dpro", function), *inputs, prevent_initial_call=True)
