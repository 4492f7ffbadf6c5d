"""What-if: choose edits, see the predicted step time with its interval, and what would change.

Takes a graph and the edits of a link, one per line, as `dpro whatif --edit` takes them; returns a prediction,
or the reason why there is none, the changes on the critical path, the limits of the step, and past trials.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from dash import Dash, Input, State, dcc, html
from dash.development.base_component import Component

from dpro.analysis.answers.whatif import search_once
from dpro.analysis.predictions import calibrated, predict_edits
from dpro.analysis.summary import (
    HEADINGS,
    NO_FIT,
    WORTH_SHOWING,
    effort_in_words,
    gain_in_words,
    group_of,
    heals_as_advised,
    shown_grade,
    step_in_words,
)
from dpro.dashboards import needs
from dpro.dashboards.account import (
    advice_info,
    healing_edits,
    healing_in_words,
    worded_for_page,
)
from dpro.dashboards.changed_spans import changed_spans
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, csv_link, facts, graph, in_browser, message, table, view
from dpro.dashboards.runs import Runs
from dpro.dashboards.theme import SPAN_LOOKS, colour, series, styled, time_unit
from dpro.dashboards.views.difference import waterfall_figure
from dpro.detect.words import describe, describe_all
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.plugins import hooks_of
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.code import code_difference
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.predict import BLOCKS, Prediction, compare
from dpro.replay.whatif.registry import LIST_HAS_ALL, help_rows, parse_edit
from dpro.replay.whatif.sensitivity import FASTEST, PART_WORDS, Curve, curve_sentence
from dpro.store import Run
from dpro.units import NS_PER_MS, format_duration, ms
from dpro.verdict.verdict import advised_predictions, explain
from dpro.verdict.words import THEN

# Step time against the speed of each part of the machine, and where it stops improving.


def curve_info(curves: Sequence[Curve]) -> pl.DataFrame:
    """Return all points of curves: `part`, `factor` (times as fast), `step_ms`, `break_even` (or null)."""
    rows = [
        (curve.part, factor, step, curve.break_even)
        for curve in curves
        if not curve.unknown
        for factor, step in zip((1.0, *curve.factors), (curve.base_ms, *curve.step_ms))
    ]
    schema = {"part": pl.String, "factor": pl.Float64, "step_ms": pl.Float64, "break_even": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def curve_figure(points: pl.DataFrame, theme: str) -> go.Figure:
    """Draw a line for each part, with its break-even marked."""
    figure = go.Figure()
    shown = points.filter(pl.col("factor") <= FASTEST)
    scale, unit = time_unit(float(shown["step_ms"].to_numpy().max(initial=0.0)))
    shown = shown.with_columns(pl.col("step_ms") / scale)
    for number, ((part,), curve) in enumerate(shown.group_by("part", maintain_order=True)):
        ink = series(number, theme)
        figure.add_scatter(
            x=curve["factor"], y=curve["step_ms"], mode="lines", line={"color": ink, "width": 2},
            name=PART_WORDS[str(part)], hovertemplate=f"x%{{x:g}}: %{{y:.4g}} {unit}",
        )  # fmt: skip
        even = curve["break_even"][0]
        if even is not None and even <= FASTEST:
            figure.add_scatter(
                x=[even], y=[_between(curve, even)], mode="markers", showlegend=False,
                name=PART_WORDS[str(part)], marker={"size": 9, "color": ink, "symbol": "diamond"},
                hovertemplate="beyond x%{x:.1f} it gains hardly anything more",
            )  # fmt: skip
    ticks = [1, 1.5, 2, 3, 4, 6, 10, 30]
    figure.update_xaxes(
        title_text="times as fast", type="log", tickvals=ticks, ticktext=[f"x{tick:g}" for tick in ticks]
    )
    figure.update_yaxes(title_text=f"usual step, {unit}", rangemode="tozero")
    return styled(figure, theme, height=300)


def _between(points: pl.DataFrame, factor: float) -> float:
    """Interpolate the step at a factor, linearly in 1 / factor, like a step limited by the part."""
    ordered = points.sort("factor", descending=True)
    speed = 1 / ordered["factor"].to_numpy()
    return float(np.interp(1 / factor, speed, ordered["step_ms"].to_numpy()))


NAME = "whatif"
HEALTH = {"good": "good", "fair": "unknown", "poor": "bad"}  # grade -> style
CHANGES = 10  # bars of the waterfall
LESS = "all smaller changes"
PACE = "hosts need that long to enqueue a step"  # faster devices wait for the hosts
_ON_PATH = {kind: words for kind, (_, words) in SPAN_LOOKS.items()} | {
    "arrive": "start of a collective",
    "start": "start taken from the trace",
}


def edits_of(link: Link) -> list[Edit]:
    """Parse the edits of a link; one that is given again is left out.

    Raises:
        UsageError: an edit is invalid.
    """
    lines = link.options.get("edit", "").splitlines()
    try:
        edits = [parse_edit(line) for line in lines if line.strip()]
        return list({str(edit): edit for edit in edits}.values())
    except UsageError as error:  # the page has the list of the command
        raise UsageError(str(error).replace(LIST_HAS_ALL, "“edits, by example” has all")) from error


def prediction_info(loaded: Loaded, edits: Sequence[Edit]) -> Prediction:
    """Predict the step under the edits together.

    Args:
        edits: in the order in which they are applied.

    Raises:
        Unanswerable: the run lacks what an edit needs.
    """
    if loaded.condensed is not None:
        return predict_edits(loaded, edits)
    return loaded.once(  # `predict_edits` would apply the edits a second time
        ("prediction", *edits),
        lambda: calibrated(loaded, compare(loaded.changed(edits), loaded.baseline, loaded.trust)),
    )


def path_info(loaded: Loaded, edits: Sequence[Edit]) -> pl.DataFrame:
    """Sum the critical path by kind, before and after: `kind`, `before_ms`, `after_ms` per step.

    Raises:
        Unanswerable: the run lacks what an edit needs.
    """
    paths = _paths(loaded, edits).group_by("kind").agg(pl.col("before_ms", "after_ms").sum())
    return paths.sort(pl.max_horizontal("before_ms", "after_ms"), "kind", descending=[True, False])


def change_info(loaded: Loaded, edits: Sequence[Edit]) -> pl.DataFrame:
    """Return what leaves the critical path and what joins it, the largest change first.

    Returns:
        `name`, `kind`, `before_ms`, `after_ms`, `delta_ms` per step; the last row sums the smallest changes.

    Raises:
        Unanswerable: the run lacks what an edit needs.
    """
    delta = pl.col("after_ms") - pl.col("before_ms")
    changes = _paths(loaded, edits).with_columns(delta_ms=delta).filter(pl.col("delta_ms") != 0)
    changes = changes.sort(pl.col("delta_ms").abs(), "kind", "name", descending=[True, False, False])
    less = changes[CHANGES:].select(
        name=pl.lit(LESS), kind=pl.lit(""), **{column: pl.col(column).sum() for column in changes.columns[2:]}
    )
    return pl.concat([changes[:CHANGES], *([less] if changes.height > CHANGES else [])])


def _paths(loaded: Loaded, edits: Sequence[Edit]) -> pl.DataFrame:
    """Return all work on either critical path: `name`, `kind`, `before_ms`, `after_ms` per step."""
    steps = max(durations_of(loaded.baseline).height, 1)
    # The name of a compiled graph has a hash, which differs from run to run.
    name = pl.col("name").str.replace_all(r"(## Call )?CompiledFxGraph \w+( ##)?", "compiled graph")
    per_step = pl.col("duration_ns").sum() / NS_PER_MS / steps
    before, after = (
        path.group_by(name, "kind").agg(ms=per_step) for path in (loaded.path, loaded.path_after(edits))
    )
    paths = before.join(after, on=["name", "kind"], how="full", coalesce=True, suffix="_after")
    paths = paths.select("name", "kind", before_ms=pl.col("ms"), after_ms=pl.col("ms_after")).fill_null(0.0)
    left_ms = ms(prediction_info(loaded, edits).predicted_ns) - float(paths["after_ms"].sum()) if edits else 0
    if left_ms < 1 / NS_PER_MS:
        return paths
    pace = {"name": PACE, "kind": "", "before_ms": 0.0, "after_ms": left_ms}
    return pl.concat([paths, pl.DataFrame(pace, schema=paths.schema)])


def prediction_figure(base_ms: float, prediction: Prediction, theme: str) -> go.Figure:
    """Draw the usual step now and under the edits, with the interval of the prediction."""
    times = ms(prediction.predicted_ns), *map(ms, prediction.between_ns)
    scale, unit = time_unit(max(base_ms, *times))
    now, predicted, low, high = (value / scale for value in (base_ms, *times))
    figure = go.Figure()
    error = {"type": "data", "array": [0, high - predicted], "arrayminus": [0, predicted - low]}
    figure.add_bar(
        y=["now", "with the edits"],
        x=[now, predicted],
        orientation="h",
        marker={"color": [colour("idle", theme), colour("compute", theme)], "line": {"width": 0}},
        error_x=error | {"color": colour("ink", theme), "thickness": 1.5},
        hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title_text=f"usual step, {unit}", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, theme, height=170)


def path_figure(path: pl.DataFrame, theme: str, *, edited: bool = True) -> go.Figure:
    """Draw what the critical path consists of, before and, if the graph was edited, after."""
    figure = go.Figure()
    values = path.select("before_ms", "after_ms").to_numpy()
    scale, unit = time_unit(float(values.max(initial=0.0)))
    sides = [("before_ms", "now", "idle"), ("after_ms", "with the edits", "compute")]
    for column, title, what in sides if edited else sides[:1]:
        figure.add_bar(
            y=path["kind"].replace(_ON_PATH), x=path[column] / scale, orientation="h", name=title,
            marker={"color": colour(what, theme), "line": {"width": 0}},
            hovertemplate=f"%{{y}}: %{{x:.4g}} {unit} per step<extra>{title}</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text=f"on the critical path, {unit} per step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, theme, height=110 + 34 * path.height).update_layout(barmode="group")


def _form(_loaded: Loaded, link: Link) -> Any:
    text, shown = link.options.get("edit", ""), bool(link.options.get("examples"))
    words = f"{'▾' if shown else '▸'} edits, by example: a click adds one"
    # On request only: for the browser, they are as much work as the rest of the page.
    examples = [
        [
            dcc.Link(_in_parts(example), href=link.with_options(edit=f"{text}\n{example}".strip())),
            html.Span(what, className="wraps"),
        ]
        for example, what in help_rows()
        if shown
    ]
    return [
        dcc.Textarea(id="edits", value=text, rows=4, placeholder="one edit a line, as heal:rank=1"),
        html.Div(
            [html.Button("predict", id="predict"), html.Button("none", id="no-edits")], className="choices"
        ),
        dcc.Link(words, href=link.with_options(examples="" if shown else "1")),
        *(
            [html.Div(table(["edit", "does"], examples, 2, most=len(examples)), className="examples")]
            if shown
            else []
        ),
    ]


def _in_parts(edit: str) -> Component:
    """Return an edit as code that wraps between its keys, and nowhere else."""
    parts = re.findall(r"[^:,]+[:,]?", edit)
    return html.Code([child for part in parts for child in (part, html.Wbr())][:-1])


def _answer(loaded: Loaded, link: Link) -> Any:
    edits, hung = edits_of(link), _hang(loaded)
    if not hung:
        _refuse_without_fit(loaded)
    base_ms = float(durations_of(loaded.baseline)["duration_ns"].to_numpy().mean()) / NS_PER_MS
    now = format_duration(base_ms * NS_PER_MS)
    first = hung or [trust_line(loaded.trust)]
    if not edits:
        asked = message(f"The usual step takes {now} as the job runs. Type an edit, or click one below.")
        return hung or [*first, asked]
    prediction = prediction_info(loaded, edits)
    heals = heals_as_advised(prediction, [advice.edit for advice in explain(loaded).advice])
    figures = facts(
        [
            ("throughput", gain_in_words(prediction)),
            ("step", f"{step_in_words(prediction)} instead of {now}"),
            ("interval", between_in_words(*prediction.between_ns)),
            ("effort", effort_in_words(prediction)),
            *([] if prediction.is_advice or heals else [("", BLOCKS["bound"])]),
            *([("", f"interval {prediction.widened}")] if prediction.widened else []),
            *(("note", line) for line in prediction.notes),
            *(("changes", line) for line in prediction.training),
            *(("finding", text) for text in _costs_healed(loaded, edits)),
            ("how", worded_for_page(prediction.how())),
            *how_to_do(loaded.run, prediction),
            *_next_steps(loaded, prediction, link),
        ]
    )
    return [
        *first,
        figures,
        graph("prediction-figure", prediction_figure(base_ms, prediction, link.theme)),
        *_changes(loaded, prediction, link),
    ]


def between_in_words(low_ns: float, high_ns: float) -> str:
    """Return the interval of a step: `20 ms to 30 ms`, or `up to 30 ms`."""
    high = format_duration(high_ns)
    return f"{format_duration(low_ns)} to {high}" if low_ns > 0 else f"up to {high}"


def _hang(loaded: Loaded) -> list[Component]:
    """Return what a hanging job needs before anything makes it faster; empty if it does not hang."""
    hangs = [finding for finding in loaded.hangs if finding.of_hang]
    return [
        part
        for described in describe_all(hangs, loaded.workers)[:1]
        for part in (
            html.P(described.headline, className="health bad"),
            html.P(f"Do: {described.do}", className="do"),
            html.P("Predictions are for the steps before it hung.", className="note"),
        )
    ]


def _refuse_without_fit(loaded: Loaded) -> None:
    """Refuse to show the usual step and what shortens it, as the verdict does, if the replay does not fit.

    Raises:
        Unanswerable: it does not fit.
    """
    if not loaded.trust.answerable:
        raise Unanswerable(f"{NO_FIT}: {next(iter(loaded.trust.reasons), 'its steps differ')}.")


def _refuse_gains(loaded: Loaded) -> None:
    """Refuse to list gains.

    Raises:
        Unanswerable: the job hangs, or the replay does not fit.
    """
    if any(finding.of_hang for finding in loaded.hangs):
        raise Unanswerable(
            "The job hangs: no change gains anything until the hang is fixed, as described above."
        )
    _refuse_without_fit(loaded)


def trust_line(trust: Trust, doubts: Sequence[str] = ()) -> Component:
    """Return how far to trust predictions, in the colour of the grade.

    Args:
        doubts: as from `interval_doubts`.
    """
    return html.P(trust.verdict, className=f"health {HEALTH[shown_grade(trust, doubts)]}")


def code_change(edits: Sequence[Edit]) -> list[tuple[str, Any]]:
    """Return the edits as a diff of a script like the job's; empty if they are not code."""
    lines = code_difference(edits)
    if not lines:
        return []
    kinds = {"+": "added", "-": "left-out"}
    marked = [html.Span(f"{line}\n", className=kinds.get(line[:1], "")) for line in lines]
    return [("code", html.Pre(marked, className="difference"))]


def try_command(run: Run, prediction: Prediction) -> str:
    """Return the command that tries the edits on the recorded job; empty if that is not possible."""
    command = next(filter(None, (say([prediction], run) for say in hooks_of("tried"))), "")
    # Imported traces have no command.
    return command.replace(
        " -- COMMAND", f" -- {shlex.join(run.manifest.command)}" if run.manifest.command else " -- COMMAND"
    )


def how_to_do(run: Run, prediction: Prediction | None) -> list[tuple[str, Any]]:
    """Return the code of edits, and the command that tries them on the job, as names and values."""
    if prediction is None:
        return []
    said = code_change(prediction.edits)
    if command := try_command(run, prediction):
        copies: Any = {"data-copies": command}
        button = html.Button("copy", title="Copy this command", **copies)
        said.append(("try it", [html.Code(command), " ", button]))
    return said


def _costs_healed(loaded: Loaded, edits: Sequence[Edit]) -> list[str]:
    """Return the costs of the findings that the edits heal, with what the edits save."""
    with suppress(DproError):  # the verdict reports the error
        healed = [
            finding
            for finding in loaded.verdict[0]
            if healing_edits(finding) == list(edits) and not finding.costs_pauses  # a note names these
        ]
        titles = [describe(finding, loaded.workers).title for finding in healed]
        return [f"{title}. {healing_in_words(loaded, one)}" for title, one in zip(titles, healed)]
    return []


def _next_steps(loaded: Loaded, prediction: Prediction, link: Link) -> list[tuple[str, Any]]:
    """Return measurements of such edits, and a link to the changed spans in the timeline."""
    said = [("measured", line) for say in hooks_of("measured") for line in say(prediction, loaded.run)]
    spans = None
    if loaded.condensed is None:  # a condensed job has no whole graph
        applied = loaded.changed(prediction.edits)
        spans = changed_spans(applied.before.graph, applied.after.graph)
    if spans:
        address = link.query(view="timeline", ranks=spans.ranks, options={"find": spans.find})
        marks = f"spans with {spans.share:.0%} of the time that it changes"
        said.append(("timeline", dcc.Link(marks, href=address, id="changed-spans")))
    return said


def _changes(loaded: Loaded, prediction: Prediction, link: Link) -> list[Component]:
    try:
        changes = change_info(loaded, prediction.edits)
    except Unanswerable as error:  # a large run is predicted without its whole graph
        return [message(str(error))]
    if not changes.height:
        return [message("Nothing changes on the critical path."), csv_link(NAME, "changes", link)]
    title, end = "change on the critical path, {} per step", step_in_words(prediction)
    figure = waterfall_figure(changes, title, link.theme, f"in all: {end}")
    return [graph("changes-figure", figure), csv_link(NAME, "changes", link)]


def _path(loaded: Loaded, link: Link) -> Any:
    edits = edits_of(link)
    _refuse_without_fit(loaded)
    figure = path_figure(path_info(loaded, edits), link.theme, edited=bool(edits))
    return [graph("path-figure", figure), csv_link(NAME, "path", link)]


def _limits(loaded: Loaded, link: Link) -> Any:
    _refuse_gains(loaded)
    curves = loaded.curves
    return [
        graph("limits-figure", curve_figure(curve_info(curves), link.theme)),
        html.Ul([html.Li(curve_sentence(curve)) for curve in curves]),
        csv_link(NAME, "limits", link),
    ]


def ranked_info(loaded: Loaded) -> pl.DataFrame:
    """Return what would help: predictions of the search, and everything that the first view says to try.

    Returns:
        `group` (key of `HEADINGS`), `advice` (its number in the first view; empty if not there), `edit`,
        `what`, `speedup_low`, `speedup`, `speedup_high`, `predicted_ms`, `samples`; in words `gain`, `step`,
        `takes`. Sorted by group; advice by its number, the others by gain, descending.

    Raises:
        Unanswerable: the job hangs, or the replay does not fit.
    """
    _refuse_gains(loaded)
    explanation = explain(loaded)
    tries = advice_info(loaded, explanation).filter(pl.col("label") != THEN)
    numbers = dict(tries.filter(pl.col("edit") != "").select("edit", "label").iter_rows())
    searched = {_edits_text(prediction): prediction for prediction in search_once(loaded).predictions}
    searched |= {_edits_text(prediction): prediction for prediction in advised_predictions(loaded)}
    rows = [_ranked_row(loaded, prediction, numbers) for prediction in searched.values()]
    for row in tries.filter(pl.col("edit") == "").iter_rows(named=True):
        gain, _, takes = row["worth"].removeprefix(": ").rpartition(", ")
        rows.append(
            {
                "group": "advised",
                "advice": row["label"],
                "edit": "",
                "what": row["do"],
                "speedup_low": row["low"],
                "speedup_high": row["high"],
                "gain": gain,
                "takes": takes or row["effort"],
            }
        )
    numbers_of = ("speedup_low", "speedup", "speedup_high", "predicted_ms", "samples")
    texts = dict.fromkeys(("group", "advice", "edit", "what"), pl.String())
    schema = (
        texts
        | dict.fromkeys(numbers_of, pl.Float64())
        | dict.fromkeys(("gain", "step", "takes"), pl.String())
    )
    group = pl.col("group").replace_strict(list(HEADINGS), range(len(HEADINGS)), return_dtype=pl.Int64)
    by = [group, pl.col("advice"), pl.col("speedup"), pl.col("edit")]
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.sort(by, descending=[False, False, True, False], nulls_last=True, maintain_order=True)


def _edits_text(prediction: Prediction) -> str:
    return "\n".join(map(str, prediction.edits))


def _ranked_row(loaded: Loaded, prediction: Prediction, numbers: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of `ranked_info`.

    Args:
        numbers: number of each advice, by its edit.
    """
    text = _edits_text(prediction)
    advised = text in numbers or heals_as_advised(prediction, numbers)
    return {
        "group": group_of(prediction, loaded.trust.answerable, advised),
        "advice": numbers.get(text, ""),
        "edit": text,
        "what": prediction.what(),
        "speedup_low": prediction.speedup_at(prediction.gain_low_ns),
        "speedup": prediction.speedup,
        "speedup_high": prediction.speedup_at(prediction.gain_high_ns),
        "predicted_ms": ms(prediction.predicted_ns),
        "samples": prediction.samples,
        "gain": gain_in_words(prediction),
        "step": step_in_words(prediction),
        "takes": effort_in_words(prediction),
    }


def _ranked(loaded: Loaded, link: Link) -> Any:
    ranked = ranked_info(loaded)
    predictions, refused = search_once(loaded).predictions, search_once(loaded).refused
    worth = ranked.filter((pl.col("speedup") >= WORTH_SHOWING).fill_null(True) | (pl.col("advice") != ""))
    groups: list[Any] = []
    for (group,), rows in worth.group_by("group", maintain_order=True):
        heading, listed = HEADINGS[str(group)], _edits(rows, link)
        folded = html.Details([html.Summary(f"{heading} ({rows.height})"), listed])
        groups += [folded] if group == "bound" else [html.H3(html.Strong(heading)), listed]
    little = ranked.height - worth.height
    widened = [f"{gain.what()}: interval {gain.widened}" for gain in predictions if gain.widened]
    refusals = [html.Li(f"{refusal.edit}: {refusal.reason}") for refusal in refused]
    offered = not worth.filter(pl.col("group") != "bound").is_empty()
    return [
        *([] if offered else [message("Nothing that was tried shortens the step.")]),
        *groups,
        *(
            [html.P(f"{little} more would change little or nothing: the CSV has them.", className="note")]
            if little
            else []
        ),
        html.Ul([html.Li(line) for line in widened], className="unknown"),
        html.Details(
            [html.Summary(f"{len(refused)} not answerable"), html.Ul(refusals, className="unknown")]
        ),
        csv_link(NAME, "ranked", link),
    ]


def _edits(ranked: pl.DataFrame, link: Link) -> Component:
    """Return a table of `ranked_info` whose links choose the edits."""
    rows = []
    for row in ranked.iter_rows(named=True):
        address = link.with_options(edit=row["edit"])
        what = dcc.Link(row["what"], href=address) if row["edit"] else html.Span(row["what"])
        number = [html.B(f"TRY {row['advice']}", className="try")] if row["advice"] else []
        rows.append(
            [
                html.Div([*number, what]),
                row["gain"],
                row["step"] or "",
                html.Span(row["takes"], className="takes"),
            ]
        )
    return html.Div(table(["if", "throughput", "step", "effort"], rows, numbers_to=3), className="ranked")


def _register(app: Dash, _runs: Runs) -> None:
    in_browser(app, "predict", Input("predict", "n_clicks"), State("edits", "value"))
    in_browser(app, "unedited", Input("no-edits", "n_clicks"))


VIEW = view(
    NAME,
    "What if",
    needs.windows,
    Panel("Edits", "whatif-form", "listing edits", _form, whole=True),
    Panel("Prediction", "whatif-answer", "building the graph", _answer, whole=True),
    Panel("What would help", "whatif-ranked", "predicting what would help", _ranked, wide=True, whole=True),
    Panel("What is a faster machine worth?", "whatif-limits", "making each part faster", _limits, whole=True),
    Panel("The critical path", "whatif-path", "building the graph", _path, whole=True),
    tables={
        "changes": lambda loaded, link: change_info(loaded, edits_of(link)),
        "limits": lambda loaded, _link: curve_info(loaded.curves),
        "path": lambda loaded, link: path_info(loaded, edits_of(link)),
        "ranked": lambda loaded, _link: ranked_info(loaded),
    },
    register=_register,
)
