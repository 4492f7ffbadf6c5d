"""Nsight Systems exports (`nsys export --type sqlite`): the ranks of one file converted to tables.

Reads a `.sqlite` file of any version with the tables of CUDA and NVTX, gzipped or not; returns a `RankTrace`
per process that used a GPU. Times are on the wall clock of the host where the export states the start of its
session. CPU samples, system calls, GPU metrics and launch facts of kernels are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.extensions.nsys.sqlite import MAGIC, Export, open_export
from dpro.extensions.nsys.tables import (
    ANNOTATION,
    EMITTED,
    GRAPH_LAUNCHES,
    WHOLE_GRAPH,
    find_steps,
    read_collectives,
    read_syncs,
    whole_graphs,
)
from dpro.ingest.derived import REPETITION
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.reading.files import rank_of_name
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import GPU_WORK_KINDS
from dpro.words import counted

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
        trace = _trace(path, number, world_size, session, *parts)
        trace.warnings.extend(impossible_in_words(path.name, trace.skipped))
        traces.append(trace)
    _share_guess(traces)
    # Warnings and counts of the whole file go to one trace.
    traces[0].skipped.update(skipped)
    traces[0].warnings.extend([*session.warnings, *warnings, *_unseen(path, spans)])
    return traces


def _unseen(path: Path, spans: pl.DataFrame) -> list[str]:
    """Return a line about CUDA graphs whose kernels were not traced, and one if no kernel was."""
    said, kind = [], spans["kind"]
    if num_whole := whole_graphs(spans).height:
        launches = spans.filter((kind == "runtime") & spans["name"].str.contains(_LAUNCHES_GRAPH)).height
        said.append(
            f"{path.name}: {num_whole} of {max(launches, num_whole)} launches of CUDA graphs are one span "
            "each: record with `--cuda-graph-trace=node` to see their kernels"
        )
    if (num_copies := kind.is_in(GPU_WORK_KINDS).sum()) and not (kind == "kernel").any():
        some = counted(int(num_copies), "copy or fill", "copies and fills")
        said.append(
            f"{path.name}: no kernel was recorded, only {some}: how busy GPUs were is "
            "unknown; record with `nsys profile -t cuda-sw,nvtx`, as root, or with another version"
        )
    return said


def _trace(
    path: Path,
    rank: int,
    world_size: int,
    session: _Session,
    spans: pl.DataFrame,
    synchronised: pl.DataFrame,
    recorded: pl.DataFrame,
) -> RankTrace:
    spans, impossible = drop_impossible(spans)
    if spans.is_empty():
        raise InputError(f"{path}: no span has a possible time; record the job again")
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


def _share_guess(traces: Sequence[RankTrace]) -> None:
    """Give all ranks the guessed steps of the first, if all are guessed.

    All ranks have one clock, but each guess may cut steps elsewhere: step 5 of one rank could be half of step
    5 and half of step 6 of another.
    """
    guessed = [trace.frames["steps"] for trace in traces]
    if all(steps["source"].is_in([REPETITION, GRAPH_LAUNCHES]).any() for steps in guessed):
        for trace in traces:
            trace.frames["steps"] = of_rank(guessed[0], trace.rank)


# Work and ranges as columns of `spans`.

# A globalTid has hardware, machine, process and thread from the highest bits to the lowest; a globalPid has
# thread 0. Processes and threads have 24 bits each.
_ID_BITS = 24
_ID_MASK = (1 << _ID_BITS) - 1

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

_MARKED, _DOMAIN_CREATED = 34, 75
# CUPTI appends the version of the interface to the runtime's names (not to the driver's).
_RUNTIME_VERSION = r"^(cuda\w+?)(_ptsz|_ptds)?_v\d+$"
_LAUNCHES_GRAPH = r"^(cuda|cu)GraphLaunch"


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
        _graphs(export, rows),
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


def _graphs(export: Export, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return CUDA graphs that were traced as a whole; each is one piece of work.

    A launch whose kernels were traced, too, is left out: its time would count twice.
    """
    rows = export.rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _ON_GPU | {"graphId": pl.Int64})
    rows = rows.join(kernels, on=["globalPid", "correlationId"], how="anti", maintain_order="left")
    return _on_gpu(rows, "kernel", pl.format(WHOLE_GRAPH, pl.col("graphId").fill_null(-1)))


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


# Synchronisation: the calls that waited, and the streams or events they waited for.

_WHERE = {"deviceId": pl.Int64, "streamId": pl.Int64, "eventId": pl.Int64, "correlationId": pl.Int64}
_NONE = 0xFFFFFFFF  # no stream or event


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


def process_of(serialised: str) -> pl.Expr:
    """Return the process id in a column of globalPid or globalTid."""
    return (pl.col(serialised) // (1 << _ID_BITS)) & _ID_MASK
