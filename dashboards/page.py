"""Building blocks of views: sections, panels, tables, and messages in place of missing figures.

Returns components; reads no run. A view consists of sections, each filled by its own request, so that fast
ones do not wait for slow ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import plotly.graph_objects as go
import polars as pl
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from dpro.dashboards import defect_in
from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import colour, least_width
from dpro.errors import DproError, UsageError
from dpro.replay.mesh import Mesh, named_axes, places_along

MAX_ROWS = 60  # in a table
_LITERAL = ("Code", "Pre", "Textarea", "Markdown")  # components whose texts are shown as they are
Filler = Callable[[Loaded, Link], Any]
Tabler = Callable[[Loaded, Link], pl.DataFrame]


def _nothing_more(_app: Dash, _runs: Runs) -> None:
    """Register nothing: most views have no callbacks besides those of their sections."""


@dataclass(frozen=True)
class View:
    """One view.

    Attributes:
        name: in links.
        title: in the navigation.
        missing: returns one sentence that says why a run has nothing to show; empty if there may be
            something. It is called for every link, so it must be cheap.
        sections: id -> function that fills the section, called whenever the link changes.
        tables: name -> function that returns the data of a figure, for its CSV.
        state: returns what the content depends on besides run and link; polled every second while the view is
            shown. None if there is nothing else.
        whole: sections about the whole run, which a selection does not refill.
    """

    name: str
    title: str
    missing: Callable[[Loaded, Link], str]
    layout: Callable[[], Component]
    sections: Mapping[str, Filler]
    tables: Mapping[str, Tabler] = field(default_factory=dict)
    register: Callable[[Dash, Runs], None] = _nothing_more
    state: Callable[[Loaded], object] | None = None
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Panel:
    """A framed part of a view with one section.

    Attributes:
        doing: what is being computed until it is filled, such as `following which rank waits for which`.
        whole: whether it is about the whole run, whatever is selected.
    """

    title: str
    section: str
    doing: str
    fill: Filler
    wide: bool = False
    whole: bool = False


def view(
    name: str,
    title: str,
    missing: Callable[[Loaded, Link], str],
    *panels: Panel | tuple[Panel, ...],
    tables: Mapping[str, Tabler],
    register: Callable[[Dash, Runs], None] = _nothing_more,
    state: Callable[[Loaded], object] | None = None,
) -> View:
    """Return a view of one panel, or of panels in a grid; other arguments as in `View`.

    Args:
        panels: in rows; a tuple is one cell, with its panels below each other.
    """

    def framed(part: Panel | tuple[Panel, ...]) -> Component:
        if isinstance(part, tuple):
            return html.Div([framed(one) for one in part], className="stack")
        shown = "" if part.title == title else part.title
        return panel(shown, section(part.section, part.doing, whole=part.whole), wide=part.wide)

    def layout() -> Component:
        return grid(*map(framed, panels)) if len(panels) > 1 else framed(panels[0])

    parts = [one for part in panels for one in (part if isinstance(part, tuple) else (part,))]
    sections = {part.section: part.fill for part in parts}
    whole = frozenset(part.section for part in parts if part.whole)
    return View(name, title, missing, layout, sections, tables, register, state, whole)


def with_panel(of: View, part: Panel, tables: Mapping[str, Tabler]) -> View:
    """Return a view with another panel after its own."""

    def layout() -> Component:
        whole = of.layout()
        whole.children = [
            *whole.children,
            panel(part.title, section(part.section, part.doing, whole=part.whole), wide=part.wide),
        ]
        return whole

    sections = {**of.sections, part.section: part.fill}
    whole = of.whole | ({part.section} if part.whole else set())
    return replace(of, layout=layout, sections=sections, tables={**of.tables, **tables}, whole=whole)


def changes(runs: Runs, *, whole: bool = False) -> list[Input | State]:
    """Return the inputs that refill a section: the view's link and, if runs can change, the version.

    The last one is the current link: sections of a view that was left are not filled.

    Args:
        whole: whether the section is about the whole run, so that another selection does not refill it.
    """
    version = [Input("version", "data")] if runs.change else []
    return [Input("whole" if whole else "link", "data"), *version, State("url", "search")]


def panel(title: str, *content: Any, wide: bool = False) -> Component:
    """Return a framed part of a view; without a title if the view's name says enough."""
    head = [html.H2(title)] if title else []
    return html.Section([*head, *content], className="panel wide" if wide else "panel")


def grid(*panels: Component) -> Component:
    """Lay out panels in a grid; wide ones span all columns."""
    return html.Div(list(panels), className="grid")


def section(name: str, doing: str, *, whole: bool = False) -> Component:
    """Return an element that a callback fills; until then it shows what is being computed.

    Args:
        whole: whether it is about the whole run, whatever is selected.
    """
    pending = html.P(f"{doing} …", className="pending")
    return html.Div(pending, id=name, className="section of-whole" if whole else "section")


def message(text: str) -> Component:
    """Return a message in place of a figure: what is missing, and what to do about it."""
    return html.P(text, className="message")


def empty(why: str, title: str = "") -> Component:
    """Return the content of a view, or of a part of one, that has nothing to show."""
    return panel(title, html.Div(message(why), className="section"), wide=True)


def csv_link(view: str, table: str, link: Link) -> Component:
    """Return links that download the data of a figure as CSV or Parquet."""
    kinds = (("CSV", "csv"), ("Parquet", "parquet"))
    address = f"{view}/{table}{link.query()}"
    return html.Span(
        [
            html.A(label, href=f"{kind}/{address}", title=f"Download the data as {label}")
            for label, kind in kinds
        ],
        className="csv",
    )


def graph(name: str, figure: go.Figure, *, zooms: bool = False, buttons: bool = True) -> Component:
    """Embed a figure in the page, without Plotly's buttons that send data to other hosts.

    Args:
        zooms: whether a zoom changes the link; otherwise the browser alone handles it.
        buttons: whether the figure has buttons.
    """
    config: Any = {
        "displaylogo": False,
        "displayModeBar": buttons and "hover",
        "showTips": False,
        "doubleClick": "autosize" if zooms else "reset",
        # Buttons are listed by name, since the defaults include one that sends the data to another host.
        "modeBarButtons": [["toImage"], ["zoom2d", "pan2d", "autoScale2d" if zooms else "resetScale2d"]],
        "plotlyServerURL": "",
        "toImageButtonOptions": {"format": "png", "scale": 2, "filename": f"dpro-{name}"},
    }
    style = {"height": f"{figure.layout.height}px", "minWidth": f"{least_width(figure)}px"}
    drawn = dcc.Graph(id=name, figure=figure, config=config, responsive=True, style=style)
    room = {} if zooms else {"minHeight": style["height"]}  # reserved while the browser loads Plotly
    return html.Div(drawn, style=room)


def table(
    header: Sequence[Any],
    rows: Sequence[Sequence[Any]],
    numbers_from: int = 1,
    numbers_to: int | None = None,
    most: int = MAX_ROWS,
) -> Component:
    """Return a table; if it has too many rows for the browser, the last row counts those left out.

    Args:
        rows: [N] at least one cell each.
        numbers_from: the first column that is aligned as numbers.
        numbers_to: the first column after those; None for the end.
        most: how many rows are shown: the time that Dash takes per cell grows with the number of cells.
    """
    numbers = range(len(header))[numbers_from:numbers_to]
    sides = ["number" if column in numbers else "" for column in range(len(header))]
    head = html.Tr([html.Th(cell, className=side) for cell, side in zip(header, sides)])
    body = [html.Tr([html.Td(cell, className=side) for cell, side in zip(row, sides)]) for row in rows[:most]]
    if len(rows) > most:
        left_out = f"{len(rows) - most:,} more: the CSV has them"
        body.append(html.Tr(html.Td(left_out, colSpan=len(header), className="note")))
    return html.Table([html.Thead(head), html.Tbody(body)])


def large_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> Component:
    """Return a table that the page's script writes: as components, this many cells would take minutes.

    Args:
        rows: [N] a text for each column.
        numbers_from: the first column that is aligned as numbers.
    """
    head = html.Tr([html.Th(cell, className="number" * (n >= numbers_from)) for n, cell in enumerate(header)])
    values: Any = {"data-rows": json.dumps(rows), "data-numbers": str(numbers_from)}
    return html.Table([html.Thead(head), html.Tbody(**values)])


def with_code(content: Any) -> Any:
    """Show as code what texts have between backticks; code itself and what users type stay as they are."""
    if isinstance(content, str):
        parts = content.split("`")
        whole = len(parts) == 1 or len(parts) % 2 == 0  # a single backtick is none of ours
        return (
            content if whole else [html.Code(part) if n % 2 else part for n, part in enumerate(parts) if part]
        )
    if isinstance(content, list | tuple):
        return [part for child in content for part in _flat_children(with_code(child))]
    if isinstance(content, Component) and hasattr(content, "children") and content._type not in _LITERAL:
        content.children = with_code(content.children)
    return content


def write_by_script(content: Any) -> Any:
    """Let the page's script write the parts of a page that have no id, figure or input.

    On every change Dash visits each component of the page, which for some hundred table cells took most of an
    interaction's time. The outermost component of such a part stays, since style sheets refer to it; its
    content is JSON of `[tag, properties, children]`.
    """
    if isinstance(content, list | tuple):
        return [write_by_script(part) for part in content]
    if not isinstance(content, Component) or not hasattr(content, "children"):
        return content
    if content._type == "Link":
        content = html.A(**cast(Any, content).to_plotly_json()["props"])
    if any(isinstance(part, Component) for part in _flat_children(content.children)):
        tree = _as_tree(content)
        if tree is None:
            content.children = write_by_script(content.children)
        else:
            content.children = None
            setattr(content, "data-tree", json.dumps(tree[2]))
    return content


def _as_tree(content: Any) -> Any:
    """Return content as the page's script reads it; None if a part must be a component."""
    if not isinstance(content, Component):
        return str(content)
    is_link = content._type == "Link"
    if not is_link and (hasattr(content, "id") or content._namespace != html.Div()._namespace):
        return None
    properties = cast(Any, content).to_plotly_json()["props"]
    inside = [_as_tree(part) for part in _flat_children(properties.pop("children", None))]
    return None if None in inside else ["a" if is_link else content._type.lower(), properties, inside]


def _flat_children(children: Any) -> list[Any]:
    """Return the children of a component as one flat list."""
    if isinstance(children, list | tuple):
        return [part for child in children for part in _flat_children(child)]
    return [] if children is None else [children]


def facts(pairs: Sequence[tuple[str, Any]]) -> Component:
    """Return a list of names and values."""
    return html.Dl([cell for name, value in pairs for cell in (html.Dt(name), html.Dd(value))])


def choices(link: Link, key: str, options: Mapping[str, str], default: str) -> Component:
    """Return links that set one of a view's parameters; the current value is marked."""
    chosen = link.options.get(key, default)
    chosen = chosen if chosen in options else default
    return html.Div(
        [
            dcc.Link(
                label,
                href=link.with_options(**{key: "" if value == default else value}),
                className="choice chosen" if value == chosen else "choice",
            )
            for value, label in options.items()
        ],
        className="choices",
    )


def answer(view: str, search: str | None, work: Callable[[Link], Any], say: Callable[[str], Any]) -> Any:
    """Compute a view's answer to a link; errors become messages."""
    try:
        link = parse_link(search or "")
        if link.view not in (view, ""):  # a link without a view shows the run's first view
            raise PreventUpdate
        return work(link)
    except UsageError as error:  # what the user gave, not what the run lacks
        return html.P(str(error), className="health bad")
    except DproError as error:
        return say(str(error))
    except PreventUpdate:
        raise
    except Exception:  # a defect of one view must not affect the others
        return say(defect_in(view))


def in_browser(app: Dash, function: str, *wires: Input | State | Output) -> None:
    """Call a function of `assets/dpro.js` when an input changes; without outputs, it changes the link."""
    call: Any = app.clientside_callback
    call(ClientsideFunction("dpro", function), *wires, prevent_initial_call=True)


# The order of ranks in views, from the parameter `order` of a link: by number, or grouped by position along
# an axis of parallelism.

KEY, BY_NUMBER = "order", "rank"
_UNKNOWN = -1  # position of a rank whose position is unknown: sorts first


class RankOrder(NamedTuple):
    """An order of ranks.

    Attributes:
        axis: the axis that ranks are grouped by; empty for none.
        places: the position of each rank along the axis.
    """

    axis: str = ""
    places: Mapping[int, int] = {}

    def place(self, rank: int) -> int:
        """Return the position of a rank along the axis; -1 if unknown, or if there is no axis."""
        return self.places.get(rank, _UNKNOWN)

    def ordered(self, ranks: Iterable[int]) -> list[int]:
        """Sort ranks by group, then by number."""
        return sorted(ranks, key=lambda rank: (self.place(rank), rank))

    def label(self, rank: int) -> str:
        """Label a rank on the axis of a figure: `tp 1: 3`, or its number alone."""
        place = self.place(rank)
        return f"{self.axis} {place if place >= 0 else '?'}: {rank}" if self.axis else str(rank)


NUMBERED = RankOrder()


def orders_of(mesh: Mesh) -> dict[str, str]:
    """Return the axes by which ranks can be grouped, with their label on a page."""
    return {axis: f"grouped by {axis}" for axis in named_axes(mesh)}


def order_choice(loaded: Loaded, link: Link) -> list[Component]:
    """Return the menu of orders; empty if the run has no axes."""
    axes = orders_of(loaded.mesh)
    return [choices(link, KEY, {BY_NUMBER: "by rank", **axes}, BY_NUMBER)] if axes else []


def order_of(loaded: Loaded, link: Link) -> RankOrder:
    """Return the order that a link requests; by number if the run does not have that axis."""
    axis = link.options.get(KEY, BY_NUMBER)
    if axis == BY_NUMBER or axis not in named_axes(loaded.mesh):
        return NUMBERED
    return RankOrder(axis, places_along(loaded.mesh, axis))


def draw_groups(figure: go.Figure, ranks: list[int], order: RankOrder, theme: str, across: str = "y") -> None:
    """Draw a line between groups of ranks.

    Args:
        figure: a heatmap with a row, a column, or both, per rank.
        across: the axes of the figure that show ranks: `x`, `y` or `xy`.
    """
    places = [order.place(rank) for rank in ranks]
    line: dict[str, Any] = {"color": colour("ink", theme), "width": 1}
    for number in range(1, len(ranks)):
        if places[number] != places[number - 1]:
            border = number - 0.5
            if "y" in across:
                figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=border, y1=border, line=line)
            if "x" in across:
                figure.add_shape(type="line", yref="paper", y0=0, y1=1, x0=border, x1=border, line=line)
