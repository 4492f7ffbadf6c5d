"""Figures of a job's account: where the usual step goes, and what changes would gain.

Takes an `Explanation`; returns frames, a figure of the step, and one sheet with the whole account, to be sent
as a PNG. The sheet's size is fixed, whatever the window's; its wording is the terminal's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from msgspec.structs import replace

from dpro.account import Account
from dpro.analysis.analysis import Analysis
from dpro.analysis.predictions import (
    healed_in_part,
    healed_in_part_in_words,
    left_out_in_words,
    predict_edits,
)
from dpro.dashboards.theme import colour, escaped, styled
from dpro.detect.findings import Finding
from dpro.errors import DproError
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.predict import Prediction
from dpro.replay.whatif.registry import parse_edit
from dpro.units import NS_PER_MS, format_duration, format_ms
from dpro.verdict.advice import MAX_GAIN, Advice
from dpro.verdict.ledger import LIMIT_OF, NO_CORE, RANK, UNEXPLAINED, cause_of_finding
from dpro.verdict.limits import (
    ALLOCATOR,
    BUBBLE,
    CHECKPOINT,
    COLLECTION,
    COMMUNICATION,
    COMPILATION,
    COMPUTE,
    COPIES,
    HOST,
    IMBALANCE,
    INPUT,
    SYNCHRONISATION,
)
from dpro.verdict.verdict import Explanation
from dpro.verdict.words import THEN, TRY, entry_in_words, paragraphs_of, shares_of, when_then, worth_in_words
from dpro.words import capitalised

STEP = "the step as it runs"
BARS = "Each bar is what removing its cause saves once those above it are gone; the last is what remains."
PROOFS = {"proven": "proven on real jobs", "unproven": "unproven"}  # by the block of a prediction
MIN_SPAN = 0.1  # least length of the scale above x1.0
NEAR = 0.02  # share of a cost: a gain that differs by less counts as equal
OPEN = 0.25  # share of the scale: room for gains without an upper end
_COLOURS = {  # of entries, as other views colour the parts of a step
    COMPUTE: "compute", COMMUNICATION: "exposed_comm", COPIES: "copy", UNEXPLAINED: "idle",
    **dict.fromkeys((RANK, IMBALANCE, BUBBLE), "exposed_wait"),
    **dict.fromkeys((HOST, NO_CORE, INPUT, SYNCHRONISATION, ALLOCATOR), "host_bound"),
    **dict.fromkeys((COMPILATION, CHECKPOINT, COLLECTION), "host_bound"),
}  # fmt: skip
_ROW, _LABEL, _ROOM = 30, 22, 100  # pixels of a row; characters per line of a label; pixels beside the bars


def entry_info(account: Account) -> pl.DataFrame:
    """Return the usual step as a waterfall of its entries; compute comes last, or else unexplained time.

    Returns:
        `name`, which begins with that of the limit it is part of, `cause`, `ms`, `share` of the step,
        `left_ms` (the step without this entry and those before it; 0 in the last row), `of_limit` (whether
        it is the largest part of the limit), `evidence`.
    """
    last = COMPUTE if any(entry.cause == COMPUTE for entry in account.entries) else UNEXPLAINED
    entries = sorted(account.entries, key=lambda entry: entry.cause == last)
    limits = [LIMIT_OF.get(entry.cause, entry.cause) for entry in entries]
    of_kind = [entry for entry, limit in zip(entries, limits) if account.limit and limit == account.limit]
    largest = max(of_kind, key=lambda entry: entry.ms, default=None)
    rows = []
    for entry, limit in zip(entries, limits):
        of_limit, name = entry is largest, entry_in_words(entry)
        if of_limit and limit != entry.cause:
            name = f"{entry_in_words(replace(entry, cause=limit, ranks=[]))}: {name}"
        rows.append((name, entry.cause, entry.ms, of_limit, entry.evidence))
    names = {"name": pl.String, "cause": pl.String, "ms": pl.Float64, "of_limit": pl.Boolean}
    frame = pl.DataFrame(rows, schema=names | {"evidence": pl.String}, orient="row")
    return frame.select(
        "name",
        "cause",
        "ms",
        share=pl.col("ms") / pl.col("ms").sum(),
        left_ms=pl.col("ms").sum() - pl.col("ms").cum_sum(),
        of_limit="of_limit",
        evidence="evidence",
    )


def bars_in_words(explanation: Explanation) -> str:
    """Word what the bars of the step count, and how its parts differ from what a rank does meanwhile."""
    shares = ", ".join(shares_of(explanation))
    return f"{BARS} By what a rank does meanwhile, on average: {shares}." if shares else BARS


def healing_edits(finding: Finding) -> list[Edit]:
    """Return edits that make ranks blamed by a finding as fast as their peers; empty if it blames none."""
    blames = cause_of_finding(finding) == RANK
    return [parse_edit(f"heal:rank={rank}") for rank in finding.ranks] if blames else []


def healing_in_words(analysis: Analysis, finding: Finding) -> str:
    """Word what healing saves of the usual step, and which steps the cost covers; empty if unknown."""
    edits = healing_edits(finding)
    if edits and finding.costs_pauses:
        return f"{capitalised(left_out_in_words(finding))}."
    try:
        done = predict_edits(analysis, edits) if edits else None
    except DproError:
        done = None
    if done is None:
        return ""
    if healed_in_part(done, finding.cost_ns):
        return f"{capitalised(healed_in_part_in_words(done, finding.cost_ns))}."
    cost, saved = (format_duration(ns) for ns in (finding.cost_ns, done.gain_ns))
    is_near = abs(finding.cost_ns - done.gain_ns) < NEAR * finding.cost_ns
    said = (
        f"Fixing it saves {cost if is_near else saved} of the usual step of {format_duration(done.base_ns)}"
    )
    if is_near or analysis.baseline.height == durations_of(analysis.baseline).height:
        return f"{said}."
    return f"{said}; its cost, {cost}, is a mean over all recorded steps, including unusual ones."


def prediction_of(analysis: Analysis, advice: Advice) -> Prediction | None:
    """Return the prediction behind the gain of an advice; None if the advice has no edit."""
    return predict_edits(analysis, [parse_edit(advice.edit)]) if advice.edit else None


def advice_info(analysis: Analysis, explanation: Explanation) -> pl.DataFrame:
    """Return what to try, in the verdict's order.

    Returns:
        `label` (1, 2, …, or THEN), `do`, `low`, `middle`, `high` (times; null where unknown), `worth` in
        words, `effort`, `when` it is worth doing, `proof`, `samples` (factor on the samples of a step),
        `edit`, `how`, `assumes`, `check`.
    """
    rows = []
    for number, advice in enumerate(explanation.advice, 1):
        rows.append((str(number), advice))
    then = explanation.then
    if then and then.kind not in {advice.kind for advice in explanation.advice}:
        rows.append((THEN, replace(then, edit="")))  # its gain was predicted with the limit removed
    gains = explanation.account.gains if explanation.account else {}
    table = []
    for label, advice in rows:
        gain, done = gains.get(advice.edit), prediction_of(analysis, advice)
        table.append(
            {
                "label": label,
                "do": advice.do,
                "low": gain.low if gain else advice.gain_low,
                "middle": gain.middle if gain else None,
                "high": gain.high if gain else advice.gain_high,
                "worth": worth_in_words(advice),
                "effort": advice.effort,
                "when": when_then(explanation) if label == THEN else "",
                "proof": PROOFS.get(done.block, "") if done else "",
                "samples": done.samples if done else 1.0,
                "edit": advice.edit,
                "how": "; ".join(_hows(done.edits)) if done else "",
                "assumes": advice.assumes,
                "check": advice.check,
            }
        )
    numbers = ("low", "middle", "high", "samples")
    texts = ("label", "do", "worth", "effort", "when", "proof", "edit", "how", "assumes", "check")
    schema = dict.fromkeys(texts, pl.String()) | dict.fromkeys(numbers, pl.Float64())
    return pl.DataFrame(table, schema=schema).select(
        *texts[:2], *numbers[:3], *texts[2:6], "samples", *texts[6:]
    )


_DIAGNOSE = "run `dpro diagnose` to find"


def _hows(edits: Sequence[Edit]) -> list[str]:
    """Return how to make each change, except where only what `dpro diagnose` finds says how."""
    return [how for how in (edit.how() for edit in edits) if not how.startswith(_DIAGNOSE)]


def worded_for_page(how: str) -> str:
    """Reword how to make a change, for another view than the one that shows what `dpro diagnose` finds."""
    return how.replace(_DIAGNOSE, "What was found, in Verdict, says")


def scale_of(advice: pl.DataFrame) -> tuple[float, float]:
    """Return both ends of the scale for all gains, in times; it contains x1.0 and the largest known gain."""
    ends = [1.0, *(value for end in ("low", "middle", "high") for value in advice[end].drop_nulls())]
    low, high = min(ends), max(max(value for value in ends if value <= MAX_GAIN), 1.0 + MIN_SPAN)
    is_open = advice.filter(
        pl.col("low").is_not_null() & ~(pl.col("high") <= MAX_GAIN).fill_null(False)
    ).height
    return low, high + (OPEN * (high - low) if is_open else 0.0)


def entry_figure(entries: pl.DataFrame, theme: str, longest_ms: float | None = None) -> go.Figure:
    """Draw the usual step, and below it one bar per entry.

    Args:
        entries: as from `entry_info`.
        longest_ms: length of the axis; None for the length of the step.
    """
    figure = go.Figure()
    rows = _draw_entries(figure, entries, theme, longest_ms)
    styled(figure, theme, height=_ROW * rows + 16)
    return figure.update_layout(showlegend=False, margin={"l": 8, "r": _ROOM, "t": 8, "b": 8})


def _draw_entries(figure: go.Figure, entries: pl.DataFrame, theme: str, longest_ms: float | None) -> int:
    """Draw the bars of `entry_figure`; return how many they are."""
    step_ms = float(entries["ms"].sum())
    shown = entries[:-1].filter(pl.col("ms") * NS_PER_MS >= 1)  # the table has the entries without time, too
    entries = pl.concat([shown, entries[-1:]])
    ink, soft, bad = (colour(what, theme) for what in ("ink", "soft", "bad"))
    limits = [False, *entries["of_limit"]]
    names, times = [STEP, *entries["name"]], [step_ms, *entries["ms"]]
    shares = ["", *(f"  {share:.0%}" if share >= 0.005 else "  <1%" for share in entries["share"])]
    said = [format_ms(time) + escaped(share) for time, share in zip(times, shares)]
    figure.add_bar(
        orientation="h",
        y=list(range(len(names))),
        x=times,
        base=[0.0, *entries["left_ms"]],
        marker={
            "color": [soft, *(colour(_COLOURS.get(cause, "idle"), theme) for cause in entries["cause"])],
            "line": {"width": 0},
        },
        width=0.66,
        text=[f"<b>{text}</b>" if limit else text for text, limit in zip(said, limits)],
        textposition="outside",
        textfont={"size": 12, "color": [bad if limit else ink for limit in limits]},
        cliponaxis=False,
        customdata=[
            escaped(f"{name}: {evidence}")
            for name, evidence in zip(names, ["as it is", *entries["evidence"]])
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    for row, left_ms in enumerate([step_ms, *entries["left_ms"][:-1]]):  # connect each bar to the next
        line = {"color": soft, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", x0=left_ms, x1=left_ms, y0=row + 0.33, y1=row + 0.67, line=line)
    marked = [f"LIMIT {name}" if limit else name for name, limit in zip(names, limits)]
    labels = ["<br>".join(map(escaped, textwrap.wrap(name, _LABEL))) for name in marked]
    mark = f'<b><span style="color:{bad}">LIMIT</span>'
    labels = [
        f"{mark}{label.removeprefix('LIMIT')}</b>" if limit else label for label, limit in zip(labels, limits)
    ]
    figure.update_xaxes(range=[0, longest_ms or step_ms or 1.0], visible=False, fixedrange=True)
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=labels, range=[len(names) - 0.5, -0.5], fixedrange=True,
        showgrid=False, zeroline=False, tickfont={"size": 12, "color": ink}, ticklabelstandoff=6,
    )  # fmt: skip
    return len(names)


# The whole account on one sheet; coordinates are pixels from its upper left corner.

WIDTH = 1200
_MARGIN, _TEXT, _BARS = 28, 104, 760  # pixels from the left: labels, texts, bars of gains
_SIZE, _LINE, _PER_LETTER = 14, 20, 7.9  # pixels: font size, line height, letter width
_NAME_SIZE, _TICK_SIZE, _THICK = 19, 11, 12


class _Sheet:
    """Texts and shapes of the picture, and the height filled with them."""

    def __init__(self, theme: str) -> None:
        self.theme, self.y = theme, 0.0
        self.texts: list[tuple[float, float, str, int, str]] = []
        self.shapes: list[dict[str, Any]] = []

    def text(self, x: float, y: float, text: str, size: int = _SIZE, what: str = "ink") -> None:
        """Place a text with its left end and the middle of its first line."""
        self.texts.append((x, y, text, size, colour(what, self.theme)))

    def bar(self, x0: float, x1: float, y: float, height: float, what: str) -> None:
        """Place a bar that is centred on `y`."""
        fill = {"fillcolor": colour(what, self.theme), "line": {"width": 0}}
        self.shapes.append(
            {"type": "rect", "x0": x0, "x1": x1, "y0": y - height / 2, "y1": y + height / 2, **fill}
        )

    def paragraph(self, label: str, text: str, until: float = WIDTH - _MARGIN, what: str = "ink") -> float:
        """Place a labelled text below everything placed before; return the y of its middle."""
        lines = textwrap.wrap(text, int((until - _TEXT) / _PER_LETTER)) or [""]
        self.y += _LINE
        self.text(_MARGIN, self.y, f"<b>{escaped(label)}</b>", what="soft")
        for number, line in enumerate(lines):
            self.text(_TEXT, self.y + number * _LINE, escaped(line), what=what)
        middle = self.y + (len(lines) - 1) * _LINE / 2
        self.y += (len(lines) - 1) * _LINE + _LINE / 2
        return middle


def picture_figure(
    explanation: Explanation, entries: pl.DataFrame, advice: pl.DataFrame, theme: str, trust: str = ""
) -> go.Figure:
    """Draw the account on one sheet of fixed width: the job, its limit, the step, faults, what to try.

    Args:
        entries: as from `entry_info`.
        advice: as from `advice_info`.
        trust: how far to trust predictions, in a sentence; empty if there are none.
    """
    sheet, figure = _Sheet(theme), go.Figure()
    sheet.text(_MARGIN, 30, f"<b>{escaped(explanation.job)}</b>", _NAME_SIZE)
    sheet.y = 52
    tries: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for label, text in paragraphs_of(explanation):
        (tries if label in (TRY, THEN, "") else others).append((label, text))
    for label, text in others:
        if label in ("LIMIT", "PHASE"):
            sheet.paragraph(label, text)
    first = sheet.y + 12
    last = sheet.y = first + _ROW * _draw_entries(figure, entries, theme, None) if entries.height else sheet.y
    if entries.height:
        sheet.paragraph("", bars_in_words(explanation), what="soft")
    for label, text in others:
        if label == "FAULT":
            sheet.y += 6
            sheet.paragraph(label, text, what="bad" if explanation.faulty_ranks else "ink")
    _draw_tries(sheet, tries, advice)
    for label, text in others:
        if label not in ("LIMIT", "PHASE", "FAULT"):
            sheet.paragraph(label, text, what="soft")
    if trust:
        sheet.paragraph("TRUST", trust)
    height = sheet.y + _MARGIN
    if entries.height:
        figure.update_xaxes(domain=[(_TEXT + 190) / WIDTH, 1 - (_ROOM + _MARGIN) / WIDTH])
        figure.update_yaxes(domain=[1 - last / height, 1 - first / height])
    _draw_sheet(figure, sheet, height)
    return figure


def _draw_tries(sheet: _Sheet, tries: list[tuple[str, str]], advice: pl.DataFrame) -> None:
    """Place what to try, with a bar for each known gain beside it."""
    low, high = scale_of(advice)
    drawn = advice["low"].drop_nulls().len() > 0
    if drawn:
        sheet.y += _LINE
        for value in (1.0, high):
            sheet.text(_x_of(value, low, high), sheet.y, times_on_scale(value), _TICK_SIZE, "soft")
    top, until = sheet.y + 8, _BARS - _MARGIN if drawn else WIDTH - _MARGIN
    for (label, text), row in zip(tries, advice.iter_rows(named=True), strict=True):
        middle = sheet.paragraph(label, text, until)
        sheet.y += 4
        for begin, end, part, what in parts_of_gain(row, (low, high)):
            sheet.bar(_x_of(begin, low, high), _x_of(end, low, high), middle, _THICK * part, what)
    if drawn:
        sheet.bar(
            _x_of(1.0, low, high), _x_of(1.0, low, high) + 1, (top + sheet.y) / 2, sheet.y - top, "soft"
        )


def _x_of(value: float, low: float, high: float) -> float:
    """Return the x of a gain, in pixels."""
    return _BARS + (value - low) / (high - low) * (WIDTH - 2 * _MARGIN - _BARS)


def times_on_scale(value: float) -> str:
    """Format a gain at one end of the scale: `x1.4`."""
    return f"x{value:.1f}" if round(value, 1) == round(value, 2) else f"x{value:.2f}"


def parts_of_gain(
    row: dict[str, Any], scale: tuple[float, float]
) -> Iterator[tuple[float, float, float, str]]:
    """Yield the bars that draw a gain: from x1.0 to its middle, its interval, and the interval's two ends.

    Args:
        row: of `advice_info`; a null `high` means no upper end.
        scale: its two ends, in times.

    Yields:
        From, to, thickness as a share, name of the colour; nothing where no gain is known.
    """
    left, right = scale
    if row["low"] is None:
        return
    low, high = max(row["low"], left), min(row["high"] or right, right)
    hair = (right - left) / 200
    if row["middle"] is not None:
        yield (*sorted((1.0, min(row["middle"], right))), 1.0, "compute" if row["middle"] >= 1 else "bad")
    yield low, high, 0.25, "ink"
    for end in (low, *([high] if (row["high"] or right + 1) <= right else [])):
        yield max(end - hair / 2, left), min(end + hair / 2, right), 0.9, "ink"


def _draw_sheet(figure: go.Figure, sheet: _Sheet, height: float) -> None:
    """Draw texts and shapes on pixel axes that span the figure."""
    x, y, texts, sizes, colours = zip(*sheet.texts)
    figure.add_scatter(
        x=x, y=y, text=texts, mode="text", textposition="middle right", xaxis="x2", yaxis="y2",
        textfont={"size": sizes, "color": colours}, hoverinfo="skip", cliponaxis=False,
    )  # fmt: skip
    for shape in sheet.shapes:
        figure.add_shape(**shape, xref="x2", yref="y2")
    styled(figure, sheet.theme, height=round(height))
    hidden = {"visible": False, "fixedrange": True}
    figure.update_layout(
        width=WIDTH, showlegend=False, margin=dict.fromkeys("lrtb", 0),
        paper_bgcolor=colour("panel", sheet.theme),
        xaxis2={"range": [0, WIDTH], "anchor": "y2", "domain": [0, 1], **hidden},
        yaxis2={"range": [height, 0], "anchor": "x2", "domain": [0, 1], **hidden},
    )  # fmt: skip
