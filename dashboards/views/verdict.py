"""The first view: whether the run is healthy, what is slow, what would help, and how far to trust it.

In: steps, and the summary of a run. Out: a figure of the step time, and panels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import search_once
from dpro.analysis.mean_step import facts_of, legend, mean_step_of
from dpro.analysis.summary import (
    Gains,
    finding_info,
    gain_info,
    health_info,
    interval_doubts,
    run_info,
    shown_grade,
    trust_info,
    what_helps,
)
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Filler, Panel, csv_link, facts, graph, message, table, view
from dpro.dashboards.theme import colour, css_name, ink_on, styled, time_unit, whole_ticks
from dpro.detect.findings import Finding
from dpro.detect.findings_log import describe_logged, logged_findings
from dpro.detect.words import describe
from dpro.errors import DproError
from dpro.replay.whatif.predict import Prediction
from dpro.schema import SPANS
from dpro.timed import with_times
from dpro.units import NS_PER_MS, format_duration, format_ms
from dpro.verdict.verdict import explain
from dpro.verdict.words import limit_of_run, paragraphs_of, shares_of

NAME = "verdict"
_DOING = "adding up where the time went"
HEALTH = {"good": "good", "fair": "unknown", "poor": "bad"}  # how a grade is shown
BEST = 5  # what-ifs that are shown
ROOM = 0.12  # of the bar: a wider part has its name inside
_TIMES = ("median_ms", "least_ms", "most_ms")
POINTS = 1200  # steps; a figure of this width cannot resolve more


def step_info(steps: pl.DataFrame, link: Link) -> pl.DataFrame:
    """Summarise the time of the selected steps over ranks.

    Returns:
        `step`, `median_ms`, `least_ms`, `most_ms` over the ranks, `deep`: whether any rank recorded it in
        depth. More than `POINTS` steps are grouped into stretches: `step` is then the first of a stretch, and
        the other columns are the median, minimum and maximum over the stretch.
    """
    timed = with_times(link.chosen(steps)).filter(pl.col("time_ns") > 0)
    number = timed["step"].to_numpy()
    every = 1 + int(np.ptp(number)) // POINTS if number.size else 1
    duration = pl.col("time_ns") / NS_PER_MS
    return (
        timed.group_by(pl.col("step") // every * every)
        .agg(
            median_ms=duration.median(),
            least_ms=duration.min(),
            most_ms=duration.max(),
            deep=(pl.col("window") >= 0).any(),
        )
        .sort("step")
    )


def step_figure(steps: pl.DataFrame, theme: str, other: pl.DataFrame | None = None) -> go.Figure:
    """Draw the step time: the median over ranks, and their range.

    Args:
        other: the same of another run, of which the median is drawn; None for none.
    """
    frames = [steps] if other is None else [steps, other]
    longest = max(float(frame["most_ms"].max() or 0) for frame in frames)  # type: ignore[arg-type]
    scale, unit = time_unit(longest)
    steps, *others = (frame.with_columns(pl.col(_TIMES) / scale) for frame in frames)
    x, ink = steps["step"], colour("compute", theme)
    figure = go.Figure()
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=x, y=steps["most_ms"], **edge)
    figure.add_scatter(
        x=x, y=steps["least_ms"], fill="tonexty", fillcolor=f"{ink}33", **edge | {"name": "all ranks"}
    )
    figure.add_scatter(
        x=x,
        y=steps["median_ms"],
        mode="lines" if steps.height > 1 else "markers",
        line={"width": 1.5, "color": ink},
        name="median of the ranks",
        hovertemplate=f"step %{{x}}: %{{y:.4g}} {unit}<extra></extra>",
    )
    deep = steps.filter("deep")
    figure.add_scatter(
        x=deep["step"],
        y=deep["median_ms"],
        mode="markers",
        marker={"size": 5, "color": colour("host_bound", theme)},
        name="recorded in depth",
        hovertemplate=f"step %{{x}}: %{{y:.4g}} {unit}, recorded in depth<extra></extra>",
    )
    for dashed in others:
        figure.add_scatter(
            x=dashed["step"],
            y=dashed["median_ms"],
            mode="lines" if dashed.height > 1 else "markers",
            line={"width": 1.5, "color": colour("exposed_comm", theme), "dash": "dash"},
            name="median of the other run",
            hovertemplate=f"step %{{x}}: %{{y:.4g}} {unit} in the other run<extra></extra>",
        )
    number = pl.concat(frames)["step"].to_numpy()
    first, last = int(number.min()), int(number.max())
    margin = max(0.5, 0.02 * (last - first))  # the markers at both ends are whole
    figure.update_xaxes(
        title_text="step",
        range=[first - margin, last + margin],
        **whole_ticks(np.unique(number).size),
    )
    figure.update_yaxes(title_text=f"step time, {unit}", rangemode="tozero")
    return styled(figure, theme, height=230)


def _in_short(loaded: Loaded, _link: Link) -> Any:
    explanation = explain(loaded)
    shares = " | ".join(shares_of(explanation))
    return [html.P(text) for text in (explanation.job, shares) if text] + [facts(paragraphs_of(explanation))]


def _run(loaded: Loaded, link: Link) -> Any:
    steps, other = step_info(loaded.steps, link), loaded.against(link)
    names = facts(run_info(loaded.run.manifest, link.chosen(loaded.steps)))
    if steps.is_empty():
        why = [] if loaded.steps.is_empty() else [message("No step of this selection was recorded.")]
        return [names, *why]
    compared = None if other is None else step_info(other.steps, link)
    figure = graph("verdict-steps-figure", step_figure(steps, link.theme, compared))
    return [names, figure, csv_link(NAME, "steps", link)]


def _findings(loaded: Loaded, link: Link) -> Any:
    findings, unknown = loaded.verdict
    replayed = loaded.run.num_rows(SPANS) > 0
    trust, unrecorded = loaded.trust if replayed else None, loaded.run.manifest.unrecorded
    state, sentence = health_info(findings, unknown, trust, unrecorded=unrecorded)
    diagnosed = trust is None or trust.answerable
    said_in_short = findings or loaded.end.early or (diagnosed and limit_of_run(loaded))
    said_of_trust = _doubts(loaded) if replayed else []
    open_questions = [html.Li(["not known: ", why]) for why in unknown if why not in said_of_trust]
    earlier = describe_logged(logged_findings(loaded.run.path))
    listed: list[Any] = [_finding(finding, loaded.workers, link) for finding in findings]
    listed += [] if said_in_short else [html.P(sentence, className=f"health {state}")]
    listed += [html.Ul(open_questions, className="unknown")] if open_questions else []
    listed += [html.Ul([html.Li(["while it ran, ", line]) for line in earlier])] if earlier else []
    withdrawn = [html.Li(str(finding)) for finding in loaded.withdrawn()]
    listed += [html.Ul(withdrawn, className="unknown")] if withdrawn else []
    nothing = f"No finding. {'What is not known is said beside.' if unknown else 'No question is open.'}"
    return [*(listed or [message(nothing)]), csv_link(NAME, "findings", link)]


def _finding(finding: Finding, workers: pl.DataFrame, link: Link) -> Component:
    hangs = finding.of_hang
    view, selected = ("hang", link.ranks) if hangs else ("timeline", finding.ranks)
    look = dcc.Link(view, href=link.query(view=view, ranks=selected, options={}))
    described = describe(finding, workers)
    head = html.H3([html.Strong(described.title), html.Span(described.meaning), look], className="health bad")
    do = [html.P(f"Do: {described.do}")] if described.do else []
    return html.Article([head, html.Ul([html.Li(line) for line in described.evidence]), *do])


def _helpful(loaded: Loaded) -> Gains:
    return what_helps(search_once(loaded).predictions)


def _gains(loaded: Loaded, link: Link) -> Any:
    helpful = _helpful(loaded)
    header = ["if", "speed-up", "step", "interval", "proof", "how"]
    rows = [_gain(gain, link) for gain in helpful.clear[:BEST]]
    drawn = (
        [table(header, rows, numbers_to=4)]
        if rows
        else [message("Nothing else that was tried beats the noise of the steps.")]
    )
    within = [
        html.Li([_edit_link(gain, link), f": x{gain.speedup:.2f}, {_interval(gain)}"])
        for gain in helpful.within_noise
    ]
    folded = [html.Summary(f"{len(within)} more of x1.00, or within the noise of the steps"), html.Ul(within)]
    note = f"The usual step takes {format_duration(loaded.baseline_ns)} as the job runs."
    if any(row.speedup > 1 and row.predicted_ns > loaded.baseline_ns for row in helpful.clear[:BEST]):
        note += " A speed-up is of samples per second: a longer step may work on more of them."
    poor = loaded.trust.grade == "poor"
    doubtful = [message("Take none of these at its word: the replay fits poorly.")] if poor else []
    more = [html.Details(folded)] if within else []
    return [*doubtful, *drawn, *more, html.P(note, className="note"), csv_link(NAME, "gains", link)]


def _gain(gain: Prediction, link: Link) -> list[Any]:
    return [
        _edit_link(gain, link),
        f"x{gain.speedup:.2f}",
        format_duration(gain.predicted_ns),
        _interval(gain),
        gain.block,
        html.Span(gain.how(), className="how"),
    ]


def _edit_link(gain: Prediction, link: Link) -> Any:
    edits = "\n".join(map(str, gain.edits))
    return dcc.Link(gain.what(), href=link.query(view="whatif", options={"edit": edits}))


def _interval(gain: Prediction) -> str:
    return f"{format_duration(gain.low_ns)} to {format_duration(gain.high_ns)}"


def _doubts(loaded: Loaded) -> list[str]:
    """What makes the replay doubtful."""
    return [*loaded.trust.reasons, *loaded.trust.doubts, *loaded.trust.assumed]


def _trust(loaded: Loaded, _link: Link) -> Any:
    trust = loaded.trust
    doubts = interval_doubts(trust, _helpful(loaded).clear[:BEST])
    said = [*doubts, *_doubts(loaded)]
    return [
        html.P(trust.verdict, className=f"health {HEALTH[shown_grade(trust, doubts)]}"),
        facts(trust_info(trust)),
        html.Ul([html.Li(line) for line in said], className="unknown"),
    ]


def _is_replayed(loaded: Loaded) -> bool:
    try:
        return loaded.trust is not None
    except DproError:
        return False


def _where_replayed(fill: Filler) -> Filler:
    """Of a run that cannot be replayed the panel is hidden: that of trust says why."""

    def filled(loaded: Loaded, link: Link) -> Any:
        try:
            return fill(loaded, link)
        except DproError:
            if _is_replayed(loaded):
                raise
            return html.Div(hidden=True)

    return filled


def _mean(loaded: Loaded, link: Link) -> Any:
    """Return the bar of the mean step; with another run those of both, on one scale."""
    other = loaded.against(link)
    if other is None:
        return _bar(loaded, 1.0, link.theme)
    runs = (("this run", loaded), (link.against, other))
    try:
        longest = max(mean_step_of(run).duration_ms for _, run in runs)
    except DproError as error:
        return [*_bar(loaded, 1.0, link.theme), message(f"{link.against} is not compared: {error}")]
    bars = []
    for name, run in runs:
        bars += [html.H3(html.Strong(name)), *_bar(run, mean_step_of(run).duration_ms / longest, link.theme)]
    return bars


def _bar(loaded: Analysis, width: float, theme: str) -> list[Component]:
    """Return the bar of the mean step, its legend and facts.

    Args:
        width: of the bar, as a share of the panel's.
    """
    mean, steps = mean_step_of(loaded), loaded.breakdown.height
    words = legend(mean, glyphs=False)
    ink = [f"var(--{css_name(part.name)})" for part in mean.shares]
    cells = [
        html.Span(
            f"{part.title} {part.share:.0%}" if part.share >= ROOM else "",
            style={
                "width": f"{100 * part.share:.3f}%",
                "background": tint,
                "color": ink_on(part.name.removesuffix("_ns"), theme),
            },
            title=text,
        )
        for part, tint, text in zip(mean.shares, ink, words)
    ]
    items = [html.Li([html.I(style={"background": tint}), text]) for tint, text in zip(ink, words)]
    title = f"The mean step of a rank in deep windows takes {format_ms(mean.duration_ms)}"
    title += f" ({steps:,} steps over all ranks)" if steps > 1 else ""
    said = [facts(facts_of(mean))] if facts_of(mean) else []
    named: Any = {"role": "img", "aria-label": "; ".join(words)}
    bar = html.Div(cells, className="shares", style={"width": f"{100 * width:.3f}%"}, **named)
    return [html.P(title), bar, html.Ul(items, className="legend"), *said]


VIEW = view(
    NAME,
    "Verdict",
    needs.anything,
    Panel("In short", "verdict-short", "working out what limits it", _in_short, wide=True),
    Panel(
        "Where the mean step of a rank goes",
        "verdict-mean",
        "adding up where the time went",
        _where_replayed(_mean),
        wide=True,
    ),
    Panel("What was found", "verdict-findings", "looking for what is slow", _findings),
    Panel("How far to believe it", "verdict-trust", "replaying", _trust),
    Panel(
        "What would help", "verdict-gains", "predicting what would help", _where_replayed(_gains), wide=True
    ),
    Panel("Step time", "verdict-run", "reading the steps", _run, wide=True),
    tables={
        "steps": lambda loaded, link: step_info(loaded.steps, link),
        "findings": lambda loaded, _link: finding_info(loaded.verdict[0]),
        "gains": lambda loaded, _link: gain_info(search_once(loaded).predictions),
    },
)
