"""Reads the processes recorded in one database of rocprofv3 (`_results.db`), its default output since ROCm 7.

Takes an open SQLite file; reads its views `kernels`, `memory_copies` and `regions`, and which GPUs it lists.
Returns a `RankTrace` per process that used a GPU, with times on the monotonic clock of its host. Does not
read allocations, counters, samples or arguments of calls.
"""

from __future__ import annotations

import polars as pl

from dpro.errors import InputError
from dpro.extensions.nsys.sqlite import Export
from dpro.extensions.rocm.tables import RANGE, TIME, traces_of
from dpro.ingest.trace import RankTrace

SOURCE = "rocprofv3"
KERNELS = "kernels"

_ROW = TIME | {"guid": pl.String, "pid": pl.Int64, "stack_id": pl.Int64, "name": pl.String}
_CALL = _ROW | {"tid": pl.Int64, "category": pl.String, "extdata": pl.String}
_WORK = _ROW | {"stream_id": pl.Int64}
_KERNEL = _WORK | {"agent_abs_index": pl.Int64}
_COPY = _WORK | {"size": pl.Int64, "dst_agent_abs_index": pl.Int64, "dst_agent_type": pl.String}
_COPY |= {"src_agent_abs_index": pl.Int64}
_NOT_READ = r"^(HIP_COMPILER|HSA)_"  # categories of calls that launch nothing and wait for nothing


def read_rocpd(file: Export, rank: int | None) -> list[RankTrace]:
    """Read all processes of a database.

    Args:
        rank: the rank of a single process, overriding the file name.

    Raises:
        InputError: the file is damaged, without GPU work, or several databases in one.
    """
    kernels = file.rows(KERNELS, _KERNEL)
    if (count := kernels["guid"].n_unique()) > 1:
        raise InputError(f"{file.path}: {count} databases in one file; give each by itself")
    work = pl.concat([_of_kernels(kernels), _of_copies(file.rows("memory_copies", _COPY))])
    how = "`rocprofv3 --runtime-trace`"
    traces = traces_of(file.path, SOURCE, _calls(file), work, rank, how)
    for trace in traces:
        devices = trace.frames["spans"]["device"].unique()
        models = _gpus(file).filter(pl.col("absolute_index").is_in(devices.to_list()))["product_name"]
        if models.n_unique() == 1:
            trace.gpus.append(models[0])
            trace.frames["workers"] = trace.frames["workers"].with_columns(gpu_name=pl.lit(models[0]))
    return traces


def _gpus(file: Export) -> pl.DataFrame:
    """Return `absolute_index` and `product_name` of all GPUs; their table is named after the recording."""
    tables = [name for name in file.present if name.startswith("rocpd_info_agent")]
    columns = {"absolute_index": pl.Int64, "product_name": pl.String, "type": pl.String}
    agents = pl.concat(
        [file.rows(name, columns) for name in sorted(tables)] or [pl.DataFrame(schema=columns)]
    )
    return agents.filter(pl.col("type") == "GPU").drop_nulls().unique(maintain_order=True)


def _calls(file: Export) -> pl.DataFrame:
    """Read calls and ranges, in the columns that `traces_of` takes."""
    rows = file.rows("regions", _CALL).filter(~pl.col("category").fill_null("").str.contains(_NOT_READ))
    is_range = pl.col("category").str.starts_with("MARKER_").fill_null(False)
    message = pl.col("extdata").str.json_path_match("$.message")
    return rows.select(
        *TIME,
        "pid",
        "tid",
        id="stack_id",
        called=pl.when(is_range).then(pl.lit(RANGE)).otherwise("name"),
        args=pl.when(is_range).then(pl.coalesce(message, "name")),
        operator=pl.lit(None, pl.String),
        seq=pl.lit(None, pl.Int64),
        sizes=pl.lit(None, pl.String),
    )


def _of_kernels(rows: pl.DataFrame) -> pl.DataFrame:
    """Return kernels in the columns of work that `traces_of` takes; fills are kernels of the runtime."""
    is_fill = pl.col("name").str.contains("^__amd_rocclr_fill").fill_null(False)
    return _of_work(
        rows.with_columns(device="agent_abs_index", size=pl.lit(-1, pl.Int64)),
        pl.when(is_fill).then(pl.lit("FillBuffer")).otherwise(pl.lit("KernelExecution")),
    )


def _of_copies(rows: pl.DataFrame) -> pl.DataFrame:
    """Return copies in the columns of work that `traces_of` takes."""
    words = pl.col("name").str.strip_prefix("MEMORY_COPY_").str.replace_all("_", " ").str.to_titlecase()
    into = pl.col("dst_agent_type") == "GPU"
    device = pl.when(into).then("dst_agent_abs_index").otherwise("src_agent_abs_index")
    return _of_work(rows.with_columns(device=device), pl.format("Copy{}", words.str.replace_all(" ", "")))


def _of_work(rows: pl.DataFrame, type: pl.Expr) -> pl.DataFrame:
    return rows.select(
        *TIME,
        "device",
        "size",
        type=type,
        description="name",
        stream=pl.col("stream_id").cast(pl.String).str.zfill(20),
        call=pl.when(pl.col("stack_id") > 0).then("stack_id"),
        process="pid",
    )
