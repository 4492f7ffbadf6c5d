"""Nsight Systems exports (`nsys export --type sqlite`): the ranks of one file converted to tables.

Reads a `.sqlite` file of any version with the tables of CUDA and NVTX, gzipped or not; returns a `RankTrace`
per process that used a GPU. Times are on the wall clock of the host where the export states the start of its
session. CPU samples, system calls, GPU metrics and launch facts of kernels are not read.
"""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from dpro.classify import classify, is_communication, operation
from dpro.errors import InputError
from dpro.ingest.derived import REPETITION, guess_steps, sync_calls, with_enclosing_span, with_launch
from dpro.ingest.derived import find_steps as find_marked_steps
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.reading.files import Source, blocks, rank_of_name
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import GPU_WORK_KINDS, SYNCS

SOURCE = "nsys"

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
# NVTX ranges that state a rank, such as `rank 3`; the payload of ncclCommInitRank states it, too.
_RANK_IN_RANGE = r"(?i)^(?:global[ _])?rank[ _:=#]*(\d+)$"


@dataclass(frozen=True)
class _Session:
    """Facts of the whole export."""

    start_ns: int  # added to every time; 0 where times are absolute, or the start is unknown
    host: str
    environment: str
    gpus: dict[int, tuple[str, str]]  # model and uuid by device
    versions: dict[str, str]
    warnings: list[str] = field(default_factory=list)


def is_nsys(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of an export: SQLite with its table of strings."""
    return head.startswith(MAGIC) and b"StringIds" in head


def read_nsys(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read all ranks of an export.

    Args:
        path: the file; its name gives the rank where an export of one process does not.
        rank: the rank of the one process, where the caller knows better.

    Raises:
        InputError: the file is damaged, is not an export, or has no CUDA or NVTX activity.
    """
    with open_export(path) as export:
        session = _session(export)
        spans, skipped = read_spans(export)
        synchronised, recorded = sync_tables(export)
        devices = export.rows(
            "TARGET_INFO_CUDA_DEVICE", {"pid": pl.Int64, "cudaId": pl.Int64, "gpuId": pl.Int64}
        )
        physical = {(pid, device): gpu for pid, device, gpu in devices.drop_nulls().iter_rows()}
    if spans.is_empty():
        raise InputError(f"{path}: no CUDA or NVTX activity in it; record with `nsys profile -t cuda,nvtx`")
    spans = _with_process(spans).with_columns(pl.col("start_ns") + session.start_ns)
    synchronised = synchronised.with_columns(pl.col("start_ns") + session.start_ns)
    processes = _processes(spans, physical)
    left_out = spans.filter(~pl.col("process").is_in(processes)).height
    if left_out:
        skipped["spans of processes without GPU work"] = left_out
    ranks, world_size, warnings = _ranks(processes, spans, session, path, rank)
    traces = []
    for process, number in zip(processes, ranks, strict=True):
        of_process = pl.col("process").is_in([process])
        parts = (frame.filter(of_process) for frame in (spans, synchronised, recorded))
        trace = _trace(number, world_size, session, *parts)
        trace.warnings.extend(impossible_in_words(path.name, trace.skipped))
        traces.append(trace)
    _share_guess(traces)
    # Warnings and counts of the whole file go to one trace.
    traces[0].skipped.update(skipped)
    traces[0].warnings.extend([*session.warnings, *warnings])
    return traces


def _trace(
    rank: int,
    world_size: int,
    session: _Session,
    spans: pl.DataFrame,
    synchronised: pl.DataFrame,
    recorded: pl.DataFrame,
) -> RankTrace:
    spans, impossible = drop_impossible(spans)
    spans = spans.with_row_index("span_id").with_columns(
        pl.col("span_id").cast(pl.Int64),
        # The thread that ran the forward pass is not recorded, only that it was another one.
        forward_thread=pl.when(pl.col("name").str.starts_with("autograd::")).then(1).otherwise(-1),
    )
    used = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))["device"].mode().sort()
    model, uuid = session.gpus.get(used[0] if used.len() else -1, ("", ""))
    ends = spans["start_ns"] + spans["duration_ns"]
    worker = {"world_size": world_size, "host": session.host, "pid": spans["process"][0], "source": SOURCE}
    worker |= {"gpu_name": model, "gpu_uuid": uuid}
    worker |= {"started_ns": spans["start_ns"].min(), "ended_ns": ends.max()}
    frames = {
        "spans": spans.drop("process", "domain", "payload").with_columns(window=pl.lit(0)),
        "collectives": read_collectives(spans),
        "syncs": read_syncs(spans, synchronised, recorded),
        "steps": find_steps(spans).with_columns(window=pl.lit(0)),
        "workers": pl.DataFrame([worker]),
    }
    return RankTrace(
        rank=rank,
        world_size=world_size,
        frames={name: of_rank(frame, rank) for name, frame in frames.items()},
        host=session.host,
        gpus=[model] if model else [],
        versions=session.versions,
        skipped=dict(sorted(impossible.items())),
    )


def _session(export: Export) -> _Session:
    """Return clock, host, GPUs and versions, and the known environment of the first process."""
    exported = _facts(export, "META_DATA_EXPORT")
    system = _facts(export, "TARGET_INFO_SYSTEM_ENV")
    captured = export.rows("META_DATA_CAPTURE", {"name": pl.String, "value": pl.String})
    started = export.rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": pl.Int64})["utcEpochNs"]
    # An export with --ts-normalize has absolute times.
    absolute = exported.get("EXPORT_PARAM_TIME_NORMALIZE") == "true"
    start_ns = started[0] if started.len() and started[0] is not None else 0
    gpus = export.rows("TARGET_INFO_GPU", {"id": pl.Int64, "name": pl.String, "uuid": pl.String})
    variables = captured.filter(pl.col("name").str.contains("^PROCESS_0:(ENVIRONMENT_VARIABLE|ARGUMENT_)"))
    versions = {
        "nsys": exported.get("EXPORT_PRODUCT_VERSION"),
        "cuda_driver": system.get("CudaDriverVersion"),
        "nvidia_driver": system.get("NvDriverVersion"),
    }
    unknown = f"{export.path.name}: the export lacks the start time of its session: times count from there"
    return _Session(
        start_ns=0 if absolute else start_ns,
        host=system.get("Hostname", ""),
        environment="\n".join(
            [*variables["value"].drop_nulls(), *system.get("DeviceEnvironment", "").split(";")]
        ),
        gpus={row["id"]: (row["name"] or "", row["uuid"] or "") for row in gpus.iter_rows(named=True)},
        versions={name: version for name, version in versions.items() if version},
        warnings=[] if absolute or start_ns else [unknown],
    )


def _facts(export: Export, table: str) -> dict[str, str]:
    rows = export.rows(table, {"name": pl.String, "value": pl.String}).drop_nulls()
    return dict(rows.iter_rows())


def _with_process(spans: pl.DataFrame) -> pl.DataFrame:
    """Assign GPU work without a process, in old exports, to the only process that makes calls."""
    processes = spans.filter(pl.col("process") >= 0)["process"].unique()
    if processes.len() != 1:
        return spans
    return spans.with_columns(process=pl.lit(processes[0], pl.Int64))


def _processes(spans: pl.DataFrame, physical: dict[tuple[int, int], int]) -> list[int]:
    """Return processes that are ranks, ordered by their most used GPU; without GPU work, all by id."""
    work = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    if work.is_empty():
        return spans["process"].unique().sort().to_list()
    used = work.group_by("process").agg(pl.col("device").mode().min()).rows()
    placed = sorted((physical.get((process, device), device), process) for process, device in used)
    return [process for _, process in placed]


def _ranks(
    processes: Sequence[int], spans: pl.DataFrame, session: _Session, path: Path, rank: int | None
) -> tuple[list[int], int, list[str]]:
    """Return the rank of each process, the world size (-1 unknown), and a warning about guesses."""
    of_processes = [_stated_rank(spans.filter(pl.col("process") == process)) for process in processes]
    sizes = [_variable(session.environment, _SIZE_VARIABLES), *(size for _, size in of_processes)]
    ranks = [number for number, _ in of_processes]
    if min(ranks) >= 0 and len(set(ranks)) == len(ranks):
        return ranks, max(sizes), []
    if len(processes) > 1:
        # Ranks of earlier hosts come first.
        match = re.search(r"--node[-_]rank[=\s](\d+)", session.environment)
        node = int(match[1]) if match else _variable(session.environment, ("NODE_RANK", "GROUP_RANK"))
        first = max(node, 0) * len(processes)
        last = first + len(processes) - 1
        by_gpu = f"{path.name}: no rank information; ranks {first}-{last} assigned by GPU order"
        return list(range(first, first + len(processes))), max(*sizes, first + len(processes)), [by_gpu]
    stated = rank if rank is not None else _variable(session.environment, _RANK_VARIABLES)
    return [stated if stated >= 0 else rank_of_name(path.name)], max(sizes), []


def _stated_rank(spans: pl.DataFrame) -> tuple[int, int]:
    """Return rank and world size that a process states in NVTX; -1 where it states none, or several."""
    ranges = spans.filter(pl.col("kind") == "annotation")
    inits = ranges.filter(pl.col("name").str.starts_with("ncclCommInit")).select(
        rank=pl.col("payload").str.extract(r'"Rank"\s*:\s*"?(\d+)').cast(pl.Int64, strict=False),
        size=pl.col("payload").str.extract(r'"No\. of ranks"\s*:\s*"?(\d+)').cast(pl.Int64, strict=False),
    )
    # The largest communicator is assumed to be the whole job.
    world = inits.drop_nulls().sort("size", descending=True)
    if world.height:
        return world.row(0)
    named = ranges["name"].unique().str.extract(_RANK_IN_RANGE).drop_nulls().unique()
    return (int(named[0]) if named.len() == 1 else -1), -1


def _variable(environment: str, names: Sequence[str]) -> int:
    """Return the value of the first variable that is a number; -1 where none is."""
    for name in names:
        match = re.search(rf'(?m)^{name}="?(\d+)"?$', environment)
        if match:
            return int(match[1])
    return -1


# Communication: rows of `collectives` from communication kernels.

_COLUMNS = (
    *("collective_id", "window", "op", "group", "peer", "bytes_in", "bytes_out", "enqueued_ns"),
    *("start_ns", "duration_ns", "span_id", "launch_span_id", "source"),
)
# Field of the payload of NCCL's ranges.
_SIZE = r'"Message size[^"]*"\s*:\s*"?(\d+)'


def read_collectives(spans: pl.DataFrame) -> pl.DataFrame:
    """Return one row per communication kernel of one process.

    Args:
        spans: its spans, with `span_id`.
    """
    kernels = spans.filter(pl.col("kind") == "kernel")
    names = [name for name in kernels["name"].unique() if is_communication(name)]
    kernels = kernels.filter(pl.col("name").is_in(names))
    ran = with_launch(kernels.select("span_id", "name", "start_ns", "duration_ns", "correlation"), spans)
    issues = _issues(spans)
    ranges = spans.filter(pl.col("kind") == "annotation").with_columns(position="span_id")
    ran = with_enclosing_span(ran, ranges.filter(pl.col("name").str.starts_with("nccl:")), "range")
    ran = with_enclosing_span(ran, issues.rename({"span_id": "position"}), "issue")
    of_issue = issues.select("op", "group", "bytes_in", "bytes_out", "peer", issue_position="span_id")
    ran = ran.join(of_issue, on="issue_position", how="left")
    # With several kernels for one group of calls, the bytes of each are unknown.
    shared = pl.col("issue_position").is_not_null() & (pl.len().over("issue_position") > 1)
    moved = (
        pl.when(shared).then(-1).otherwise(name).fill_null(-1).alias(name)
        for name in ("bytes_in", "bytes_out", "peer")
    )
    ops = {name: operation(name) for name in ran["range_name"].drop_nulls().unique()}
    by_name = {name: classify(name).op or name for name in names}
    ranged = pl.col("range_name").replace_strict(ops, default="", return_dtype=pl.String)
    issued = [pl.when(op != "").then(op) for op in (ranged, pl.col("op"))]
    return (
        ran.sort("start_ns", "span_id")
        .with_columns(
            *moved,
            op=pl.coalesce(*issued, pl.col("name").replace_strict(by_name, return_dtype=pl.String)),
            group=pl.col("group").fill_null(""),
            collective_id=pl.int_range(pl.len()),
            enqueued_ns=pl.col("launch_ns").fill_null(-1),
            launch_span_id=pl.col("launch_span_id").fill_null(-1),
            window=pl.lit(0),
            source=pl.lit("nsys kernel"),
        )
        .select(_COLUMNS)
    )


def _issues(spans: pl.DataFrame) -> pl.DataFrame:
    """Return NCCL's ranges in which work is launched: a single call, or the end of the group it is in.

    Returns:
        `span_id`, `tid`, `start_ns`, `duration_ns`, `name` of the range, and of the calls it launches `op`
        (empty where they differ), `group`, `bytes_in`, `bytes_out` and `peer`.
    """
    nccl = (
        spans.filter((pl.col("kind") == "annotation") & pl.col("name").str.contains(r"^nccl[A-Z]"))
        .sort("tid", "start_ns", "span_id")
        .select("span_id", "tid", "start_ns", "duration_ns", "name", "payload")
    )
    ops = {name: operation(name.removeprefix("nccl")) for name in nccl["name"].unique()}
    opened, closed = pl.col("name") == "ncclGroupStart", pl.col("name") == "ncclGroupEnd"
    level = (opened.cast(pl.Int64) - closed.cast(pl.Int64)).cum_sum().over("tid")
    # The window may begin inside a group: ends without a start do not count.
    depth = level - pl.min_horizontal(level.cum_min().over("tid"), 0)
    nccl = nccl.with_columns(
        op=pl.col("name").replace_strict(ops, default="", return_dtype=pl.String), depth=depth
    ).with_columns(ends=pl.when(closed & (pl.col("depth") == 0)).then("span_id"))
    calls = nccl.with_columns(
        issue=pl.when(pl.col("depth") == 0)
        .then("span_id")
        .otherwise(pl.col("ends").backward_fill().over("tid")),
        size=pl.col("payload").str.extract(_SIZE).cast(pl.Int64, strict=False),
        peer=pl.col("payload").str.extract(r'"Peer rank"\s*:\s*"?(\d+)').cast(pl.Int64, strict=False),
        communicator=pl.col("payload").str.extract(r'"NCCL communicator ID"\s*:\s*"?(\w+)'),
    ).filter(pl.col("op") != "")
    return nccl.select("span_id", "tid", "start_ns", "duration_ns", "name").join(
        _combine_calls(calls), left_on="span_id", right_on="issue"
    )


def _combine_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Combine the calls of each group into one row.

    NCCL states the input of a rank for an all-gather, its output for a reduce-scatter.
    """
    op, size = pl.col("op"), pl.col("size")
    both_ways = ~op.is_in(["send", "recv", "all_gather", "reduce_scatter"])
    puts = pl.when(op.is_in(["send", "all_gather"]) | both_ways).then(size).when(op == "recv").then(0)
    gets = pl.when(op.is_in(["recv", "reduce_scatter"]) | both_ways).then(size).when(op == "send").then(0)
    distinct = op.unique().sort()
    exchanged = (distinct.len() == 2) & op.is_in(["send", "recv"]).all()
    return calls.group_by("issue").agg(
        pl.when(op.n_unique() == 1)
        .then(op.first())
        .when(exchanged)
        .then(pl.lit("send_recv"))
        .otherwise(pl.lit(""))
        .alias("op"),
        group=pl.when(pl.col("communicator").n_unique() == 1).then(pl.col("communicator").first()),
        bytes_in=pl.when(puts.is_not_null().all()).then(puts.sum()),
        bytes_out=pl.when(gets.is_not_null().all()).then(gets.sum()),
        peer=pl.when(pl.col("peer").n_unique() == 1).then(pl.col("peer").first()),
    )


# Work and ranges as columns of `spans`.

_TIME = {"start": pl.Int64, "end": pl.Int64}
_ON_GPU = _TIME | {
    "deviceId": pl.Int64,
    "streamId": pl.Int64,
    "correlationId": pl.Int64,
    "globalPid": pl.Int64,
}
_CALL = _TIME | {"globalTid": pl.Int64, "nameId": pl.Int64, "correlationId": pl.Int64}

# CUPTI's numbers, with torch.profiler's names.
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH"}
_COPIES |= {10: "PtoP"}
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}

# Suffixes of `torch.autograd.profiler.emit_nvtx` on operator names, each where known:
# `, seq = 41, op_id = 990, sizes = [[2, 3]], input_op_ids = [(989,0)]`.
EMITTED = r", (?:seq|op_id) = \d.*$|, sizes = \[.*$"
# Operators that torch.profiler calls annotations.
ANNOTATION = r"^(Optimizer\.|ProfilerStep#|nccl:|gloo:|FSDP::|DistributedDataParallel|enumerate\(DataLoader)"

_MARKED, _DOMAIN_CREATED = 34, 75
# CUPTI appends the version of the interface to the runtime's names (not to the driver's).
_RUNTIME_VERSION = r"^(cuda\w+?)(_ptsz|_ptds)?_v\d+$"


def read_spans(export: Export) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return all spans of all processes, and the number of rows left out, by reason.

    Returns:
        Columns of `spans` without ids, and `process` (its id), `domain` (of an NVTX range) and `payload` (its
        JSON, empty for none), by start and then the longer first. Times are as in the export.
    """
    names = {"demangledName": pl.Int64, "shortName": pl.Int64}
    rows = export.rows("CUPTI_ACTIVITY_KIND_KERNEL", _ON_GPU | names)
    named = export.named(rows, long="demangledName", short="shortName")
    parts = [
        _on_gpu(named, "kernel", pl.coalesce("long", "short")),
        _graphs(export),
        _copies(export),
        _fills(export),
        _calls(export),
        _ranges(export),
        _overhead(export),
    ]
    spans = pl.concat(parts, how="diagonal_relaxed").with_columns(duration_ns=pl.col("end") - pl.col("start"))
    whole = spans.filter(pl.col("duration_ns") >= 0)
    lost = {
        "spans without an end": spans.height - whole.height,
        "operating system calls": export.count("OSRT_API"),
    }
    numbers = [name for name, dtype in whole.schema.items() if dtype == pl.Int64]
    filled = whole.with_columns(pl.col(numbers).fill_null(-1), pl.col(pl.String).fill_null(""))
    ordered = filled.rename({"start": "start_ns"}).drop("end")
    return (
        ordered.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True),
        {reason: count for reason, count in lost.items() if count},
    )


def _on_gpu(rows: pl.DataFrame, kind: str, name: pl.Expr) -> pl.DataFrame:
    return rows.select(
        *_TIME,
        kind=pl.lit(kind),
        name=name,
        process=process_of("globalPid"),
        device="deviceId",
        stream="streamId",
        correlation="correlationId",
        bytes="bytes" if "bytes" in rows.columns else pl.lit(-1, pl.Int64),
    )


def _graphs(export: Export) -> pl.DataFrame:
    """Return CUDA graphs that were traced as a whole; each is one piece of work."""
    rows = export.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _ON_GPU | {"graphId": pl.Int64})
    return _on_gpu(rows, "kernel", pl.format("CUDA graph {}", pl.col("graphId").fill_null(-1)))


def _copies(export: Export) -> pl.DataFrame:
    kinds = {"bytes": pl.Int64, "copyKind": pl.Int64, "srcKind": pl.Int64, "dstKind": pl.Int64}
    rows = export.rows("CUPTI_ACTIVITY_KIND_MEMCPY", _ON_GPU | kinds)
    source, target = (
        pl.col(side).replace_strict(_MEMORIES, default="Unknown", return_dtype=pl.String)
        for side in ("srcKind", "dstKind")
    )
    way = pl.col("copyKind").replace_strict(_COPIES, default="Unknown", return_dtype=pl.String)
    return _on_gpu(rows, "memcpy", pl.format("Memcpy {} ({} -> {})", way, source, target))


def _fills(export: Export) -> pl.DataFrame:
    rows = export.rows("CUPTI_ACTIVITY_KIND_MEMSET", _ON_GPU | {"bytes": pl.Int64, "memKind": pl.Int64})
    memory = pl.col("memKind").replace_strict(_MEMORIES, default="Unknown", return_dtype=pl.String)
    return _on_gpu(rows, "memset", pl.format("Memset ({})", memory))


def _calls(export: Export) -> pl.DataFrame:
    rows = export.named(export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", _CALL), name="nameId")
    name = pl.col("name").str.replace(_RUNTIME_VERSION, "$1")
    return _on_thread(rows.with_columns(name), "runtime", correlation=pl.col("correlationId"))


def _overhead(export: Export) -> pl.DataFrame:
    tables = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")
    rows = pl.concat([export.rows(table, _CALL) for table in tables])
    return _on_thread(export.named(rows, name="nameId"), "overhead")


def _ranges(export: Export) -> pl.DataFrame:
    """Return NVTX ranges on the thread that began them; those PyTorch emitted for operators are parsed."""
    texts = {"text": pl.String, "textId": pl.Int64, "jsonText": pl.String, "jsonTextId": pl.Int64}
    kinds = {"eventType": pl.Int64, "domainId": pl.Int64, "globalTid": pl.Int64}
    rows = export.named(export.rows("NVTX_EVENTS", _TIME | kinds | texts), stored="textId", json="jsonTextId")
    rows = rows.with_columns(name=pl.coalesce("text", "stored"), payload=pl.coalesce("jsonText", "json"))
    domains = rows.filter(pl.col("eventType") == _DOMAIN_CREATED).select(
        "domainId", process=process_of("globalTid"), domain="name"
    )
    ranges = rows.filter(pl.col("end").is_not_null() & (pl.col("eventType") < _DOMAIN_CREATED))
    ranges = ranges.filter(pl.col("eventType") != _MARKED).with_columns(process=process_of("globalTid"))
    ranges = ranges.join(
        domains.unique(["domainId", "process"], keep="any"), on=["domainId", "process"], how="left"
    )
    name, op = pl.col("name"), pl.col("name").str.replace(EMITTED, "")
    operator = (op != name) & ~name.str.contains(ANNOTATION)
    return _on_thread(
        ranges.with_columns(
            name=op,
            kind=pl.when(operator).then(pl.lit("cpu_op")).otherwise(pl.lit("annotation")),
            sequence_number=name.str.extract(r", seq = (\d+)").cast(pl.Int64, strict=False),
            shapes=name.str.extract(r", sizes = (\[.*?\])(?:, input_op_ids|$)").str.replace_all(" ", ""),
        ),
        "",
        **{kept: pl.col(kept) for kept in ("sequence_number", "shapes", "domain", "payload")},
    )


def _on_thread(rows: pl.DataFrame, kind: str, **more: pl.Expr) -> pl.DataFrame:
    """Return rows as CPU spans; an empty `kind` means that it is a column."""
    return rows.select(
        *_TIME,
        "name",
        kind=pl.lit(kind) if kind else pl.col("kind"),
        process=process_of("globalTid"),
        pid=process_of("globalTid"),
        tid=pl.col("globalTid") & _ID_MASK,
        **more,
    )


# Training steps from NVTX ranges.

_STEP_COLUMNS = ("step", "start_ns", "duration_ns", "source")
_COUNTED = r"(?i)^(.*(?:step|iter|iteration|batch)[^\d]{0,3})(\d+)[^\w]*$"
# Ranges of libraries repeat within a step.
_LIBRARY = r"^(nccl|gloo|FSDP::|DistributedDataParallel|Optimizer\.|enumerate\()"


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of one process.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `tid`, `domain`, `sequence_number` and
            `forward_thread`, and the columns for `guess_steps`.
    """
    ranges = spans.filter(
        (pl.col("kind") == "annotation")
        & ~pl.col("name").str.contains(_LIBRARY)
        & (pl.col("domain").str.to_uppercase() != "NCCL")
        & (pl.col("duration_ns") > 0)
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    for steps in (_counted(ranges), find_marked_steps(spans)):
        if steps.height:
            return steps
    before = pl.col("end_ns").cum_max().shift(1).over("tid")
    top = ranges.sort("start_ns", "end_ns", descending=[False, True]).filter(
        before.is_null() | (pl.col("start_ns") >= before)
    )
    repeated = _repeated(top)
    for steps in (repeated.filter(_share_kernels(repeated, spans)), _busiest_phase(top, spans)):
        if steps.height:
            return steps
    return guess_steps(spans)


def _share_kernels(steps: pl.DataFrame, spans: pl.DataFrame) -> bool:
    """Return whether steps repeat their work: most kernel time in them is of kernels that run in several.

    A library that compiles gives its ranges one name, but does other work in each.
    """
    bounds = steps.select("start_ns", "step", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    kernels = spans.filter(pl.col("kind") == "kernel").select("start_ns", "name", "duration_ns")
    placed = kernels.sort("start_ns").join_asof(bounds.sort("start_ns"), on="start_ns")
    inside = placed.filter(pl.col("start_ns") < pl.col("end_ns"))
    times = inside.group_by("name").agg(pl.col("step").n_unique(), pl.col("duration_ns").sum())
    return 2 * times.filter(pl.col("step") > 1)["duration_ns"].sum() >= times["duration_ns"].sum()


def _share_guess(traces: Sequence[RankTrace]) -> None:
    """Give all ranks the guessed steps of the first, if all are guessed.

    All ranks have one clock, but each guess may cut steps elsewhere: step 5 of one rank could be half of step
    5 and half of step 6 of another.
    """
    guessed = [trace.frames["steps"] for trace in traces]
    if all((steps["source"] == REPETITION).any() for steps in guessed):
        for trace in traces:
            trace.frames["steps"] = of_rank(guessed[0], trace.rank)


def _counted(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the outermost ranges with numbered names; of several series, the one with the most time."""
    series = ["tid", "prefix"]
    counted = (
        ranges.with_columns(
            prefix=pl.col("name").str.extract(_COUNTED, 1),
            step=pl.col("name").str.extract(_COUNTED, 2).cast(pl.Int64, strict=False),
        )
        .drop_nulls("step")
        .sort("start_ns", maintain_order=True)
    )
    # A number that recurs counts something within a step; steps do not overlap.
    apart = (pl.col("start_ns") >= pl.col("end_ns").shift(1).over(series)).fill_null(True)
    candidates = (
        counted.with_columns(apart=apart)
        .group_by(series)
        .agg(
            total=pl.col("duration_ns").sum(),
            sound=pl.col("step").is_unique().all() & pl.col("apart").all(),
        )
    )
    best = (
        candidates.filter("sound").sort(["total", "prefix", "tid"], descending=[True, False, False]).head(1)
    )
    steps = counted.join(best, on=series, how="semi").with_columns(source=pl.format("NVTX {}N", "prefix"))
    return steps.select(_STEP_COLUMNS).sort("step")


def _busiest_phase(top: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the phase that occurs once (set-up, warm-up, measured loop) and has most of the kernel time.

    Args:
        top: ranges at the top level of threads.
    """
    phases = top.sort("start_ns")
    kernels = spans.filter(pl.col("kind") == "kernel").select("start_ns", busy="duration_ns").sort("start_ns")
    placed = kernels.join_asof(phases.select("start_ns", begin="start_ns", end="end_ns"), on="start_ns")
    busy = placed.filter(pl.col("start_ns") < pl.col("end")).group_by("begin").agg(pl.col("busy").sum())
    longest = busy.filter(pl.col("busy") > kernels["busy"].sum() / 2)
    chosen = phases.join(longest, left_on="start_ns", right_on="begin", how="semi").head(1)
    return _cycles(chosen.with_columns(nth=pl.lit(0, pl.Int64)))


def _repeated(top: pl.DataFrame) -> pl.DataFrame:
    """Return the repeating ranges at the top level of a thread that take the most time.

    Ranges that occur equally often, one after the other (forward, backward, optimizer), form a step together.

    Args:
        top: ranges at the top level of threads.
    """
    named = top.with_columns(
        count=pl.len().over("tid", "name"), nth=pl.int_range(pl.len()).over("tid", "name")
    )
    repeated = named.filter(pl.col("count") > 1)
    totals = repeated.group_by("tid", "name", "count").agg(total=pl.col("duration_ns").sum())
    longest = totals.sort(["total", "name", "tid"], descending=[True, False, False]).head(1)
    alone = repeated.join(longest, on=["tid", "name"], how="semi")
    together = _cycles(repeated.join(longest, on=["tid", "count"], how="semi"))
    if (together["start_ns"] >= together["start_ns"].shift(1) + together["duration_ns"].shift(1)).all():
        return together
    return _cycles(alone)


def _cycles(ranges: pl.DataFrame) -> pl.DataFrame:
    """Combine the n-th range of each name, in order."""
    first, last = pl.col("start_ns").min(), pl.col("end_ns").max()
    cycles = ranges.group_by("nth").agg(
        start_ns=first,
        duration_ns=last - first,
        source=pl.lit("NVTX ") + pl.col("name").sort_by("start_ns").str.join(", "),
    )
    return cycles.rename({"nth": "step"}).select(_STEP_COLUMNS).sort("step")


# Synchronisation: the calls that waited, and the streams or events they waited for.

_WHERE = {"deviceId": pl.Int64, "streamId": pl.Int64, "eventId": pl.Int64, "correlationId": pl.Int64}
_NONE = 0xFFFFFFFF  # no stream or event
_SYNC_COLUMNS = [name for name in SYNCS.columns if name != "rank"]


def sync_tables(export: Export) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return synchronisations and recorded events of all processes.

    Returns:
        Both with `process`, `correlation`, `device`, `stream`, `event_id`; the first also with its time.
    """
    times = {"start": pl.Int64, "end": pl.Int64}
    tables = (
        export.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", _WHERE | times | {"globalPid": pl.Int64}),
        export.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", _WHERE | times | {"globalPid": pl.Int64}),
    )
    synchronised, recorded = (
        table.select(
            process=process_of("globalPid"),
            correlation=pl.col("correlationId").fill_null(-1),
            device="deviceId",
            stream=pl.col("streamId").replace(_NONE, -1),
            event_id=pl.col("eventId").replace(_NONE, -1),
            start_ns="start",
            duration_ns=pl.col("end") - pl.col("start"),
        )
        for table in tables
    )
    return synchronised, recorded.drop("start_ns", "duration_ns")


def read_syncs(spans: pl.DataFrame, synchronised: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `syncs` of one process.

    Args:
        spans: its spans, with `span_id`.
        synchronised, recorded: its rows of `sync_tables`.
    """
    calls = spans.filter(pl.col("kind") == "runtime").select(
        "name", "span_id", "correlation", "start_ns", "duration_ns"
    )
    named = sync_calls(calls)
    details = pl.concat([synchronised.drop("start_ns", "duration_ns"), recorded]).unique(
        "correlation", keep="first", maintain_order=True
    )
    by_call = named.join(details.drop("process"), on="correlation", how="left", maintain_order="left")
    # Queries wait for nothing, though they are recorded as synchronisations.
    asked = calls.filter(pl.col("name").str.contains(r"^(cuda|cu|hip)(Event|Stream)Query"))
    made = pl.concat([named.select("correlation"), asked.select("correlation")])
    uncalled = synchronised.join(made, on="correlation", how="anti").with_columns(
        kind=_kind_by_content(), span_id=pl.lit(-1, pl.Int64)
    )
    rows = _with_records(_with_device(pl.concat([by_call, uncalled], how="diagonal"), spans))
    rows = rows.with_columns(window=pl.lit(0), duration_ns=pl.col("duration_ns").clip(lower_bound=-1))
    return rows.with_columns(pl.col(pl.Int64).fill_null(-1)).select(_SYNC_COLUMNS)


def _with_device(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Set the device of a stream to where its work ran: some versions record a wrong one (always 0)."""
    ran = spans.filter(pl.col("stream") >= 0).select("stream", ran_on="device").unique()
    alone = ran.unique("stream", keep="none")
    placed = rows.join(alone, on="stream", how="left", maintain_order="left")
    return placed.with_columns(device=pl.coalesce("ran_on", "device")).drop("ran_on")


def _kind_by_content() -> pl.Expr:
    """Return the kind of a synchronisation, from the stream and event that it names."""
    event, stream = pl.col("event_id") >= 0, pl.col("stream") >= 0
    return (
        pl.when(event & stream)
        .then(pl.lit("stream_wait_event"))
        .when(event)
        .then(pl.lit("event_sync"))
        .when(stream)
        .then(pl.lit("stream_sync"))
        .otherwise(pl.lit("device_sync"))
    )


def _with_records(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the last record of an event before each wait for it."""
    records = rows.filter((pl.col("kind") == "event_record") & (pl.col("event_id") >= 0)).select(
        "event_id", "start_ns", record_stream="stream", record_correlation="correlation"
    )
    waits = pl.col("kind").is_in(["stream_wait_event", "event_sync"])
    recorded = rows.sort("start_ns", "span_id").join_asof(
        records.sort("start_ns"), on="start_ns", by="event_id", check_sortedness=False
    )
    return recorded.with_columns(
        pl.when(waits & (pl.col("event_id") >= 0)).then(name).otherwise(-1).alias(name)
        for name in ("record_stream", "record_correlation")
    )


# Access to tables and columns that may be missing: versions differ in both.

MAGIC = b"SQLite format 3\0"
_GZIP = b"\x1f\x8b"
_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter for bytes quoted in SQLite's message

# A globalTid has hardware, machine, process and thread from the highest bits to the lowest; a globalPid has
# thread 0. Processes and threads have 24 bits each.
_ID_BITS = 24
_ID_MASK = (1 << _ID_BITS) - 1

MIN_ROW_BYTES = 4  # a row's offset in its page, its length and its number

Columns = Mapping[str, type[pl.DataType]]


@dataclass(frozen=True)
class Export:
    """An opened export.

    Attributes:
        present: columns by name of table or view.
        max_rows: maximum rows of a table; one with damaged pages may seem to have any number.
    """

    path: Path
    connection: sqlite3.Connection
    present: Mapping[str, frozenset[str]]
    max_rows: int

    def rows(self, table: str, columns: Columns) -> pl.DataFrame:
        """Return a table's rows with the requested columns, null where it lacks one; none without the table.

        Args:
            columns: types by name.

        Raises:
            InputError: the database is damaged.
        """
        have = self.present.get(table, frozenset())
        if not have:
            return pl.DataFrame(schema=columns)
        # SQLite cells may have any type: values of another type than the column's become null.
        stored = {name: "text" if dtype == pl.String else "integer" for name, dtype in columns.items()}
        selected = ", ".join(
            f"""CASE typeof("{name}") WHEN '{stored[name]}' THEN "{name}" END""" if name in have else "NULL"
            for name in columns
        )
        rows = self._all(f'SELECT {selected} FROM "{table}"')
        return pl.DataFrame(rows, schema=columns, orient="row", strict=False)

    def count(self, table: str) -> int:
        """Return the number of rows of a table; 0 where there is none."""
        if table not in self.present:
            return 0
        return int(self._all(f'SELECT count(*) FROM "{table}"')[0][0])

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        try:
            rows = self.connection.execute(query).fetchmany(self.max_rows + 1)
        except _DAMAGE as error:
            raise _damaged(self.path, error) from error
        if len(rows) > self.max_rows:
            raise _damaged(self.path, ValueError("more rows than its pages can hold"))
        return rows

    @cached_property
    def texts(self) -> pl.DataFrame:
        """`StringIds`, with columns `id` and `value`."""
        return self.rows("StringIds", {"id": pl.Int64, "value": pl.String})

    def named(self, frame: pl.DataFrame, **ids: str) -> pl.DataFrame:
        """Add texts that are looked up in `StringIds`.

        Args:
            frame: with columns of ids.
            ids: name of the text column -> the column with its id.
        """
        for text, identifier in ids.items():
            texts = self.texts.rename({"id": identifier, "value": text})
            frame = frame.join(texts, on=identifier, how="left", maintain_order="left")
        return frame


def process_of(serialised: str) -> pl.Expr:
    """Return the process id in a column of globalPid or globalTid."""
    return (pl.col(serialised) // (1 << _ID_BITS)) & _ID_MASK


@contextmanager
def open_export(
    path: Path,
    tables: Sequence[str] = ("StringIds",),
    kind: str = "an export of Nsight Systems",
    give: str = "what `nsys export --type sqlite` writes",
) -> Iterator[Export]:
    """Open an export; a gzipped one is unpacked to a temporary file while it is open.

    Args:
        tables: tables or views, of which every file of the kind has one.
        kind: name of the kind of file, for errors.
        give: advice on which file to give, for errors.

    Raises:
        InputError: the file cannot be read, is truncated, or is not of the kind.
    """
    with tempfile.TemporaryDirectory(prefix="dpro-nsys-") as folder:
        database = _unpacked(path, Path(folder))
        _refuse_cut_short(database, path, give)
        address = f"file:{quote(os.fsencode(database.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", errors="replace")
            max_rows = database.stat().st_size // MIN_ROW_BYTES
            present = _present(connection, path)
            if not present.keys() & set(tables):
                raise InputError(f"{path}: not {kind} (no table {' or '.join(tables)}); give {give}")
            yield Export(path, connection, present, max_rows)


def _unpacked(path: Path, folder: Path) -> Path:
    try:
        with path.open("rb") as file:
            if file.read(len(_GZIP)) != _GZIP:
                return path
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    database, damage = folder / "export.sqlite", list[str]()
    with database.open("wb") as plain:
        plain.writelines(blocks(Source(str(path), path), damage))
    if damage:
        raise InputError(f"{path}: truncated or damaged gzip ({damage[0]}); copy the file again")
    return database


def _refuse_cut_short(database: Path, path: Path, give: str) -> None:
    """Raise if a file is truncated, which SQLite notices only when it happens to read the missing part."""
    with database.open("rb") as file:
        header = file.read(100)
    if not header.startswith(MAGIC) or len(header) < 100:
        raise InputError(f"{path}: not a SQLite database; give {give}")
    page_bytes, num_pages = int.from_bytes(header[16:18]), int.from_bytes(header[28:32])
    page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
    if database.stat().st_size < page_bytes * num_pages:
        raise InputError(f"{path}: SQLite database cut short; copy or export it again")


def _present(connection: sqlite3.Connection, path: Path) -> dict[str, frozenset[str]]:
    try:
        tables, views = (
            connection.execute("SELECT name FROM sqlite_master WHERE type = ?", [kind]).fetchall()
            for kind in ("table", "view")
        )
        columns = {name: _columns_of(connection, name) for (name,) in tables}
        for (name,) in views:
            with suppress(sqlite3.OperationalError):  # a view of tables that are missing
                columns[name] = _columns_of(connection, name)
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    return columns


def _columns_of(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(row[1] for row in connection.execute(f'PRAGMA table_info("{table}")'))


def _damaged(path: Path, error: Exception) -> InputError:
    what = str(error)[:200].encode("unicode_escape").decode()  # SQLite quotes the damage itself
    return InputError(f"{path}: damaged SQLite database ({what}); copy or export it again")
