"""From what a process left to its rows of `starts` and `checkpoints`: its life beside its steps.

In: `started.json`, `checkpoints.jsonl` and the records of a process. Out: rows. What went on in the
background has two lines, of which the later counts; a line that was cut off counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.inside.names import CHECKPOINTS as LINES
from dpro.collectors.inside.names import STARTED
from dpro.schema import CHECKPOINTS, STARTS
from dpro.words import from_json


def starts(process: RecordedProcess, recorded: Sequence[records.Record], launched_ns: int) -> pl.DataFrame:
    """How a process came to its first step, as a row of `starts`; none where it does not say.

    Args:
        launched_ns: when its launcher started the command, -1 where unknown.
    """
    moments: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        moments = from_json((process.folder / STARTED).read_text())
    if not isinstance(moments, dict) or not moments:
        return STARTS.empty()
    attempt = str(process.facts.get("attempt", ""))
    row = {name: value for name, value in moments.items() if name in STARTS.columns and type(value) is int}
    row |= {"rank": process.rank, "launched_ns": launched_ns}
    row |= {"restart": int(attempt) if attempt.isdigit() else -1}
    row |= {"first_update_ns": min((r.c for r in recorded if r.kind == records.UPDATE), default=-1)}
    return pl.DataFrame([row], schema={name: STARTS.dtypes[name] for name in row})


def checkpoints(process: RecordedProcess) -> pl.DataFrame:
    """What a process saved and loaded, as rows of `checkpoints`."""
    path = process.folder / LINES
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            row = from_json(line)
            rows[int(row["start_ns"]), str(row["path"])] = {"rank": process.rank, **row}
    return pl.DataFrame(list(rows.values()), schema=CHECKPOINTS.dtypes).with_columns(
        pl.col(name).fill_null(CHECKPOINTS.columns[name].default) for name in CHECKPOINTS.columns
    )
