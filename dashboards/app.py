"""The dashboard application: navigation, selection, and the view that the link names.

Takes runs, the token and the accepted host names; returns a Dash application. All state is in the link: every
interaction changes the link, and every section is rendered from the link alone, so that back, reload and
shared links reproduce the view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import polars as pl
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update, set_props
from dash.development.base_component import Component
from flask import Response, abort, request

from dpro.analysis.unanswered import pretended_in_words
from dpro.dashboards import window_button
from dpro.dashboards.guard import LOOPBACK, check_bodies, guard, harden, hash_of
from dpro.dashboards.links import Link, named_runs, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import (
    Filler,
    View,
    answer,
    changes,
    empty,
    in_browser,
    message,
    with_code,
    write_by_script,
)
from dpro.dashboards.runs import OfferedRun, Runs, ShownRun, StillOpening, runs_of
from dpro.dashboards.theme import css_variables, in_cell
from dpro.dashboards.views import (
    breakdown,
    collectives,
    difference,
    hang,
    heatmap,
    kernels,
    layout,
    matrix,
    over_time,
    pipeline,
    telemetry,
    timeline,
    verdict,
    whatif,
)
from dpro.errors import DproError, UsageError
from dpro.plugins import extended, load, places
from dpro.schema import STEPS
from dpro.selection import ranges_of, ranges_text
from dpro.words import printable, shortened

_MODULES = (  # in the order of the navigation
    verdict, heatmap, breakdown, timeline, collectives, matrix, kernels, whatif, telemetry, hang, difference,
    layout, pipeline, over_time,
)  # fmt: skip
VIEWS: tuple[View, ...] = (
    *(extended(f"view {module.VIEW.name}", module.VIEW) for module in _MODULES),
    *map(load, places("views").values()),
)

POLLED = {view.name: view.state for view in VIEWS if view.state is not None}
TICK_MS = 1000  # polling interval of a run that is being recorded
_UNOPENED = -1  # version of a run that is not open yet
MAX_LISTED = 8  # ranges of steps or ranks in a message
_LONGEST_WHY = 60  # characters of the reason why a run cannot be chosen
_VIEW_KEYS = "1234567890-=[];'\\`~"  # the top row of a keyboard, then the keys of the next row
_KEYS = (
    ("n p", "next tab, previous tab"),
    ("w s a d ← →", "timeline: zoom in and out, move left and right (Ctrl+wheel zooms, drag moves)"),
    (", .", "timeline: previous span, next span"),
    ("f m e", "timeline: zoom to the selection, ruler, fold"),
    ("x", "clear the selection"),
    ("r", "choose the run"),
    ("t", "dark or light"),
    ("/", "search the timeline, filter, or select steps"),
    ("?", "this help; Esc closes it"),
)
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<title>{%title%}</title>{%favicon%}{%css%}<style>PALETTE</style><script>THEME</script></head>
<body>{%app_entry%}{%config%}{%scripts%}{%renderer%}</body>
</html>"""
_THEME = """(() => {
  const query = new URLSearchParams(location.search);
  let chosen = null;
  try { chosen = localStorage.getItem("dpro-theme"); } catch { /* storage is off: as the system */ }
  chosen ??= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  if (!query.has("theme") && chosen === "dark") {
    query.set("theme", "dark");
    history.replaceState(null, "", "?" + query);
  }
  document.documentElement.dataset.theme = query.get("theme") === "dark" ? "dark" : "light";
})();"""


def make_app(
    run: Loaded | ShownRun | Runs, token: str | None = None, names: Collection[str] | None = LOOPBACK
) -> Dash:
    """Make the application; `token` and `names` are passed to `guard`."""
    runs = runs_of(run)
    app = Dash(
        __name__,
        assets_folder=str(Path(__file__).with_name("assets")),
        index_string=_INDEX.replace("PALETTE", css_variables()).replace("THEME", _THEME),
        title=_in_markup(f"dpro: {runs.opened.loaded.run.label}"),
        update_title="",
        suppress_callback_exceptions=True,
        enable_mcp=False,
        add_log_handler=False,
    )
    guard(app.server, token, names)
    check_bodies(app)
    app.layout = _frame(runs)
    _register_navigation(app, runs)
    for view in VIEWS:
        for name, fill in view.sections.items():
            _register_section(app, runs, view, name, fill)
        view.register(app, runs)
    _serve_tables(app, runs)
    if runs.change:
        _register_refresh(app, runs)
    if runs.change and token is not None:  # with --no-token, pages are read-only
        window_button.register(app, runs)
    harden(app.server, [hash_of(_THEME), *app.csp_hashes()])
    return app


def _in_markup(text: str) -> str:
    """Escape text for the page template: neither markup nor a placeholder of dash remains."""
    return escape(printable(text)).replace("{", "&#123;")


def view_of(link: Link) -> View:
    """Return the view that a link names.

    Raises:
        UsageError: there is no such view.
    """
    for view in VIEWS:
        if view.name == link.view:
            return view
    raise UsageError(f"no view {link.view!r}; there are {', '.join(view.name for view in VIEWS)}")


def first_view(run: ShownRun, link: Link) -> View:
    """Return the view of a link without one: a hang, the difference of two runs, else the verdict."""
    with suppress(DproError):  # the verdict shows the error
        if any(finding.of_hang for finding in run.loaded.hangs) and not _why_missing(run, link, hang.VIEW):
            return hang.VIEW
    if link.against and not _why_missing(run, link, difference.VIEW):
        return difference.VIEW
    return verdict.VIEW


def _frame(runs: Runs) -> Component:
    """Return the frame of all views: navigation, choice of runs, selection, help."""
    selection = [
        html.Label(["steps", _entry("steps", "3-8,12")]),
        html.Label(["ranks", _entry("ranks", "0,2-3")]),
        html.Button("clear", id="clear", title="Clear the selection (x)"),
        html.Button("◐", id="theme", title="Dark or light (t)"),
        html.Button("?", id="help", title="Keys (?)"),
    ]
    shown = [html.Span(id="run"), html.Div(id="runs")]
    shown += [html.Span(id="live", className="live"), window_button.button()] if runs.change else []
    menu: Any = {"aria-haspopup": "dialog", "aria-controls": "more"}
    tick = dcc.Interval(id="tick", interval=TICK_MS, disabled=not runs.opened.lives)
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="link"),
            dcc.Store(id="whole"),
            dcc.Store(id="shown"),
            *([tick, dcc.Store(id="version")] if runs.change else []),
            html.Header(
                [
                    html.Strong("dpro"),
                    html.Nav(id="nav"),
                    html.Button("more ▾", id="menu", title="Views that this run has no data for", **menu),
                    html.Div([html.Div(shown, className="shown"), *selection], className="selection"),
                ]
            ),
            html.Main(
                [
                    html.H1(id="title"),
                    html.P(id="outside", role="status"),
                    html.P(id="changing", role="status", hidden=True),
                    html.Div(id="content"),
                ]
            ),
            html.Div(id="tip", role="tooltip"),
            html.Dialog(id="more"),
            html.Dialog(write_by_script(_help()), id="keys"),
        ]
    )


def _keyed_views() -> Iterator[tuple[str, View]]:
    """Yield the views, each after its key; extensions may bring more views than keys: these have none."""
    for number, view in enumerate(VIEWS):
        yield _VIEW_KEYS[number : number + 1], view


def _help() -> list[Component]:
    """Return the help: the keys, and the key of each view."""
    cells = [cell for key, does in _KEYS for cell in (html.Dt(html.Kbd(key)), html.Dd(does))]
    views = [html.Span([html.Kbd(key), view.title]) for key, view in _keyed_views() if key]
    return [html.H2("Keys"), html.Dl(cells), html.P(views, className="keyed")]


def _entry(name: str, placeholder: str) -> Component:
    return dcc.Input(id=name, type="text", placeholder=placeholder, debounce=True, autoComplete="off")


def _register_navigation(app: Dash, runs: Runs) -> None:
    outputs = {name: Output(name, "children") for name in ("nav", "more", "run", "runs", "outside")}
    outputs |= {name: Output(name, "children") for name in ("title", "content")}
    entries = {name: Output(name, "value") for name in ("steps", "ranks")}
    outputs |= entries | {"run_title": Output("run", "title"), "shown": Output("shown", "data")}
    version = [Input("version", "data")] if runs.change else []
    typed = [State(name, "value") for name in entries]

    @app.callback(outputs, Input("url", "search"), *version, State("shown", "data"), *typed)
    def navigate(search: str | None, *more: Any) -> dict[str, Any]:
        before, *texts = more[-3:]
        before = before if isinstance(before, dict) else {}
        page = page_of(runs, search or "", before)
        # Of a later copy of the run, sections fill themselves, and text being typed stays. If another view
        # was requested meanwhile, the browser drops the answer to that request, so this one includes it.
        stays = all(page["shown"][name] == before.get(name) for name in ("asked", "view", "of"))
        if stays and before.get("view") and ctx.triggered_id == "version":
            same = dict.fromkeys(outputs, no_update) | {"outside": page["outside"]}
            if page["shown"]["head"] == before.get("head"):
                return same
            head = {"shown": before | {"head": page["shown"]["head"]}}
            return same | {name: page[name] for name in ("nav", "more", "runs")} | head
        polled = page["shown"]["view"] in POLLED
        if runs.change and (polled or (before and page["shown"]["head"] != before.get("head"))):
            set_props("tick", {"disabled": False})
        kept = [name for name, text in zip(entries, texts) if page[name] == (text or "")]
        kept += ["shown"] if page["shown"] == before else []
        return page | dict.fromkeys(kept, no_update)

    stores = Output("link", "data"), Output("whole", "data")
    in_browser(app, "link", *stores, Input("url", "search"), State("shown", "data"))
    for name in entries:
        in_browser(app, name, Input(name, "value"))
    in_browser(app, "titled", Input("shown", "data"))
    for name in ("clear", "theme", "help", "menu"):
        in_browser(app, name, Input(name, "n_clicks"))


def page_of(runs: Runs, search: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page around the sections of a link's view; parts that have not changed are `no_update`.

    Args:
        before: the state of the page, as returned under `shown`.
    """
    page: dict[str, Any] = {"outside": ""}
    try:
        link = parse_link(search)
        named, run = view_of(link) if link.view else None, runs.shown(link.run)
        view = named or first_view(run, link)
        page |= {"steps": ranges_text(link.steps), "ranks": ranges_text(ranges_of(link.ranks))}
        page["title"] = view.title
        with suppress(DproError):  # the content shows the error
            page["outside"] = notes_on_selection(run.loaded, link)
        asked, current, refused = link.view, view.name, _why_missing(run, link, view)
        content = partial(empty, refused, view.title) if refused else view.layout
    except DproError as error:  # other runs can be chosen
        run, link, asked, current, refused = runs.opened, _runs_in_link(search), None, "", str(error)
        page |= {"steps": no_update, "ranks": no_update, "title": ""}
        content = partial(message, refused)
    reasons = {view.name: _why_missing(run, link, view) for view in VIEWS}
    head = crc32(repr((reasons, link.run, link.against, *_names_of_run(run), runs.offers())).encode())
    shown = {
        "asked": asked,
        "view": current,
        "content": f"{current} {refused}",
        "head": head,
        "of": list(named_runs(search)),
    }
    surrounding: dict[str, Any] = dict.fromkeys(("nav", "more", "run", "run_title", "runs"), no_update)
    if head != before.get("head"):
        short, whole = _names_of_run(run)
        surrounding = {"run": short, "run_title": whole, "runs": _pickers(runs, link)}
        parts = (write_by_script(with_code(part)) for part in _navigation(reasons))
        surrounding["nav"], surrounding["more"] = parts
    # Sections of another run begin again: what they show must not stand under its name until they are filled.
    same = all(shown[name] == before.get(name, -1) for name in ("asked", "content", "of"))
    return page | surrounding | {"shown": shown, "content": no_update if same else with_code(content())}


def notes_on_selection(loaded: Loaded, link: Link) -> str:
    """Say that ranks were pretended, and which steps or ranks of the selection the run does not have."""
    manifest, said = loaded.run.manifest, []
    if manifest.is_pretended:
        said.append(f"{pretended_in_words(manifest)}: no waiting was measured.")
    ranks = manifest.ranks
    if link.ranks and ranks and not set(link.ranks) & set(ranks):
        said.append(f"No selected rank was recorded: the run has {_listed(ranks)}.")
    steps = loaded.steps.filter(pl.col("step") >= 0) if link.steps else STEPS.empty()
    deep = steps.filter(pl.col("window") >= 0)
    if not steps.is_empty() and link.chosen(steps.select("step")).is_empty():
        said.append(f"No selected step was recorded: the run has {_listed(steps['step'].unique())}.")
    elif not deep.is_empty() and link.chosen(deep.select("step")).is_empty():
        is_one = len(link.steps) == 1 and link.steps[0][0] == link.steps[0][1]
        chosen = f"Step{'' if is_one else 's'} {ranges_text(link.steps, MAX_LISTED)}"
        others = _listed(deep["step"].unique())
        said.append(f"{chosen} {'was' if is_one else 'were'} not recorded in depth; {others} were.")
    return " ".join(said)


def _listed(numbers: Iterable[int]) -> str:
    return ranges_text(ranges_of(numbers), MAX_LISTED)


def _runs_in_link(search: str) -> Link:
    """Return the runs named by an otherwise invalid link, so that others can be chosen."""
    run, against = named_runs(search)
    return Link(run=run, against=against)


def _names_of_run(run: ShownRun) -> tuple[str, str]:
    """Return the last part of a run's label, and the whole label."""
    label = run.loaded.run.label
    return Path(label).name or label, label


def _pickers(runs: Runs, link: Link) -> list[Component]:
    """Return the menus for the run and for the run to compare it with; empty if only one run is offered."""
    offers = runs.offers()
    if len(offers) < 2:
        return []
    shown = link.run or runs.name
    others = [offer for offer in offers if offer.name != shown]
    # The opened run has no name in a link.
    values = ["" if offer.name == runs.name else offer.name for offer in offers]
    run = [_option(offer, value, offer.name == shown) for offer, value in zip(offers, values, strict=True)]
    other: list[Any] = [html.Option("no other run", value="", selected=not link.against)]
    other += [_option(offer, offer.name, offer.name == link.against) for offer in others]
    opened: Any = {"data-opened": runs.name}  # for links that are copied, which others may open elsewhere
    return [
        html.Label(["run", html.Select(run, id="pick-run", **opened)]),
        html.Label(["compared with", html.Select(other, id="pick-against")]),
    ]


def _option(offer: OfferedRun, value: str, selected: bool) -> Any:
    why = offer.why or ("being recorded" if offer.lives else "")
    words = f"{offer.name} ({shortened(why, _LONGEST_WHY)})" if why else offer.name
    return html.Option(
        printable(words), value=value, selected=selected, disabled=bool(offer.why), title=printable(why)
    )


def _navigation(reasons: Mapping[str, str]) -> tuple[Component, list[Component]]:
    """Return links to the views, and a list of those without data and why; scripts add the selection."""
    links: list[Component] = []
    others: list[Component] = []
    for key, view in _keyed_views():
        data: Any = {"data-view": view.name} | ({"data-press": key} if key else {})
        chip = [html.Kbd(key)] if key in tuple("123456789") else []
        named = html.A([*chip, view.title], href=f"?view={view.name}", **data)
        if reasons[view.name]:
            others += [html.Dt(named), html.Dd(reasons[view.name])]
        else:
            links.append(named)
    listed = [html.H2("Views that this run has no data for"), html.Dl(others)]
    return html.Span(links), listed if others else []


def _why_missing(run: ShownRun, link: Link, view: View) -> str:
    """Return why a view has no data; empty while the run is being recorded, since its data may still come."""
    try:
        return "" if run.lives else view.missing(run.loaded, link)
    except DproError as error:
        return str(error)


def _register_section(app: Dash, runs: Runs, view: View, name: str, fill: Filler) -> None:
    @app.callback(Output(name, "children"), *changes(runs, whole=name in view.whole))
    def filled(*now: Any) -> Any:
        def work(link: Link) -> Any:
            # Sections that ignore the selection make links without it; the page's script adds it when one is
            # followed.
            asked = replace(link, steps=(), ranks=(), time_ms=None) if name in view.whole else link
            return fill(runs.loaded(link.run), asked)

        return write_by_script(with_code(answer(view.name, now[-1], work, message)))


def _register_refresh(app: Dash, runs: Runs) -> None:
    """Let the browser poll for later states of the shown run and of the one compared with it."""

    @app.callback(
        Output("live", "children"),
        Output("tick", "disabled"),
        Input("tick", "n_intervals"),
        State("url", "search"),
        State("version", "data"),
    )
    def refresh(_ticks: int | None, search: str | None, last_version: int | None) -> tuple[Any, ...]:
        def now(version: int) -> None:  # as an output, it would block its readers
            if version != (last_version or 0):
                set_props("version", {"data": version})

        try:
            link = parse_link(search or "")
            shown_runs = [
                runs.shown(name) for name in dict.fromkeys([link.run, *filter(None, [link.against])])
            ]
        except StillOpening:
            now(_UNOPENED)
            return "", False
        except DproError:  # the content shows the error
            return "", True
        lives = [run.lives for run in shown_runs]  # read first, so that no version is missed
        if not lives[0]:
            set_props(window_button.PLACE, {"hidden": True})
        follow = POLLED.get(link.view)
        besides = crc32(repr(follow(shown_runs[0].loaded)).encode()) if follow else 0
        now(sum(run.version for run in shown_runs) + besides)
        ended = "recorded" if shown_runs[0].version else ""
        return "recording" if lives[0] else ended, not any(lives) and not follow


def _serve_tables(app: Dash, runs: Runs) -> None:
    tables = {(view.name, name): make for view in VIEWS for name, make in view.tables.items()}

    @app.server.route("/<any(csv, parquet):kind>/<view>/<name>")  # type: ignore[untyped-decorator]
    def download(kind: str, view: str, name: str) -> Response:
        write, mimetype = _DOWNLOADS[kind]
        make = tables.get((view, name)) or abort(404)
        try:
            link = parse_link(request.query_string.decode(errors="replace"))
            frame = make(runs.loaded(link.run), link)
        except DproError as error:
            return Response(f"{error}\n", 400, mimetype="text/plain")
        disposition = {"Content-Disposition": f'attachment; filename="dpro-{view}-{name}.{kind}"'}
        return Response(write(frame), mimetype=mimetype, headers=disposition)


def in_csv(frame: Any) -> str:
    """Write a frame as CSV: lists joined by blanks, text that looks like a formula escaped."""
    lists = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    plain = frame.with_columns(pl.col(lists).list.eval(pl.element().cast(pl.String)).list.join(" "))
    texts = [name for name, dtype in plain.schema.items() if not (dtype.is_numeric() or dtype == pl.Boolean)]
    cells = pl.col(texts).cast(pl.String).map_elements(in_cell, return_dtype=pl.String)
    text = plain.with_columns(cells).write_csv()
    assert isinstance(text, str)
    return text


def in_parquet(frame: Any) -> bytes:
    """Write a frame as Parquet, with its types and lists."""
    content = BytesIO()
    frame.write_parquet(content)
    return content.getvalue()


_DOWNLOADS: Mapping[str, tuple[Callable[[Any], str | bytes], str]] = {
    "csv": (in_csv, "text/csv"),
    "parquet": (in_parquet, "application/vnd.apache.parquet"),
}
