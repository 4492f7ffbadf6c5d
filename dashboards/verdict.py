"""The first view: is it healthy, what is slow, what would help, and how far to believe all that.

In: steps, findings, predictions and the fit of the replay. Out: frames and words (`*_info`), a figure of the
step time, and panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import View, csv_link, facts, graph, grid, message, panel, section, table
from dpro.dashboards.theme import colour, styled
from dpro.detect.findings import Finding
from dpro.detect.hang.words import HANGS, verdict_in_words
from dpro.replay.accuracy import Trust
from dpro.replay.whatif.predict import Prediction
from dpro.schema import SPANS
from dpro.store import Manifest
from dpro.units import NS_PER_MS, format_duration, ms

NAME = "verdict"
BEST = 3  # what-ifs that are shown
POINTS = 1200  # steps that a figure of this width can tell apart
_RANKS_NAMED = 8


def step_info(steps: pl.DataFrame, link: Link) -> pl.DataFrame:
    """How long the selected steps took.

    Args:
        steps: table `steps`.
        link: the selection.

    Returns:
        `step`, `median_ms`, `least_ms`, `most_ms` over the ranks, `deep`: whether any rank recorded it in
        depth. Of many steps as many stretches as can be shown: `step` is then the first, the rest are the
        median, least and most of all.
    """
    known = link.chosen(steps).filter(pl.col("duration_ns") > 0)
    number = known["step"].to_numpy()
    every = 1 + int(np.ptp(number)) // POINTS if number.size else 1
    duration = pl.col("duration_ns") / NS_PER_MS
    return (
        known.group_by(pl.col("step") // every * every)
        .agg(
            median_ms=duration.median(),
            least_ms=duration.min(),
            most_ms=duration.max(),
            deep=(pl.col("window") >= 0).any(),
        )
        .sort("step")
    )


def step_figure(steps: pl.DataFrame, theme: str) -> go.Figure:
    """The step time, and how far ranks differ.

    Args:
        steps: as from `step_info`.
        theme: light or dark.
    """
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
        hovertemplate="step %{x}: %{y:.3f} ms<extra></extra>",
    )
    deep = steps.filter("deep")
    figure.add_scatter(
        x=deep["step"],
        y=deep["median_ms"],
        mode="markers",
        marker={"size": 5, "color": colour("host_bound", theme)},
        name="recorded in depth",
        hovertemplate="step %{x}: %{y:.3f} ms, recorded in depth<extra></extra>",
    )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="step time, ms", rangemode="tozero")
    return styled(figure, theme, height=230)


def run_info(manifest: Manifest, steps: pl.DataFrame) -> list[tuple[str, str]]:
    """What was recorded, as names and values: step time first."""
    outside = steps.filter((pl.col("duration_ns") > 0) & (pl.col("window") < 0))
    known = outside if outside.height else steps.filter(pl.col("duration_ns") > 0)
    where = "outside deep windows" if outside.height else "in deep windows, which slow steps down"
    typical = float(np.median(known["duration_ns"].to_numpy())) if known.height else None
    rows = [
        ("step time", "no step was recorded" if typical is None else format_duration(typical)),
        ("", "" if typical is None else f"median, {where}"),
        ("steps", f"{steps['step'].n_unique():,}"),
        ("ranks", _ranks(manifest)),
        ("hosts", ", ".join(manifest.hosts)),
        ("GPUs", ", ".join(manifest.gpus)),
        ("command", " ".join(manifest.command)),
    ]
    rows += [("warning", warning) for warning in manifest.warnings]
    return [(name, value) for name, value in rows if value]


def _ranks(manifest: Manifest) -> str:
    missing = manifest.missing_ranks
    named = ", ".join(map(str, missing[:_RANKS_NAMED])) + (" …" if len(missing) > _RANKS_NAMED else "")
    return f"{len(manifest.ranks)} of {manifest.world_size}" + (f", missing {named}" if missing else "")


def health_info(findings: Sequence[Finding], unknown: Sequence[str], trust: Trust | None) -> tuple[str, str]:
    """A word for the state of the run (good, bad, unknown) and a sentence.

    Args:
        findings: what is slow or broken.
        unknown: what keeps the run from showing it.
        trust: the fit of the replay; None where findings rest on calls alone.
    """
    if findings:
        worst = findings[0]
        if worst.class_ in HANGS:
            more = f"; {len(findings) - 1} more below" if len(findings) > 1 else ""
            return "bad", f"The job stands still. {verdict_in_words(worst)}{more}"
        who = f"{worst.component_kind} {worst.component_id}"
        cost = f" costs {format_duration(worst.cost_ns)} per step, {worst.severity:.0%} of it"
        return "bad", f"{who}: {worst.class_}" + (cost if worst.cost_ns > 0 else "")
    if trust is not None and not trust.answerable:
        return "unknown", "Not diagnosed: the replay does not fit the trace"
    if unknown:
        return "unknown", "Nothing is wrong that this run can show; it cannot show everything"
    return "good", "Healthy: no rank and no input pipeline holds the job up"


def finding_info(findings: Sequence[Finding]) -> pl.DataFrame:
    """The findings as a table, costliest first."""
    names = ("class", "component", "ranks", "cost_ms_per_step", "severity", "confidence", "evidence")
    return pl.DataFrame(
        {
            "class": [finding.class_ for finding in findings],
            "component": [f"{finding.component_kind} {finding.component_id}" for finding in findings],
            "ranks": [list(finding.ranks) for finding in findings],
            "cost_ms_per_step": [
                None if finding.class_ in HANGS else ms(finding.cost_ns) for finding in findings
            ],
            "severity": [finding.severity for finding in findings],
            "confidence": [finding.confidence for finding in findings],
            "evidence": ["; ".join(finding.evidence) for finding in findings],
        },
        schema=dict(zip(names, [pl.String, pl.String, pl.List(pl.Int64), *[pl.Float64] * 3, pl.String])),
    )


def gain_info(predictions: Sequence[Prediction]) -> pl.DataFrame:
    """Predictions as a table, in their order: what would help most comes first."""
    names = ("edit", "what", "predicted_ms", "low_ms", "high_ms", "speedup", "how")
    return pl.DataFrame(
        {
            "edit": ["\n".join(map(str, each.edits)) for each in predictions],
            "what": [" and ".join(edit.describe() for edit in each.edits) for each in predictions],
            "predicted_ms": [ms(each.predicted_ns) for each in predictions],
            "low_ms": [ms(each.low_ns) for each in predictions],
            "high_ms": [ms(each.high_ns) for each in predictions],
            "speedup": [each.speedup for each in predictions],
            "how": [each.how() for each in predictions],
        },
        schema=dict(zip(names, [pl.String, pl.String, *[pl.Float64] * 4, pl.String])),
    )


def trust_info(trust: Trust) -> list[tuple[str, str]]:
    """How well the replay fits, as names and values."""
    p50, p95 = trust.start_error_ns
    classified = trust.kernels_classified
    rows = [
        ("step time off by", f"{trust.error_pct:.2f} % on average"),
        ("starts off by", f"{format_duration(p50)} (median), {format_duration(p95)} (95th percentile)"),
        ("collectives found on all ranks", f"{trust.collectives_matched:.1%}"),
        ("GPU time in known kernels", "no kernels" if classified is None else f"{classified:.1%}"),
        ("time nothing explains", f"{trust.time_unexplained:.2%}"),
        ("CPU time in no span", f"{trust.host_gaps:.1%}"),
        ("starts taken from the trace", f"{trust.starts_anchored:.1%}"),
    ]
    if trust.overlap is not None:
        overlap = trust.overlap
        beside = f"x{overlap.slowdown:.2f} ({overlap.low:.2f} to {overlap.high:.2f})"
        rows.append(("kernels beside communication", beside))
    return rows


def _run(loaded: Loaded, link: Link) -> Any:
    steps = step_info(loaded.steps, link)
    names = facts(run_info(loaded.run.manifest, link.chosen(loaded.steps)))
    if steps.is_empty():
        return [names, message("No step of this selection was recorded.")]
    figure = graph("verdict-steps-figure", step_figure(steps, link.theme))
    return [names, figure, csv_link(NAME, "steps", link)]


def _findings(loaded: Loaded, link: Link) -> Any:
    findings, unknown = loaded.verdict
    replayed = loaded.run.rows()[SPANS.name] > 0
    state = _health(*health_info(findings, unknown, loaded.trust if replayed else None))
    open_questions = [html.Li(["not known: ", reason]) for reason in unknown]
    told = [*(_finding(each, link) for each in findings), html.Ul(open_questions, className="unknown")]
    return [state, *told, csv_link(NAME, "findings", link)]


def _health(state: str, sentence: str) -> Component:
    return html.P(sentence, className=f"health {state}")


def _finding(finding: Finding, link: Link) -> Component:
    hangs = finding.class_ in HANGS  # its cost is how long it has been waited for, as far as that is known
    view, selected = ("hang", link.ranks) if hangs else ("timeline", finding.ranks)
    look = dcc.Link(view, href=link.query(view=view, ranks=selected, own={}))
    cost = f"{format_duration(finding.cost_ns)} per step" if finding.cost_ns > 0 and not hangs else ""
    head = [html.Strong(finding.class_), html.Span(f"{finding.component_kind} {finding.component_id}")]
    head += [html.Span(cost), html.Span(f"confidence {finding.confidence:.2f}"), look]
    return html.Article([html.H3(head), html.Ul([html.Li(line) for line in finding.evidence])])


def _gains(loaded: Loaded, link: Link) -> Any:
    predictions, _ = loaded.search
    helpful = [each for each in predictions if each.speedup > 1][:BEST]
    if not helpful:
        return message("No edit that was tried would shorten the step.")
    rows = [
        [
            dcc.Link(
                row["what"], href=link.query(view="whatif", own={"edit": row["edit"]}), title=row["how"]
            ),
            f"x{row['speedup']:.2f}",
            f"{row['predicted_ms']:.2f}",
            f"{row['low_ms']:.2f} to {row['high_ms']:.2f}",
        ]
        for row in gain_info(helpful).iter_rows(named=True)
    ]
    measured = float(np.mean(loaded.trust.steps["measured_ns"].to_numpy()))
    note = f"of a mean step of {format_duration(measured)} in deep windows"
    doubtful = [] if loaded.trust.answerable else [message("Do not rely on it: the replay fits badly.")]
    header = ["if", "speed-up", "step, ms", "interval, ms"]
    return [*doubtful, table(header, rows), html.P(note, className="note"), csv_link(NAME, "gains", link)]


def _trust(loaded: Loaded, _link: Link) -> Any:
    trust = loaded.trust
    verdict = "Predictions can be believed." if trust.answerable else "Do not predict from this run."
    said = [*trust.reasons, *trust.doubts, *trust.assumed]
    return [
        html.P(verdict, className="health good" if trust.answerable else "health bad"),
        facts(trust_info(trust)),
        html.Ul([html.Li(line) for line in said], className="unknown"),
    ]


def _layout() -> Component:
    return grid(
        panel("Is it healthy?", section("verdict-findings", "looking for what is slow")),
        panel("What would help?", section("verdict-gains", "predicting what would help")),
        panel("Step time", section("verdict-run", "reading the steps")),
        panel("How far to believe it", section("verdict-trust", "replaying")),
    )


VIEW = View(
    NAME,
    "Verdict",
    _layout,
    {
        "verdict-run": _run,
        "verdict-findings": _findings,
        "verdict-gains": _gains,
        "verdict-trust": _trust,
    },
    {
        "steps": lambda loaded, link: step_info(loaded.steps, link),
        "findings": lambda loaded, _link: finding_info(loaded.verdict[0]),
        "gains": lambda loaded, _link: gain_info(loaded.search[0]),
    },
)
