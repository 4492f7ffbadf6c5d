"""Figures of a run for reports and notebooks.

Takes a run; returns Plotly figures of selected steps and ranks, or raises an error that says why there is
nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import plotly.graph_objects as go
import polars as pl

from dpro.account import Account
from dpro.dashboards.account import entry_figure, entry_info
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.theme import LIGHT, THEMES
from dpro.dashboards.timeline.figure import drawn_timeline
from dpro.dashboards.views import breakdown, collectives, heatmap, telemetry, verdict, whatif
from dpro.dashboards.views.hang import chain_figure, chains_of
from dpro.errors import Unanswerable, UsageError
from dpro.plugins import load, places
from dpro.replay.whatif.registry import parse_edit
from dpro.selection import parse_ranges
from dpro.units import ms
from dpro.verdict.verdict import explain

_LEGEND, _BUTTONS = 50, 26  # pixels


class Figures:
    """Figures of a run.

    All methods take the selection as keywords: `steps` (a number, the first and the last, or a text such as
    "3,5,7-9"), `ranks`, and `theme` (light or dark). All raise `Unanswerable` if there is nothing to draw,
    and `UsageError` if an argument is invalid.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._run = loaded

    def __getattr__(self, name: str) -> Callable[..., go.Figure]:
        """Return an extension's figure by its name; it takes the selection as keywords, too."""
        place = places("figures").get(name)
        if place is None:
            raise AttributeError(f"no figure {name!r}")
        return lambda **selected: load(place)(self._run, selection(**selected))

    def account(self, theme: str = LIGHT) -> go.Figure:
        """Draw the usual step as a waterfall of the account's entries."""
        entries = _require_rows(entry_info(explain(self._run).account or Account()), "deep window")
        figure = entry_figure(entries, selection(theme=theme).theme)
        room = {"height": figure.layout.height + _BUTTONS, "margin_t": figure.layout.margin.t + _BUTTONS}
        return figure.update_layout(**room)

    def steps(self, **selected: Any) -> go.Figure:
        """Draw the time of each step: the median over ranks, and their range."""
        link = selection(**selected)
        return verdict.step_figure(
            _require_rows(verdict.step_info(self._run.timed_steps, link), "step"), link.theme
        )

    def heatmap(self, metric: str = "step", **selected: Any) -> go.Figure:
        """Draw a heatmap of one value per rank and step; the selection is outlined."""
        if metric not in heatmap.METRICS:
            raise UsageError(f"no metric {metric!r}; there are {', '.join(heatmap.METRICS)}")
        values = _require_rows(heatmap.heat_info(self._run, metric), "step")
        return heatmap.heat_figure(values, heatmap.METRICS[metric].title, selection(**selected))

    def breakdown(self, by: str = "rank", **selected: Any) -> go.Figure:
        """Draw where the time of the mean step goes, by rank or by step."""
        if by not in ("rank", "step"):
            raise UsageError(f"no breakdown by {by!r}: by rank, or by step")
        link = selection(**selected)
        parts = breakdown.part_info(breakdown.shown_steps(self._run, link)[0], by, link)
        return breakdown.with_legend(breakdown.part_figure(_require_rows(parts, "step"), by, link.theme))

    def timeline(self, **selected: Any) -> go.Figure:
        """Draw the measured lanes on one clock; without a selection, those of the first deep window.

        Args:
            selected: steps, ranks, theme, and `time_ms`: from and to, ms since the first span.
        """
        figure = drawn_timeline(self._run.tracks, self._run.step_extents, selection(**selected))
        legend = {"yref": "container", "y": 0, "yanchor": "bottom"}
        room = {"height": figure.layout.height + _LEGEND, "margin_b": figure.layout.margin.b + _LEGEND}
        return figure.update_layout(showlegend=True, legend=legend, **room)

    def collectives(self, **selected: Any) -> go.Figure:
        """Draw transfer times by size, with the fitted latency and bandwidth."""
        link = selection(**selected)
        transfers = collectives.transfer_info(self._run.outline.graph, link)
        return collectives.transfer_figure(
            _require_rows(transfers, "transfer of known size"), self._run.costs, link.theme
        )

    def waiting(self, **selected: Any) -> go.Figure:
        """Draw how often each rank arrives last at collectives, and how long the others wait for it."""
        link = selection(**selected)
        ranks = collectives.last_info(collectives.arrivals(self._run, link))
        return collectives.last_figure(_require_rows(ranks, "collective of several ranks"), link.theme)

    def hang(self, theme: str = LIGHT) -> go.Figure:
        """Draw which ranks of a hanging job wait for which."""
        chains = chains_of(self._run)
        if not chains.boxes:
            raise Unanswerable("nothing to draw: no rank has waited for long")
        return chain_figure(chains, selection(theme=theme).theme)

    def telemetry(self, **selected: Any) -> go.Figure:
        """Draw the sampled counters that changed."""
        link = selection(**selected)
        values = telemetry.telemetry_info(self._run.counters, self._run.workers, *self._run.clocks, link)
        return telemetry.telemetry_figure(_require_rows(values, "telemetry"), link.time_ms, link.theme)

    def whatif(self, *edits: str, theme: str = LIGHT) -> go.Figure:
        """Draw the mean step now and under edits (as `dpro whatif --edit` takes them), with its interval."""
        predicted = whatif.prediction_info(self._run, [parse_edit(edit) for edit in edits])
        return whatif.prediction_figure(ms(self._run.baseline_ns), predicted, selection(theme=theme).theme)

    def critical_path(self, *edits: str, theme: str = LIGHT) -> go.Figure:
        """Draw what the critical path consists of, now and under edits."""
        path = whatif.path_info(self._run, [parse_edit(edit) for edit in edits])
        return whatif.path_figure(path, selection(theme=theme).theme, edited=bool(edits))


def selection(
    steps: int | tuple[int, int] | str | None = None,
    ranks: Iterable[int] = (),
    theme: str = LIGHT,
    time_ms: tuple[float, float] | None = None,
) -> Link:
    """Return the selection as a link, which is the form that views take.

    Args:
        steps: a step, the first and the last, or text such as `3-8,12`; None selects all.
        time_ms: from and to, ms since the first span; None selects all of the steps.

    Raises:
        UsageError: there is no such theme, or `steps` is not a list of numbers.
    """
    if theme not in THEMES:
        raise UsageError(f"no theme {theme!r}; there are {', '.join(THEMES)}")
    text = "-".join(map(str, steps)) if isinstance(steps, tuple) else str("" if steps is None else steps)
    return Link(
        steps=parse_ranges(text, "steps"), ranks=tuple(sorted(set(ranks))), theme=theme, time_ms=time_ms
    )


def _require_rows(frame: pl.DataFrame, what: str) -> pl.DataFrame:
    """Return the frame.

    Raises:
        Unanswerable: the frame is empty.
    """
    if frame.is_empty():
        raise Unanswerable(f"nothing to draw: no {what} of this selection was recorded")
    return frame
