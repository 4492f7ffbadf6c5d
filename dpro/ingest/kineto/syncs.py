"""Synchronisation in a Kineto trace: the calls that waited, and the streams or events they waited for.

In: spans and `cuda_sync` events (recent PyTorch writes them on request). Out: rows of `syncs`. Runtime calls
that no such event explains are classified by their name; what they waited for is then unknown (-1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from dpro.ingest.kineto.events import EventArguments
from dpro.schema import SYNCS

_EVENT_NAMES = {
    "Stream Wait Event": "stream_wait_event",
    "Event Sync": "event_sync",
    "Stream Sync": "stream_sync",
    "Context Sync": "device_sync",
}
# Runtime and driver calls, CUDA and HIP, with and without suffixes such as `_v2`, `WithFlags`, `_ptsz`.
_CALL_NAMES = (
    (r"^(cuda|hip|cu)EventRecord", "event_record"),
    (r"^(cuda|hip|cu)StreamWaitEvent", "stream_wait_event"),
    (r"^(cuda|hip|cu)EventSynchronize", "event_sync"),
    (r"^(cuda|hip|cu)StreamSynchronize", "stream_sync"),
    (r"^((cuda|hip)DeviceSynchronize|cuCtxSynchronize)", "device_sync"),
)
_TEXTS = {"name": pl.String, "kind": pl.String}


def read_syncs(spans: pl.DataFrame, events: pl.DataFrame, args: Sequence[EventArguments]) -> pl.DataFrame:
    """Rows of `syncs`.

    Args:
        spans: all spans of the rank, with `span_id`.
        events: the `cuda_sync` events, with `position`.
    """
    calls = spans.select("kind", "name", "correlation", "start_ns", "duration_ns", "span_id").filter(
        pl.col("kind") == "runtime"
    )
    explained = _explained(events, args, calls)
    names = calls["name"].unique().to_list()
    kinds = pl.DataFrame({"name": names, "kind": [*map(_kind_of_call, names)]}, schema_overrides=_TEXTS)
    named = calls.drop("kind").join(kinds.drop_nulls(), on="name", maintain_order="left")
    unexplained = named.join(explained, on="correlation", how="anti")
    return pl.concat([explained, _unexplained(unexplained)]).sort("start_ns", "span_id", maintain_order=True)


def _kind_of_call(name: str) -> str | None:
    return next((kind for pattern, kind in _CALL_NAMES if re.search(pattern, name)), None)


def _explained(events: pl.DataFrame, args: Sequence[EventArguments], calls: pl.DataFrame) -> pl.DataFrame:
    """Sync events, each with the span of its call; the time is the call's where there is one."""
    mine = [args[position] for position in events["position"]]
    details = {
        "device": [a.device for a in mine],
        "stream": [a.stream for a in mine],
        "event_id": [a.wait_on_event for a in mine],
        "record_stream": [a.wait_on_stream for a in mine],
        "record_correlation": [a.wait_on_record for a in mine],
    }
    rows = events.select(
        pl.col("name").replace_strict(_EVENT_NAMES, default=None, return_dtype=pl.String).alias("kind"),
        "correlation",
        "start_ns",
        "duration_ns",
    ).with_columns(pl.Series(name, values, dtype=pl.Int64, strict=False) for name, values in details.items())
    by_correlation = calls.select("correlation", "span_id").unique(
        "correlation", keep="first", maintain_order=True
    )
    joined = rows.drop_nulls("kind").join(by_correlation, on="correlation", how="left", maintain_order="left")
    return _columns(joined.with_columns(pl.col(pl.Int64).fill_null(-1)))


def _unexplained(calls: pl.DataFrame) -> pl.DataFrame:
    unknown = ("device", "stream", "event_id", "record_stream", "record_correlation")
    return _columns(calls.with_columns(pl.lit(-1, dtype=pl.Int64).alias(name) for name in unknown))


def _columns(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(name for name in SYNCS.columns if name not in ("rank", "window"))
