"""Events of a Kineto trace as columns.

In: decoded events. Out: one frame, sorted by time, with the columns of `spans` and the place of each row in
the list of events, where the rarer arguments are looked up. What rows mean together is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl
from msgspec import Raw

from dpro.ingest.kineto_json import NO_ARGS, Event
from dpro.schema import GPU_WORK_KINDS

SYNC = "cuda_sync"  # events that explain a runtime call; they are no spans

# Category of an event in lower case (old traces capitalise it) -> kind of a span.
_KINDS = {
    "cpu_op": "cpu_op",
    "operator": "cpu_op",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "hip_runtime": "runtime",
    "runtime": "runtime",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "user_annotation": "annotation",
    "gpu_user_annotation": "gpu_annotation",
    "python_function": "python",
    "overhead": "overhead",
    "cuda_sync": SYNC,
}
_ON_GPU = pl.col("kind").is_in([*GPU_WORK_KINDS, "gpu_annotation"])
_ON_CPU = ~pl.col("kind").is_in([*GPU_WORK_KINDS, "gpu_annotation", SYNC])


def columns(events: Sequence[Event], base_ns: int) -> tuple[pl.DataFrame, dict[str, int]]:
    """Rows that have a kind and a time, by start and then the longer first.

    Args:
        events: as decoded.
        base_ns: what is added to every time, ns.

    Returns:
        The frame, whose `position` is the row's index in `events`, and what was not taken, by reason.
        Arrows, metadata, instants and the profiler's own frame are no loss: they are not counted.
    """
    kinds, skipped = _kinds(events)
    positions = [position for position, kind in enumerate(kinds) if kind]
    taken = [events[position] for position in positions]
    args = [event.args or NO_ARGS for event in taken]
    pids, tids = _ids([event.pid for event in taken]), _ids([event.tid for event in taken])
    frame = pl.DataFrame(
        {
            "position": pl.Series(positions, dtype=pl.Int64),
            "kind": pl.Series([kinds[position] for position in positions], dtype=pl.String),
            "name": pl.Series([event.name for event in taken], dtype=pl.String),
            "start_ns": _nanoseconds([event.time for event in taken]) + base_ns,
            "duration_ns": _nanoseconds([event.duration for event in taken]),
            "pid": pids,
            "tid": tids,
            "device": _numbers([a.device for a in args]).fill_null(pids),
            "stream": _numbers([a.stream for a in args]).fill_null(tids),
            "correlation": _numbers([a.correlation for a in args]),
            "external_id": _numbers([a.external_id for a in args]).fill_null(
                _numbers([a.external_id_2021 for a in args])
            ),
            "sequence_number": _numbers([a.sequence_number for a in args]),
            "forward_thread": _numbers([a.forward_thread for a in args]),
            "bytes": _numbers([a.bytes for a in args]),
            "shapes": _texts([a.shapes for a in args]).fill_null(_texts([a.shapes_2020 for a in args])),
        }
    )
    whole = frame.filter(pl.col("start_ns").is_not_null() & (pl.col("duration_ns") >= 0))
    if whole.height < frame.height:
        skipped["spans without a time or duration"] = frame.height - whole.height
    return _placed(whole), skipped


def _kinds(events: Sequence[Event]) -> tuple[list[str | None], dict[str, int]]:
    """Kind of every event, None for what is not taken, and the count of what is lost by that."""
    known = {
        category: _KINDS.get((category or "").lower()) for category in {event.category for event in events}
    }
    kinds = [known[event.category] if event.phase == "X" else None for event in events]
    lost: Counter[str] = Counter()
    for event, kind in zip(events, kinds, strict=True):
        if kind is None and event.phase == "X" and event.category not in ("Trace", "trace"):
            lost[f"category {event.category or '(none)'}"] += 1
        elif event.phase == "B":
            lost["begin/end events"] += 1
    return kinds, dict(sorted(lost.items()))


def _placed(frame: pl.DataFrame) -> pl.DataFrame:
    """A CPU span has process and thread, a GPU span device and stream; the others are -1."""
    on_gpu, on_cpu = ["device", "stream", "bytes"], ["pid", "tid"]
    return (
        frame.with_columns(
            *(pl.when(_ON_CPU).then(name).otherwise(None).alias(name) for name in on_cpu),
            *(pl.when(_ON_GPU).then(name).otherwise(None).alias(name) for name in on_gpu),
            pl.col("shapes").fill_null(""),
        )
        .with_columns(pl.col(pl.Int64).fill_null(-1))
        .sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
    )


def _numbers(values: Sequence[Any]) -> pl.Series:
    """Whole numbers, also those written as text; null where there is none or it does not fit int64."""
    return pl.Series(values, dtype=pl.Int64, strict=False)


def _ids(values: Sequence[Any]) -> pl.Series:
    """Ids of processes and threads, also those written as `stream 7`."""
    numbers = _numbers(values)
    if not numbers.null_count():
        return numbers
    texts = pl.Series([value if isinstance(value, str) else None for value in values], dtype=pl.String)
    return numbers.fill_null(texts.str.extract(r"(\d+)").cast(pl.Int64, strict=False))


def _nanoseconds(values: Sequence[Raw]) -> pl.Series:
    """Microseconds as written, in ns: through decimals, since a float loses digits of an absolute time."""
    texts = (
        pl.Series([bytes(value) for value in values], dtype=pl.Binary).cast(pl.String).str.strip_chars('"')
    )
    exact = texts.cast(pl.Decimal(38, 3), strict=False)
    return (exact * 1000).cast(pl.Int64, strict=False)


def _texts(values: Sequence[Raw]) -> pl.Series:
    """JSON as it was written, without blanks; null where there is none."""
    texts = pl.Series([bytes(value) for value in values], dtype=pl.Binary).cast(pl.String, strict=False)
    dense = texts.str.replace_all(r"\s+", "")
    return dense.replace({"": None, "null": None})
