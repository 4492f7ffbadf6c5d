"""Communication on GPU in a Kineto trace: rows of `collectives` from kernels (NCCL, RCCL, DeepEP and others).

In: spans of one rank and the arguments of their events. Out: one row per communication kernel: its bytes, its
group or peer, and the call that launched it. Matching the ranks with each other is left to `dpro.replay`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from dpro.classify import classify, is_communication, operation
from dpro.ingest.derived.launches import enclosed, launched
from dpro.ingest.kineto.events import NO_ARGS, EventArguments
from dpro.ingest.kineto.messages import Groups, calls_of, group_columns, payload_columns, peer_of, whole
from dpro.ingest.reading.values import text
from dpro.schema import COLLECTIVES

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
    """One row per communication kernel.

    Args:
        spans: all spans of the rank, with `span_id` and `position`.
        groups: ranks by name of process group.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    if not names:
        return pl.DataFrame(schema=COLUMNS)
    kernels = _with_issuers(kernels.filter(pl.col("name").is_in(names)), spans)
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
    """Messages that were called one by one and launched together, by the kernel that carries them.

    Their calls launch nothing: the next launch on their thread that lies in no other call carries them all.

    Returns:
        Positions of the calls' records, by span of the kernel.
    """
    launches = kernels.drop_nulls("launch_ns").select("span_id", "thread", "launch_ns", "record_position")
    own = launches["record_position"].drop_nulls().to_list()
    records = spans.filter((pl.col("name") == "record_param_comms") & ~pl.col("position").is_in(own))
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
    found: dict[int, list[int]] = {}
    for span, position in carried.select("span_id", "position").iter_rows():
        found.setdefault(span, []).append(position)
    return found


def _with_issuers(kernels: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Each kernel with its runtime call, and with the ranges on the calling thread that the call lies in."""
    found = launched(kernels, spans)
    name, kind = pl.col("name"), pl.col("kind")
    found = enclosed(found, spans.filter(name.str.starts_with("nccl:") & (kind == "annotation")), "range")
    found = enclosed(found, spans.filter(name == "record_param_comms"), "record")
    found = enclosed(found, spans.filter(name.str.starts_with("c10d::")), "call")
    return found.sort("start_ns", "span_id", maintain_order=True)


def _row(
    kernel: Mapping[str, Any], args: Sequence[EventArguments], groups: Groups, rank: int
) -> dict[str, Any]:
    own, ranged, record, call = (
        NO_ARGS if position is None else args[position]
        for position in map(kernel.get, ("position", "range_position", "record_position", "call_position"))
    )
    recorded = own if text(own.collective) else record
    op = _operation(kernel, recorded)
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


def _operation(kernel: Mapping[str, Any], recorded: EventArguments) -> str:
    """The operation as recorded, else by the names of the issuing ranges, else by the kernel's own name."""
    names = (text(recorded.collective), kernel["range_name"] or "", kernel["call_name"] or "")
    issued = next(filter(None, map(operation, names)), "")
    return issued or classify(kernel["name"]).op or str(kernel["name"])
