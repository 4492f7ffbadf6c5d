"""Rows of `iterations` and `requests` from the records of a process.

Reads records of kinds `ENGINE`, `BATCH` and `KV_CACHE`, and the lines of its requests. A request has a line
when it is first scheduled and one when it ends; the later line counts, and a truncated line is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess, latest_lines
from dpro.collectors.inside import records
from dpro.collectors.inside.files import ENGINE, ENGINES
from dpro.collectors.inside.files import REQUESTS as LINES
from dpro.collectors.launch.recording import Launch
from dpro.schema import ITERATIONS, REQUESTS, kind_of_batch
from dpro.store import write_part
from dpro.words import from_json

HOOK = "hook"


def iterations(process: RecordedProcess, recorded: Sequence[records.Record]) -> pl.DataFrame:
    """Return the iterations of a process's engine, as rows of `iterations`."""
    batches = {r.a: (r.b, r.c, r.d) for r in recorded if r.kind == records.BATCH}
    lacking = {r.a: (r.b, r.c) for r in recorded if r.kind == records.KV_CACHE}
    rows = [
        (r.a, r.b - r.a, r.c, r.d, *batches.get(r.a, (-1, -1, -1)), *lacking.get(r.a, (-1, -1)))
        for r in recorded
        if r.kind == records.ENGINE
    ]
    columns = (
        "start_ns", "duration_ns", "prefill_tokens", "decode_tokens",
        "num_requests", "context_tokens", "waiting", "kv_waiting", "evicted",
    )  # fmt: skip
    frame = pl.DataFrame(rows, dict.fromkeys(columns, pl.Int64), orient="row").sort("start_ns")
    return frame.with_columns(
        rank=pl.lit(process.rank, pl.Int32),
        replica=pl.lit(_replica(process), pl.Int64),
        iteration=pl.int_range(pl.len(), dtype=pl.Int64),
        kind=kind_of_batch(),
        source=pl.lit(HOOK),
    ).pipe(lambda rows: rows if rows.height else ITERATIONS.empty())


def requests(process: RecordedProcess) -> pl.DataFrame:
    """Return the requests that a process served, as rows of `requests`, numbered in order of arrival."""
    lines = latest_lines(process.folder / LINES, lambda line: (str(line["name"]), int(line["arrival_ns"])))
    if not lines:
        return REQUESTS.empty()
    dtypes = {name: dtype for name, dtype in REQUESTS.dtypes.items() if name not in ("replica", "request")}
    rows = [{"source": HOOK, **line} for line in lines]
    frame = pl.DataFrame(rows, schema=dtypes).sort("arrival_ns", "name")
    return frame.with_columns(
        *(pl.col(name).fill_null(REQUESTS.columns[name].default) for name in dtypes),
        replica=pl.lit(_replica(process), pl.Int64),
        request=pl.int_range(pl.len(), dtype=pl.Int64) + (process.rank << REQUEST_BITS),
    )


def write_engines(launch: Launch) -> None:
    """Write the tables of engines of a launch whose processes have no rank.

    Raises:
        OSError: a table cannot be written.
    """
    for path in sorted(launch.raw.glob(f"{ENGINES}*/{ENGINE}")):
        facts = _facts(path)
        if {"rank", "pid"} <= facts.keys():
            process = RecordedProcess(path.parent, facts)
            recorded = records.read_records(path.parent / "records.bin")
            write_part(launch.run, ITERATIONS, process.part, iterations(process, recorded))
            write_part(launch.run, REQUESTS, process.part, requests(process))


def _replica(process: RecordedProcess) -> int:
    return _facts(process.folder / ENGINE).get("replica", 0)


def _facts(path: Path) -> dict[str, int]:
    """Read the facts of an engine that are numbers in range; empty where the file is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        document = from_json(path.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return {
                name: value
                for name, value in document.items()
                if type(value) is int and 0 <= value < MAX_FACT
            }
    return {}


MAX_FACT = 1 << 22  # above all ranks, replicas and process ids
REQUEST_BITS = 40  # the rank is above these bits: requests of several engines have distinct numbers
