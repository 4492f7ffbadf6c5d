"""The button that requests a deep window from the shown job, and the outcome of the request.

Takes the runs of the page; returns a part of its header, visible while a job that accepts window requests is
being recorded. `ShownRun.window` sends the request; this module only shows it.
"""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html
from dash.development.base_component import Component

from dpro.dashboards.links import parse_link
from dpro.dashboards.runs import Runs
from dpro.errors import DproError

LOOK_MS = 1000  # polling interval for the outcome
PLACE = "window"  # id of the whole part; hidden if no window can be requested


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
    """Request a window when the button is pressed, and show the outcome."""

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
        except DproError:  # the content shows the error
            return True, True, "", True
        if run.window is None or not run.lives:
            return True, True, "", True
        if ctx.triggered_id == "ask":
            run.window.ask()
        waits, said = run.window.follow()
        return False, waits, said, not waits
