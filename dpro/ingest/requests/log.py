"""From logs of requests to rows of the table `requests`.

In: files. Out: rows in order of arrival, and what was left out, by reason, with the line of the first.
Moments stay on the clock of the log: seconds since its start, or since 1970.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError
from dpro.ingest.requests.columns import LogColumns, count, duration_ns, moment_ns, outcome
from dpro.ingest.requests.rows import Row, read_rows, rows_of
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, merge_counts, open_run, write_manifest, write_part
from dpro.table import complete

NO_ARRIVAL = "without a moment of arrival"
OTHER_SPAN = "of spans without a model"
MODEL = "gen_ai_"  # in names of attributes of spans about models
BACKWARDS = "with moments that run backwards"
APART_NS = 5_000_000  # how far before its arrival another process may have noted a moment of a request
_ORDER = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")


@dataclass
class RequestLog:
    """What files say of requests.

    Attributes:
        requests: rows of `requests`.
        skipped: rows that were not taken, by reason.
        warnings: one line for each reason, with the first line that it holds for.
    """

    requests: pl.DataFrame
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_requests(paths: Sequence[Path]) -> RequestLog:
    """Read logs of requests.

    Raises:
        InputError: a file cannot be read, or no row of it is a request.
    """
    rows: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    warnings: list[str] = []
    for path in paths:
        taken, left = _read(path)
        if not taken:
            raise InputError(f"{path}: no row is a request ({_why(left)})")
        rows += taken
        for reason, lines in left.items():
            skipped[f"requests {reason}"] += len(lines)
            warnings.append(
                f"{path.name}: {len(lines)} rows left out, {reason}, the first in line {lines[0]}"
            )
    said = {name: _SCHEMA[name] for name in rows[0]}  # a log does not say the rest
    frame = pl.DataFrame(rows, schema=said).sort("arrival_ns", maintain_order=True)
    replicas = {text: number for number, text in enumerate(sorted(frame["replica"].unique(), key=_as_number))}
    numbered = frame.with_columns(
        pl.col("replica").replace_strict(replicas, return_dtype=pl.Int64),
        request=pl.int_range(pl.len(), dtype=pl.Int64),
    )
    return RequestLog(
        conform(REQUESTS, complete(REQUESTS, numbered)), dict(sorted(skipped.items())), warnings
    )


def is_log(head: bytes) -> bool:
    """Whether a file that begins like this is a log of requests: when each came, and how long it was or took.

    Args:
        head: the first bytes of the file.
    """
    row = next((row for _, row in rows_of(head.decode(errors="ignore"))), None)
    if not isinstance(row, dict):
        return False
    columns = LogColumns(row)
    timed = [name for name, _ in (*columns.moments.values(), *columns.durations.values()) if name]
    return bool(columns.moments["arrival_ns"][0]) and (len(timed) > 1 or any(columns.counts.values()))


def add_requests(run: Path, log: RequestLog) -> Manifest:
    """Add requests to a run, and say in its manifest what was left out; return the manifest."""
    opened = open_run(run)
    first = max(opened.table(REQUESTS, ["request"])["request"].to_list(), default=-1) + 1
    write_part(
        run,
        REQUESTS,
        f"log-{len(opened.parts(REQUESTS)):05d}",
        log.requests.with_columns(pl.col("request") + first),
    )
    had = opened.manifest
    manifest = replace(
        had,
        warnings=[*had.warnings, *log.warnings],
        skipped=merge_counts([had.skipped, log.skipped]),
        sources=had.sources | {REQUESTS.name: ", ".join(sorted(set(log.requests["source"])))},
    )
    write_manifest(run, manifest)
    return manifest


_SCHEMA = {**REQUESTS.dtypes, "replica": pl.String}


def _as_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (1 << 62, text)


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """The requests of a file, and the lines that are none, by reason."""
    found: dict[tuple[str, ...], LogColumns] = {}
    taken, left = [], dict[str, list[int]]()
    for line, row in _of_requests(read_rows(path)):
        if isinstance(row, str):
            left.setdefault(row, []).append(line)
            continue
        names = tuple(row)
        columns = found.get(names) or found.setdefault(names, LogColumns(row))
        request = _request(row, columns)
        if isinstance(request, str):
            left.setdefault(request, []).append(line)
        else:
            taken.append(request | {"source": path.name})
    return taken, left


def _of_requests(rows: Iterable[tuple[int, Row | str]]) -> Iterator[tuple[int, Row | str]]:
    """The rows; where some are spans about models, those of other spans are said to be none."""
    read = list(rows)
    about = [isinstance(row, dict) and any(MODEL in name for name in row) for _, row in read]
    for (line, row), is_about in zip(read, about, strict=True):
        other = any(about) and not is_about and isinstance(row, dict)
        yield line, OTHER_SPAN if other else row


def _request(row: Row, columns: LogColumns) -> dict[str, Any] | str:
    """One request, or why a row is none."""
    moments: dict[str, int] = {}
    for meaning, (name, factor) in columns.moments.items():
        at = moment_ns(row[name], factor) if name else None
        if at is not None:
            moments[meaning] = at
    if "arrival_ns" not in moments:
        return NO_ARRIVAL
    for meaning, (name, factor) in columns.durations.items():
        lasted = duration_ns(row[name], factor) if name else None
        if lasted is not None:
            moments.setdefault(meaning, moments["arrival_ns"] + lasted)
    for name in _ORDER[1:]:  # processes of one server write their moments a little apart
        if 0 <= moments["arrival_ns"] - moments.get(name, -1) <= APART_NS and name in moments:
            moments[name] = moments["arrival_ns"]
    ordered = [moments[name] for name in _ORDER if name in moments]
    if ordered != sorted(ordered):
        return BACKWARDS
    counts = {meaning: count(row[name]) if name else -1 for meaning, name in columns.counts.items()}
    said = outcome({name: row[name] for name in columns.outcomes})
    ended = said if said != "unknown" or "end_ns" not in moments else "finished"
    return {
        **{name: moments.get(name, -1) for name in _ORDER},
        **counts,
        "name": str(row[columns.name]) if columns.name else "",
        "replica": str(row[columns.replica]) if columns.replica else "0",
        "outcome": ended,
    }


def _why(left: dict[str, list[int]]) -> str:
    if not left:
        return "the file is empty"
    reason, lines = max(left.items(), key=lambda item: len(item[1]))
    known = (
        "; arrivals are in columns such as arrival_time, start_time or timestamp"
        if reason == NO_ARRIVAL
        else ""
    )
    return f"{len(lines)} rows {reason}, the first in line {lines[0]}{known}"
