"""Names of GPU streams by the work on them: `stream 7 (compute)`, `stream 20 (NCCL)`.

Takes work on streams, or a graph; returns names of lanes for the dashboard, reports and exports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.classify import is_communication
from dpro.replay.graph import Graph, NodeKind

STREAM = "stream"  # work of a stream on which no work is known
HANDLES = 1_000  # stream numbers from here on are addresses, and are replaced by consecutive numbers
_WORK = (NodeKind.KERNEL, NodeKind.COPY, NodeKind.TRANSFER)


def stream_work(busy: pl.DataFrame, lane: Sequence[str]) -> pl.DataFrame:
    """Return the kind of work that takes most time on each stream.

    Args:
        busy: work on streams: `name`, `duration_ns`, `computes` (a kernel, not a copy), `moves` (a member of
            a collective), and the columns of `lane`.
        lane: columns that identify a stream.

    Returns:
        The columns of `lane`, and `work`: NCCL, transfer (by another library), compute or copy.
    """
    names = busy["name"].unique()
    moving = names.filter(pl.Series(map(is_communication, names), dtype=pl.Boolean))
    moves = pl.col("moves") | pl.col("name").is_in(moving.implode())
    work = (
        pl.when(moves & pl.col("name").str.contains("(?i)nccl"))
        .then(pl.lit("NCCL"))
        .when(moves)
        .then(pl.lit("transfer"))
        .when("computes")
        .then(pl.lit("compute"))
        .otherwise(pl.lit("copy"))
    )
    totals = busy.group_by(*lane, work=work).agg(pl.col("duration_ns").sum())
    return totals.sort("duration_ns", "work").group_by(*lane).agg(pl.col("work").last())


def stream_label(work: pl.Expr, stream: pl.Expr, counted: pl.Expr) -> pl.Expr:
    """Return an expression that names streams: `stream 7 (compute)`, or `compute 1` if numbers are addresses.

    Args:
        work: kind of work on the stream.
        stream: number of the stream.
        counted: number of the stream among those with the same work.
    """
    named = pl.format("stream {} ({})", stream, work)
    numbered = pl.when(work == STREAM).then(pl.format("stream {}", stream)).otherwise(named)
    return pl.when(stream < HANDLES).then(numbered).otherwise(pl.format("{} {}", work, counted))


def lane_names(graph: Graph) -> list[str]:
    """Return [L] readable names of the lanes of a graph."""
    lanes = pl.DataFrame(graph.lanes, schema={"rank": pl.Int64, "lane": pl.String}, orient="row")
    lanes = lanes.with_row_index("number").cast({"number": pl.Int64})
    stream = pl.col("lane").str.extract(r"^stream (\d+)$").cast(pl.Int64)
    named = lanes.with_columns(stream=stream).join(
        stream_work(_busy(graph), ["number"]), on="number", how="left", maintain_order="left"
    )
    work = pl.col("work").fill_null(STREAM)
    counted = pl.int_range(1, pl.len() + 1).over("rank", "work")
    called = stream_label(work, pl.col("stream"), counted)
    name = pl.when(pl.col("stream").is_not_null()).then(called).otherwise("lane")
    return named.select(name).to_series().to_list()


def _busy(graph: Graph) -> pl.DataFrame:
    """Return the measured work of all streams, including the waits of collectives for their members."""
    nodes = graph.nodes
    on_stream = np.array([what.startswith(f"{STREAM} ") for _, what in graph.lanes] + [False], np.bool_)
    work = np.flatnonzero(on_stream[nodes.lane] & np.isin(nodes.kind, _WORK))
    arrived = np.flatnonzero(nodes.kind == NodeKind.ARRIVE)
    columns = {name: getattr(nodes, name) for name in ("collective", "rank")}
    since = pl.DataFrame(
        {name: of[arrived] for name, of in columns.items()} | {"since": nodes.measured_start[arrived]}
    )
    frame = pl.DataFrame({
        "number": nodes.lane[work], "name": pl.Series(graph.names, dtype=pl.String).gather(nodes.name[work]),
        "start": nodes.measured_start[work], "end": nodes.measured_end[work],
        "computes": nodes.kind[work] == NodeKind.KERNEL, "moves": nodes.kind[work] == NodeKind.TRANSFER,
        **{name: of[work] for name, of in columns.items()},
    })  # fmt: skip
    frame = frame.join(since.unique(["collective", "rank"]), on=["collective", "rank"], how="left")
    start = pl.when("moves").then(pl.coalesce("since", "start")).otherwise("start")
    return frame.with_columns(pl.col("number").cast(pl.Int64), duration_ns=pl.col("end") - start)
