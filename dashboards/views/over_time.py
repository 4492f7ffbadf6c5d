"""The offered runs over time: what each one was, how long its steps took, what limited it.

Takes the offered runs; returns a table, and a figure with the step time of each job's runs. Reading and
judging takes seconds per run: a background thread does it run by run, the latest first, and results appear as
they complete. Runs of one job have equal commands and numbers of ranks.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
import polars as pl
from dash import Input, dcc, html
from dash.development.base_component import Component

from dpro.analysis.analysis import Analysis
from dpro.analysis.jobs import Job, job_names
from dpro.analysis.step_time import MIN_CHANGE, SIGMAS, median_between
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, choices, csv_link, graph, in_browser, message, table, view
from dpro.dashboards.runs import OfferedRun
from dpro.dashboards.theme import colour, plain, series, styled, time_unit
from dpro.dashboards.timeline.measured import MAX_UNASKED
from dpro.dashboards.views import difference
from dpro.detect.findings import Finding
from dpro.detect.host_bound import THE_HOST
from dpro.detect.pauses import mean_pause
from dpro.errors import DproError
from dpro.plugins import hooks_of
from dpro.replay.steps import step_series, steps_of
from dpro.schema import STARTS, STEPS
from dpro.store import MANIFEST, open_run
from dpro.units import NS_PER_MS, NS_PER_S, format_duration
from dpro.verdict.facts import STUDIED_CONFIDENCE
from dpro.verdict.verdict import explain
from dpro.words import shortened

NAME = "runs"
FIRST_DATE_NS = 10**18  # in 2001; clocks that count from the start of a host or a trace are earlier
MAX_JUDGED = 30  # latest runs for which the limit is found
AXES = {"order": "in order", "date": "by date"}
JOBS = {"all": "all jobs", "shown": "the job of the run shown"}
LIMITS = {"imbalance": "uneven ranks"}  # wording of the first view
_SCHEMA: Mapping[str, Any] = {
    "run": pl.String, "began": pl.Datetime("ms"), "command": pl.String, "ranks": pl.Int64, "state": pl.String,
    "steps": pl.Int64, "step_ms": pl.Float64, "step_low_ms": pl.Float64, "step_high_ms": pl.Float64,
    "before": pl.String, "change": pl.Float64, "goodput": pl.Float64, "limit": pl.String, "fault": pl.String,
}  # fmt: skip


class Timed(NamedTuple):
    """When a run began, and how long its steps took.

    Attributes:
        began_ns: start of its command, or else of its first step; without a date, when it was written.
        command: as it was typed; empty if unknown.
        steps: number of recorded steps, as in the other views.
        step_ns, low_ns, high_ns: the typical step, with what pauses add to the mean one, and its interval; 0
            without steps.
    """

    began_ns: int
    command: str
    ranks: int
    steps: int = 0
    step_ns: float = 0.0
    low_ns: float = 0.0
    high_ns: float = 0.0


class Judgement(NamedTuple):
    """The verdict on a run.

    Attributes:
        limit: what limits it, or why that is unknown.
        fault: what is at fault; empty if nothing is.
        goodput: share of the time in which steps were done for the first time; None if unknown.
    """

    limit: str
    fault: str
    goodput: float | None


class InBackground:
    """Values that a thread computes one by one and keeps; a line with the reason where one fails."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._wanted: list[tuple[Hashable, Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._works = False

    def of(self, wanted: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
        """Return the values computed so far; let the thread compute the others, in the given order."""
        with self._lock:
            self._wanted = [(key, make) for key, make in wanted.items() if key not in self._values]
            if self._wanted and not self._works:
                self._works = True
                threading.Thread(target=self._work, daemon=True).start()
            return {key: self._values[key] for key in wanted if key in self._values}

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._works = False
                    return
                key, make = self._wanted.pop(0)
            try:
                value = make()
            except DproError as error:
                value = str(error)
            except Exception as error:  # a defect with one run must not stop the others
                value = f"cannot be read: {type(error).__name__}"
            except KeyboardInterrupt:  # for the main thread: Polars raises it in whichever one computes
                continue  # asked for again, it is computed
            with self._lock:
                self._values[key] = value


_FACTS = InBackground()


def timed_run(path: Path) -> Timed:
    """Read when a run began and how long its steps took.

    Raises:
        DproError: it cannot be opened.
    """
    run = open_run(path)
    manifest = run.manifest
    launched = run.table(STARTS, ["launched_ns"]).filter(pl.col("launched_ns") > 0)["launched_ns"].min()
    stepped = run.table(STEPS, ["start_ns"]).filter(pl.col("start_ns") > FIRST_DATE_NS)["start_ns"].min()
    dated = next((began for began in (launched, stepped) if isinstance(began, int)), None)
    began_ns = (path / MANIFEST).stat().st_mtime_ns if dated is None else dated
    timed = Timed(began_ns, shlex.join(manifest.command), len(manifest.ranks))
    recorded = steps_of(run)
    steps = step_series(recorded)
    if steps is None:
        return timed
    low_ns, high_ns = median_between(steps.times[~steps.paused], steps.cycle)
    added_ns, error_ns = mean_pause(steps)
    return Timed(
        *timed[:3], recorded["step"].n_unique(), steps.typical_ns + added_ns,
        low_ns + max(added_ns - SIGMAS * error_ns, 0.0), high_ns + added_ns + SIGMAS * error_ns,
    )  # fmt: skip


def judged_run(path: Path) -> Judgement:
    """Find what limits a run and what is at fault.

    Raises:
        DproError: it cannot be opened.
    """
    analysis = Analysis(open_run(path))
    goodput = next((share for share in (say(analysis) for say in hooks_of("goodput")) if share), None)
    if analysis.run.rows()["spans"] > MAX_UNASKED:
        return Judgement("not judged here: open it", "", goodput)
    verdict = explain(analysis)
    at_fault = bool(_blaming(analysis)) or analysis.end.early
    limit = verdict.limit.kind if verdict.limit else "not known"
    return Judgement(limit, verdict.fault if at_fault else "", goodput)


def _blaming(analysis: Analysis) -> list[Finding]:
    """Return the likely findings that blame ranks or parts, as `explain` words them."""
    try:
        findings, _ = analysis.verdict
    except DproError:  # the limit says why
        return []
    likely = [finding for finding in findings if finding.confidence >= STUDIED_CONFIDENCE]
    return [finding for finding in likely if finding.component_id != THE_HOST]


def facts_of(offers: Sequence[OfferedRun]) -> tuple[dict[str, Timed | str], dict[str, Judgement | str]]:
    """Return what is known so far of the complete runs, by name."""
    whole = {offer.name: Path(offer.path) for offer in offers if offer.is_whole}
    written = {name: (path / MANIFEST).stat().st_mtime_ns for name, path in whole.items()}
    latest = sorted(whole, key=written.__getitem__, reverse=True)

    def wanted(name: str, read: Callable[[Path], Any]) -> tuple[Hashable, Callable[[], Any]]:
        return (read.__name__, str(whole[name]), written[name]), lambda: read(whole[name])

    timing = {name: wanted(name, timed_run) for name in latest}
    judging = {name: wanted(name, judged_run) for name in latest[:MAX_JUDGED]}
    there = _FACTS.of(dict([*timing.values(), *judging.values()]))
    timed, judged = (
        {name: there[key] for name, (key, _) in of.items() if key in there} for of in (timing, judging)
    )
    judged |= dict.fromkeys(latest[MAX_JUDGED:], "open it to see")
    return timed, judged


def runs_info(offers: Sequence[OfferedRun]) -> pl.DataFrame:
    """Tabulate runs, the latest first.

    Returns:
        `run` (its name), `began`, `command`, `ranks`, `state` (empty for a complete run that was read),
        `steps`, `step_ms` (with pauses) with its interval, `before` (name of the previous run of the job) and
        `change` (by which share the step became longer; 0 where the intervals overlap), `goodput`, `limit`,
        `fault`; null where unknown, or not known yet.
    """
    timed, judged = facts_of(offers)
    rows = [_row(offer, timed.get(offer.name), judged.get(offer.name)) for offer in offers]
    table = pl.DataFrame(rows, schema=_SCHEMA).sort("began", "run", nulls_last=True)
    job, step = ["command", "ranks"], pl.col("step_ms")
    apart = (pl.col("step_low_ms") > pl.col("step_high_ms").shift().over(job)) | (
        pl.col("step_high_ms") < pl.col("step_low_ms").shift().over(job)
    )
    change = step / step.shift().over(job) - 1
    clear = pl.when(apart & (change.abs() >= MIN_CHANGE)).then(change).otherwise(0.0)
    before = pl.col("run").shift().over(job)
    of_jobs = table.filter(step.is_not_null(), pl.col("command") != "").select(
        "run", before=before, change=pl.when(before.is_not_null()).then(clear)
    )
    compared = table.drop("before", "change").join(of_jobs, on="run", how="left").select(list(_SCHEMA))
    return compared.sort("began", "run", descending=[True, False], nulls_last=True)


def _row(offer: OfferedRun, timed: Timed | str | None, judged: Judgement | str | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_SCHEMA) | {"run": offer.name, "state": _state_of(offer, timed)}
    if isinstance(timed, Timed):
        row |= {
            "began": datetime.fromtimestamp(timed.began_ns / NS_PER_S, UTC).replace(tzinfo=None),
            "command": timed.command, "ranks": timed.ranks, "steps": timed.steps,
        }  # fmt: skip
        if timed.steps:
            times = (timed.step_ns, timed.low_ns, timed.high_ns)
            row |= zip(("step_ms", "step_low_ms", "step_high_ms"), (ns / NS_PER_MS for ns in times))
    if isinstance(judged, Judgement):
        row |= {"limit": judged.limit, "fault": judged.fault, "goodput": judged.goodput}
    elif judged is not None:
        row["limit"] = judged
    return row


def _state_of(offer: OfferedRun, timed: Timed | str | None) -> str:
    if offer.lives or offer.why:
        return "being recorded" if offer.lives else offer.why
    if isinstance(timed, Timed):
        return ""
    if not offer.is_whole:
        return "traces: open them to see"
    return timed or "…"


def runs_figure(runs: pl.DataFrame, axis: str, shown: str, theme: str) -> go.Figure:
    """Draw the step of each run, pauses included, with its interval, one line per job.

    Args:
        runs: as from `runs_info`, with steps.
        axis: key of `AXES`.
        shown: the run that the page shows, which is marked.
    """
    ordered = runs.sort("began", "run").with_row_index("place")
    scale, unit = time_unit(float(ordered["step_high_ms"].to_numpy().max()))
    figure = go.Figure()
    of_several = pl.len().over("command", "ranks") > 1  # only these need a colour of their own
    ordered = ordered.sort(of_several, "place", descending=[True, False])
    jobs = ordered.group_by("command", "ranks", maintain_order=True)
    names_of = job_names(ordered.select("command", "ranks").iter_rows())
    for number, ((command, ranks), rows) in enumerate(jobs):
        ink = series(number, theme) if rows.height > 1 else colour("soft", theme)
        middle = rows["step_ms"] / scale
        sizes = [13 if name == shown else 8 for name in rows["run"]]
        figure.add_scatter(
            x=rows["began"] if axis == "date" else rows["place"], y=middle, mode="lines+markers",
            name=plain(names_of[str(command), int(str(ranks))]), customdata=rows["run"].to_list(),
            line={"color": ink, "width": 1}, marker={"color": ink, "size": sizes},
            error_y={
                "type": "data", "array": rows["step_high_ms"] / scale - middle,
                "arrayminus": middle - rows["step_low_ms"] / scale, "thickness": 1, "width": 3,
            },
            text=[plain(name) for name in rows["run"]],
            hovertemplate=f"%{{text}}: %{{y:.4~g}} {unit}",
        )  # fmt: skip
    if axis != "date":
        ordered = ordered.sort("place")
        names = [plain(shortened(name, 16)) for name in ordered["run"]]
        every = 1 + len(names) // 12
        # Upright where they have no room: at an angle, the last ones would be left out.
        figure.update_xaxes(
            tickvals=ordered["place"][::every], ticktext=names[::every], autotickangles=[0, 90]
        )
    figure.update_yaxes(title_text=f"step with pauses, {unit}", rangemode="tozero")
    return styled(figure, theme, height=340).update_layout(showlegend=False, clickmode="event")


def _legend(figure: go.Figure) -> Component:
    """Return the legend of jobs with several runs, whose long names wrap on a narrow page."""
    entries = [
        html.Li([html.I(style={"background": trace.line.color}), unescape(trace.name)])
        for trace in figure.data
        if len(trace.y) > 1
    ]
    return html.Ul(entries, className="legend")


def require_several(loaded: Loaded, _link: Link) -> str:
    """Require several runs."""
    if len(loaded.offers()) > 1:
        return ""
    return "One run is offered: `dpro dashboard FOLDER`, or several runs, shows how they changed over time."


def _shown(loaded: Loaded, link: Link) -> str:
    """Return the name of the run that is shown."""
    paths = {offer.name: offer.path for offer in loaded.offers()}
    here = str(loaded.run.source or loaded.run.path)
    return link.run or next((name for name, path in paths.items() if path == here), "")


def _picture(loaded: Loaded, link: Link) -> Any:
    runs = runs_info(loaded.offers())
    timed = runs.filter(pl.col("step_ms").is_not_null())
    if timed.is_empty():
        pending = (runs["state"] == "…").any()
        return html.P("reading the steps …", className="note") if pending else message("No run has steps.")
    axis, shown = link.options.get("axis", "order"), _shown(loaded, link)
    of_job = timed.join(timed.filter(run=shown).select("command", "ranks"), on=["command", "ranks"])
    drawn = of_job if link.options.get("jobs") == "shown" and not of_job.is_empty() else timed
    figure = runs_figure(drawn, axis, shown, link.theme)
    return [
        choices(link, "axis", AXES, "order"),
        *([choices(link, "jobs", JOBS, "all")] if of_job.height < timed.height else []),
        graph("runs-figure", figure),
        _legend(figure),
        html.P("A click opens a run. Bars are intervals.", className="note"),
    ]


def _table(loaded: Loaded, link: Link) -> Any:
    runs = runs_info(loaded.offers())
    shown = _shown(loaded, link)
    header = ["run", "step with pauses", "since before", "goodput", "steps", "limit", "fault", "began", "job"]
    names = job_names(runs.drop_nulls("command").select("command", "ranks").iter_rows())
    rows = [_cells(row, row["run"] == shown, link, names) for row in runs.iter_rows(named=True)]
    note = (
        "Times are in UTC. A run is compared with the one before it of the same command and number of ranks: "
        f"they differ where their intervals are apart, by {MIN_CHANGE:.0%} or more. A click says "
        "what changed."
    )
    return [table(header, rows, 1, 5), html.P(note, className="note"), csv_link(NAME, "runs", link)]


def _cells(row: Mapping[str, Any], is_shown: bool, link: Link, names: Mapping[Job, str]) -> list[Any]:
    address = Link(theme=link.theme, run=row["run"]).query()
    opens = row["state"] in ("", "being recorded") or row["state"].startswith("traces")
    name = dcc.Link(row["run"], href=address) if opens and not is_shown else html.Strong(row["run"])
    if row["began"] is None:
        return [name, "", "", "", "", row["state"], "", "", ""]
    return [
        name,
        "" if row["step_ms"] is None else format_duration(row["step_ms"] * NS_PER_MS),
        _change(row, link),
        "" if row["goodput"] is None else f"{row['goodput']:.0%}",
        f"{row['steps']:,}",
        "…" if row["limit"] is None else LIMITS.get(row["limit"], row["limit"]),
        html.Span((row["fault"] or "").partition(". ")[0], title=row["fault"], className="wraps"),
        f"{row['began']:%Y-%m-%d %H:%M}",
        html.Span(names[row["command"], row["ranks"]], title=row["command"], className="wraps"),
    ]


def _change(row: Mapping[str, Any], link: Link) -> Any:
    """Return the change since the previous run, as a link that compares both."""
    if row["change"] is None:
        return ""
    both = Link(difference.NAME, row["run"], row["before"], theme=link.theme)
    words = f"{row['change']:+.1%}" if row["change"] else "the same"
    mark = "bad" if row["change"] > 0 else "good" if row["change"] < 0 else ""
    return dcc.Link(words, href=both.query(), className=mark, title=f"what changed since {row['before']}")


def _state(loaded: Loaded) -> object:
    """Return what the view depends on besides the shown run: the offered runs, and what is known of them."""
    offers = loaded.offers()
    return offers, *facts_of(offers)


VIEW = view(
    NAME,
    "Runs",
    require_several,
    Panel("Step time of each job's runs", "runs-picture", "listing the runs", _picture, wide=True),
    Panel("All runs", "runs-table", "listing the runs", _table, wide=True),
    tables={"runs": lambda loaded, _link: runs_info(loaded.offers())},
    register=lambda app, _runs: in_browser(app, "open_run", Input("runs-figure", "clickData")),
    state=_state,
)
