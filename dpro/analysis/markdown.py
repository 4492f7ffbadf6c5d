"""A report as Markdown, for an issue or a pull request.

In: a `RunReport`. Out: text. Names from traces are escaped: none of them becomes a link, a tag, a mention or
a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from dpro.analysis.mean_step import MeanStep, bar_in_text, facts_of, legend
from dpro.analysis.report import ReportTable, RunReport
from dpro.units import format_ms
from dpro.words import printable, shortened

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")
_LONGEST = 160  # characters of a cell
_BAR = 80  # characters
_MARKS = {"good": "✅", "bad": "🔴", "unknown": "❔"}


def markdown_of(report: RunReport) -> str:
    """Return the report as Markdown, ending in a newline."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# dpro: {_plain(report.name)}"
    yield ""
    yield f"{_MARKS[report.state]} **{_plain(report.verdict)}**"
    if report.mean_step is not None:
        yield from _mean_step(report.mean_step)
    yield from _table(["", ""], report.facts)
    for finding in report.findings:
        yield from _titled(finding.title)
        yield _plain(finding.meaning)
        yield ""
        yield from _list([*finding.evidence, *([f"do: {finding.advice}"] if finding.advice else [])])
    if report.unknown:
        yield from _titled("Not known")
        yield from _list(report.unknown)
    if report.of_step:
        yield from _titled("What would help")
        yield from _gains(report)
    for table in report.tables:
        yield from _folded(table)
    yield from _titled("How far to believe it")
    if report.trust is not None:
        yield _plain(report.trust)
        yield from _table(["", ""], report.fit)
    yield ""
    yield from _list(report.doubts)
    yield from _folded(ReportTable("How it was measured", ["", ""], report.measured))


def _mean_step(mean: MeanStep) -> Iterator[str]:
    """Yield the bar of the mean step in fixed width, its legend and its facts."""
    title = f"Where the mean step of a rank in deep windows ({format_ms(mean.duration_ms)}) goes"
    yield from _titled(title)
    yield "```text"
    yield bar_in_text(mean, _BAR)
    yield from legend(mean)
    yield "```"
    if said := facts_of(mean):
        yield from _table(["", ""], said)


def _gains(report: RunReport) -> Iterator[str]:
    if report.gains:
        yield f"The mean step in deep windows takes {_plain(report.of_step)} (replayed):"
        rows = [[each.what, *each.cells] for each in report.gains]
        yield from _table(["if", "speed-up", "step", "interval", "proof"], rows)
        yield ""
    else:
        yield "Nothing that was tried shortens the step by more than its noise."
    for each in report.gains:
        edits = "".join(f" ({_code('--edit ' + edit)})" for edit in each.edits)
        fixed = f", which fixes {_plain(each.fixes)}" if each.fixes else ""
        yield f"- {_plain(each.what)}{edits}{fixed}: {_plain(each.how)}"
    if report.within_noise:
        within = [[each.what, each.cells[0], each.cells[2]] for each in report.within_noise]
        title = f"{len(within)} more of ×1.00, or within the noise of the steps"
        yield from _folded(ReportTable(title, ["if", "speed-up", "interval"], within))


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
    """Yield a table that is folded until it is clicked."""
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
