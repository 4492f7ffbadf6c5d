"""Which call launched a kernel, and which range on the calling thread that call lies in.

In: spans of one rank. Out: the kernels, with columns of what was found.
"""

from __future__ import annotations

import polars as pl


def launched(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Each kernel with the runtime call that launched it: `launch_span_id`, `launch_ns`, `launch_end_ns` and
    its `thread`, null where the trace holds no such call.

    Args:
        kernels: spans of kernels, with their `correlation`.
        spans: all spans of the rank, in order of time.
    """
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).select(
        "correlation",
        launch_span_id="span_id",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        thread="tid",
    )
    calls = calls.unique("correlation", keep="first", maintain_order=True)
    return kernels.join(calls, on="correlation", how="left", maintain_order="left")


def enclosed(launches: pl.DataFrame, outer: pl.DataFrame, label: str) -> pl.DataFrame:
    """Find the span on the launching thread that holds each launch.

    Spans of one kind do not nest: the last one begun before the launch is the only candidate.

    Args:
        launches: with `span_id`, `thread`, `launch_ns` and `launch_end_ns`, null where nothing was launched.
        label: `{label}_position` and `{label}_name` are added, null where no span holds the launch.
    """
    spans = outer.select(
        thread="tid",
        outer_ns="start_ns",
        outer_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        position="position",
        name="name",
    ).sort("outer_ns", maintain_order=True)
    known = launches.drop_nulls("launch_ns").sort("launch_ns", maintain_order=True)
    last = known.select("span_id", "thread", "launch_ns", "launch_end_ns").join_asof(
        spans, left_on="launch_ns", right_on="outer_ns", by="thread", check_sortedness=False
    )
    held = last.filter(pl.col("outer_end_ns") >= pl.col("launch_end_ns")).select(
        "span_id", pl.col("position").alias(f"{label}_position"), pl.col("name").alias(f"{label}_name")
    )
    return launches.join(held, on="span_id", how="left", maintain_order="left")
