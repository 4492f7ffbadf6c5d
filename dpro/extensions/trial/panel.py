"""A panel of What if: predictions and measurements of the changes of the run's job tried on this machine.

Takes the ledger and a run; returns a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.page import Panel, View, csv_link, message, table, with_panel
from dpro.dashboards.views.whatif import NAME
from dpro.extensions.trial.changes import kind_of_edit
from dpro.extensions.trial.ledger import TOO_WIDE, LedgerEntry, Ratio, joint_kind, read
from dpro.replay.whatif.predict import Prediction
from dpro.store import Run
from dpro.units import NS_PER_MS, format_duration
from dpro.words import counted

_RATIOS = {"ratio": "", "low": "_low", "high": "_high"}


def ledger_info(entries: Sequence[LedgerEntry]) -> pl.DataFrame:
    """Tabulate the entries of the ledger.

    Returns:
        `time`, `edits`, `kind`, `baseline_ms`, `predicted_ms` with `predicted_low_ms` and `predicted_high_ms`
        (null without a prediction), `measured_ms` with its interval, `off_by` (predicted / measured - 1) and
        `inside` (whether the measured step is in the predicted interval). The interval of what was measured,
        `off_by` and `inside` are null where too little was measured for them.
    """
    rows = [
        {
            "time": entry.time,
            "edits": " ".join(entry.edits),
            "kind": entry.kind,
            "baseline_ms": entry.baseline_ms,
            **_times(entry.predicted, "predicted", entry.baseline_ms),
            **_times(entry.measured, "measured", entry.baseline_ms),
            "off_by": None
            if entry.predicted is None or entry.measured.is_vague
            else entry.predicted.ratio / entry.measured.ratio - 1,
            "inside": None if entry.measured.is_vague else entry.is_inside,
        }
        for entry in entries
    ]
    times = [f"{side}{suffix}_ms" for side in ("predicted", "measured") for suffix in _RATIOS.values()]
    schema: dict[str, pl.DataType] = dict.fromkeys(("time", "edits", "kind"), pl.String())
    schema |= dict.fromkeys(("baseline_ms", *times, "off_by"), pl.Float64()) | {"inside": pl.Boolean()}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.sort("time", descending=True, maintain_order=True)


def _times(ratio: Ratio | None, side: str, baseline_ms: float) -> dict[str, float | None]:
    """Return a ratio as step times of `ledger_info`; the ends are null where they say nothing."""
    shares = {} if ratio is None else {"ratio": ratio.ratio}
    if ratio is not None and not ratio.is_vague:
        shares |= {"low": ratio.low, "high": ratio.high}
    times = {name: share * baseline_ms for name, share in shares.items()}
    return {f"{side}{suffix}_ms": times.get(name) for name, suffix in _RATIOS.items()}


def tries_of(run: Run) -> list[LedgerEntry]:
    """Return the trials of a run's job: those of its command."""
    command = run.manifest.command
    return [entry for entry in read()[0] if command and entry.command == command]


def _tries(loaded: Loaded, link: Link) -> Any:
    every, damaged = read()
    entries = tries_of(loaded.run)
    elsewhere = f" {counted(len(every) - len(entries), 'trial')} of other jobs: dpro ledger."
    elsewhere = elsewhere if len(every) > len(entries) else ""
    if not entries:
        return message(f"No change of this job was tried here (dpro try EDIT... -- COMMAND...).{elsewhere}")
    chosen = [line.strip() for line in link.options.get("edit", "").splitlines() if line.strip()]
    kind = joint_kind(map(kind_of_edit, chosen))
    same, others = (
        [entry for entry in entries if (entry.kind == kind) == wanted] for wanted in (True, False)
    )
    lost = f"{damaged} damaged lines of the ledger are passed over." if damaged else ""
    summary = html.Summary(f"{len(others)} of other kinds")
    listed = [
        *([html.P("Of the kind of the chosen edits:"), _table(same)] if same else []),
        *([html.Details([summary, _table(others)])] if same and others else []),
        *([] if same else [_table(others)]),
    ]
    return [*listed, html.P(f"{lost}{elsewhere}", className="note"), csv_link(NAME, "tries", link)]


def _table(entries: Sequence[LedgerEntry]) -> Component:
    header = ["tried", "on", "of", "predicted", "measured", "off by", "inside its interval"]
    rows = [
        [
            html.Code(row["edits"]),
            row["time"][:10],
            format_duration(row["baseline_ms"] * NS_PER_MS),
            _interval(row, "predicted"),
            _interval(row, "measured"),
            "" if row["off_by"] is None else f"{row['off_by']:+.1%}",
            {True: "yes", False: "no", None: ""}[row["inside"]],
        ]
        for row in ledger_info(entries).iter_rows(named=True)
    ]
    return table(header, rows, 2)


def _interval(row: Mapping[str, Any], side: str) -> str:
    middle, low, high = (row[f"{side}{end}_ms"] for end in ("", "_low", "_high"))
    if middle is None:
        return "not"
    if low is None:
        return f"{format_duration(middle * NS_PER_MS)} ({TOO_WIDE})"
    said = [format_duration(value * NS_PER_MS) for value in (middle, low, high)]
    return f"{said[0]} ({said[1]} to {said[2]})"


def measured_in_words(prediction: Prediction, run: Run) -> list[str]:
    """Return one line per trial of exactly these edits on the job: measured and predicted time."""
    texts = {str(edit) for edit in prediction.edits}
    entries = [entry for entry in tries_of(run) if {*entry.edits} == texts]
    return [
        f"{_interval(row, 'measured')}, predicted {_interval(row, 'predicted')}, "
        f"of {format_duration(row['baseline_ms'] * NS_PER_MS)} on {row['time'][:10]}"
        for row in ledger_info(entries).iter_rows(named=True)
    ]


def add_tries(view: View) -> View:
    """Return the view What if with a panel of the trials on this machine."""
    tried = "What was tried on this machine"
    panel = Panel(tried, "whatif-tries", "reading the ledger", _tries, wide=True, whole=True)
    return with_panel(view, panel, {"tries": lambda loaded, _link: ledger_info(tries_of(loaded.run))})
