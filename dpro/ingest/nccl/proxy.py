"""What NCCL's proxy threads sent, from `proxy_trace` records of the Inspector, as rows of `sends`.

In: records of one rank, each with the communicator it is of. Out: one row per operation of the proxy: what it
sent to one peer over one channel for one call. An operation is cut into steps: each waits for the GPU, then
for room at the peer, and is then on the wire until the network has done with it; the last is what counts.
Steps stand in records of their own, or in those of their operation. Receives are left out: how long one waits
for its data mostly depends on the sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import polars as pl

from dpro.ingest.reading.values import int32, int64, mapping, rounded, sequence, text
from dpro.schema import SENDS
from dpro.units import NS_PER_US

Fact = Mapping[str, Any]
Whose = tuple[str, int]  # communicator, and the rank's number in it


def sends_of(records: Iterable[tuple[Whose, Fact]], rank: int, skipped: Counter[str]) -> pl.DataFrame:
    """Rows of `sends` of one rank.

    Args:
        records: the communicator and the rank's place in it, and the record.
        skipped: what is not taken is counted here.
    """
    sends: dict[tuple[Whose, int], list[dict[str, Any]]] = {}
    short: set[tuple[Whose, int]] = set()  # operations of which steps are missing
    for whose, record in records:
        if record.get("direction") != "send":
            skipped["records of NCCL's proxy that are of no send"] += 1
            continue
        operation = whose, int64(record.get("proxy_op_sn"))
        if int64(record.get("n_steps_dropped", 0)) > 0:
            short.add(operation)
        rows = [row for step in _steps(record) if (row := _row(whose, record, step)) is not None]
        sends.setdefault(operation, []).extend(rows)
    whole = {operation: rows for operation, rows in sends.items() if rows and operation not in short}
    if len(whole) < len(sends):
        skipped["sends of NCCL's proxy of which steps are missing"] += len(sends) - len(whole)
    rows = [row | {"rank": rank} for rows in whole.values() for row in rows]
    if not rows:
        return SENDS.empty()
    steps = pl.DataFrame(rows, schema={name: SENDS.dtypes[name] for name in rows[0]})
    call = ["rank", "group", "member", "peer_member", "sequence", "channel", "operation"]
    return steps.group_by(call, maintain_order=True).agg(
        pl.col("time_ns").min(), pl.col("bytes", "wire_ns").sum(), steps=pl.len().cast(pl.Int64)
    )


def _steps(record: Fact) -> Iterator[Fact]:
    """The steps in a record."""
    if record.get("record_type") == "proxy_step":
        yield record
    yield from map(mapping, sequence(record.get("steps")))


def _row(whose: Whose, record: Fact, step: Fact) -> dict[str, Any] | None:
    """One step; None where its time on the wire or its size is unknown."""
    times = mapping(step.get("event_trace_ts"))
    posted, done = (int64(times.get(f"{name}_ts")) for name in ("send_wait", "proxy_step_stop"))
    measured = step.get("wire_us", done - posted if 0 < posted <= done else None)
    size, peer = int64(step.get("trans_size_bytes")), int32(record.get("peer"))
    wire_ns = rounded(measured, NS_PER_US)
    if wire_ns <= 0 or size <= 0 or peer < 0:
        return None
    return {
        "group": text(whose[0]),
        "member": whose[1],
        "peer_member": peer,
        "sequence": int64(record.get("parent_sn")),
        "channel": int32(record.get("channel_id")),
        "operation": int64(record.get("proxy_op_sn")),
        "time_ns": posted * NS_PER_US if posted > 0 else -1,
        "bytes": size,
        "wire_ns": wire_ns,
    }
