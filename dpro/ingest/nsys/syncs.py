"""Synchronisation in a Nsight Systems export: the calls that waited, and what they waited for.

In: one process's calls, and the tables of synchronisations and of recorded events. Out: rows of `syncs`. A
call's name decides the kind: the numbers of `syncType` mean different things in different versions.
"""

from __future__ import annotations

import polars as pl

from dpro.ingest.nsys.tables import Export, process_of
from dpro.schema import SYNCS

_CALLS = (
    (r"^(cuda|cu)EventRecord", "event_record"),
    (r"^(cuda|cu)StreamWaitEvent", "stream_wait_event"),
    (r"^(cuda|cu)EventSynchronize", "event_sync"),
    (r"^(cuda|cu)StreamSynchronize", "stream_sync"),
    (r"^(cudaDeviceSynchronize|cuCtxSynchronize)", "device_sync"),
)
_QUERY = r"^(cuda|cu)(Event|Stream)Query"
_WHERE = {"deviceId": pl.Int64, "streamId": pl.Int64, "eventId": pl.Int64, "correlationId": pl.Int64}
_NONE = 0xFFFFFFFF  # of streams and events
_COLUMNS = [name for name in SYNCS.columns if name != "rank"]


def sync_tables(export: Export) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Synchronisations and recorded events of all processes.

    Returns:
        Both with `process`, `correlation`, `device`, `stream`, `event_id`; the first also with its time.
    """
    times = {"start": pl.Int64, "end": pl.Int64}
    tables = (
        export.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", _WHERE | times | {"globalPid": pl.Int64}),
        export.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", _WHERE | times | {"globalPid": pl.Int64}),
    )
    synchronised, recorded = (
        table.select(
            process=process_of("globalPid"),
            correlation=pl.col("correlationId").fill_null(-1),
            device="deviceId",
            stream=pl.col("streamId").replace(_NONE, -1),
            event_id=pl.col("eventId").replace(_NONE, -1),
            start_ns="start",
            duration_ns=pl.col("end") - pl.col("start"),
        )
        for table in tables
    )
    return synchronised, recorded.drop("start_ns", "duration_ns")


def read_syncs(spans: pl.DataFrame, synchronised: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Rows of `syncs` of one process.

    Args:
        spans: its spans, with `span_id`.
        synchronised, recorded: its rows of `sync_tables`.
    """
    calls = spans.filter(pl.col("kind") == "runtime").select(
        "name", "span_id", "correlation", "start_ns", "duration_ns"
    )
    kind = pl.lit(None, dtype=pl.String)
    for pattern, called in _CALLS:
        kind = pl.when(pl.col("name").str.contains(pattern)).then(pl.lit(called)).otherwise(kind)
    named = calls.with_columns(kind=kind).drop_nulls("kind")
    details = pl.concat([synchronised.drop("start_ns", "duration_ns"), recorded]).unique(
        "correlation", keep="first", maintain_order=True
    )
    by_call = named.join(details.drop("process"), on="correlation", how="left", maintain_order="left")
    # Asking whether something has ended waits for nothing, though it is recorded as a synchronisation.
    asked = calls.filter(pl.col("name").str.contains(_QUERY))
    known = pl.concat([named.select("correlation"), asked.select("correlation")])
    uncalled = synchronised.join(known, on="correlation", how="anti").with_columns(
        kind=_kind_by_content(), span_id=pl.lit(-1, pl.Int64)
    )
    rows = _with_records(_with_device(pl.concat([by_call, uncalled], how="diagonal"), spans))
    rows = rows.with_columns(window=pl.lit(0), duration_ns=pl.col("duration_ns").clip(lower_bound=-1))
    return rows.with_columns(pl.col(pl.Int64).fill_null(-1)).select(_COLUMNS)


def _with_device(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The device of a stream is where its work ran: the one recorded is wrong in some versions (always 0)."""
    ran = spans.filter(pl.col("stream") >= 0).select("stream", ran_on="device").unique()
    alone = ran.unique("stream", keep="none")
    placed = rows.join(alone, on="stream", how="left", maintain_order="left")
    return placed.with_columns(device=pl.coalesce("ran_on", "device")).drop("ran_on")


def _kind_by_content() -> pl.Expr:
    """The kind of a synchronisation, from the stream and event that it names."""
    event, stream = pl.col("event_id") >= 0, pl.col("stream") >= 0
    return (
        pl.when(event & stream)
        .then(pl.lit("stream_wait_event"))
        .when(event)
        .then(pl.lit("event_sync"))
        .when(stream)
        .then(pl.lit("stream_sync"))
        .otherwise(pl.lit("device_sync"))
    )


def _with_records(rows: pl.DataFrame) -> pl.DataFrame:
    """Where an event is waited for, the last record of it before that."""
    records = rows.filter((pl.col("kind") == "event_record") & (pl.col("event_id") >= 0)).select(
        "event_id", "start_ns", record_stream="stream", record_correlation="correlation"
    )
    waits = pl.col("kind").is_in(["stream_wait_event", "event_sync"])
    found = rows.sort("start_ns", "span_id").join_asof(
        records.sort("start_ns"), on="start_ns", by="event_id", check_sortedness=False
    )
    return found.with_columns(
        pl.when(waits & (pl.col("event_id") >= 0)).then(name).otherwise(-1).alias(name)
        for name in ("record_stream", "record_correlation")
    )
