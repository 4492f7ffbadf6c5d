"""Reads the ranks recorded in one file of rocmProfileData (`.rpd`).

Reads the SQLite file that rpd_tracer writes, schemas up to 3, gzipped or not. Returns a `RankTrace` per
process that used a GPU, with times on the monotonic clock of its host. Does not read clocks and power
(`rocpd_monitor`), hardware counters or call stacks. Databases of rocprofv3 are left to `rocpd.py`.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.extensions.nsys.sqlite import MAGIC, Export, open_export
from dpro.extensions.rocm.rocpd import KERNELS, read_rocpd
from dpro.extensions.rocm.tables import TIME, traces_of
from dpro.ingest.trace import RankTrace

SOURCE = "rocmProfileData"
NEWEST_SCHEMA = 3

_API = TIME | {"id": pl.Int64, "pid": pl.Int64, "tid": pl.Int64, "apiName_id": pl.Int64, "args_id": pl.Int64}
_OP = TIME | {"id": pl.Int64, "gpuId": pl.Int64, "queueId": pl.Int64}
_OP |= {"description_id": pl.Int64, "opType_id": pl.Int64}


def is_rpd(head: bytes) -> bool:
    """Return whether the first bytes are SQLite, as those of rocmProfileData and rocprofv3 are."""
    return head.startswith(MAGIC)


def read_rpd(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read all ranks of a file.

    Args:
        path: the file; its name gives the rank of a single process.
        rank: the rank of a single process, overriding the file name.

    Raises:
        InputError: the file is damaged, newer, of another tool, or without GPU work.
    """
    kind, give = "a recording of rocmProfileData or rocprofv3", "an .rpd file, or a database of rocprofv3"
    with open_export(path, ("rocpd_op", KERNELS), kind, give) as file:
        if KERNELS in file.present:
            return read_rocpd(file, rank)
        _refuse_newer(file)
        calls = _calls(file)
        work = _work(file, calls)
    return traces_of(path, SOURCE, calls, work, rank, "`runTracer.sh` of rocmProfileData")


def _refuse_newer(file: Export) -> None:
    """Raise if the schema is newer than `NEWEST_SCHEMA`, whose columns may mean something else."""
    facts = file.rows("rocpd_metadata", {"tag": pl.String, "value": pl.String}).drop_nulls()
    versions = facts.filter(pl.col("tag") == "schema_version")["value"].cast(pl.Int64, strict=False)
    version = versions.max()
    if isinstance(version, int) and version > NEWEST_SCHEMA:
        raise InputError(
            f"{file.path}: schema {version} of rocmProfileData, which is newer than {NEWEST_SCHEMA}, the "
            "last one that this version of dpro reads; update dpro"
        )


def _calls(file: Export) -> pl.DataFrame:
    """Read calls and ranges, in the columns that `traces_of` takes."""
    # Since schema 3, texts that occur once are in a separate table.
    texts = "rocpd_ustring" if "rocpd_ustring" in file.present else "rocpd_string"
    rows = _with_texts(file, file.rows("rocpd_api", _API), called="apiName_id")
    rows = _with_texts(file, rows, texts, args="args_id")
    operators = file.rows(
        "ext_autogradapi",
        {"api_ptr_id": pl.Int64, "seq": pl.Int64, "sizes": pl.String, "autogradName_id": pl.Int64},
    )
    operators = _with_texts(file, operators.unique("api_ptr_id", keep="first"), operator="autogradName_id")
    return rows.join(operators, left_on="id", right_on="api_ptr_id", how="left", maintain_order="left")


def _work(file: Export, calls: pl.DataFrame) -> pl.DataFrame:
    """Read device operations, in the columns that `traces_of` takes.

    Work is on the HIP stream named by its call, with streams in the order of their addresses; else on its
    queue.
    """
    of_work = calls.select(
        api_id="id", process="pid", named_stream=pl.col("args").str.extract(r"\bstream ?= ?(0x[0-9a-f]+)")
    )
    joined = file.rows("rocpd_api_ops", {"api_id": pl.Int64, "op_id": pl.Int64}).unique("op_id", keep="first")
    launches = file.rows("rocpd_kernelapi", {"api_ptr_id": pl.Int64, "stream": pl.String})
    copies = file.rows("rocpd_copyapi", {"api_ptr_id": pl.Int64, "stream": pl.String, "size": pl.Int64})
    facts = pl.concat([launches, copies], how="diagonal").unique("api_ptr_id", keep="last")
    rows = _with_texts(file, file.rows("rocpd_op", _OP), description="description_id", type="opType_id")
    rows = (
        rows.join(joined, left_on="id", right_on="op_id", how="left", maintain_order="left")
        .join(of_work, on="api_id", how="left", maintain_order="left")
        .join(facts, left_on="api_id", right_on="api_ptr_id", how="left", maintain_order="left")
    )
    queue = pl.format("queue {}", pl.col("queueId").fill_null(-1))
    stream = pl.coalesce("stream", "named_stream", queue)
    return rows.with_columns(device="gpuId", call="api_id", stream=stream)


def _with_texts(file: Export, frame: pl.DataFrame, table: str = "rocpd_string", **ids: str) -> pl.DataFrame:
    """Add text columns to the frame, looked up by id.

    Args:
        ids: name of the text column -> the column with its id.
    """
    texts = file.rows(table, {"id": pl.Int64, "string": pl.String}).unique("id", keep="first")
    for text, identifier in ids.items():
        of_column = texts.rename({"id": identifier, "string": text})
        frame = frame.join(of_column, on=identifier, how="left", maintain_order="left")
    return frame
