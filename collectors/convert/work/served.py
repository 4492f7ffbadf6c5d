"""From the records of a process to its rows of `iterations` and `requests`.

In: records of kinds `ENGINE` and `BATCH`, and the lines of its requests. Out: rows. A request has a line when
it is first scheduled and one when it ends; the later counts, and one that was cut off counts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.inside.names import REQUESTS as LINES
from dpro.schema import ITERATIONS, REQUESTS
from dpro.schema.serving import kind_of_batch

HOOK = "hook"


def iterations(process: RecordedProcess, recorded: Sequence[records.Record]) -> pl.DataFrame:
    """The iterations of a process's engine, as rows of `iterations`.

    Args:
        process: the process.
        recorded: its records.
    """
    batches = {r.a: (r.b, r.c, r.d) for r in recorded if r.kind == records.BATCH}
    rows = [
        (r.a, r.b - r.a, r.c, r.d, *batches.get(r.a, (-1, -1, -1)))
        for r in recorded
        if r.kind == records.ENGINE
    ]
    columns = (
        "start_ns", "duration_ns", "prefill_tokens", "decode_tokens",
        "num_requests", "context_tokens", "waiting",
    )  # fmt: skip
    frame = pl.DataFrame(rows, dict.fromkeys(columns, pl.Int64), orient="row").sort("start_ns")
    return frame.with_columns(
        rank=pl.lit(process.rank, pl.Int32),
        iteration=pl.int_range(pl.len(), dtype=pl.Int64),
        kind=kind_of_batch(),
        source=pl.lit(HOOK),
    ).pipe(lambda rows: rows if rows.height else ITERATIONS.empty())


def requests(process: RecordedProcess) -> pl.DataFrame:
    """The requests that a process served, as rows of `requests`, numbered in order of arrival."""
    path = process.folder / LINES
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        with suppress(ValueError, LookupError, TypeError):
            row = json.loads(line)
            rows[str(row["name"]), int(row["arrival_ns"])] = {"source": HOOK, **row}
    if not rows:
        return REQUESTS.empty()
    known = {name: dtype for name, dtype in REQUESTS.dtypes.items() if name not in ("replica", "request")}
    frame = pl.DataFrame(list(rows.values()), schema=known).sort("arrival_ns", "name")
    return frame.with_columns(
        *(pl.col(name).fill_null(REQUESTS.columns[name].default) for name in known),
        request=pl.int_range(pl.len(), dtype=pl.Int64) + (process.rank << REQUEST_BITS),
    )


REQUEST_BITS = 40  # numbers of requests are unique within a run of several engines
