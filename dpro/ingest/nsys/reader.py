"""Nsight Systems exports (`nsys export --type sqlite`): the ranks of one file into tables.

In: a `.sqlite` file of any version with the tables of CUDA and NVTX, gzipped or not. Out: a `RankTrace` per
process that used a GPU, with times on the wall clock of its host where the export states when its session
began. CPU samples, system calls, GPU metrics and launch facts of kernels are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.ingest.nsys.collectives import read_collectives
from dpro.ingest.nsys.spans import read_spans
from dpro.ingest.nsys.steps import find_steps
from dpro.ingest.nsys.syncs import read_syncs, sync_tables
from dpro.ingest.nsys.tables import MAGIC, Export, open_export
from dpro.ingest.reading.files import rank_of_name
from dpro.ingest.trace import RankTrace
from dpro.schema import GPU_WORK_KINDS

SOURCE = "nsys"

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK")
# Ranks that a job states in NVTX: a range called `rank 3`, or the payload of ncclCommInitRank.
_RANK_IN_RANGE = r"(?i)^(?:global[ _])?rank[ _:=#]*(\d+)$"
_RANK_IN_PAYLOAD = r'"Rank"\s*:\s*"?(\d+)'
_PAYLOAD_SIZE = r'"No\. of ranks"\s*:\s*"?(\d+)'


@dataclass(frozen=True)
class _Session:
    """Facts of the whole export."""

    start_ns: int  # what is added to every time; 0 where times are absolute, or nothing is known
    host: str
    environment: str
    gpus: dict[int, tuple[str, str]]  # model and uuid by device
    versions: dict[str, str]
    warnings: list[str] = field(default_factory=list)


def is_nsys(head: bytes) -> bool:
    """Whether the first bytes of a file are those of an export: SQLite with its table of strings."""
    return head.startswith(MAGIC) and b"StringIds" in head


def read_nsys(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read all ranks of an export.

    Args:
        path: the file; its name gives the rank where an export of one process does not.
        rank: the rank of the one process, where the caller knows better.

    Raises:
        InputError: the file is damaged, is no export, or holds no CUDA or NVTX activity.
    """
    with open_export(path) as export:
        session = _session(export)
        spans, skipped = read_spans(export)
        synchronised, recorded = sync_tables(export)
        physical = _physical_devices(export)
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
        mine = pl.col("process").is_in([process])
        parts = (frame.filter(mine) for frame in (spans, synchronised, recorded))
        traces.append(_trace(number, world_size, session, *parts))
    # Warnings and counts of the whole file: once.
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
    """One process's tables."""
    spans = spans.with_row_index("span_id").with_columns(
        pl.col("span_id").cast(pl.Int64),
        # Which thread ran forward is not recorded, only that it was another.
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
        frames={name: frame.with_columns(rank=pl.lit(rank, pl.Int32)) for name, frame in frames.items()},
        host=session.host,
        gpus=[model] if model else [],
        versions=session.versions,
    )


def _session(export: Export) -> _Session:
    """Clock, host, GPUs, versions, and what is known of the environment of the first process."""
    exported = _facts(export, "META_DATA_EXPORT")
    system = _facts(export, "TARGET_INFO_SYSTEM_ENV")
    captured = export.rows("META_DATA_CAPTURE", {"name": pl.String, "value": pl.String})
    started = export.rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": pl.Int64})["utcEpochNs"]
    # An export with --ts-normalize has absolute times already.
    absolute = exported.get("EXPORT_PARAM_TIME_NORMALIZE") == "true"
    start_ns = started[0] if started.len() and started[0] is not None else 0
    gpus = export.rows("TARGET_INFO_GPU", {"id": pl.Int64, "name": pl.String, "uuid": pl.String})
    variables = captured.filter(pl.col("name").str.contains("^PROCESS_0:(ENVIRONMENT_VARIABLE|ARGUMENT_)"))
    versions = {
        "nsys": exported.get("EXPORT_PRODUCT_VERSION"),
        "cuda_driver": system.get("CudaDriverVersion"),
        "nvidia_driver": system.get("NvDriverVersion"),
    }
    unknown = f"{export.path.name}: the export does not state when its session began: times are since then"
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


def _physical_devices(export: Export) -> dict[tuple[int, int], int]:
    """(process, device as it calls it) -> the host's number of that GPU, where the export states it."""
    devices = export.rows("TARGET_INFO_CUDA_DEVICE", {"pid": pl.Int64, "cudaId": pl.Int64, "gpuId": pl.Int64})
    return {(pid, device): gpu for pid, device, gpu in devices.drop_nulls().iter_rows()}


def _with_process(spans: pl.DataFrame) -> pl.DataFrame:
    """Old exports do not state the process of GPU work: with one process that makes calls, it is that one."""
    known = spans.filter(pl.col("process") >= 0)["process"].unique()
    if known.len() != 1:
        return spans
    return spans.with_columns(process=pl.lit(known[0], pl.Int64))


def _processes(spans: pl.DataFrame, physical: dict[tuple[int, int], int]) -> list[int]:
    """Processes that are ranks, in the order of the GPU they used most, else of their ids.

    Without any GPU work all processes are.
    """
    work = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    if work.is_empty():
        return spans["process"].unique().sort().to_list()
    used = work.group_by("process").agg(pl.col("device").mode().min()).rows()
    placed = sorted((physical.get((process, device), device), process) for process, device in used)
    return [process for _, process in placed]


def _ranks(
    processes: Sequence[int], spans: pl.DataFrame, session: _Session, path: Path, rank: int | None
) -> tuple[list[int], int, list[str]]:
    """Rank of each process, the world size (-1 unknown), and what is guessed."""
    stated = [_stated_rank(spans.filter(pl.col("process") == process)) for process in processes]
    sizes = [_variable(session.environment, _SIZE_VARIABLES), *(size for _, size in stated)]
    ranks = [number for number, _ in stated]
    if min(ranks) >= 0 and len(set(ranks)) == len(ranks):
        return ranks, max(sizes), []
    if len(processes) > 1:
        first = _first_rank(session.environment, len(processes))
        by_gpu = f"{path.name}: nothing states the ranks of its {len(processes)} processes"
        by_gpu += f"; taken as {first} and up, in order of their GPUs"
        return list(range(first, first + len(processes))), max(*sizes, first + len(processes)), [by_gpu]
    known = rank if rank is not None else _variable(session.environment, _RANK_VARIABLES)
    return [known if known >= 0 else rank_of_name(path.name)], max(sizes), []


def _stated_rank(spans: pl.DataFrame) -> tuple[int, int]:
    """Rank and world size that a process states in NVTX; -1 where it states none, or several."""
    ranges = spans.filter(pl.col("kind") == "annotation")
    inits = ranges.filter(pl.col("name").str.starts_with("ncclCommInit")).select(
        rank=pl.col("payload").str.extract(_RANK_IN_PAYLOAD).cast(pl.Int64, strict=False),
        size=pl.col("payload").str.extract(_PAYLOAD_SIZE).cast(pl.Int64, strict=False),
    )
    # The largest communicator is the job's.
    world = inits.drop_nulls().sort("size", descending=True)
    if world.height:
        return world.row(0)
    named = ranges["name"].unique().str.extract(_RANK_IN_RANGE).drop_nulls().unique()
    return (int(named[0]) if named.len() == 1 else -1), -1


def _first_rank(environment: str, num_processes: int) -> int:
    """Rank of the first process of a host: those of the hosts before it come first."""
    found = re.search(r"--node[-_]rank[=\s](\d+)", environment)
    node = int(found[1]) if found else _variable(environment, _NODE_VARIABLES)
    return max(node, 0) * num_processes


def _variable(environment: str, names: Sequence[str]) -> int:
    """The first of these variables that is a number, -1 where none is."""
    for name in names:
        found = re.search(rf'(?m)^{name}="?(\d+)"?$', environment)
        if found:
            return int(found[1])
    return -1
