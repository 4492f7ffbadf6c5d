"""Kineto traces (torch.profiler): one rank's file converted to spans, collectives, syncs, steps and a worker.

Reads a `.json` file, compressed or not, of any PyTorch since 2020, of a job on NVIDIA, AMD or CPU; returns a
`RankTrace`. Reads a single file; the importer decides which files make a run. Flow arrows and counter events
are not read: correlation and sequence numbers contain the information of the arrows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest.derived import find_iterations, guess_steps, model_calls, sync_calls, with_enclosing_span
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.kineto.collectives import (
    COLUMNS,
    Groups,
    calls_of,
    gpu_collectives,
    group_columns,
    payload_columns,
    peer_of,
    whole,
)
from dpro.ingest.kineto.columns import Columns, Memory
from dpro.ingest.kineto.events import LAST_NS, NO_ARGS, EventArguments, EventReader, Marks, TraceFacts
from dpro.ingest.reading.files import Source, blocks, rank_of_name
from dpro.ingest.reading.values import int32, ranks_of
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import SYNCS
from dpro.store import CUT
from dpro.words import counted

if TYPE_CHECKING:
    from dpro.ingest.kineto.scanner import Scanner


SOURCE = "kineto"
_KEPT_BYTES = (1 << 25) - (1 << 12)  # with the header of a block, below glibc's limit of 32 MB
_OF_RPD2TRACING = b'{"traceEvents": [ {}'  # head of a file from rpd2tracing.py


def read_trace(path: Path | Source, *, rank: int | None = None, window: int = 0) -> RankTrace:
    """Read one rank's trace, a damaged one up to where it can be read.

    Args:
        path: the file; its name gives the rank where its content does not.
        rank: the rank, where the caller knows better.
        window: number given to all rows, where one rank has several files.

    Raises:
        InputError: the file is not a trace, or no span can be read from it.
    """
    source = path if isinstance(path, Source) else Source(str(path), path)
    # Make the C library keep the memory that a chunk frees for the next: requesting it again took 10% of the
    # time. glibc returns freed blocks that are larger than any freed before, 32 MB at most.
    bytes(_KEPT_BYTES)  # never touched, so it takes only address space
    columns, marks, memory = Columns(), Marks(), Memory()
    scanner = scanner_of(source, columns, memory)
    reader = EventReader(source, scanner.take if scanner else None)
    for events in reader.chunks():
        whole_spans = [event for event in events if event.phase == "X"]
        if scanner and events:
            scanner.flush()
        columns.add(whole_spans)
        if len(whole_spans) < len(events):
            marks.add(events)
            memory.add(events)
    if scanner:
        scanner.flush()
    marked, unmatched = marks.spans()
    columns.add(marked)
    facts, distributed = reader.facts, _distributed(reader.facts)
    spans, sync_events = columns.frames(_base_ns(facts))
    spans, impossible = drop_impossible(spans)
    if spans.is_empty():
        raise InputError(f"{source.label}: {_why_empty(reader, source)}")
    own_rank, warnings = _known_rank(distributed, marks, source) if rank is None else (rank, [])
    frames = _tables(spans, sync_events, columns, facts, own_rank)
    counters = memory.rows(_base_ns(facts)).with_columns(host=pl.lit(_text(facts.host)))
    gpu = _gpu_name(facts, spans)
    damage = _damage(reader, source)
    lost = {"begin or end marks without a match": unmatched, CUT: int(bool(reader.truncated))}
    lost |= {"memory events without totals": memory.without_total, "malformed events": reader.malformed}
    versions = {
        "cuda_runtime": facts.cuda_runtime,
        "cuda_driver": facts.cuda_driver,
        "hip_runtime": facts.hip_runtime,
        "nccl": distributed.get("nccl_version"),
    }
    return RankTrace(
        rank=own_rank,
        world_size=int32(distributed.get("world_size")),
        frames={name: _stamped(name, frame, own_rank, window) for name, frame in frames.items()}
        | ({"counters": of_rank(counters, own_rank)} if counters.height else {}),
        host=_text(facts.host),
        gpus=[gpu] if gpu else [],
        versions={name: str(version) for name, version in versions.items() if version},
        skipped=dict(sorted((columns.lost + impossible + Counter(lost)).items())),
        warnings=[*warnings, *damage, *impossible_in_words(source.name, impossible)],
    )


def _known_rank(distributed: dict[str, Any], marks: Marks, source: Source) -> tuple[int, list[str]]:
    """Return the rank by distributedInfo, else by metadata events, else by the file's name; and warnings."""
    rank = int32(distributed.get("rank"))
    if rank >= 0:
        return rank, []
    if marks.rank >= 0:
        return marks.rank, [
            f"{source.name}: no distributedInfo; rank {marks.rank} by its {marks.rank_source}"
        ]
    return rank_of_name(source.name), []


def _base_ns(facts: TraceFacts) -> int:
    """Return the base of all times, ns; 0 where it is missing or invalid."""
    base_ns = whole(facts.base_ns, default=0)
    return base_ns if abs(base_ns) < LAST_NS else 0


def _distributed(facts: TraceFacts) -> dict[str, Any]:
    return facts.distributed if isinstance(facts.distributed, dict) else {}


def _tables(
    spans: pl.DataFrame,
    sync_events: pl.DataFrame,
    columns: Columns,
    facts: TraceFacts,
    rank: int,
) -> dict[str, pl.DataFrame]:
    """Return all tables, without the columns that are equal in every row."""
    distributed = _distributed(facts)
    # Abbreviated lists of ranks are left out.
    groups = {}
    configs = distributed.get("pg_config")
    for config in configs if isinstance(configs, list) else []:
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            groups[str(config.get("pg_name"))] = ranks_of(ranks)
    spans = spans.with_columns(span_id=pl.int_range(pl.len()))
    # Most spans are often Python calls, of which only some are needed for further tables.
    is_other = pl.col("kind") != "python"
    calls = model_calls(columns.names)
    others = spans.filter(is_other | pl.col("name").is_in(calls) if calls else is_other)
    details = [*columns.details, NO_ARGS]  # position -1 means no details
    collectives = pl.concat(
        [read(others, details, groups, rank) for read in (gpu_collectives, gloo_collectives)]
    )
    return {
        "spans": spans.drop("position"),
        "collectives": collectives.with_row_index("collective_id"),
        "syncs": read_syncs(others, sync_events, details),
        "steps": guess_steps(spans),
        "iterations": find_iterations(others),
        "workers": _worker(spans, facts, distributed),
    }


def _damage(reader: EventReader, source: Source) -> list[str]:
    """Word what a damaged file lacks and how much of it was read, in at most one line."""
    if not reader.truncated and not reader.malformed:
        return []
    what = [reader.truncated] if reader.truncated else []
    what += [counted(reader.malformed, "malformed event")] if reader.malformed else []
    lost = (
        "; its base time is lost too, so times of day are unknown"
        if reader.truncated and reader.facts.base_ns is None
        else ""
    )
    return [f"{source.name}: damaged ({', '.join(what)}); read up to there, {reader.read} events{lost}"]


def _why_empty(reader: EventReader, source: Source) -> str:
    if reader.truncated:
        return f"{reader.truncated} before the first span could be read; copy or record it again"
    if not reader.read:
        return "a trace without events; record it again, with profiled work in the window"
    if next(blocks(source, []), b"").startswith(_OF_RPD2TRACING):
        return (
            "made from an .rpd file by rpd2tracing.py, which omits the kinds of events; import the .rpd file"
        )
    return "no operator, runtime call or kernel in it; record it with torch.profiler"


def _worker(spans: pl.DataFrame, facts: TraceFacts, distributed: dict[str, Any]) -> pl.DataFrame:
    pids = spans.select("pid").filter(pl.col("pid") >= 0)["pid"].mode().sort()
    return pl.DataFrame(
        {
            "world_size": [int32(distributed.get("world_size"))],
            "host": [_text(facts.host)],
            "pid": [pids[0] if pids.len() else -1],
            "gpu_name": [_gpu_name(facts, spans)],
            "started_ns": [spans["start_ns"].min()],
            "ended_ns": [spans.select(pl.col("start_ns") + pl.col("duration_ns")).max().item()],
            "source": [SOURCE],
        }
    )


def _gpu_name(facts: TraceFacts, spans: pl.DataFrame) -> str:
    """Return the model of the device with most of the rank's kernels; the trace lists the host's devices.

    Devices of a single model need no number: ROCm numbers agents in kernels, but GPUs in the list.
    """
    used = spans.select("kind", "device").filter(pl.col("kind") == "kernel")["device"].mode().sort()
    devices = facts.devices if used.len() and isinstance(facts.devices, list) else []
    models = {device.get("id"): _text(device.get("name")) for device in devices if isinstance(device, dict)}
    names = set(models.values())
    return models.get(used[0], names.pop() if len(names) == 1 else "") if models else ""


def _stamped(name: str, frame: pl.DataFrame, rank: int, window: int) -> pl.DataFrame:
    stamped = of_rank(frame, rank)
    return (
        stamped
        if name in ("workers", "iterations")
        else stamped.with_columns(window=pl.lit(window, dtype=pl.Int32))
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# Communication on CPU: rows of `collectives` from gloo's ranges.

_POINT_TO_POINT = ("send", "recv")


def gloo_collectives(
    spans: pl.DataFrame, args: Sequence[EventArguments], groups: Groups, rank: int
) -> pl.DataFrame:
    """Return one row per `gloo:*` range.

    Args:
        spans: all spans of the rank, with `span_id` and `position`.
        args: details by `position`.
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
    """Return calls into c10d that gloo may have run: those without an `nccl:*` range inside."""
    calls = spans.filter((pl.col("kind") == "cpu_op") & pl.col("name").str.starts_with("c10d::"))
    nccl = spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("nccl:")).select(
        "span_id",
        thread="tid",
        launch_ns="start_ns",
        launch_end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    on_nccl = with_enclosing_span(nccl, calls, "call")["call_position"].drop_nulls()
    return calls.filter(~pl.col("position").is_in(on_nccl.to_list()))


def _with_operation(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that are a collective, send or receive, ordered by start, with its name as `op`."""
    names = frame["name"].unique().to_list()
    ops = pl.col("name").replace_strict(names, [operation(name) for name in names], return_dtype=pl.String)
    return frame.with_columns(op=ops).filter(pl.col("op") != "").sort("start_ns", "span_id")


def _paired(ranges: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Pair the k-th range with the k-th call, after the ranges that were called before the window.

    The number of those ranges is not recorded. A range never starts before its call and has the operation of
    its call: the smallest number with the most agreeing pairs is used, and pairs that disagree are dropped.
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
    """Return the number of leading ranges without a call, and which of the following pairs agree."""
    starts, issued = ranges["start_ns"].to_numpy(), calls["start_ns"].to_numpy()
    ops = ranges["op"].to_numpy()
    # Gloo implements reduce-scatter as an all-reduce, and names its range so.
    called = calls["op"].replace("reduce_scatter", "all_reduce").to_numpy()
    best = 0, np.zeros(0, dtype=np.bool_)
    for shift in range(len(starts)):
        count = min(len(starts) - shift, len(issued))
        shifted = slice(shift, shift + count)
        agree = (starts[shifted] >= issued[:count]) & (ops[shifted] == called[:count])
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


# Synchronisation: the calls that waited, and the streams or events they waited for.

_EVENT_NAMES = {
    "Stream Wait Event": "stream_wait_event",
    "Event Sync": "event_sync",
    "Stream Sync": "stream_sync",
    "Context Sync": "device_sync",
}


def read_syncs(spans: pl.DataFrame, events: pl.DataFrame, args: Sequence[EventArguments]) -> pl.DataFrame:
    """Return rows of `syncs`.

    Args:
        spans: all spans of the rank, with `span_id`.
        events: the `cuda_sync` events, with `position`.
        args: details by `position`.
    """
    columns = spans.select("kind", "name", "correlation", "start_ns", "duration_ns", "span_id")
    calls = columns.filter(pl.col("kind") == "runtime").drop("kind")
    explained = _explained(events, args, calls)
    unexplained = sync_calls(calls).join(explained, on="correlation", how="anti")
    return pl.concat([explained, _unexplained(unexplained)]).sort("start_ns", "span_id", maintain_order=True)


def _explained(events: pl.DataFrame, args: Sequence[EventArguments], calls: pl.DataFrame) -> pl.DataFrame:
    """Return sync events with the span of their call."""
    of_events = [args[position] for position in events["position"]]
    details = {
        "device": [a.device for a in of_events],
        "stream": [a.stream for a in of_events],
        "event_id": [a.wait_on_event for a in of_events],
        "record_stream": [a.wait_on_stream for a in of_events],
        "record_correlation": [a.wait_on_record for a in of_events],
    }
    rows = events.select(
        pl.col("name").replace_strict(_EVENT_NAMES, default=None, return_dtype=pl.String).alias("kind"),
        "correlation",
        "start_ns",
        "duration_ns",
    ).with_columns(pl.Series(name, values, dtype=pl.Int64, strict=False) for name, values in details.items())
    # Kineto before pull request 1339 keeps only the latest record of an event, which may follow the wait.
    is_later = pl.col("record_correlation") >= pl.col("correlation")
    rows = rows.with_columns(
        pl.when(is_later).then(-1).otherwise(name).alias(name)
        for name in ("record_stream", "record_correlation")
    )
    by_correlation = calls.select("correlation", "span_id").unique(
        "correlation", keep="first", maintain_order=True
    )
    joined = rows.drop_nulls("kind").join(by_correlation, on="correlation", how="left", maintain_order="left")
    return _columns(joined.with_columns(pl.col(pl.Int64).fill_null(-1)))


def _unexplained(calls: pl.DataFrame) -> pl.DataFrame:
    unknown = ("device", "stream", "event_id", "record_stream", "record_correlation")
    return _columns(calls.with_columns(pl.lit(-1, dtype=pl.Int64).alias(name) for name in unknown))


def _columns(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(name for name in SYNCS.columns if name not in ("rank", "window"))


# A trace is scanned by compiled loops where that saves more time than loading them takes. Else every event is
# decoded, with the same result. A process that reads many traces loads the loops once it has seen enough
# JSON.


# Scanning saves 1 µs of CPU time per event, and a MB of JSON has 2,400 to 4,400 events; loading numba and the
# loops takes 0.27 s if nothing else in the process has loaded them.
MIN_BYTES = 96 << 20
MIN_FILE_BYTES = 2 << 20  # smaller files are decoded, since starting a scan takes 1 ms
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_MIN_EXPANSION = 4  # minimum expansion of a compressed trace; 10 to 20 are usual
_SCANNER = "dpro.ingest.kineto.scanner"
seen_bytes = 0  # bytes of JSON in the traces that this process has read


def scanner_of(source: Source, columns: Columns, memory: Memory) -> Scanner | None:
    """Return a scanner for a trace; None where it is not worthwhile, or not compiled yet.

    Compiling takes longer than decoding most files, so a process in the background does it for later files.
    """
    global seen_bytes
    of_file = text_bytes(source)
    seen_bytes += of_file
    if of_file < MIN_FILE_BYTES:
        return None
    from dpro.compiled import can_compile, is_kept, is_loaded, run_beside

    if not can_compile() or not (is_loaded() or seen_bytes >= MIN_BYTES):
        return None
    from dpro.ingest.kineto.scan_kernel import scan
    from dpro.ingest.kineto.scanner import Scanner

    if not is_kept(scan):
        run_beside(_SCANNER)
        return None
    return Scanner(columns, memory)


def text_bytes(source: Source) -> int:
    """Estimate the bytes of JSON in a file; 0 where unknown, as for a member of an archive."""
    if source.member:
        return 0
    try:
        with source.path.open("rb") as file:
            start, stored = file.read(4), source.path.stat().st_size
            if start == _ZSTD:
                return _MIN_EXPANSION * stored
            if not start.startswith(_GZIP) or stored < 8:
                return stored
            file.seek(-4, 2)  # ISIZE of RFC 1952: the length of the content, modulo 2^32
            return max(int.from_bytes(file.read(4), "little"), _MIN_EXPANSION * stored)
    except OSError:
        return 0
