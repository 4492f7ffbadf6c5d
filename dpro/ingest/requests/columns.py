"""What the columns of a log of requests mean, and in which unit they are.

In: a flat row. Out: moments and durations in ns, counts, the outcome. Names are those of vLLM's and SGLang's
benchmarks and metrics, of OpenTelemetry (`gen_ai.*`), of Azure's public traces and of gateways. A unit is in
the name (`_ms`); without one a duration is in seconds, and a moment in what makes it a date of our days.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

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
_ENDED = ("abort", "cancel", "error", "fail", "false", "timeout", "reject", "0")


class LogColumns:
    """Which columns of a log mean what, found once for each set of names."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        """Find them among the names of a row."""
        self.moments = {meaning: self._timed(names, known) for meaning, known in MOMENTS.items()}
        self.durations = {meaning: self._timed(names, known) for meaning, known in DURATIONS.items()}
        self.counts = {meaning: self._named(names, known) for meaning, known in COUNTS.items()}
        self.name, self.replica = self._named(names, NAMES), self._named(names, REPLICAS)
        self.outcomes = [name for name in names if _inner(name) in OUTCOMES]

    @staticmethod
    def _named(names: Mapping[str, Any], known: tuple[str, ...]) -> str:
        """The column with the first of the known names; empty for none."""
        inner = {_inner(name): name for name in reversed(list(names))}
        return next((inner[each] for each in known if each in inner), "")

    @staticmethod
    def _timed(names: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, float]:
        """The same, and ns per unit of it; 0 where its name has no unit."""
        found: dict[str, tuple[str, float]] = {}
        for name in names:
            plain, factor = without_unit(_inner(name))
            found.setdefault(plain, (name, factor))
        return next((found[each] for each in known if each in found), ("", 0.0))


def _inner(name: str) -> str:
    """A name without what the objects that it was in are called, one within the other."""
    while (outer := next((each for each in _OUTER if name.startswith(each)), "")) not in ("", name):
        name = name[len(outer) :]
    return name


def without_unit(name: str) -> tuple[str, float]:
    """A name without its unit, and ns per unit; 0 where it has none."""
    for unit, factor in UNITS_NS.items():
        if name.endswith(f"_{unit}"):
            return name[: -len(unit) - 1], factor
    return name, 0.0


def moment_ns(value: Any, factor: float) -> int | None:
    """A moment in ns.

    Args:
        value: a number, or a date as ISO 8601 has it.
        factor: ns per unit; 0 where the name has no unit.

    Returns:
        None where it is no moment.
    """
    number = _number(value)
    if number is not None:
        if not factor:
            factor = next((unit for least, unit in _EPOCHS if abs(number) >= least), 1e9)
        whole = _integer(value)
        return whole if factor == 1.0 and whole is not None else round(number * factor)
    try:
        date = datetime.fromisoformat(str(value).strip()[:26])
    except ValueError:
        return None
    since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - datetime.fromtimestamp(0, UTC)
    return since // timedelta(microseconds=1) * 1_000


_EPOCHS = ((1e17, 1.0), (1e14, 1e3), (1e11, 1e6))  # what makes a number a date after 1973, and ns per unit


def duration_ns(value: Any, factor: float) -> int | None:
    """A duration in ns, in seconds where its name has no unit; None where it is none.

    Args:
        factor: ns per unit; 0 where the name has no unit.
    """
    number = _number(value)
    return None if number is None or number < 0 else round(number * (factor or 1e9))


def count(value: Any) -> int:
    """A count; -1 where it is none."""
    number = _number(value)
    return -1 if number is None or number < 0 else int(number)


def _number(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        return None
    return number if number is not None and abs(number) < 9e18 else None


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def outcome(values: Mapping[str, Any]) -> str:
    """How a request ended, by the columns that say so.

    Args:
        values: of these columns, by name.
    """
    said = [_outcome(_inner(name), value) for name, value in values.items()]
    return next((each for each in ("aborted", "finished") if each in said), "unknown")


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
    if any(text.startswith(each) for each in _ENDED):
        return "aborted"
    return "finished" if text in _GOOD else "unknown"
