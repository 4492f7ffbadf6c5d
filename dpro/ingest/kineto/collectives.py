"""Communication on GPU in a Kineto trace: rows of `collectives` from kernels (NCCL, RCCL, DeepEP and others).

Reads spans of one rank and the arguments of their events; returns one row per communication kernel, with
bytes, group or peer, and launching call. Matching the ranks with each other is left to `dpro.replay`.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Raw

from dpro.classify import classify, is_communication, operation
from dpro.ingest.derived import with_enclosing_span, with_launch
from dpro.ingest.kineto.events import NO_ARGS, EventArguments
from dpro.ingest.reading.values import (
    directed_bytes,
    dtype_bytes,
    dtype_name,
    elements,
    global_peer,
    of_each_call,
    ranks_in,
    text,
)
from dpro.schema import COLLECTIVES
from dpro.schema.members import GROUP_RANKS

COLUMNS = {
    name: dtype
    for name, dtype in COLLECTIVES.dtypes.items()
    if name not in ("rank", "window", "collective_id", "state", "asked_ns")
}
MESSAGES = ("send", "recv")
_ALGORITHM = re.compile(r"_(RING|TREE|COLLNET\w*?|NVLS\w*?|PAT)_(LL128|LL|SIMPLE)(?=_|\(|$)")


def gpu_collectives(
    spans: pl.DataFrame, args: Sequence[EventArguments], groups: Groups, rank: int
) -> pl.DataFrame:
    """Return one row per communication kernel, or per message that it carries.

    Args:
        spans: all spans of the rank, with `span_id` and `position`.
        args: details by `position`.
        groups: ranks by name of process group.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    if not names:
        return pl.DataFrame(schema=COLUMNS)
    issued = with_launch(kernels.filter(pl.col("name").is_in(names)), spans)
    name, kind = pl.col("name"), pl.col("kind")
    issued = with_enclosing_span(
        issued, spans.filter(name.str.starts_with("nccl:") & (kind == "annotation")), "range"
    )
    issued = with_enclosing_span(issued, spans.filter(name == "record_param_comms"), "record")
    issued = with_enclosing_span(issued, spans.filter(name.str.starts_with("c10d::")), "call")
    kernels = issued.sort("start_ns", "span_id", maintain_order=True)
    batched = _batched(kernels, spans, args)
    rows = [
        _row(kernel | {"record_position": part}, args, groups, rank)
        for kernel in kernels.iter_rows(named=True)
        for part in batched.get(kernel["span_id"], [kernel["record_position"]])
    ]
    return calls_of(rows, COLUMNS)


def _batched(
    kernels: pl.DataFrame, spans: pl.DataFrame, args: Sequence[EventArguments]
) -> dict[int, list[int]]:
    """Return messages that were called one by one and launched together, by the kernel that carries them.

    Their calls launch nothing: the next launch on their thread that is in no other call carries them all.

    Returns:
        Positions of the calls' records, by span of the kernel.
    """
    launches = kernels.drop_nulls("launch_ns").select("span_id", "thread", "launch_ns", "record_position")
    positions = launches["record_position"].drop_nulls().to_list()
    records = spans.filter((pl.col("name") == "record_param_comms") & ~pl.col("position").is_in(positions))
    is_message = [operation(text(args[position].collective)) in MESSAGES for position in records["position"]]
    calls = records.filter(pl.Series(is_message, dtype=pl.Boolean)).select(
        "position", thread="tid", called_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    carried = calls.sort("called_ns", maintain_order=True).join_asof(
        launches.sort("launch_ns", maintain_order=True),
        left_on="called_ns",
        right_on="launch_ns",
        by="thread",
        strategy="forward",
        check_sortedness=False,
    )
    carried = carried.filter(pl.col("span_id").is_not_null() & pl.col("record_position").is_null())
    carried_by: dict[int, list[int]] = {}
    for span, position in carried.select("span_id", "position").iter_rows():
        carried_by.setdefault(span, []).append(position)
    return carried_by


def _row(
    kernel: Mapping[str, Any], args: Sequence[EventArguments], groups: Groups, rank: int
) -> dict[str, Any]:
    kernel_args, ranged, record, call = (
        NO_ARGS if position is None else args[position]
        for position in map(kernel.get, ("position", "range_position", "record_position", "call_position"))
    )
    recorded = kernel_args if text(kernel_args.collective) else record
    names = (text(recorded.collective), kernel["range_name"] or "", kernel["call_name"] or "")
    issued = next(filter(None, map(operation, names)), "")
    op = issued or classify(kernel["name"]).op or str(kernel["name"])
    group = group_columns(recorded, groups)
    ranks = group["group_ranks"]
    algorithm = _ALGORITHM.search(kernel["name"])
    return {
        "op": op,
        **group,
        "sequence": whole(recorded.sequence),
        **payload_columns(op, recorded, ranged, len(ranks)),
        "peer": peer_of(op, recorded, call, rank, ranks),
        "enqueued_ns": -1 if kernel["launch_ns"] is None else kernel["launch_ns"],
        "start_ns": kernel["start_ns"],
        "duration_ns": kernel["duration_ns"],
        "algorithm": algorithm[1] if algorithm else "",
        "protocol": algorithm[2] if algorithm else "",
        "span_id": kernel["span_id"],
        "launch_span_id": -1 if kernel["launch_span_id"] is None else kernel["launch_span_id"],
        "source": "kineto kernel",
    }


# Bytes, group and peer of one communication call, from the recorded arguments.

NOT_DESCRIBED = ("", "undefined")  # the latter is PyTorch's default description of a group
Groups = Mapping[str, Sequence[int]]
"""Global ranks of every process group of the job, by name; empty where the trace lacks them."""


def group_columns(recorded: EventArguments, groups: Groups) -> dict[str, Any]:
    """Return name and ranks of the group; the name may have a description, `35 TENSOR_MODEL_PARALLEL_GROUP`.

    In a job with a single group, that group is taken where none is recorded. An abbreviated list of ranks
    (`[0, 1, ..., 63]`) is looked up by the group's name.

    Args:
        recorded: arguments that may name the group.
    """
    only = next(iter(groups)) if len(groups) == 1 else ""
    name = only if recorded.group is None else str(recorded.group)
    listed = str(recorded.group_ranks or "")
    ranks = ranks_in(listed) if listed and "..." not in listed else groups.get(name, ())
    described = recorded.group_description
    is_said = name and isinstance(described, str) and described not in NOT_DESCRIBED
    return {"group": f"{name} {described}" if is_said else name, "group_ranks": ranks}


def calls_of(rows: list[dict[str, Any]], columns: Mapping[str, Any]) -> pl.DataFrame:
    """Return rows of `collectives`; the ranks of a group, which its calls share, are stored once.

    Args:
        columns: types of the columns, in order.
    """
    ranks = [row.pop(GROUP_RANKS) for row in rows]
    groups = {id(group): group for group in ranks}  # mostly one object; comparing lists is slow
    numbers = {identifier: number for number, identifier in enumerate(groups)}
    of_call = np.array([numbers[id(group)] for group in ranks], np.int64)
    rest = {name: dtype for name, dtype in columns.items() if name != GROUP_RANKS}
    frame = pl.DataFrame(rows, schema=rest, orient="row")
    return frame.with_columns(of_each_call(list(groups.values()), of_call)).select(*columns)


def payload_columns(
    op: str, recorded: EventArguments, ranged: EventArguments, group_size: int
) -> dict[str, Any]:
    """Return bytes in and out and element type: as recorded, else from the shapes of the issuing range.

    Args:
        recorded: arguments that may have element counts.
        ranged: arguments of the `nccl:*` or `gloo:*` range, which may have shapes.
        group_size: number of ranks of the group; 0 unknown.
    """
    dtype = str(recorded.dtype or "")
    size = dtype_bytes(dtype)
    elements_in, elements_out = whole(recorded.elements_in), whole(recorded.elements_out)
    if size > 0 and elements_in >= 0 and elements_out >= 0:
        bytes_in, bytes_out = whole(elements_in * size), whole(elements_out * size)
    else:
        bytes_in, dtype = _shaped_bytes(ranged)
        bytes_out = _bytes_out(op, bytes_in, group_size)
    bytes_in, bytes_out = directed_bytes(op, bytes_in, bytes_out)
    return {"bytes_in": bytes_in, "bytes_out": bytes_out, "dtype": dtype_name(dtype)}


def peer_of(op: str, recorded: EventArguments, call: EventArguments, rank: int, ranks: Sequence[int]) -> int:
    """Return the other global rank of a send or receive, from its arguments or its `c10d` call; else -1.

    Args:
        recorded: arguments that may name the peer.
        call: arguments of its `c10d` call.
        ranks: global ranks of the group, in order; empty unknown.
    """
    if op not in ("send", "recv"):
        return -1
    peer = whole(recorded.destination_rank if op == "send" else recorded.source_rank)
    if peer < 0:
        inputs = _json(call.inputs)  # tensors, process group, peer, tag
        peer = whole(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else -1
    return global_peer(-1, peer, rank, ranks)


def whole(value: Any, default: int = -1) -> int:
    """Return a number as int64, also one written as text.

    Args:
        default: returned where it is not a number, or does not fit.
    """
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 1 << 63 else default


def _shaped_bytes(ranged: EventArguments) -> tuple[int, str]:
    """Return bytes and element type of the tensors of a range; -1 and empty where either is unknown."""
    shapes, types = _json(ranged.shapes), _json(ranged.types)
    if not isinstance(types, list) or not isinstance(shapes, list) or not 0 < len(types) == len(shapes):
        return -1, ""
    sizes = [dtype_bytes(recorded) if isinstance(recorded, str) else -1 for recorded in types]
    counts = [elements(shape) for shape in shapes]
    if min(sizes) < 0 or min(counts) < 0:
        return -1, ""
    return whole(sum(map(operator.mul, sizes, counts))), types[0]


def _bytes_out(op: str, bytes_in: int, group_size: int) -> int:
    """Derive the output bytes of a rank from its input bytes; -1 if the operation does not determine them."""
    if op in ("all_reduce", "all_to_all", "broadcast", "barrier", "send", "recv"):
        return bytes_in
    if op == "all_gather" and group_size and bytes_in >= 0:
        return whole(bytes_in * group_size)
    if op == "reduce_scatter" and group_size and bytes_in >= 0:
        return bytes_in // group_size
    return -1


def _json(text: Raw) -> Any:
    try:
        return json.loads(bytes(text))
    except ValueError:
        return None
