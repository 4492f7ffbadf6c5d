"""A report of a run as one self-contained HTML file: it needs no network, no server and no dpro.

Takes a run; returns the page, with equal bytes for equal runs. Strings from traces are untrusted: the
template escapes them, and figures get their data as JSON that a browser cannot parse as markup. The page's
content security policy allows its own two scripts and no others.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from dpro.analysis.mean_step import MeanStep, facts_of, legend
from dpro.dashboards.figures import Figures
from dpro.dashboards.guard import hash_of
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.theme import css_name, css_variables, dark_counterparts, least_width
from dpro.documents import plain
from dpro.errors import DproError
from dpro.plugins import hooks_of
from dpro.units import format_bytes, format_ms
from dpro.verdict.report import RunReport, gain_cells
from dpro.verdict.verdict import Explanation, explain
from dpro.verdict.words import paragraphs_of, shares_of
from dpro.words import printable

MAX_BYTES = 2_500_000  # of all figures; the drawing library takes 2 MB, and the page must stay below 5 MB
MAX_LANES_OF = 8  # ranks in the timeline
MAX_POINTS = 60_000  # in the timeline; a browser draws this many in a few seconds
_STEPS = 2  # in the timeline


class DrawnFigure(NamedTuple):
    """A figure in the page: its JSON for the drawing library, or a message in its place."""

    title: str
    data: Markup
    height: int
    least_width: int = 0
    said: str = ""


def html_of(loaded: Loaded, report: RunReport) -> str:
    """Render the report of a run as one page."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    script, plotly = Path(__file__).with_name("report.js").read_text(encoding="utf-8"), get_plotlyjs()
    return templates.get_template("report.html").render(
        report=report,
        short=_verdict_lines(explain(loaded)),
        account=_escaped(json.dumps(plain(explain(loaded).account))),
        cells=gain_cells,
        **_mean_step(report.mean_step),
        figures=list(_drawn_within(MAX_BYTES, _figures(loaded, report))),
        palette=Markup(css_variables()),
        dark=Markup(json.dumps(dark_counterparts())),
        allowed=Markup(f"{hash_of(script)} {hash_of(plotly)}"),
        script=Markup(script),
        plotly=Markup(_packed(plotly)),
    )


def _verdict_lines(verdict: Explanation) -> list[str]:
    """Return the lines of the verdict, which the page wraps."""
    lines = [verdict.job, " | ".join(shares_of(verdict))]
    return [*filter(None, lines), *(f"{label:<7}{text}" for label, text in paragraphs_of(verdict))]


def _mean_step(mean: MeanStep | None) -> dict[str, Any]:
    """Return the template's variables for the bar of the mean step."""
    if mean is None:
        return {}
    return {
        "duration": format_ms(mean.duration_ms),
        "colours": {part.name: css_name(part.name) for part in mean.shares},
        "legend": legend(mean),
        "mean_facts": facts_of(mean),
    }


def _figures(loaded: Loaded, report: RunReport) -> Iterator[tuple[str, Callable[[], go.Figure]]]:
    """Yield the title of each figure and a function that draws it, the most informative first."""
    draw = Figures(loaded)
    yield "Which ranks wait for which", draw.hang
    yield "Where the usual step goes", draw.account
    lanes = lanes_of(loaded)
    for more in hooks_of("report_figures"):
        yield from more(loaded, lanes)
    yield "Step time", draw.steps
    yield "Where the usual step of each rank goes", draw.breakdown
    if report.gains:
        best = report.gains[0]
        yield f"Predicted: {best.what()}", lambda: draw.whatif(*map(str, best.edits))
    yield "Step time of each rank", draw.heatmap
    yield "Which rank comes last to collectives", draw.waiting
    yield "Transfers by size, and the fitted lines", draw.collectives
    some = " of some ranks" if len(lanes) < len(loaded.run.manifest.ranks) else ""
    yield f"Timeline{some}; what is on the critical path is underlined", lambda: timeline_of(loaded, lanes)


def lanes_of(loaded: Loaded) -> list[int]:
    """Return the ranks whose lanes are drawn: the ranks of findings first, then the lowest numbers."""
    ranks = loaded.run.manifest.ranks
    try:
        blamed = [rank for finding in loaded.verdict[0] for rank in finding.ranks if rank in ranks]
    except DproError:
        blamed = []
    return sorted(list(dict.fromkeys([*blamed, *ranks]))[:MAX_LANES_OF])


def timeline_of(loaded: Loaded, ranks: list[int]) -> go.Figure:
    """Draw the last steps of the first deep window, since its first step includes the profiler's warm-up.

    Args:
        ranks: whose lanes are drawn; halved until they have at most `MAX_POINTS` points.
    """
    steps = loaded.step_extents
    window = steps.filter(window=steps["window"].min())["step"]
    chosen = (int(window[-min(_STEPS, window.len())]), int(window[-1])) if window.len() else None
    figure = Figures(loaded).timeline(ranks=ranks, steps=chosen)
    if len(ranks) > 1 and sum(len(trace.x) for trace in figure.data) > MAX_POINTS:
        return timeline_of(loaded, ranks[: len(ranks) // 2])
    return figure


def _drawn_within(
    budget: int, figures: Iterator[tuple[str, Callable[[], go.Figure]]]
) -> Iterator[DrawnFigure]:
    """Draw figures until the budget (bytes) is spent; skip those that the run has no data for."""
    for title, draw in figures:
        try:
            figure = draw()
        except DproError:
            continue
        text = _json(figure)
        if len(text) > budget:
            size = format_bytes(len(text))
            yield DrawnFigure(
                title, Markup(), 0, said=f"left out: it takes {size}; `dpro dashboard` shows it"
            )
            continue
        budget -= len(text)
        yield DrawnFigure(title, text, int(figure.layout.height), least_width(figure))


def _json(figure: go.Figure) -> Markup:
    """Return a figure as JSON; WebGL traces become SVG ones."""
    drawn = figure.to_plotly_json()
    for trace in drawn["data"]:
        trace["type"] = trace["type"].removesuffix("gl")
    return _escaped(str(to_json_plotly(drawn)))


def _escaped(text: str) -> Markup:
    """Escape JSON so that it cannot open a tag."""
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _packed(script: str) -> str:
    """Compress a script with zlib and encode it in base64, for the browser's `DecompressionStream`."""
    return base64.b64encode(zlib.compress(script.encode(), 9)).decode()
