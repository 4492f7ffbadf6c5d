"""A panel of What if: predictions and measurements of the changes tried on this machine.

Takes the ledger; returns a table.
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
from dpro.extensions.trial.ledger import LedgerEntry, joint_kind, read
from dpro.replay.whatif.predict import Prediction
from dpro.units import NS_PER_MS, format_duration

_RATIOS = {"ratio": "", "low": "_low", "high": "_high"}


def ledger_info(entries: Sequence[LedgerEntry]) -> pl.DataFrame:
    """Tabulate the entries of the ledger.

    Returns:
        `time`, `edits`, `kind`, `baseline_ms`, `predicted_ms` with `predicted_low_ms` and `predicted_high_ms`
        (null without a prediction), `measured_ms` with its interval, `off_by` (predicted / measured - 1) and
        `inside` (whether the measured step is in the predicted interval).
    """
    rows = [
        {
            "time": entry.time,
            "edits": " ".join(entry.edits),
            "kind": entry.kind,
            "baseline_ms": entry.baseline_ms,
            **{
                f"{side}{suffix}_ms": None if ratio is None else getattr(ratio, name) * entry.baseline_ms
                for side, ratio in (("predicted", entry.predicted), ("measured", entry.measured))
                for name, suffix in _RATIOS.items()
            },
            "off_by": entry.predicted and entry.predicted.ratio / entry.measured.ratio - 1,
            "inside": entry.is_inside,
        }
        for entry in entries
    ]
    times = [f"{side}{suffix}_ms" for side in ("predicted", "measured") for suffix in _RATIOS.values()]
    schema: dict[str, pl.DataType] = dict.fromkeys(("time", "edits", "kind"), pl.String())
    schema |= dict.fromkeys(("baseline_ms", *times, "off_by"), pl.Float64()) | {"inside": pl.Boolean()}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.sort("time", descending=True, maintain_order=True)


def _tries(_loaded: Loaded, link: Link) -> Any:
    entries, damaged = read()
    if not entries:
        return message("No change was tried on this machine yet: dpro try EDIT... -- COMMAND...")
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
    return [*listed, html.P(lost, className="note"), csv_link(NAME, "tries", link)]


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
    said = [format_duration(value * NS_PER_MS) for value in (middle, low, high)]
    return f"{said[0]} ({said[1]} to {said[2]})"


def measured_in_words(prediction: Prediction) -> list[str]:
    """Return one line per trial of exactly these edits: the measured and the predicted time."""
    texts = {str(edit) for edit in prediction.edits}
    entries = [entry for entry in read()[0] if {*entry.edits} == texts]
    return [
        f"{_interval(row, 'measured')}, predicted {_interval(row, 'predicted')}, "
        f"of {format_duration(row['baseline_ms'] * NS_PER_MS)} on {row['time'][:10]}"
        for row in ledger_info(entries).iter_rows(named=True)
    ]


def add_tries(view: View) -> View:
    """Return the view What if with a panel of the trials on this machine."""
    tried = "What was tried on this machine"
    panel = Panel(tried, "whatif-tries", "reading the ledger", _tries, wide=True, whole=True)
    return with_panel(view, panel, {"tries": lambda _loaded, _link: ledger_info(read()[0])})
