"""The first view: whether the run is healthy, what is slow, what would help, and how far to trust it.

Takes steps, findings and the account of a run; returns a figure of the step time, and panels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from dpro.account import Account
from dpro.analysis.analysis import Analysis
from dpro.analysis.step_time import step_names_in_words
from dpro.analysis.summary import (
    finding_info,
    health_info,
    interval_doubts,
    run_info,
    trust_info,
)
from dpro.dashboards import needs
from dpro.dashboards.account import (
    advice_info,
    bars_in_words,
    entry_figure,
    entry_info,
    healing_edits,
    healing_in_words,
    parts_of_gain,
    picture_figure,
    prediction_of,
    scale_of,
    times_on_scale,
)
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, facts, graph, message, view
from dpro.dashboards.theme import colour, styled, time_unit, whole_ticks
from dpro.dashboards.timeline.search import LONGEST, literally
from dpro.dashboards.views.whatif import how_to_do, trust_line
from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.findings_log import describe_logged, logged_findings
from dpro.detect.words import describe
from dpro.errors import DproError
from dpro.replay.fidelity.accuracy import Trust
from dpro.schema import SPANS
from dpro.timed import with_times
from dpro.units import NS_PER_MS, format_ms
from dpro.verdict.facts import short_kernel
from dpro.verdict.verdict import NOT_DIAGNOSED, Explanation, advised_predictions, explain
from dpro.verdict.words import BOTH, THEN, limit_of_run, paragraphs_of, times

NAME = "verdict"
_TIMES = ("median_ms", "least_ms", "most_ms")
BY_GPU = (
    "Steps recorded in depth end here, as in Breakdown, when their GPU has done what was launched in them; "
    "the figures above use the marks of their hosts."
)
COPY = (
    "Copy the address of this view with its selection; it works while this dashboard runs, in browsers that "
    "opened it with its token"
)
WHOLE_RUN = "This view is of the whole run: the selection applies to Step time alone."
SHORTEST_NAME = 4  # least letters of a span's name that is looked for in a text
ROOM = 30.0  # percent of a gain's bar that its interval in words needs
POINTS = 1200  # steps; more than a figure of this width can resolve


def step_info(steps: pl.DataFrame, link: Link) -> pl.DataFrame:
    """Summarise the time of the selected steps over ranks.

    Returns:
        `step`, `median_ms`, `least_ms`, `most_ms` over the ranks, `deep`: whether any rank recorded it in
            depth. More than `POINTS` steps are grouped: `step` is then the first of a group, and the other
            columns are median, minimum and maximum over the group.
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
        other: step times of another run, whose median is drawn; None for none.
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
    margin = max(0.5, 0.02 * (last - first))  # so that the markers at both ends are not cut
    figure.update_xaxes(
        title_text="step",
        range=[first - margin, last + margin],
        **whole_ticks(np.unique(number).size),
    )
    figure.update_yaxes(title_text=f"step time, {unit}", rangemode="tozero")
    return styled(figure, theme, height=230)


def _picture(loaded: Loaded, link: Link) -> Any:
    """Return the account in words and as a waterfall, with buttons that save it and copy its address."""
    explanation = explain(loaded)
    said = [
        html.P([html.B(label), text], className="said")
        for label, text in paragraphs_of(explanation)
        if label in ("LIMIT", "PHASE")
    ]

    def draw() -> str:
        advice = advice_info(loaded, explanation)
        trust = ""
        with suppress(DproError):  # nothing is predicted from a run without operators
            trust = "" if _hangs(loaded) else loaded.trust.verdict
        return str(picture_figure(explanation, _entries(explanation), advice, link.theme, trust).to_json())

    drawn: Any = {"data-figure": loaded.once(("picture", link.theme), draw)}
    copied: Any = {"data-copied": "copied: for this browser, while dpro runs"}
    buttons = [
        html.Button(
            "save picture",
            id="save-picture",
            title="Save what limits, faults and what to try as a PNG",
            **drawn,
        ),
        html.Button("copy link", id="copy-link", title=COPY, **copied),
    ]
    hangs = _hangs(loaded)
    hung = [html.P(health_info(hangs, (), None, loaded.end)[1], className="health bad")] if hangs else []
    return [
        *hung,
        html.P(explanation.job, className="job"),
        html.P(WHOLE_RUN, className="note whole-run"),
        *said,
        *_step_waterfalls(loaded, link),
        html.Div(buttons, className="choices"),
        html.Div(dcc.Graph(figure={}), hidden=True),  # loads Plotly, which draws the picture to save
    ]


def _hangs(loaded: Loaded) -> list[Finding]:
    return [finding for finding in loaded.hangs if finding.of_hang]


def _entries(explanation: Explanation) -> pl.DataFrame:
    return entry_info(explanation.account or Account())


def _step_waterfalls(loaded: Loaded, link: Link) -> list[Any]:
    """Return the usual step as a waterfall; with another run, both on one scale."""
    runs: list[tuple[str, Analysis]] = [("this run", loaded)]
    missing: list[Component] = []
    try:
        other = loaded.against(link)
        runs += [(link.against, other)] if other is not None and explain(other) else []
    except DproError as error:
        missing = [message(f"{link.against} is not compared: {error}")]
    taken = [(name, explain(run)) for name, run in runs]
    longest_ms = max(float(_entries(explained)["ms"].sum()) for _, explained in taken)
    drawn: list[Any] = []
    for number, (name, explained) in enumerate(taken):
        entries = _entries(explained)
        drawn += [html.H3(html.Strong(name))] if len(taken) > 1 else []
        if entries.is_empty():
            unknown = (len(taken) > 1 or explained.step_ms) and not _hangs(loaded)
            drawn += [message("Where its step goes is not known.")] if unknown else []
            continue
        figure = entry_figure(entries, link.theme, longest_ms)
        whole = f"The usual step takes {format_ms(float(entries['ms'].sum()))} as the job runs"
        parts = "; ".join(f"{row['name']} {format_ms(row['ms'])}" for row in entries.iter_rows(named=True))
        named: Any = {"role": "img", "aria-label": f"{whole}: {parts}"}
        drawn.append(html.Div(graph(f"verdict-step-{number}", figure, buttons=False), **named))
        drawn.append(html.P(bars_in_words(explained), className="note"))
    return [*drawn, *missing, *([csv_link(NAME, "entries", link)] if len(drawn) else [])]


def _run(loaded: Loaded, link: Link) -> Any:
    steps, other = step_info(loaded.timed_steps, link), loaded.against(link)
    names = facts(run_info(loaded.run.manifest, link.chosen(loaded.steps)))
    if steps.is_empty():
        why = [] if loaded.steps.is_empty() else [message("No step of this selection was recorded.")]
        return [names, *why]
    compared = None if other is None else step_info(other.timed_steps, link)
    figure = graph("verdict-steps-figure", step_figure(steps, link.theme, compared))
    is_other = not loaded.timed_steps["time_ns"].equals(loaded.steps["time_ns"])
    untimed = needs.untimed_steps(link.chosen(loaded.timed_steps))
    texts = (step_names_in_words(loaded.steps), BY_GPU * is_other, untimed)
    notes = [html.P(text, className="note") for text in texts if text]
    return [names, figure, *notes, csv_link(NAME, "steps", link)]


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
    fault = explain(loaded).fault
    # What hung is above in short, and in full on its card.
    listed: list[Any] = [] if _hangs(loaded) else [html.P([html.B("FAULT"), fault], className="said")]
    listed += [_finding(finding, loaded, link) for finding in findings]
    said_in_short = said_in_short or fault.startswith(NOT_DIAGNOSED.rstrip("."))
    listed += [] if said_in_short else [html.P(sentence, className=f"health {state}")]
    listed += [html.P(note, className="note") for note in ([] if _hangs(loaded) else loaded.notes(findings))]
    listed += [html.Ul(open_questions, className="unknown")] if open_questions else []
    listed += [html.Ul([html.Li(["while it ran, ", line]) for line in earlier])] if earlier else []
    withdrawn = [html.Li(str(finding)) for finding in loaded.withdrawn()]
    listed += [html.Ul(withdrawn, className="unknown")] if withdrawn else []
    return [*listed, csv_link(NAME, "findings", link)]


def _finding(finding: Finding, loaded: Loaded, link: Link) -> Component:
    described = describe(finding, loaded.workers)
    look = _look(finding, loaded, link)
    head = html.H3(
        [html.Strong(described.title), html.Span(described.meaning), *look], className="health bad"
    )
    do = [html.P(f"Do: {described.do}")] if described.do else []
    place = [html.P(["in ", _code_place(finding.place)])] if finding.place else []
    shown = [html.Li(line) for line in described.evidence]
    edits, saves = {"edit": "\n".join(map(str, healing_edits(finding)))}, healing_in_words(loaded, finding)
    what_if = dcc.Link("what if", href=link.query(view="whatif", options=edits))
    linked = [] if finding.costs_pauses else [what_if]  # predictions are of steps without pauses
    healed = [html.P([f"{saves} ", *linked])] if saves else []
    return html.Article([head, *place, html.Ul(shown), *healed, *do], className="card")


def _look(finding: Finding, loaded: Loaded, link: Link) -> list[Component]:
    """Return a link to what a finding is about: the hang, or its spans in the timeline; empty if none."""
    if finding.of_hang:
        return [dcc.Link("hang", href=link.query(view="hang", options={}))]
    named = f"{finding.component_id} {finding.place.name if finding.place else ''}"
    find = _spans_named(named, _short_names(loaded))
    return [_marked("timeline", find, link)] if find else []


def _marked(text: str, find: str, link: Link) -> Component:
    """Return a link to the timeline of all ranks with some spans marked.

    A slow rank is seen beside its peers, and the timeline unfolds those at fault first.

    Args:
        find: an expression for the names of the spans.
    """
    return dcc.Link(text, href=link.query(view="timeline", ranks=(), options={"find": find}))


def _code_place(place: CodeLocation) -> Component:
    """Return a code location; its tooltip has the whole path of the file."""
    return html.Code(place.in_words, title=f"{place.file}:{place.line}" if place.file else place.name)


def _advice(loaded: Loaded, link: Link) -> Any:
    """Return what to try, one card each, with the gains on one scale."""
    explanation = explain(loaded)
    rows = advice_info(loaded, explanation)
    if rows.is_empty():
        return html.Div(hidden=True)
    scale = scale_of(rows)
    poor = explanation.limit is not None and loaded.trust.grade == "poor"
    doubtful = [message(f"Do not rely on these: {_weakness(loaded.trust)}.")] if poor else []
    names = _short_names(loaded)
    changes = {advice.edit: prediction_of(loaded, advice) for advice in explanation.advice if advice.edit}
    cards = [
        _card(
            row | {"find": _spans_named(row["do"], names), "hung": bool(_hangs(loaded))},
            scale,
            link,
            how_to_do(loaded.run, changes.get(row["edit"])),
        )
        for row in rows.iter_rows(named=True)
    ]
    edits = explanation.together.edits if explanation.together else ()
    both = {"edit": "\n".join(edits)}
    note = [
        html.P([html.B(label), _changes_link(text, both, link) if label == BOTH else text], className="said")
        for label, text in paragraphs_of(explanation)
        if label in (BOTH, "NOT")
    ]
    listed = html.Div(cards, className="cards")
    return [*doubtful, listed, *note, csv_link(NAME, "advice", link)]


def _changes_link(text: str, options: Mapping[str, str], link: Link) -> Component:
    """Return a link to the prediction of edits; their text is without the options of the command line."""
    return dcc.Link(text.partition(" (--edit")[0], href=link.query(view="whatif", options=options))


def _weakness(trust: Trust) -> str:
    """Return why predictions are rated poor, in words."""
    if not trust.answerable:
        return next(iter(trust.reasons), "the replay does not fit the trace")
    return trust.weakest


def _short_names(analysis: Analysis) -> dict[str, str]:
    """Return the names of recorded spans, by the short names that advice uses."""
    try:
        names = analysis.outline.graph.names
    except DproError:
        return {}
    return {
        short: name for name in names for short in (name, short_kernel(name)) if len(short) >= SHORTEST_NAME
    }


def _spans_named(text: str, names: Mapping[str, str]) -> str:
    """Return an expression that finds the spans named in a text; empty if it names none, or too many.

    Args:
        names: as from `_short_names`.
    """
    named = (short for short in names if short in text)
    whole = {names[short] for short in named if re.search(rf"(?<![\w:]){re.escape(short)}(?!\w|::)", text)}
    expression = f"^({'|'.join(map(literally, sorted(whole)))})"
    return expression if whole and len(expression) <= LONGEST else ""


def _card(
    row: dict[str, Any], scale: tuple[float, float], link: Link, done_by: Sequence[tuple[str, Any]]
) -> Component:
    """Return a card for one thing to try: change, gain as a bar, effort, its spans, how, and assumptions.

    Args:
        row: of `advice_info`, `find`, as from `_spans_named`, and `hung`: whether the job hung.
        done_by: as from `how_to_do`.
    """
    to = link.query(view="whatif", options={"edit": row["edit"]})
    what = dcc.Link(row["do"], href=to) if row["edit"] else row["do"]
    more = f"for x{row['samples']:.3g} the samples" if row["samples"] != 1 else ""
    likely = f"likely {times(row['middle'], row['middle'])}" if row["middle"] else ""
    facts_of_it = " · ".join(filter(None, [likely, row["effort"], more, row["proof"], row["when"]]))
    marked = [html.P(_marked("mark its spans in the timeline", row["find"], link))] if row["find"] else []
    how = [html.P(f"How: {row['how']}", className="how")] if row["how"] else []
    how += [html.P(part) for _, part in done_by]
    assumed = [html.P(f"Assumes that {row['assumes']}", className="note")] if row["assumes"] else []
    summary = " and ".join(filter(None, ("how" if how else "", "what this assumes" if assumed else "")))
    folded = [html.Details([html.Summary(summary), *how, *assumed])]
    bar = _gain_bar(row, scale) if row["low"] is not None else html.P(_no_bar(row), className="note")
    return html.Article(
        [
            html.H3([html.B(row["label"]), html.Span(what)]),
            bar,
            html.P(facts_of_it, className="worth"),
            *marked,
            *(folded if how or assumed else []),
        ],
        className="card",
    )


def _no_bar(row: dict[str, Any]) -> str:
    """Word why a card has no bar."""
    if row["label"] == THEN:
        return "No bar: its gain can be predicted only once the limit above is removed."
    if row["hung"]:
        return "No bar: the job hung, and has no step to shorten."
    why = "the replay gave no gain for it" if row["edit"] else "the replay cannot model it"
    return f"No bar: {why}."


def _ends_of_gain(row: dict[str, Any], scale: tuple[float, float]) -> Component:
    """Return the interval of a gain as a label at its lower end."""
    left, right = scale
    from_left = 100 * (min(max(row["low"], left), right) - left) / (right - left)
    high = math.inf if row["high"] is None else row["high"]
    place = {"left": f"{min(from_left, 100 - ROOM):.2f}%"}
    return html.Div(html.Span(times(row["low"], high), style=place), className="scale")


def _gain_bar(row: dict[str, Any], scale: tuple[float, float]) -> Component:
    """Return the bar of a gain on the common scale, with a line at x1.0 and the interval drawn thin."""
    left, right = scale

    def place(begin: float, end: float, part: float, what: str) -> Component:
        share = 100 / (right - left)
        box = {"left": f"{share * (begin - left):.2f}%", "width": f"max(1px, {share * (end - begin):.2f}%)"}
        return html.I(style=box | {"height": f"{100 * part:.0f}%", "background": f"var(--{what})"})

    parts = [place(*part) for part in parts_of_gain(row, scale)]
    named: Any = {"role": "img", "aria-label": row["worth"]}
    ends = [html.Span(times_on_scale(right), className="end")]
    at_one = html.Span("x1.0", style={"left": f"{100 * (1 - left) / (right - left):.2f}%"})
    return html.Div(
        [
            _ends_of_gain(row, scale),
            html.Div([*parts, place(1.0, 1.0, 1.5, "soft")], className="gain", **named),
            html.Div([at_one, *ends], className="scale"),
        ]
    )


def _doubts(loaded: Loaded) -> list[str]:
    return [*loaded.trust.reasons, *loaded.trust.doubts, *loaded.trust.assumed]


def _trust(loaded: Loaded, _link: Link) -> Any:
    """Return what is unsure, and how well the replay fits; hidden if neither is known.

    Where the job hung, only how sure that is: nothing is predicted from such a run.
    """
    explanation = explain(loaded)
    if _hangs(loaded):
        return _trust_in_hangs(loaded)
    try:
        trust: Trust | None = loaded.trust
    except DproError:
        trust = None
    if trust is None:
        unsure = explanation.unsure if loaded.run.num_rows(SPANS) else []
        listed = [html.Ul([html.Li(line) for line in unsure], className="unknown")] if unsure else []
        return listed or html.Div(hidden=True)
    doubts = interval_doubts(trust, advised_predictions(loaded))
    said = dict.fromkeys([*explanation.unsure, *doubts, *_doubts(loaded)])
    return [
        trust_line(trust, doubts),
        html.Ul([html.Li(line) for line in said], className="unknown"),
        html.Details([html.Summary("how well the replay fits"), facts(trust_info(trust))]),
    ]


def _trust_in_hangs(loaded: Loaded) -> list[Component]:
    """Return how sure it is what hung; empty if nothing hung."""
    return [
        html.P(f"{describe(finding, loaded.workers).title}: confidence {finding.confidence:.2f} of 1.")
        for finding in _hangs(loaded)
    ]


VIEW = view(
    NAME,
    "Verdict",
    needs.anything,
    (
        Panel("In short", "verdict-short", "working out what limits it", _picture, whole=True),
        Panel("What was found", "verdict-findings", "looking for what is slow", _findings, whole=True),
    ),
    (
        Panel("What to try", "verdict-advice", "predicting what would help", _advice, whole=True),
        Panel("How far to believe it", "verdict-trust", "replaying", _trust, whole=True),
    ),
    Panel("Step time", "verdict-run", "reading the steps", _run, wide=True),
    tables={
        "steps": lambda loaded, link: step_info(loaded.timed_steps, link),
        "findings": lambda loaded, _link: finding_info(loaded.verdict[0]),
        "entries": lambda loaded, _link: _entries(explain(loaded)),
        "advice": lambda loaded, _link: advice_info(loaded, explain(loaded)),
    },
)
