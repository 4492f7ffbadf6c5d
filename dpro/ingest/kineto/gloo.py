"""Communication on CPU in a Kineto trace: rows of `collectives` from gloo's ranges.

In: spans of one rank and the arguments of their events. Out: one row per `gloo:*` range (a worker thread at
work), with the `c10d::*` call that submitted it. The trace links the two by nothing but order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.ingest.derived.launches import enclosed
from dpro.ingest.kineto.collectives import COLUMNS
from dpro.ingest.kineto.events import NO_ARGS, EventArguments
from dpro.ingest.kineto.messages import Groups, calls_of, group_columns, payload_columns, peer_of

_POINT_TO_POINT = ("send", "recv")


def gloo_collectives(
    spans: pl.DataFrame, args: Sequence[EventArguments], groups: Groups, rank: int
) -> pl.DataFrame:
    """One row per `gloo:*` range.

    Args:
        spans: all spans of the rank, with `span_id` and `position`.
        groups: ranks by name of process group.
    """
    ranges = spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("gloo:"))
    if ranges.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    ranges, calls = _with_operation(ranges), _with_operation(_calls(spans))
    # Collectives wait in one queue; a send or receive starts at once.
    queues = [pl.col("op") == op for op in _POINT_TO_POINT] + [~pl.col("op").is_in(_POINT_TO_POINT)]
    pairs = pl.concat(_paired(ranges.filter(queue), calls.filter(queue)) for queue in queues)
    rows = [
        _row(pair, args, groups, rank) for pair in pairs.sort("start_ns", "span_id").iter_rows(named=True)
    ]
    return calls_of(rows, COLUMNS)


def _calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Calls into c10d that gloo may have run: those that hold no `nccl:*` range."""
    calls = spans.filter((pl.col("kind") == "cpu_op") & pl.col("name").str.starts_with("c10d::"))
    nccl = spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("nccl:")).select(
        "span_id",
        thread="tid",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    on_nccl = enclosed(nccl, calls, "call")["call_position"].drop_nulls()
    return calls.filter(~pl.col("position").is_in(on_nccl.to_list()))


def _with_operation(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows that are a collective, send or receive, in the order they began, with its name as `op`."""
    names = frame["name"].unique().to_list()
    ops = pl.col("name").replace_strict(names, [operation(name) for name in names], return_dtype=pl.String)
    return frame.with_columns(op=ops).filter(pl.col("op") != "").sort("start_ns", "span_id")


def _paired(ranges: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The k-th range with the k-th call, after the ranges whose call was made before the window opened.

    How many those are is not recorded. A range never starts before its call and is of its call's operation:
    the smallest number for which most pairs agree is taken, and a pair that does not agree is not made.
    """
    orphans, agree = _best_shift(ranges, calls)
    linked = calls.select(
        call_span_id="span_id", call_position="position", call_ns="start_ns", call_op="op"
    ).with_row_index("order")
    kept = linked.head(len(agree)).filter(pl.Series(agree, dtype=pl.Boolean))
    order = (pl.int_range(pl.len()) - orphans).cast(pl.Int64)
    numbered = ranges.with_columns(order=order)
    return numbered.join(kept.cast({"order": pl.Int64}), on="order", how="left", maintain_order="left")


def _best_shift(ranges: pl.DataFrame, calls: pl.DataFrame) -> tuple[int, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Number of leading ranges without a call, and which of the pairs that follow agree."""
    starts, issued = ranges["start_ns"].to_numpy(), calls["start_ns"].to_numpy()
    ops = ranges["op"].to_numpy()
    # Gloo carries a reduce-scatter out as an all-reduce, and names its range so.
    called = calls["op"].replace("reduce_scatter", "all_reduce").to_numpy()
    best = 0, np.zeros(0, dtype=np.bool_)
    for shift in range(len(starts)):
        count = min(len(starts) - shift, len(issued))
        mine = slice(shift, shift + count)
        agree = (starts[mine] >= issued[:count]) & (ops[mine] == called[:count])
        if agree.sum() > best[1].sum():
            best = shift, agree
        if best[1].sum() >= count:  # no later shift can do better
            break
    return best


def _row(
    pair: Mapping[str, Any], args: Sequence[EventArguments], groups: Groups, rank: int
) -> dict[str, Any]:
    ranged = args[pair["position"]]
    call = NO_ARGS if pair["call_position"] is None else args[pair["call_position"]]
    op = pair["call_op"] or pair["op"]
    group = group_columns(NO_ARGS, groups)
    ranks = group["group_ranks"]
    return {
        "op": op,
        **group,
        "sequence": -1,
        **payload_columns(op, NO_ARGS, ranged, len(ranks)),
        "peer": peer_of(op, NO_ARGS, call, rank, ranks),
        "enqueued_ns": -1 if pair["call_ns"] is None else pair["call_ns"],
        "start_ns": pair["start_ns"],
        "duration_ns": pair["duration_ns"],
        "algorithm": "",
        "protocol": "",
        "span_id": pair["span_id"],
        "launch_span_id": -1 if pair["call_span_id"] is None else pair["call_span_id"],
        "source": "kineto gloo range",
    }
