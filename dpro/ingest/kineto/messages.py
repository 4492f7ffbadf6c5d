"""Bytes, group and peer of one communication call, from the arguments that the profiler kept.

In: arguments of an event. Out: bytes, element type, process group and peer, in the columns of `collectives`.
Other modules find which events belong to one call.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Raw

from dpro.ingest.kineto.events import EventArguments
from dpro.ingest.reading.dtypes import dtype_bytes, dtype_name
from dpro.ingest.reading.peers import directed_bytes, global_peer, of_each_call, ranks_in
from dpro.ingest.reading.values import elements
from dpro.schema.members import GROUP_RANKS

NOT_DESCRIBED = ("", "undefined")  # the latter is what PyTorch says of a group that the job did not describe
Groups = Mapping[str, Sequence[int]]
"""Global ranks of every process group of the job, by name; empty where the trace does not list them."""


def group_columns(recorded: EventArguments, groups: Groups) -> dict[str, Any]:
    """Name and ranks of the group; the name with what the job says of it, `35 TENSOR_MODEL_PARALLEL_GROUP`.

    A job with one group has no other to communicate in: that one is taken where no group is recorded. A list
    of ranks that the profiler cut short (`[0, 1, ..., 63]`) is looked up by the group's name.

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
    """Rows of `collectives`; the ranks of a group, which its calls share, are held once.

    Args:
        columns: their types, in order.
    """
    ranks = [row.pop(GROUP_RANKS) for row in rows]
    groups = {id(each): each for each in ranks}  # mostly the same object: to compare them takes long
    numbers = {identifier: number for number, identifier in enumerate(groups)}
    of_call = np.array([numbers[id(each)] for each in ranks], np.int64)
    rest = {name: dtype for name, dtype in columns.items() if name != GROUP_RANKS}
    frame = pl.DataFrame(rows, schema=rest, orient="row")
    return frame.with_columns(of_each_call(list(groups.values()), of_call)).select(*columns)


def payload_columns(
    op: str, recorded: EventArguments, ranged: EventArguments, group_size: int
) -> dict[str, Any]:
    """Bytes in and out and element type: as recorded, else from the shapes of the range that issued the call.

    Args:
        recorded: arguments that may hold element counts.
        ranged: arguments of the `nccl:*` or `gloo:*` range, which may hold shapes.
        group_size: number of ranks of the group, 0 unknown.
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
    """The other global rank of a send or receive, from its arguments or those of its `c10d` call; else -1.

    Args:
        recorded: arguments that may name the peer.
        call: arguments of its `c10d` call.
        rank: this side's global rank.
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
    """A whole number that a column can hold, also one written as text.

    Args:
        default: where it is no such number.
    """
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 1 << 63 else default


def _shaped_bytes(ranged: EventArguments) -> tuple[int, str]:
    """Bytes of the tensors that a range was given, and their element type; -1 where either is unknown."""
    shapes, types = _json(ranged.shapes), _json(ranged.types)
    if not isinstance(types, list) or not isinstance(shapes, list) or not 0 < len(types) == len(shapes):
        return -1, ""
    sizes = [dtype_bytes(recorded) if isinstance(recorded, str) else -1 for recorded in types]
    counts = [elements(shape) for shape in shapes]
    if min(sizes) < 0 or min(counts) < 0:
        return -1, ""
    return whole(sum(map(operator.mul, sizes, counts))), types[0]


def _bytes_out(op: str, bytes_in: int, group_size: int) -> int:
    """What a rank gets for what it puts in, where that follows from the operation."""
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
