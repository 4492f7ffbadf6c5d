"""Communication in a Kineto trace: rows of `collectives` from kernels (NCCL, RCCL, DeepEP, …) and gloo ranges.

In: spans of one rank and the arguments of their events. Out: what each communication kernel or worker-thread range
moved, for whom, and which call issued it. Matching the ranks with each other is left to `dpro.replay`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from dpro.classify import classify, is_communication, operation
from dpro.ingest.dtypes import dtype_bytes, dtype_name
from dpro.ingest.kineto_json import NO_ARGS, Args
from dpro.schema import COLLECTIVES

_SCHEMA = {
    name: dtype
    for name, dtype in COLLECTIVES.dtypes.items()
    if name not in ("rank", "window", "collective_id")
}
_ALGORITHM = re.compile(r"_(RING|TREE|COLLNET\w*?|NVLS\w*?|PAT)_(LL128|LL|SIMPLE)(?=_|\(|$)")


def gpu_collectives(
    spans: pl.DataFrame, args: Sequence[Args], groups: Mapping[str, list[int]]
) -> pl.DataFrame:
    """One row per communication kernel.

    Args:
        spans: all spans of the rank, with `span_id` and `position`.
        args: arguments by position.
        groups: ranks by name of process group, for lists the trace abbreviates.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    kernels = _with_issuers(kernels.filter(pl.col("name").is_in(names)), spans)
    rows = [_kernel_row(kernel, args, groups) for kernel in kernels.iter_rows(named=True)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def gloo_collectives(spans: pl.DataFrame, args: Sequence[Args]) -> pl.DataFrame:
    """One row per `gloo:*` range of a worker thread, with the `c10d::*` call that issued it."""
    ranges = spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("gloo:"))
    calls = _gloo_calls(spans)
    pairs = []
    for op in sorted({operation(name) for name in ranges["name"].unique()}):
        mine = _of_operation(ranges, op)
        issued = _of_operation(calls, op)
        pairs.append(_issued_by(mine, issued))
    rows = [_gloo_row(row, args) for row in pl.concat(pairs).iter_rows(named=True)] if pairs else []
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("start_ns", "span_id", maintain_order=True)


def _with_issuers(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Each kernel with its runtime call, and with the ranges on the calling thread that the call lies in."""
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0)).select(
        "correlation",
        launch_span_id="span_id",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        thread="tid",
    )
    calls = calls.unique("correlation", keep="first", maintain_order=True)
    found = kernels.join(calls, on="correlation", how="left", maintain_order="left")
    named = pl.col("name")
    found = _enclosed(
        found, spans.filter(named.str.starts_with("nccl:") & (pl.col("kind") == "annotation")), "range"
    )
    found = _enclosed(found, spans.filter(named == "record_param_comms"), "record")
    found = _enclosed(found, spans.filter(named.str.starts_with("c10d::")), "call")
    return found.sort("start_ns", "span_id", maintain_order=True)


def _enclosed(launches: pl.DataFrame, outer: pl.DataFrame, label: str) -> pl.DataFrame:
    """Add position and name of the span on the launching thread that holds the launch; null where none does."""
    outer = outer.select(
        thread="tid",
        outer_ns="start_ns",
        outer_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        position="position",
        name="name",
    ).sort("outer_ns", maintain_order=True)
    known = launches.drop_nulls("launch_ns").sort("launch_ns", maintain_order=True)
    inside = known.select("span_id", "thread", "launch_ns", "launch_end_ns").join_asof(
        outer, left_on="launch_ns", right_on="outer_ns", by="thread", check_sortedness=False
    )
    held = inside.filter(pl.col("outer_end_ns") >= pl.col("launch_end_ns")).select(
        "span_id", pl.col("position").alias(f"{label}_position"), pl.col("name").alias(f"{label}_name")
    )
    return launches.join(held, on="span_id", how="left", maintain_order="left")


def _kernel_row(
    kernel: Mapping[str, Any], args: Sequence[Args], groups: Mapping[str, list[int]]
) -> dict[str, Any]:
    own = args[kernel["position"]]
    record = args[kernel["record_position"]] if kernel["record_position"] is not None else NO_ARGS
    ranged = args[kernel["range_position"]] if kernel["range_position"] is not None else NO_ARGS
    told = own if own.collective else record
    names = (told.collective or "", kernel["range_name"] or "", kernel["call_name"] or "")
    op = next(filter(None, map(operation, names)), "") or classify(kernel["name"]).op or kernel["name"]
    ranks = _group_ranks(told, groups)
    algorithm = _ALGORITHM.search(kernel["name"])
    return {
        "op": op,
        "group": str(told.group) if told.group is not None else "",
        "group_ranks": ranks,
        "sequence": _number(told.sequence),
        **_payload(op, told, ranged, len(ranks)),
        "peer": _number({"send": told.destination_rank, "recv": told.source_rank}.get(op)),
        "enqueued_ns": -1 if kernel["launch_ns"] is None else kernel["launch_ns"],
        "start_ns": kernel["start_ns"],
        "duration_ns": kernel["duration_ns"],
        "algorithm": algorithm[1] if algorithm else "",
        "protocol": algorithm[2] if algorithm else "",
        "span_id": kernel["span_id"],
        "launch_span_id": -1 if kernel["launch_span_id"] is None else kernel["launch_span_id"],
        "source": "kineto kernel",
    }


def _payload(op: str, told: Args, ranged: Args, group_size: int) -> dict[str, Any]:
    """Bytes in and out and element type: as told, else from the shapes of the range that issued it."""
    dtype = str(told.dtype or "")
    size = dtype_bytes(dtype)
    elements_in, elements_out = _number(told.elements_in), _number(told.elements_out)
    if size > 0 and elements_in >= 0 and elements_out >= 0:
        return {"bytes_in": elements_in * size, "bytes_out": elements_out * size, "dtype": dtype_name(dtype)}
    bytes_in, dtype = _shaped_bytes(ranged)
    return {"bytes_in": bytes_in, "bytes_out": _bytes_out(op, bytes_in, group_size), "dtype": dtype}


def _shaped_bytes(ranged: Args) -> tuple[int, str]:
    """Bytes of the tensors that a `nccl:*` or `gloo:*` range was given, and their element type; -1 unknown."""
    try:
        shapes, types = json.loads(bytes(ranged.shapes)), json.loads(bytes(ranged.types))
        sizes = [dtype_bytes(recorded) for recorded in types]
        counts = [math.prod(shape) for shape in shapes]
    except (ValueError, TypeError, AttributeError):
        return -1, ""
    if not sizes or min(sizes) < 0 or len(sizes) != len(counts):
        return -1, ""
    return sum(size * count for size, count in zip(sizes, counts, strict=True)), dtype_name(types[0])


def _bytes_out(op: str, bytes_in: int, group_size: int) -> int:
    """What a rank gets for what it puts in, where that follows from the operation."""
    if bytes_in < 0:
        return -1
    if op in ("all_reduce", "all_to_all", "broadcast", "barrier"):
        return bytes_in
    if op == "all_gather" and group_size:
        return bytes_in * group_size
    if op == "reduce_scatter" and group_size:
        return bytes_in // group_size
    return -1


def _group_ranks(told: Args, groups: Mapping[str, list[int]]) -> list[int]:
    """Ranks of the group as listed; a list the profiler cut short (`[0, 1, ..., 63]`) is looked up by name."""
    listed = str(told.group_ranks or "")
    if listed and "..." not in listed:
        return [int(rank) for rank in re.findall(r"\d+", listed)]
    return groups.get(str(told.group), [])


def _gloo_calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Calls into c10d that may have been handed to gloo: those that did not launch on NCCL."""
    calls = spans.filter((pl.col("kind") == "cpu_op") & pl.col("name").str.starts_with("c10d::"))
    nccl = spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("nccl:")).select(
        "span_id",
        thread="tid",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    on_nccl = _enclosed(nccl, calls, "call")["call_position"].drop_nulls()
    return calls.filter(~pl.col("position").is_in(on_nccl.to_list()))


def _of_operation(frame: pl.DataFrame, op: str) -> pl.DataFrame:
    names = [name for name in frame["name"].unique() if operation(name) == op]
    return frame.filter(pl.col("name").is_in(names)).sort("start_ns", "span_id", maintain_order=True)


def _issued_by(ranges: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The k-th range with the k-th call, after the ranges whose call was made before the window opened.

    A range never starts before its call: the smallest number of leading ranges that makes this true of
    all pairs is left without a call.
    """
    starts, issued = ranges["start_ns"].to_numpy(), calls["start_ns"].to_numpy()
    orphans = 0
    while orphans < len(starts):
        count = min(len(starts) - orphans, len(issued))
        if (starts[orphans : orphans + count] >= issued[:count]).all():
            break
        orphans += 1
    count = min(len(starts) - orphans, len(issued))
    before = pl.Series([None] * orphans, dtype=pl.Int64)
    after = pl.Series([None] * (len(starts) - orphans - count), dtype=pl.Int64)
    return ranges.with_columns(
        launch_span_id=pl.concat([before, calls["span_id"][:count], after]).fill_null(-1),
        launch_ns=pl.concat([before, calls["start_ns"][:count], after]).fill_null(-1),
    )


def _gloo_row(row: Mapping[str, Any], args: Sequence[Args]) -> dict[str, Any]:
    op = operation(row["name"]) or row["name"]
    return {
        "op": op,
        "group": "",
        "group_ranks": [],
        "sequence": -1,
        **_payload(op, NO_ARGS, args[row["position"]], 0),
        "peer": -1,
        "enqueued_ns": row["launch_ns"],
        "start_ns": row["start_ns"],
        "duration_ns": row["duration_ns"],
        "algorithm": "",
        "protocol": "",
        "span_id": row["span_id"],
        "launch_span_id": row["launch_span_id"],
        "source": "kineto gloo range",
    }


def _number(value: Any) -> int:
    """A whole number, also one written as text; -1 where there is none."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
