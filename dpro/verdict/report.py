"""The content of a report, independent of its format (HTML or Markdown), and its Markdown.

Takes an `Analysis`; returns a `RunReport`, and text for an issue or a pull request, in which names from
traces are escaped: none becomes a link, a tag, a mention or a table. A report is reproducible: nothing in it
depends on the date, on the machine that makes it, or on the directory of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dpro._version import __version__
from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.diagnosis import DiagnosisDocument
from dpro.analysis.answers.replay import ReplayDocument
from dpro.analysis.answers.whatif import search_once
from dpro.analysis.mean_step import MeanStep, facts_of, mean_step_of, mean_steps, shown_parts
from dpro.analysis.summary import (
    PROOFS,
    Gains,
    health_info,
    interval_doubts,
    run_info,
    step_in_words,
    trust_info,
    what_helps,
)
from dpro.detect.words import FindingInWords, describe_all
from dpro.documents import Document
from dpro.errors import DproError
from dpro.replay.whatif.predict import Prediction
from dpro.units import format_duration, ms
from dpro.verdict.verdict import Explanation, advised_predictions, explain
from dpro.verdict.words import limit_of_run, lines_of
from dpro.words import distinct_names, printable, short_name, shortened

MAX_PREDICTIONS = 5
MAX_KERNELS = 10
MAX_RANKS = 16  # rows of a table
LONGEST_NAME = 160  # characters: names of kernels have hundreds

Pairs = Sequence[tuple[str, str]]
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class ReportTable:
    """A table of formatted cells, with a note below it."""

    title: str
    header: Sequence[str]
    rows: Rows
    note: str = ""


@dataclass(frozen=True)
class RunReport:
    """The content of a report, in words.

    Attributes:
        name: the last part of the run's path.
        in_short: the verdict of `dpro explain`, in lines.
        state: good, bad or unknown.
        mean_step: parts of the usual step of a rank; None if none was recorded.
        unknown: faults that the run lacks the data to rule out.
        gains: what would help: proven changes first.
        within_noise: what may help, but does not stand out from the noise of the steps.
        of_step: the usual step as the job runs, which predictions start from; empty if nothing could be
            predicted.
        trust: how far to believe predictions, in one sentence; None if nothing was replayed.
    """

    name: str
    in_short: Sequence[str]
    state: str
    verdict: str
    mean_step: MeanStep | None
    facts: Pairs
    findings: Sequence[FindingInWords]
    unknown: Sequence[str]
    gains: Sequence[Prediction]
    within_noise: Sequence[Prediction]
    of_step: str
    refused: Pairs
    tables: Sequence[ReportTable]
    trust: str | None
    fit: Pairs
    doubts: Sequence[str]
    measured: Pairs


def make_report(analysis: Analysis) -> RunReport:
    """Compute the content of a report; where the run cannot answer, the report gives the reason."""
    try:
        findings, unknown = analysis.verdict
    except DproError as error:
        findings, unknown = [], [str(error)]
    try:
        trust, doubts = analysis.trust, []
    except DproError as error:
        trust, doubts = None, [f"nothing was replayed: {error}"]
    if trust is not None:
        doubts = [*trust.reasons, *trust.doubts, *trust.assumed]
    try:
        mean = mean_step_of(analysis)
    except DproError:
        mean = None
    state, verdict = health_info(
        findings, unknown, trust, analysis.end, limit_of_run(analysis), analysis.run.manifest.unrecorded
    )
    gains, of_step, refused = _gains(analysis)
    if trust is not None:
        doubts += interval_doubts(trust, gains.clear[:MAX_PREDICTIONS])
    manifest = analysis.run.manifest
    rows = analysis.run.rows()
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    options = ", ".join(f"{name} {value}" for name, value in sorted(manifest.options.items()) if value)
    pairs = [
        ("recorded by", manifest.created_by),
        ("on", versions),
        ("options", options),
        ("rows", ", ".join(f"{name} {count:,}" for name, count in sorted(rows.items()) if count)),
        ("left out", ", ".join(f"{reason}: {count:,}" for reason, count in sorted(manifest.skipped.items()))),
        ("analysed by", f"dpro {__version__}"),
    ]
    return RunReport(
        name=os.path.basename(os.path.abspath(analysis.run.label)),
        in_short=lines_of(explain(analysis)),
        state=state,
        verdict=verdict,
        mean_step=mean,
        facts=[
            *run_info(analysis.run.manifest, analysis.steps),
            *(("earlier steps", line) for line in analysis.end.can_say),
        ],
        findings=describe_all(findings, analysis.workers),
        unknown=unknown,
        gains=gains.clear[:MAX_PREDICTIONS],
        within_noise=gains.within_noise,
        of_step=of_step,
        refused=refused,
        tables=[*_breakdown(analysis), *_kernels(analysis)],
        trust=None if trust is None else trust.verdict,
        fit=[] if trust is None else trust_info(trust),
        doubts=doubts,
        measured=[(name, value) for name, value in pairs if value],
    )


def _gains(analysis: Analysis) -> tuple[Gains, str, Pairs]:
    """Return what would help, the step time it starts from, and refused edits.

    All are empty without a replay, or if the job hung.
    """
    if analysis.end.hung:
        return Gains([], []), "", []
    try:
        result = search_once(analysis)
        base_ns = analysis.baseline_ns
    except DproError:
        return Gains([], []), "", []
    helpful = what_helps(result.predictions, advised_predictions(analysis))
    return helpful, format_duration(base_ns), [(refusal.edit, refusal.reason) for refusal in result.refused]


def _breakdown(analysis: Analysis) -> list[ReportTable]:
    """Tabulate the parts of each rank's mean step; of many ranks, only those with the longest steps."""
    try:
        steps = analysis.usual_breakdown
    except DproError:
        return []
    mean = mean_steps(steps, "rank")
    shown = mean.sort(["duration_ns", "rank"], descending=[True, False]).head(MAX_RANKS).sort("rank")
    parts = shown_parts(shown) | {"overlapped_comm_ns": "communication beside compute"}
    rows = [
        [
            str(row["rank"]),
            f"{ms(row['duration_ns']):.2f}",
            *(f"{row[part] / row['duration_ns']:.1%}" if row["duration_ns"] else "?" for part in parts),
        ]
        for row in shown.iter_rows(named=True)
    ]
    header = ["rank", "mean step, ms", *parts.values()]
    left = mean.height - shown.height
    note = f"The {shown.height} ranks with the longest steps; {left} more are not listed." if left else ""
    return [ReportTable("Where the usual step of each rank goes", header, rows, note)]


def _kernels(analysis: Analysis) -> list[ReportTable]:
    from dpro.replay.steps import kernel_totals

    kernels = kernel_totals(analysis.spans)
    if kernels.is_empty():
        return []
    whole = float(kernels["total_ns"].sum())
    shown = kernels.head(MAX_KERNELS)
    names = distinct_names([short_name(name) for name in shown["name"]], LONGEST_NAME)
    rows = [
        [name, f"{count:,}", f"{ms(total_ns):.2f}", f"{total_ns / whole:.1%}"]
        for name, (count, total_ns) in zip(names, shown.select("count", "total_ns").iter_rows())
    ]
    on_gpu = bool((analysis.spans["kind"] == "kernel").any())
    title = f"{'GPU kernels' if on_gpu else 'CPU operators by their own time'} in deep windows, all ranks"
    left = kernels.height - len(rows)
    note = f"{left:,} more are not listed." if left else ""
    return [ReportTable(title, ["name", "count", "total, ms", "share"], rows, note)]


# The report as Markdown.

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
_LONGEST = 160  # characters of a cell
_MARKS = {"good": "✅", "bad": "🔴", "unknown": "❔"}


def markdown_of(report: RunReport) -> str:
    """Return the report as Markdown, ending in a newline."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# dpro: {_plain(report.name)}"
    yield ""
    yield f"{_MARKS[report.state]} **{_plain(report.verdict)}**"
    yield ""
    yield from (f"    {printable(' '.join(line.splitlines()))}" for line in report.in_short)
    if report.mean_step is not None:
        yield from _table(["", ""], facts_of(report.mean_step))
    yield from _table(["", ""], report.facts)
    for finding in report.findings:
        yield from _titled(finding.title)
        yield _plain(finding.meaning)
        yield ""
        yield from _list([*finding.evidence, *([f"do: {finding.do}"] if finding.do else [])])
    if report.unknown:
        yield from _titled("Not known")
        yield from _list(report.unknown)
    if report.of_step:
        yield from _titled("What would help")
        if report.gains:
            yield f"The usual step takes {_plain(report.of_step)} as the job runs:"
            rows = [[gain.what(), *gain_cells(gain)] for gain in report.gains]
            yield from _table(["if", "speed-up", "step", "interval", "proof"], rows)
            yield ""
        else:
            yield "Nothing that was tried shortens the step by more than its noise."
        for gain in report.gains:
            edits = "".join(f" ({_code(f'--edit {edit}')})" for edit in gain.edits)
            yield f"- {_plain(gain.what())}{edits}: {_plain(gain.how())}"
        if report.within_noise:
            within = [[gain.what(), *gain_cells(gain)[:3:2]] for gain in report.within_noise]
            title = f"{len(within)} more of x1.00, or within the noise of the steps"
            yield from _folded(ReportTable(title, ["if", "speed-up", "interval"], within))
    for table in report.tables:
        yield from _folded(table)
    yield from _titled("How far to believe it")
    if report.trust is not None:
        yield _plain(report.trust)
        yield from _table(["", ""], report.fit)
    yield ""
    yield from _list(report.doubts)
    yield from _folded(ReportTable("How it was measured", ["", ""], report.measured))


def gain_cells(gain: Prediction) -> tuple[str, str, str, str]:
    """Return speed-up, step, interval and proof."""
    return (
        f"x{gain.speedup:.2f}",
        step_in_words(gain),
        " to ".join(f"{ms(end_ns):.2f}" for end_ns in gain.between_ns) + " ms",
        PROOFS.get(gain.block, "none: unproven"),
    )


def _titled(title: str) -> Iterator[str]:
    yield ""
    yield f"## {_plain(title)}"
    yield ""


def _list(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"- {_plain(line)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(_plain(shortened(cell, _LONGEST)) for cell in row)} |"


def _folded(table: ReportTable) -> Iterator[str]:
    """Yield a table that is folded until clicked."""
    yield ""
    yield f"<details><summary>{_plain(table.title)}</summary>"
    yield from _table(table.header, table.rows)
    yield ""
    if table.note:
        yield _plain(table.note)
        yield ""
    yield "</details>"


def _plain(text: str) -> str:
    """Escape text so that it is shown literally: no markup, tags or control characters, no `@` mentions."""
    one_line = (
        printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    return _SPECIAL.sub(r"\\\1", one_line).replace("@", "@\u2060")


def _code(text: str) -> str:
    """Quote text as inline code; the fence is longer than any run of backticks in the text."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    room = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{room}{printable(' '.join(text.split()))}{room}{fence}"


class DemoDocument(Document, frozen=True, kw_only=True):
    """What was recorded, what limits it, and what is wrong with it.

    Attributes:
        run: of the job with the fault.
        replay: answer of `dpro replay`.
        diagnose: answer of `dpro diagnose`.
        explain: answer of `dpro explain`.
        really_saved_ms: by how much a step of the job without the fault is shorter, as recorded; null where
            no job was recorded.
    """

    run: str
    replay: ReplayDocument
    diagnose: DiagnosisDocument
    explain: Explanation
    really_saved_ms: float | None
