"""Logs of NCCL's Inspector plug-in: measured collectives of one process, one JSON object per line.

Reads a log of format 4.0 to 5.0, RCCL's too; returns rows of `collectives` with durations. Some formats state
the communicator in every line, others once per dump, in a `dump_stats` line that applies to all following
lines. Processes are killed while they write: truncated or corrupted lines are counted, not refused. Transfers
of NCCL's proxy threads become rows of `sends`. The global ranks of a communicator are not in a log: they
follow from its rows on all ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest.reading.files import read_bytes
from dpro.ingest.reading.values import int32, int64, mapping, rounded, sequence, text
from dpro.ingest.trace import RankTrace
from dpro.schema import COLLECTIVES, SENDS
from dpro.units import NS_PER_US

SOURCE = "NCCL Inspector"
_KINDS = {"coll_perf": "coll", "p2p_perf": "p2p", "proxy_trace": "proxy"}
_PROXY = "proxy"
_RECORD = re.compile(rb'"(?:coll_perf|p2p_perf|dump_stats|proxy_trace)"\s*:\s*\{')
_LACKS = ("window", "state", "asked_ns")
_COLUMNS = {name: dtype for name, dtype in COLLECTIVES.dtypes.items() if name not in _LACKS}


@dataclass(frozen=True)
class _Communicator:
    """The communicator of a record, this process's rank in it, and the process."""

    group: str
    rank: int
    num_ranks: int
    host: str
    pid: int
    version: str


@dataclass(frozen=True)
class _Record:
    """A measured operation and its communicator."""

    of: _Communicator
    kind: str
    facts: Mapping[str, Any]


def is_inspector_log(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of an Inspector log."""
    return head.lstrip().startswith(b"{") and _RECORD.search(head) is not None


def read_inspector_log(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read a log, or several logs of one job joined together.

    Args:
        rank: the rank of all records, where the caller knows better.

    Returns:
        A trace per process and GPU. Its rank is its number in the largest communicator, which is assumed to
        be the whole job. Of a process with several ranks in that one, the ranks in its other communicators
        are unknown, and its records in those are counted as left out.

    Raises:
        InputError: the file cannot be read, or has no record of a collective.
    """
    skipped: Counter[str] = Counter()
    records = list(_records(read_bytes(path), skipped))
    if not records:
        counts = "; ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise InputError(f"{path}: no collective of NCCL's Inspector in it ({counts or 'no lines'})")
    by_process: dict[tuple[str, int], list[_Record]] = {}
    for record in records:
        by_process.setdefault((record.of.host, record.of.pid), []).append(record)
    traces = [trace for process in by_process.values() for trace in _traces(process, rank, skipped)]
    if traces:
        traces[0] = replace(traces[0], skipped=dict(skipped))
    return traces


def _records(data: bytes, skipped: Counter[str]) -> Iterator[_Record]:
    """Yield records with their communicators; count lines and records that are left out."""
    current: _Communicator | None = None
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            document = mapping(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            document = {}
        if not document:
            skipped["malformed lines"] += 1
            continue
        if "header" in document or "n_ranks" in document:
            current = _communicator(document)
        # The Inspector measured these since the last dump but dropped them for lack of space.
        stats = mapping(document.get("dump_stats"))
        kinds = (kind for kind in _KINDS.values() if kind != _PROXY)
        if dropped := sum(max(int64(stats.get(f"{kind}_dropped_since_last_dump")), 0) for kind in kinds):
            skipped["collectives that the Inspector dropped"] += dropped
        for key, kind in _KINDS.items():
            facts = mapping(document.get(key))
            if facts and current:
                yield _Record(current, kind, facts)
            elif facts:
                skipped["records without a communicator"] += 1


def _communicator(document: Mapping[str, Any]) -> _Communicator | None:
    """Return the communicator that a line states, in sub-objects or beside the record; None for none."""
    header = mapping(document.get("header")) or document
    metadata = mapping(document.get("metadata")) or document
    rank, num_ranks = int32(header.get("rank")), int32(header.get("n_ranks"))
    if not 0 <= rank < num_ranks:
        return None
    name = text(header.get("comm_name"))
    identifier = text(header.get("id"))
    return _Communicator(
        group=identifier if name in ("", "unknown") else f"{identifier} {name}",
        rank=rank,
        num_ranks=num_ranks,
        host=text(metadata.get("hostname")),
        pid=int64(metadata.get("pid")),
        version=text(metadata.get("inspector_output_format_version")),
    )


def _traces(records: list[_Record], rank: int | None, skipped: Counter[str]) -> Iterator[RankTrace]:
    """Yield a process's records as one trace per rank that it has in its largest communicator."""
    world = max(record.of.num_ranks for record in records)
    whole = next(record.of.group for record in records if record.of.num_ranks == world)
    ranks = sorted({record.of.rank for record in records if record.of.group == whole})
    for number in ranks:
        of_rank = [r for r in records if len(ranks) == 1 or (r.of.group == whole and r.of.rank == number)]
        yield _trace(of_rank, number if rank is None else rank, world, skipped)
    if len(ranks) > 1 and (unknown := sum(record.of.group != whole for record in records)):
        skipped["records of a process with several ranks"] += unknown


def _trace(records: list[_Record], rank: int, world_size: int, skipped: Counter[str]) -> RankTrace:
    first = records[0].of
    calls = [record for record in records if record.kind != _PROXY]
    rows = [{"collective_id": i, "rank": rank, **_row(r, world_size)} for i, r in enumerate(calls)]
    schema = {name: dtype for name, dtype in _COLUMNS.items() if not rows or name in rows[0]}
    proxy = (((r.of.group, r.of.rank), r.facts) for r in records if r.kind == _PROXY)
    sends = sends_of(proxy, rank, skipped).with_columns(source=pl.lit(SOURCE))
    worker = {"rank": rank, "world_size": world_size, "host": first.host, "pid": first.pid, "source": SOURCE}
    return RankTrace(
        rank=rank,
        world_size=world_size,
        frames={
            "collectives": pl.DataFrame(rows, schema=schema, orient="row").with_columns(
                window=pl.lit(-1, dtype=pl.Int32)
            ),
            "workers": pl.DataFrame([worker]),
            **({"sends": sends} if sends.height else {}),
        },
        host=first.host,
        versions={"NCCL Inspector format": first.version} if first.version else {},
    )


def _row(record: _Record, world_size: int) -> dict[str, Any]:
    of, kind, facts = record.of, record.kind, record.facts
    name = text(facts.get(kind))
    op = operation(name) or name
    bytes_in, bytes_out = _bytes(op, int64(facts.get(f"{kind}_msg_size_bytes")), of.num_ranks)
    times = mapping(facts.get("event_trace_ts"))
    # Verbose logs have the kernel's start time per channel, 0 if it was not observed.
    channels = map(mapping, sequence(times.get("kernel_events")))
    starts = [rounded(channel.get("kernel_start_ts"), NS_PER_US) for channel in channels]
    # A duration that begins with the call would include the time in the queue.
    of_kernel = facts.get(f"{kind}_timing_source") != "collective_cpu"
    return {
        "op": op,
        "group": of.group,
        "sequence": int64(facts.get(f"{kind}_sn")),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        # A communicator of all ranks numbers them as the job does; the ranks of smaller ones are unknown.
        "peer": int32(facts.get("p2p_peer")) if of.num_ranks == world_size else -1,
        "enqueued_ns": rounded(times.get(f"{kind}_start_ts") or -1, NS_PER_US),
        "start_ns": min((start for start in starts if start > 0), default=-1),
        "duration_ns": rounded(facts.get(f"{kind}_exec_time_us"), NS_PER_US) if of_kernel else -1,
        "algorithm": _known(facts.get("coll_algo")),
        "protocol": _known(facts.get("coll_proto")),
        "source": SOURCE,
    }


def _bytes(op: str, size: int, num_ranks: int) -> tuple[int, int]:
    """Return bytes in and out from the Inspector's size: elements as passed to NCCL, times their width.

    NCCL's counts are per rank for all-gather (input), reduce-scatter (output) and all-to-all (to each rank).
    """
    if size < 0:
        return -1, -1
    whole = int64(size * num_ranks)
    sizes = {
        "all_gather": (size, whole),
        "reduce_scatter": (whole, size),
        "all_to_all": (whole, whole),
        "send": (size, 0),
        "recv": (0, size),
        "reduce": (size, -1),
        "gather": (size, -1),
        "scatter": (-1, size),
    }
    return sizes.get(op, (size, size))


def _known(value: Any) -> str:
    name = text(value).upper()
    return "" if name == "UNKNOWN" else name


# Transfers of NCCL's proxy threads, from `proxy_trace` records, as rows of `sends`.

Fact = Mapping[str, Any]
Whose = tuple[str, int]  # communicator, and the rank's number in it


def sends_of(records: Iterable[tuple[Whose, Fact]], rank: int, skipped: Counter[str]) -> pl.DataFrame:
    """Return rows of `sends` of one rank.

    Args:
        records: communicator and the rank's number in it, with the record.
        skipped: counts of records left out are added here.
    """
    sends: dict[tuple[Whose, int], list[dict[str, Any]]] = {}
    short: set[tuple[Whose, int]] = set()  # operations with missing steps
    for whose, record in records:
        if record.get("direction") != "send":
            skipped["records of NCCL's proxy that are not sends"] += 1
            continue
        operation = whose, int64(record.get("proxy_op_sn"))
        if int64(record.get("n_steps_dropped", 0)) > 0:
            short.add(operation)
        rows = [row for step in _steps(record) if (row := _proxy_row(whose, record, step)) is not None]
        sends.setdefault(operation, []).extend(rows)
    whole = {operation: rows for operation, rows in sends.items() if rows and operation not in short}
    if len(whole) < len(sends):
        skipped["sends of NCCL's proxy with missing steps"] += len(sends) - len(whole)
    rows = [row | {"rank": rank} for rows in whole.values() for row in rows]
    if not rows:
        return SENDS.empty()
    steps = pl.DataFrame(rows, schema={name: SENDS.dtypes[name] for name in rows[0]})
    call = ["rank", "group", "member", "peer_member", "sequence", "channel", "operation"]
    return steps.group_by(call, maintain_order=True).agg(
        pl.col("time_ns").min(), pl.col("bytes", "wire_ns").sum(), steps=pl.len().cast(pl.Int64)
    )


def _steps(record: Fact) -> Iterator[Fact]:
    if record.get("record_type") == "proxy_step":
        yield record
    yield from map(mapping, sequence(record.get("steps")))


def _proxy_row(whose: Whose, record: Fact, step: Fact) -> dict[str, Any] | None:
    """Return one step as a row; None where its time on the wire, its size or its peer is unknown."""
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
