"""The button that asks the job that is shown for a deep window, and what became of it.

In: the runs of the page. Out: a part of its header, which is there while a job is being recorded that takes
windows. What asks the job is `ShownRun.window`; this module only shows it.
"""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html
from dash.development.base_component import Component

from dpro.dashboards.links import parse_link
from dpro.dashboards.runs import Runs
from dpro.errors import DproError

LOOK_MS = 1000  # from one look at what became of the window to the next
PLACE = "window"  # id of all of it; hidden where there is nothing to ask


def button() -> Component:
    """Return the button and the line beside it, hidden."""
    title = "Record some steps in depth on all ranks, as `dpro attach RUN --steps K` does"
    return html.Span(
        [
            html.Button("record a deep window", id="ask", title=title),
            html.Span(id="asked", role="status"),
            dcc.Interval(id="asking", interval=LOOK_MS, disabled=True),
        ],
        id=PLACE,
        hidden=True,
    )


def register(app: Dash, runs: Runs) -> None:
    """Ask when the button is pressed, and say what became of it."""

    @app.callback(
        Output(PLACE, "hidden"),
        Output("ask", "disabled"),
        Output("asked", "children"),
        Output("asking", "disabled"),
        Input("ask", "n_clicks"),
        Input("asking", "n_intervals"),
        Input("shown", "data"),
        Input("version", "data"),
        State("url", "search"),
    )
    def follow(*now: Any) -> tuple[bool, bool, str, bool]:
        try:
            run = runs.shown(parse_link(now[-1] or "").run)
        except DproError:  # the content says it
            return True, True, "", True
        if run.window is None or not run.lives:
            return True, True, "", True
        if ctx.triggered_id == "ask":
            run.window.ask()
        waits, said = run.window.follow()
        return False, waits, said, not waits
