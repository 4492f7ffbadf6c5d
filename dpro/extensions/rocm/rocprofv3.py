"""Reads the CSV files that rocprofv3 wrote for one process, which share a name prefix.

Reads `PREFIX_kernel_trace.csv` and, if present with the same prefix, `hip_api_trace`, `memory_copy_trace`,
`marker_api_trace`, `rccl_api_trace` and `agent_info`. Columns are looked up by name, since versions differ.
Returns a `RankTrace`, or several where the calls belong to several processes. Does not read HSA calls,
allocations, counters or JSON; `rocpd.py` reads databases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from warnings import catch_warnings

import polars as pl

from dpro.errors import InputError
from dpro.extensions.rocm.tables import RANGE, traces_of
from dpro.ingest.reading.files import Source, read_bytes, read_head
from dpro.ingest.trace import RankTrace

SOURCE = "rocprofv3"

_KERNELS = "kernel_trace"
_RECORD = "`rocprofv3 --runtime-trace --output-format csv`"
# Columns, as named in the files.
_TIMES = {"Start_Timestamp": pl.Int64, "End_Timestamp": pl.Int64}
_CALL = _TIMES | {
    "Correlation_Id": pl.Int64,
    "Process_Id": pl.Int64,
    "Thread_Id": pl.Int64,
    "Function": pl.String,
}
_KERNEL = _TIMES | {"Correlation_Id": pl.Int64, "Thread_Id": pl.Int64, "Queue_Id": pl.String}
_KERNEL |= {"Stream_Id": pl.String, "Agent_Id": pl.String, "Kernel_Name": pl.String, "Guid": pl.String}
_COPY = _TIMES | {"Correlation_Id": pl.Int64, "Direction": pl.String, "Stream_Id": pl.String}
_COPY |= {"Source_Agent_Id": pl.String, "Destination_Agent_Id": pl.String}


def is_rocprofv3(head: bytes) -> bool:
    """Return whether the first bytes are a CSV file of rocprofv3, or its JSON, which is refused by name."""
    first = head.partition(b"\n")[0]
    timed = b"Start_Timestamp" in first and b"Correlation_Id" in first
    return timed or b"Logical_Node_Id" in first or _is_json(head)


def _is_json(head: bytes) -> bool:
    return head.lstrip()[:1] == b"{" and b"rocprofiler-sdk-tool" in head[:200]


def read_rocprofv3(source: Path | Source, *, rank: int | None = None) -> list[RankTrace]:
    """Read the files of a process.

    Args:
        source: the kernel trace; any other of its files yields no trace. Its name gives the rank.
        rank: the rank, overriding the file name.

    Raises:
        InputError: the file is damaged, of another kind or in an archive, or has no kernel trace beside it.
    """
    path = path_outside_archives(source)
    head = read_head(path)
    columns = head.partition(b"\n")[0]
    if b"Kernel_Name" not in columns or b"Counter_Value" in columns:
        if _kernels_beside(path):
            return []
        what = "JSON of rocprofv3, which is not read" if _is_json(head) else f"no {_KERNELS}.csv beside it"
        raise InputError(f"{path}: {what}; record with {_RECORD}")
    warnings: list[str] = []
    calls = _calls(path, warnings)
    work = pl.concat([_kernels(path), _copies(path, warnings)])
    threads = calls.select("tid", process="pid").unique("tid", keep="first")
    work = work.join(threads, on="tid", how="left", maintain_order="left").with_columns(
        size=pl.lit(-1, pl.Int64)
    )
    traces = traces_of(path, SOURCE, calls, work, rank, _RECORD)
    models = _read_beside(path, "agent_info", {"Agent_Type": pl.String, "Product_Name": pl.String}, warnings)
    gpus = models.filter(pl.col("Agent_Type") == "GPU")["Product_Name"].drop_nulls().unique()
    traces[0].warnings.extend(warnings)
    for trace in traces if gpus.len() == 1 else ():
        trace.gpus.append(gpus[0])
        trace.frames["workers"] = trace.frames["workers"].with_columns(gpu_name=pl.lit(gpus[0]))
    return traces


def path_outside_archives(source: Path | Source) -> Path:
    """Return the path of a file that is read together with others beside it.

    Raises:
        InputError: it is a member of an archive.
    """
    path = source.path if isinstance(source, Source) else source
    if isinstance(source, Source) and source.label != str(path):
        raise InputError(f"{source.label}: unpack the archive; the files of a process are read together")
    return path


def _kernels_beside(path: Path) -> bool:
    """Return whether a kernel trace with the same prefix is beside the file."""
    words = path.name.split("_")
    prefixes = ["".join(f"{word}_" for word in words[:count]) for count in range(len(words))]
    packed = ".gz" if path.suffix == ".gz" else ""
    return any(path.with_name(f"{prefix}{_KERNELS}.csv{packed}").is_file() for prefix in prefixes)


def _read_beside(
    path: Path, kind: str, columns: dict[str, type[pl.DataType]], warnings: list[str]
) -> pl.DataFrame:
    """Read another file of the process; no rows where it is missing, or damaged, which adds a warning."""
    beside = path.with_name(path.name.replace(_KERNELS, kind))
    try:
        if beside != path and beside.is_file():
            return rows_of_csv(beside, columns, SOURCE)
    except InputError as error:
        warnings.append(f"left out: {error}")
    return pl.DataFrame(schema=columns)


def rows_of_csv(path: Path, columns: dict[str, type[pl.DataType]], tool: str) -> pl.DataFrame:
    """Read the requested columns of a file; null where a column is missing or a row was cut short.

    Args:
        columns: types by name.
        tool: the program that wrote the file, for errors.

    Raises:
        InputError: the file cannot be read, is damaged, or has none of the columns.
    """
    content = read_bytes(path).rstrip(b"\r\n")
    if content.count(b'"', content.rfind(b"\n") + 1) % 2:  # cut within a name
        content += b'"'
    how: dict[str, Any] = {"infer_schema": False, "encoding": "utf8-lossy"}
    how |= {"truncate_ragged_lines": True, "ignore_errors": True}
    try:
        have = pl.read_csv(content, n_rows=0, **how).columns
        held = [name for name in columns if name in have]
        if not held:
            raise InputError(f"{path}: none of the columns {', '.join(columns)}; give what {tool} wrote")
        with catch_warnings(record=True, action="always") as doubts:
            texts = pl.read_csv(content, columns=held, **how)
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: damaged CSV; copy the file again") from error
    if doubts:
        raise InputError(f"{path}: damaged CSV; copy the file again")
    return texts.with_columns(
        pl.lit(None, pl.String).alias(name) for name in columns if name not in have
    ).select(pl.col(name).cast(dtype, strict=False) for name, dtype in columns.items())


def _calls(path: Path, warnings: list[str]) -> pl.DataFrame:
    """Read HIP and RCCL calls and ranges, in the columns that `traces_of` takes."""
    parts = []
    for kind in ("hip_api_trace", "rccl_api_trace", "marker_api_trace"):
        rows = _read_beside(path, kind, _CALL, warnings)
        if kind == "hip_api_trace" and rows.is_empty():
            lacking = f"{path.name}: no HIP calls beside it, so the launches of its kernels are unknown"
            warnings.append(f"{lacking}; record with {_RECORD}")
        is_range = kind == "marker_api_trace"
        parts.append(
            rows.select(
                start="Start_Timestamp",
                end="End_Timestamp",
                id="Correlation_Id",
                pid="Process_Id",
                tid="Thread_Id",
                called=pl.lit(RANGE) if is_range else "Function",
                args="Function" if is_range else pl.lit(None, pl.String),
                operator=pl.lit(None, pl.String),
                seq=pl.lit(None, pl.Int64),
                sizes=pl.lit(None, pl.String),
            )
        )
    return pl.concat(parts)


def _kernels(path: Path) -> pl.DataFrame:
    """Read the kernels, each on its HIP stream, or else its queue.

    Raises:
        InputError: the file cannot be read, or combines several databases.
    """
    rows = rows_of_csv(path, _KERNEL, SOURCE)
    num_processes = rows["Guid"].drop_nulls().n_unique()
    if num_processes > 1:
        raise InputError(f"{path}: {num_processes} databases in one file; convert each by itself")
    queue = pl.format("queue {}", pl.col("Queue_Id").str.zfill(20))
    return _work(
        rows, "Agent_Id", pl.lit("KernelExecution"), pl.col("Kernel_Name"), queue, pl.col("Thread_Id")
    )


def _copies(path: Path, warnings: list[str]) -> pl.DataFrame:
    """Read the copies, each on its HIP stream, or else on one stream per direction."""
    rows = _read_beside(path, "memory_copy_trace", _COPY, warnings)
    words = pl.col("Direction").str.strip_prefix("MEMORY_COPY_").str.replace_all("_", " ").str.to_titlecase()
    into = pl.col("Direction").str.ends_with("TO_DEVICE")
    rows = rows.with_columns(
        direction=pl.format("Copy{}", words.str.replace_all(" ", "")),
        agent=pl.when(into).then("Destination_Agent_Id").otherwise("Source_Agent_Id"),
    )
    nothing = pl.lit(None, pl.Int64)
    return _work(rows, "agent", pl.col("direction"), nothing.cast(pl.String), pl.col("direction"), nothing)


def _work(
    rows: pl.DataFrame, agent: str, type: pl.Expr, description: pl.Expr, lane: pl.Expr, thread: pl.Expr
) -> pl.DataFrame:
    """Return the work columns of `traces_of`, with the thread; an agent is a number, or `Agent 4`."""
    call = pl.col("Correlation_Id")
    return rows.select(
        start="Start_Timestamp",
        end="End_Timestamp",
        type=type,
        description=description,
        device=pl.col(agent).str.extract(r"(\d+)").cast(pl.Int64, strict=False),
        stream=pl.coalesce(pl.col("Stream_Id").str.zfill(20), lane),
        call=pl.when(call > 0).then(call),
        tid=thread,
    )
