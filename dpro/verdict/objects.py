"""Python objects that ranks exchange: pickled, sent as bytes, unpickled, and read in Python.

Takes tables `collectives` and `spans`; returns each exchange, and how long it blocks its thread. PyTorch
sends objects in two successive calls of one kind: the lengths, as int64, then the pickled bytes.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.steps import END

BYTES, LENGTHS = "uint8", "int64"
_OF_THREAD = ["rank", "window", "tid"]


def exchanges_of_objects(collectives: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the exchanges of objects that threads wait for in deep windows.

    Args:
        collectives, spans: the tables, or rows of them.

    Returns:
        `rank`, `window`, `op`, `bytes` (that the rank sends), `took_ns`: from the end of the last span before
        pickling to the start of the first span after unpickling.
    """
    calls = (
        collectives.filter((pl.col("launch_span_id") >= 0) & (pl.col("duration_ns") >= 0))
        .select("rank", "window", "group", "op", "dtype", "bytes_in", END, span_id="launch_span_id")
        .join(spans.select(*_OF_THREAD, "span_id", called_ns="start_ns"), on=["rank", "window", "span_id"])
        .sort(*_OF_THREAD, "called_ns")
    )
    before = {name: pl.col(name).shift(1).over(_OF_THREAD) for name in ("group", "op", "dtype")}
    exchanges = calls.with_columns(
        first_called_ns=pl.col("called_ns").shift(1).over(_OF_THREAD),
        is_exchange=(pl.col("dtype") == BYTES)
        & (before["dtype"] == LENGTHS)
        & (before["op"] == pl.col("op"))
        & (before["group"] == pl.col("group")),
    ).filter("is_exchange")
    ends = spans.select(*_OF_THREAD, began_ns=END).sort("began_ns")
    starts = spans.select(*_OF_THREAD, over_ns="start_ns").sort("over_ns")
    return (
        exchanges.sort("first_called_ns")
        .join_asof(
            ends, left_on="first_called_ns", right_on="began_ns", by=_OF_THREAD, check_sortedness=False
        )
        .sort("end_ns")
        .join_asof(
            starts, left_on="end_ns", right_on="over_ns", by=_OF_THREAD, strategy="forward",
            check_sortedness=False,
        )
        .select(
            "rank", "window", "op", bytes="bytes_in",
            took_ns=pl.col("over_ns").fill_null(pl.col("end_ns"))
            - pl.col("began_ns").fill_null(pl.col("first_called_ns")),
        )
    )  # fmt: skip
