"""Rows of table `requests` from request logs of a server.

Reads files; returns rows in order of arrival, and the number of rows left out, by reason, with the first line
of each. Times stay on the clock of the log: since its start, or since 1970.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl

from dpro.errors import InputError
from dpro.limits import MAX_NESTING, MAX_WHOLE_BYTES, read_small
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, merge_counts, open_run, write_manifest, write_part
from dpro.table import complete
from dpro.words import whole_number

NO_ARRIVAL = "without an arrival time"
OTHER_SPAN = "of spans without a model"
MODEL = "gen_ai_"  # part of the attribute names of spans with a model
BACKWARDS = "with times that run backwards"
APART_NS = 5_000_000  # times from another process may precede a request's arrival by this much
_ORDER = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")


@dataclass
class RequestLog:
    """Requests in log files.

    Attributes:
        requests: rows of `requests`.
        skipped: number of rows left out, by reason.
        warnings: one line for each reason, with the first line that it applies to.
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
    said = {name: _SCHEMA[name] for name in rows[0]}  # a log lacks the other columns
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
    """Return whether a file that begins with `head` is a request log: arrivals with durations or sizes."""
    row = next((row for _, row in rows_of(head.decode(errors="ignore"))), None)
    if not isinstance(row, dict):
        return False
    columns = LogColumns(row)
    timed = [name for name, _ in (*columns.moments.values(), *columns.durations.values()) if name]
    return bool(columns.moments["arrival_ns"][0]) and (len(timed) > 1 or any(columns.counts.values()))


def add_requests(run: Path, log: RequestLog) -> Manifest:
    """Add requests to a run and the rows left out to its manifest; return the manifest."""
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
    return (whole_number(text), "") if whole_number(text) >= 0 else (1 << 62, text)


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Return the requests of a file, and the numbers of lines left out, by reason."""
    columns_by_names: dict[tuple[str, ...], LogColumns] = {}
    taken, left = [], dict[str, list[int]]()
    for line, row in _of_requests(read_rows(path)):
        if isinstance(row, str):
            left.setdefault(row, []).append(line)
            continue
        names = tuple(row)
        columns = columns_by_names.get(names) or columns_by_names.setdefault(names, LogColumns(row))
        request = _request(row, columns)
        if isinstance(request, str):
            left.setdefault(request, []).append(line)
        else:
            taken.append(request | {"source": path.name})
    return taken, left


def _of_requests(rows: Iterable[tuple[int, Row | str]]) -> Iterator[tuple[int, Row | str]]:
    """Mark rows of other spans as left out, where some rows are spans with a model."""
    read = list(rows)
    about = [isinstance(row, dict) and any(MODEL in name for name in row) for _, row in read]
    some_are = any(about)
    for (line, row), is_about in zip(read, about, strict=True):
        other = some_are and not is_about and isinstance(row, dict)
        yield line, OTHER_SPAN if other else row


def _request(row: Row, columns: LogColumns) -> dict[str, Any] | str:
    """Return a row as a request, or why it is not one."""
    moments: dict[str, int] = {}
    for meaning, (name, factor) in columns.moments.items():
        moment = moment_ns(row[name], factor) if name else None
        if moment is not None:
            moments[meaning] = moment
    if "arrival_ns" not in moments:
        return NO_ARRIVAL
    for meaning, (name, factor) in columns.durations.items():
        lasted = duration_ns(row[name], factor) if name else None
        if lasted is not None:
            moments.setdefault(meaning, moments["arrival_ns"] + lasted)
    for name in _ORDER[1:]:  # clocks of a server's processes differ a little
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
    columns = (
        "; arrivals are in columns such as arrival_time, start_time or timestamp"
        if reason == NO_ARRIVAL
        else ""
    )
    return f"{len(lines)} rows {reason}, the first in line {lines[0]}{columns}"


# Meaning and unit of the columns of a request log.

UNITS_NS = {
    "unix_nano": 1.0, "nanoseconds": 1.0, "ns": 1.0, "us": 1e3, "microseconds": 1e3, "ms": 1e6,
    "milliseconds": 1e6, "s": 1e9, "sec": 1e9, "secs": 1e9, "seconds": 1e9,
}  # fmt: skip
_OUTER = (
    "usage_",
    "metrics_",
    "attributes_",
    "gen_ai_usage_",
    "gen_ai_latency_",
    "gen_ai_server_",
    "gen_ai_",
)

MOMENTS = {
    "arrival_ns": (
        "arrival",
        "arrival_time",
        "arrived",
        "arrived_at",
        "arrival_timestamp",
        "start",
        "start_time",
        "start_timestamp",
        "request_start_time",
        "sent",
        "send_time",
        "created",
        "created_at",
        "created_time",
        "timestamp",
        "time",
        "datetime",
    ),
    "queued_ns": (
        "queued",
        "queued_time",
        "queued_ts",
    ),
    "scheduled_ns": (
        "scheduled",
        "scheduled_time",
        "scheduled_ts",
        "first_scheduled_time",
        "schedule_time",
    ),
    "first_token_ns": (
        "first_token",
        "first_token_time",
        "first_token_ts",
        "first_token_timestamp",
    ),
    "end_ns": (
        "end",
        "end_time",
        "end_timestamp",
        "last_token",
        "last_token_time",
        "last_token_ts",
        "finished",
        "finished_time",
        "finish_time",
        "finished_at",
        "completed_at",
        "completion_time",
        "done_time",
    ),
}
DURATIONS = {
    "scheduled_ns": (
        "queue_time",
        "queue",
        "time_in_queue",
        "queuing_delay",
        "queueing_delay",
        "waiting_time",
        "queue_duration",
    ),
    "first_token_ns": (
        "ttft",
        "time_to_first_token",
    ),
    "end_ns": (
        "latency",
        "e2e",
        "e2e_latency",
        "e2e_time",
        "request_latency",
        "total_latency",
        "duration",
        "total_time",
        "end_to_end_latency",
        "elapsed",
    ),
}
COUNTS = {
    "prompt_tokens": (
        "prompt_tokens",
        "input_tokens",
        "input_len",
        "input_length",
        "prompt_len",
        "prompt_length",
        "num_prompt_tokens",
        "context_tokens",
        "isl",
        "num_prefill_tokens",
        "prompt_size",
    ),
    "output_tokens": (
        "output_tokens",
        "completion_tokens",
        "generated_tokens",
        "output_len",
        "output_length",
        "num_generation_tokens",
        "num_output_tokens",
        "generation_tokens",
        "osl",
        "num_decode_tokens",
        "token_size",
    ),
    "cached_tokens": (
        "cached_tokens",
        "num_cached_tokens",
        "cache_read_input_tokens",
        "prompt_tokens_details_cached_tokens",
        "cached_prompt_tokens",
    ),
    "evictions": (
        "evictions",
        "num_preemptions",
        "preemptions",
        "num_retractions",
        "retraction_count",
    ),
}
NAMES = (
    "request_id",
    "req_id",
    "rid",
    "id",
    "request",
    "response_id",
    "trace_id",
    "span_id",
    "x_request_id",
    "context_trace_id",
)
REPLICAS = (
    "replica",
    "replica_id",
    "dp_rank",
    "data_parallel_rank",
    "engine",
    "engine_index",
    "instance",
    "device",
)
OUTCOMES = ("finish_reason", "finished_reason", "response_finish_reasons", "outcome", "status", "status_code",
            "http_status", "success", "error")  # fmt: skip
_GOOD = ("finished", "stop", "length", "ok", "success", "true", "complete", "completed", "eos", "1")
_ABORTED = ("abort", "cancel", "error", "fail", "false", "timeout", "reject", "0")


class LogColumns:
    """Meaning of the columns of a log, found once for each set of names."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        """Find the columns among the names of a row."""
        self.moments = {meaning: self._timed(names, spellings) for meaning, spellings in MOMENTS.items()}
        self.durations = {meaning: self._timed(names, spellings) for meaning, spellings in DURATIONS.items()}
        self.counts = {meaning: self._named(names, spellings) for meaning, spellings in COUNTS.items()}
        self.name, self.replica = self._named(names, NAMES), self._named(names, REPLICAS)
        self.outcomes = [name for name in names if _inner(name) in OUTCOMES]

    @staticmethod
    def _named(names: Mapping[str, Any], spellings: tuple[str, ...]) -> str:
        """Return the column with the first of the known names; empty for none."""
        inner = {_inner(name): name for name in reversed(list(names))}
        return next((inner[spelling] for spelling in spellings if spelling in inner), "")

    @staticmethod
    def _timed(names: Mapping[str, Any], spellings: tuple[str, ...]) -> tuple[str, float]:
        """Return the column with the first of the known names (empty for none), and its unit in ns or 0."""
        columns: dict[str, tuple[str, float]] = {}
        for name in names:
            plain, factor = without_unit(_inner(name))
            columns.setdefault(plain, (name, factor))
        return next((columns[spelling] for spelling in spellings if spelling in columns), ("", 0.0))


def _inner(name: str) -> str:
    """Strip the names of enclosing objects from the beginning of a name."""
    while (outer := next((outer_name for outer_name in _OUTER if name.startswith(outer_name)), "")) not in (
        "",
        name,
    ):
        name = name[len(outer) :]
    return name


def without_unit(name: str) -> tuple[str, float]:
    """Split a name into the part before its unit and the unit in ns; 0 without one."""
    for unit, factor in UNITS_NS.items():
        if name.endswith(f"_{unit}"):
            return name[: -len(unit) - 1], factor
    return name, 0.0


def moment_ns(value: Any, factor: float) -> int | None:
    """Return a time in ns; None where it is invalid.

    Args:
        value: a number, or an ISO 8601 date.
        factor: unit in ns; 0 where the name has no unit.
    """
    number = _number(value)
    if number is not None:
        factor = factor or next((unit for least, unit in _EPOCHS if abs(number) >= least), 1e9)
        whole = _integer(value)
        ns = whole if factor == 1.0 and whole is not None else round(number * factor)
        return ns if abs(ns) <= MAX_NS else None
    try:
        date = datetime.fromisoformat(str(value).strip())
    except ValueError:
        return None
    since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - datetime.fromtimestamp(0, UTC)
    ns = since // timedelta(microseconds=1) * 1_000
    return ns if abs(ns) <= MAX_NS else None


_EPOCHS = ((1e17, 1.0), (1e14, 1e3), (1e11, 1e6))  # least number that is a date after 1973, and unit in ns
MAX_NS = 1 << 62  # latest time, the year 2116; twice the maximum duration of a request
MAX_TOKENS = 1 << 24  # maximum count of tokens


def duration_ns(value: Any, factor: float) -> int | None:
    """Return a duration in ns, read as seconds where its name has no unit; None where it is invalid.

    Args:
        factor: unit in ns; 0 where the name has no unit.
    """
    number = _number(value)
    ns = -1.0 if number is None else number * (factor or 1e9)
    return round(ns) if 0 <= ns <= MAX_NS // 2 else None


def count(value: Any) -> int:
    """Return a count; -1 where it is invalid."""
    number = _number(value)
    return int(number) if number is not None and 0 <= number <= MAX_TOKENS else -1


def _number(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 9e18 else None


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def outcome(values: Mapping[str, Any]) -> str:
    """Return how a request ended: `aborted`, `finished` or `unknown`.

    Args:
        values: values of the outcome columns, by name.
    """
    said = [_outcome(_inner(name), value) for name, value in values.items()]
    return next((word for word in ("aborted", "finished") if word in said), "unknown")


def _outcome(name: str, value: Any) -> str:
    if isinstance(value, list):
        value = value[0] if value else ""
    text = str(value).strip().lower()
    if text in ("", "none", "null"):
        return "unknown"
    if name == "error":
        return "aborted"
    if text.isdigit() and len(text) == 3:
        return "finished" if text.startswith("2") else "aborted"
    if any(text.startswith(word) for word in _ABORTED):
        return "aborted"
    return "finished" if text in _GOOD else "unknown"


# Rows of a request log in JSON, JSON lines or CSV.

Row: TypeAlias = dict[str, Any]
BAD = "not a JSON object"
DEEP = f"nested more than {MAX_NESTING} deep"
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_VALUES = ("string_value", "int_value", "double_value", "bool_value")  # types of OpenTelemetry attributes
_LISTS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "start_times",
    "itls",
    "errors",
)  # keys of vLLM's and SGLang's benchmarks


def read_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yield the number of each line, or of each entry, with its row, or with what is wrong with it.

    Raises:
        InputError: the file cannot be read as text.
    """
    try:
        text = read_small(path, MAX_WHOLE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file; give JSON lines, JSON or CSV") from error
    yield from rows_of(text)


def rows_of(text: str) -> Iterator[tuple[int, Row | str]]:
    """Yield the number of each line or entry of a text, with its row, or with what is wrong with it."""
    if not text.lstrip().startswith(("{", "[")):
        reader = csv.DictReader(io.StringIO(text, newline=None))
        try:
            for row in reader:
                values = {
                    snake(name): value for name, value in row.items() if name and value not in (None, "")
                }
                yield reader.line_num, values if None not in row else "more values than columns"
        except csv.Error as error:
            yield reader.line_num + 1, f"not CSV ({error})"
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                yield number, BAD
                continue
            yield from _entries(number, entry)
        return
    for number, entry in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield from _entries(number, entry)


def _entries(number: int, entry: Any) -> Iterator[tuple[int, Row | str]]:
    if not isinstance(entry, dict):
        yield number, BAD
    elif _is_deep(entry):
        yield number, DEEP
    elif "resourceSpans" in entry or "resource_spans" in entry:
        for span in _spans(entry):
            yield number, span
    elif isinstance(entry.get("input_lens"), list):
        yield from enumerate(_listed(entry), 1)
    else:
        yield number, flat(entry)


def _is_deep(entry: Any) -> bool:
    """Return whether a JSON value is nested more deeply than `MAX_NESTING`."""
    level = [entry]
    for _ in range(MAX_NESTING):
        held = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for values in held for part in values if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _spans(entry: Any) -> Iterator[Row]:
    """Yield the spans of an OpenTelemetry export, at any depth."""
    if isinstance(entry, dict):
        if "startTimeUnixNano" in entry or "start_time_unix_nano" in entry:
            yield flat(entry)
            return
        entry = list(entry.values())
    if isinstance(entry, list):
        for part in entry:
            yield from _spans(part)


def _listed(entry: Mapping[str, Any]) -> Iterator[Row]:
    lists = {name: entry[name] for name in _LISTS if isinstance(entry.get(name), list)}
    for place in range(max(map(len, lists.values()))):
        row = {name: values[place] for name, values in lists.items() if place < len(values)}
        itls = row.pop("itls", None)
        if isinstance(itls, list) and isinstance(row.get("ttfts"), int | float):
            row["latency"] = row["ttfts"] + sum(
                latency for latency in itls if isinstance(latency, int | float)
            )
        yield {_SINGULAR.get(name, name): value for name, value in row.items()}


_SINGULAR = {
    "input_lens": "input_len", "output_lens": "output_len", "ttfts": "ttft", "start_times": "start_time",
    "errors": "error",
}  # fmt: skip


def flat(entry: Mapping[str, Any]) -> Row:
    """Flatten nested objects to one level of names; OpenTelemetry's lists of keys and values, too."""
    row: Row = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            row |= {f"{snake(name)}_{inner}": part for inner, part in flat(value).items()}
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(part, dict) and "key" in part for part in value)
        ):
            row |= {snake(str(part["key"])): _attribute(part.get("value")) for part in value}
        else:
            row[snake(name)] = value
    return row


def _attribute(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return next((part for name, part in value.items() if snake(name) in _VALUES), None)


def snake(name: str) -> str:
    """Return a name in snake case."""
    return "_".join(word for word in _WORDS.split(name.strip()) if word).lower()
