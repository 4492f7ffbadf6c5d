"""Recordings of rocmProfileData (`.rpd`): the ranks of one file into tables.

In: the SQLite file that rpd_tracer writes, schemas up to 3, gzipped or not. Out: a `RankTrace` per process
that used a GPU, with times on the monotonic clock of its host. Clocks and power (`rocpd_monitor`), hardware
counters and call stacks are not read, nor what rocprofv3 writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from dpro.errors import InputError
from dpro.ingest.derived import find_iterations
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.nsys import (
    ANNOTATION,
    EMITTED,
    MAGIC,
    Export,
    find_steps,
    open_export,
    read_collectives,
    read_syncs,
    sync_tables,
)
from dpro.ingest.reading.files import rank_of_name
from dpro.ingest.reading.symbols import demangled
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import GPU_WORK_KINDS

SOURCE = "rocmProfileData"
NEWEST_SCHEMA = 3

_TIME = {"start": pl.Int64, "end": pl.Int64}
_API = _TIME | {"id": pl.Int64, "pid": pl.Int64, "tid": pl.Int64, "apiName_id": pl.Int64, "args_id": pl.Int64}
_OP = _TIME | {"id": pl.Int64, "gpuId": pl.Int64, "queueId": pl.Int64}
_OP |= {"description_id": pl.Int64, "opType_id": pl.Int64}
_RANGE = "UserMarker"  # the name of the call that a range is recorded as
# What the recorder notes of its own work.
_OVERHEAD = r"::writeRows$|_callback$|^rpdflush$|^BLOCKING$"
# Calls of a runtime; ranges of rocmProfileData's own kind have names of the job's in their place.
_RUNTIME = r"^_*(hip|hsa|cuda|cu[A-Z])"
# Operations of a device that do no work.
_WAITS = r"(?i)marker|barrier|^StreamOperation"


def is_rpd(head: bytes) -> bool:
    """Whether the first bytes are SQLite: of rocmProfileData, or of rocprofv3, to be refused by name."""
    return head.startswith(MAGIC)


def read_rpd(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read all ranks of a file.

    Args:
        path: the file; its name gives the rank of a single process.
        rank: the rank of the one process, where the caller knows better.

    Raises:
        InputError: the file is damaged, newer, of another tool, or without GPU work.
    """
    with open_export(
        path,
        "rocpd_op",
        "a recording of rocmProfileData",
        "an .rpd file (those of rocprofv3 are not read)",
    ) as file:
        _refuse_newer(file)
        spans, skipped = read_spans(file)
        nothing = sync_tables(file)  # such files have no tables of waits: those are known by their calls
    work = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    if work.is_empty():
        raise InputError(f"{path}: no GPU work in it; record the job with `runTracer.sh` of rocmProfileData")
    used = work.group_by("process").agg(pl.col("device").mode().min()).rows()
    processes = [process for _, process in sorted((device, process) for process, device in used)]
    left_out = spans.filter(~pl.col("process").is_in(processes)).height
    if left_out:
        skipped["spans of processes without GPU work"] = left_out
    ranks, world_size = [rank_of_name(path.name) if rank is None else rank], -1
    if len(processes) > 1:
        ranks, world_size = list(range(len(processes))), len(processes)
    traces = [
        _trace(path, number, world_size, spans.filter(pl.col("process") == process), nothing)
        for process, number in zip(processes, ranks, strict=True)
    ]
    traces[0].skipped.update(skipped)
    if len(processes) > 1:
        assigned = f"{path.name}: no rank information; ranks 0-{ranks[-1]} assigned by GPU order"
        traces[0].warnings.append(assigned)
    return traces


def _trace(
    path: Path, rank: int, world_size: int, spans: pl.DataFrame, nothing: Sequence[pl.DataFrame]
) -> RankTrace:
    """One process's tables."""
    spans, impossible = drop_impossible(spans)
    spans = spans.with_row_index("span_id").with_columns(
        pl.col("span_id").cast(pl.Int64),
        # Which thread ran forward is not recorded, only that it was another.
        forward_thread=pl.when(pl.col("name").str.starts_with("autograd::")).then(1).otherwise(-1),
        window=pl.lit(0),
    )
    ends = spans["start_ns"] + spans["duration_ns"]
    worker = {"world_size": world_size, "pid": spans["process"][0], "source": SOURCE}
    worker |= {"started_ns": spans["start_ns"].min(), "ended_ns": ends.max()}
    iterations = find_iterations(spans)
    steps = find_steps(spans).with_columns(
        window=pl.lit(0), source=pl.col("source").str.replace("^NVTX ", "roctx ")
    )
    frames = {
        "spans": spans.drop("process", "domain", "payload"),
        "collectives": read_collectives(spans).with_columns(source=pl.lit(f"{SOURCE} kernel")),
        "syncs": read_syncs(spans, *nothing),
        "steps": steps,
        "iterations": iterations,
        "workers": pl.DataFrame([worker]),
    }
    return RankTrace(
        rank=rank,
        world_size=world_size,
        frames={name: of_rank(frame, rank) for name, frame in frames.items()},
        skipped=dict(sorted(impossible.items())),
        warnings=impossible_in_words(path.name, impossible),
    )


def _refuse_newer(file: Export) -> None:
    """Refuse a schema whose columns may mean something else."""
    facts = file.rows("rocpd_metadata", {"tag": pl.String, "value": pl.String}).drop_nulls()
    versions = facts.filter(pl.col("tag") == "schema_version")["value"].cast(pl.Int64, strict=False)
    version = versions.max()
    if isinstance(version, int) and version > NEWEST_SCHEMA:
        raise InputError(
            f"{file.path}: schema {version} of rocmProfileData, which is newer than {NEWEST_SCHEMA}, the "
            "last one that this version of dpro reads; update dpro"
        )


class _Calls(NamedTuple):
    """What is known of calls, by their `id`: their process and the HIP stream that they name."""

    spans: pl.DataFrame
    of_work: pl.DataFrame


def read_spans(file: Export) -> tuple[pl.DataFrame, dict[str, int]]:
    """All spans of all processes, and what was not taken, by reason.

    Returns:
        Columns of `spans` without ids, and `process`, `domain` and `payload` (empty), by start and then the
        longer first.
    """
    calls = _calls(file)
    work, waits = _work(file, calls.of_work)
    spans = pl.concat([calls.spans, work], how="diagonal_relaxed")
    spans = spans.with_columns(duration_ns=pl.col("end") - pl.col("start"))
    whole = spans.filter(pl.col("duration_ns") >= 0)
    lost = {"spans without an end": spans.height - whole.height, "markers and barriers of devices": waits}
    numbers = [name for name, dtype in whole.schema.items() if dtype == pl.Int64]
    filled = whole.with_columns(
        pl.col(numbers).fill_null(-1), pl.col(pl.String).fill_null(""), domain=pl.lit(""), payload=pl.lit("")
    )
    return (
        filled.rename({"start": "start_ns"})
        .drop("end")
        .sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True),
        {reason: count for reason, count in lost.items() if count},
    )


def _calls(file: Export) -> _Calls:
    """Calls, ranges, and the recorder's own work."""
    # From schema 3 on, texts that come once have a table of their own.
    texts = "rocpd_ustring" if "rocpd_ustring" in file.present else "rocpd_string"
    rows = _named(file, file.rows("rocpd_api", _API), called="apiName_id")
    rows = _named(file, rows, texts, args="args_id")
    operators = file.rows(
        "ext_autogradapi",
        {"api_ptr_id": pl.Int64, "seq": pl.Int64, "sizes": pl.String, "autogradName_id": pl.Int64},
    )
    operators = _named(file, operators.unique("api_ptr_id", keep="first"), operator="autogradName_id")
    rows = rows.join(operators, left_on="id", right_on="api_ptr_id", how="left", maintain_order="left")
    is_range = (pl.col("called") == _RANGE) | pl.col("operator").is_not_null()
    text = pl.coalesce("args", "called")
    name = pl.coalesce("operator", text.str.replace(EMITTED, ""))
    # `rpd_tracer` keeps what torch emits for an operator; its own scripts split it into a table.
    is_operator = pl.col("operator").is_not_null() | (text != text.str.replace(EMITTED, ""))
    kind = (
        pl.when(is_range & is_operator & ~name.str.contains(ANNOTATION))
        .then(pl.lit("cpu_op"))
        .when(is_range)
        .then(pl.lit("annotation"))
        .when(pl.col("called").str.contains(_OVERHEAD))
        .then(pl.lit("overhead"))
        .when(pl.col("called").str.contains(_RUNTIME))
        .then(pl.lit("runtime"))
        .otherwise(pl.lit("annotation"))
    )
    sizes = pl.coalesce(
        pl.col("sizes").replace("", None), text.str.extract(r", sizes = (\[.*?\])(?:, input_op_ids|$)")
    )
    numbered = text.str.extract(r", seq = (\d+)").cast(pl.Int64, strict=False)
    spans = rows.select(
        *_TIME,
        "pid",
        "tid",
        kind=kind,
        name=pl.when(is_range).then(name).otherwise("called"),
        process="pid",
        correlation=pl.when(~is_range).then("id"),
        sequence_number=pl.when(is_range).then(pl.coalesce("seq", numbered)),
        shapes=pl.when(is_range).then(sizes.str.replace_all(" ", "")),
    )
    of_work = rows.select(
        api_id="id", process="pid", named_stream=pl.col("args").str.extract(r"\bstream ?= ?(0x[0-9a-f]+)")
    )
    return _Calls(spans, of_work)


def _work(file: Export, calls: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Kernels, copies and fills; and the number of operations that do no work.

    What a graph holds is all launched by one call. Work is on the HIP stream that its call names, numbered in
    the order of the streams' addresses; else on its queue.
    """
    joined = file.rows("rocpd_api_ops", {"api_id": pl.Int64, "op_id": pl.Int64}).unique("op_id", keep="first")
    launches = file.rows("rocpd_kernelapi", {"api_ptr_id": pl.Int64, "stream": pl.String})
    copies = file.rows("rocpd_copyapi", {"api_ptr_id": pl.Int64, "stream": pl.String, "size": pl.Int64})
    facts = pl.concat([launches, copies], how="diagonal").unique("api_ptr_id", keep="last")
    rows = _named(file, file.rows("rocpd_op", _OP), description="description_id", type="opType_id")
    rows = (
        rows.join(joined, left_on="id", right_on="op_id", how="left", maintain_order="left")
        .join(calls, on="api_id", how="left", maintain_order="left")
        .join(facts, left_on="api_id", right_on="api_ptr_id", how="left", maintain_order="left")
    )
    kind = (
        pl.when(pl.col("type").str.contains("(?i)copy"))
        .then(pl.lit("memcpy"))
        .when(pl.col("type").str.contains("(?i)fill|memset"))
        .then(pl.lit("memset"))
        .otherwise(pl.lit("kernel"))
    )
    works = rows.filter(~pl.col("type").fill_null("").str.contains(_WAITS)).with_columns(kind=kind)
    described = pl.when(pl.col("kind") == "kernel").then(pl.col("description").replace("", None))
    stream = pl.coalesce("stream", "named_stream", pl.format("queue {}", pl.col("queueId").fill_null(-1)))
    # Work whose call is not there is of the process that used its device.
    owner = pl.coalesce("process", pl.col("process").drop_nulls().mode().first().over("gpuId"))
    alone = (pl.len().over("api_id") == 1) & pl.col("api_id").is_not_null()
    named = works.with_columns(name=pl.coalesce(described, "type"))
    plain = {name: demangled(name) for name in named["name"].drop_nulls().unique()}
    return (
        named.select(
            *_TIME,
            "kind",
            name=pl.col("name").replace_strict(plain, default="", return_dtype=pl.String),
            process=pl.coalesce(owner, pl.lit(calls["process"].min(), pl.Int64), -1),
            device="gpuId",
            stream=stream.rank("dense").cast(pl.Int64) - 1,
            correlation="api_id",
            bytes=pl.when(alone & (pl.col("kind") == "memcpy")).then("size"),
        ),
        rows.height - works.height,
    )


def _named(file: Export, frame: pl.DataFrame, table: str = "rocpd_string", **ids: str) -> pl.DataFrame:
    """The frame with texts looked up.

    Args:
        ids: name of the text column -> the column with its id.
    """
    texts = file.rows(table, {"id": pl.Int64, "string": pl.String}).unique("id", keep="first")
    for text, identifier in ids.items():
        of_column = texts.rename({"id": identifier, "string": text})
        frame = frame.join(of_column, on=identifier, how="left", maintain_order="left")
    return frame
