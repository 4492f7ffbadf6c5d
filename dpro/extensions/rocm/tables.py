"""Converts what any of AMD's profilers recorded into the tables of ranks.

Takes calls, ranges and device work with their names, times and ids; returns a `RankTrace` per process that
used a GPU, with times on the monotonic clock of its host. Reads no file.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.extensions.nsys.tables import ANNOTATION, EMITTED, find_steps, read_collectives, read_syncs
from dpro.ingest.derived import find_iterations
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.reading.files import rank_of_name
from dpro.ingest.reading.symbols import demangled
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import GPU_WORK_KINDS, ITERATIONS

TIME = {"start": pl.Int64, "end": pl.Int64}
RANGE = "UserMarker"  # a range is recorded as a call of this name
# Work of the recorder itself.
_OVERHEAD = r"::writeRows$|_callback$|^rpdflush$|^BLOCKING$"
# Calls of a runtime; ranges recorded through rocmProfileData's API have names chosen by the job instead.
_RUNTIME = r"^_*(hip|hsa|cuda|cu[A-Z])"
# Device operations that only wait.
_WAITS = r"(?i)marker|barrier|^StreamOperation"
# Empty: none of the files has tables of events and synchronisations, so waits are found by their calls.
_RECORDED = pl.DataFrame(
    schema=dict.fromkeys(("process", "correlation", "device", "stream", "event_id"), pl.Int64)
)
_SYNCHRONISED = pl.DataFrame(schema=_RECORDED.schema | {"start_ns": pl.Int64, "duration_ns": pl.Int64})


def traces_of(
    path: Path, source: str, calls: pl.DataFrame, work: pl.DataFrame, rank: int | None, how: str
) -> list[RankTrace]:
    """Return one trace per process of the file that used a GPU.

    Args:
        path: the file; its name gives the rank of a single process.
        source: the recording tool.
        calls: `start`, `end`, `id`, `pid`, `tid`, `called` (`RANGE` of a range), `args` (text of a range),
            and, for ranges known to be operators, `operator`, `seq` and `sizes`.
        work: `start`, `end`, `type` (such as `KernelExecution`, `CopyHostToDevice`), `description` (the name
            of a kernel), `device`, `stream` (text), `call`, `size`, and `process`, null where it is unknown.
        rank: the rank of a single process, overriding the file name.
        how: the command that records a job with GPU work, for the error.

    Raises:
        InputError: there is no GPU work.
    """
    works = work.filter(~pl.col("type").fill_null("").str.contains(_WAITS))
    parts = [_spans_of_calls(calls), _spans_of_work(works, calls["pid"])]
    spans_of_all = pl.concat(parts, how="diagonal_relaxed").with_columns(
        duration_ns=pl.col("end") - pl.col("start")
    )
    spans = _in_order(spans_of_all.filter(pl.col("duration_ns") >= 0))
    of_gpus = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))
    if of_gpus.is_empty():
        raise InputError(f"{path}: no GPU work in it; record the job with {how}")
    used = of_gpus.group_by("process").agg(pl.col("device").mode().min()).rows()
    processes = [process for _, process in sorted((device, process) for process, device in used)]
    ranks, world_size = [rank_of_name(path.name) if rank is None else rank], -1
    if len(processes) > 1:
        ranks, world_size = list(range(len(processes))), len(processes)
    traces = [
        _trace(path, source, number, world_size, spans.filter(pl.col("process") == process))
        for process, number in zip(processes, ranks, strict=True)
    ]
    lost = {
        "spans without an end": spans_of_all.height - spans.height,
        "markers and barriers of devices": work.height - works.height,
        "spans of processes without GPU work": spans.filter(~pl.col("process").is_in(processes)).height,
    }
    traces[0].skipped.update({reason: count for reason, count in lost.items() if count})
    if len(processes) > 1:
        assigned = f"{path.name}: no rank information; ranks 0-{ranks[-1]} assigned by GPU order"
        traces[0].warnings.append(assigned)
    return traces


def _spans_of_calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Convert calls, ranges and the recorder's own work to spans."""
    is_range = (pl.col("called") == RANGE) | pl.col("operator").is_not_null()
    text = pl.coalesce("args", "called")
    name = pl.coalesce("operator", text.str.replace(EMITTED, ""))
    # `rpd_tracer` stores the text that torch emits for an operator; its scripts split that into a table.
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
    return rows.select(
        *TIME,
        "pid",
        "tid",
        kind=kind,
        name=pl.when(is_range).then(name).otherwise("called"),
        process="pid",
        correlation=pl.when(~is_range).then("id"),
        sequence_number=pl.when(is_range).then(pl.coalesce("seq", numbered)),
        shapes=pl.when(is_range).then(sizes.str.replace_all(" ", "")),
    )


def _spans_of_work(rows: pl.DataFrame, processes: pl.Series) -> pl.DataFrame:
    """Convert kernels, copies and fills to spans; all nodes of a HIP graph share the call that launched it.

    Streams are numbered in the order of their texts.

    Args:
        processes: processes that made calls; the lowest is the process of work that nothing else assigns.
    """
    kind = (
        pl.when(pl.col("type").str.contains("(?i)copy"))
        .then(pl.lit("memcpy"))
        .when(pl.col("type").str.contains("(?i)fill|memset"))
        .then(pl.lit("memset"))
        .otherwise(pl.lit("kernel"))
    )
    works = rows.with_columns(kind=kind)
    described = pl.when(pl.col("kind") == "kernel").then(pl.col("description").replace("", None))
    # Work without its call is assigned to the process that used the device.
    owner = pl.coalesce("process", pl.col("process").drop_nulls().mode().first().over("device"))
    alone = (pl.len().over("call") == 1) & pl.col("call").is_not_null()
    named = works.with_columns(name=pl.coalesce(described, "type"))
    plain = {name: demangled(name) for name in named["name"].drop_nulls().unique()}
    return named.select(
        *TIME,
        "kind",
        "device",
        name=pl.col("name").replace_strict(plain, default="", return_dtype=pl.String),
        process=pl.coalesce(owner, pl.lit(processes.min(), pl.Int64), -1),
        stream=pl.col("stream").rank("dense").cast(pl.Int64) - 1,
        correlation="call",
        bytes=pl.when(alone & (pl.col("kind") == "memcpy")).then("size"),
    )


def _in_order(spans: pl.DataFrame) -> pl.DataFrame:
    """Fill nulls and sort by start, then longer spans first; `domain` and `payload` are empty."""
    numbers = [name for name, dtype in spans.schema.items() if dtype == pl.Int64]
    filled = spans.with_columns(
        pl.col(numbers).fill_null(-1), pl.col(pl.String).fill_null(""), domain=pl.lit(""), payload=pl.lit("")
    )
    return (
        filled.rename({"start": "start_ns"})
        .drop("end")
        .sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
    )


def _trace(path: Path, source: str, rank: int, world_size: int, spans: pl.DataFrame) -> RankTrace:
    spans, impossible = drop_impossible(spans)
    if spans.is_empty():
        raise InputError(f"{path}: no span has a possible time; record the job again")
    spans = spans.with_row_index("span_id").with_columns(
        pl.col("span_id").cast(pl.Int64),
        # The forward thread's id is not recorded, only that it was a different thread.
        forward_thread=pl.when(pl.col("name").str.starts_with("autograd::")).then(1).otherwise(-1),
        window=pl.lit(0),
    )
    ends = spans["start_ns"] + spans["duration_ns"]
    worker = {"world_size": world_size, "pid": spans["process"][0], "source": source}
    worker |= {"started_ns": spans["start_ns"].min(), "ended_ns": ends.max()}
    # PyTorch servers capture decoding batches as graphs and have ranges; other programs capture everything.
    marked = spans["kind"].is_in(["annotation", "cpu_op"]).any()
    iterations = find_iterations(spans) if marked else ITERATIONS.empty()
    steps = find_steps(spans).with_columns(
        window=pl.lit(0), source=pl.col("source").str.replace("^NVTX ", "roctx ")
    )
    frames = {
        "spans": spans.drop("process", "domain", "payload"),
        "collectives": read_collectives(spans).with_columns(source=pl.lit(f"{source} kernel")),
        "syncs": read_syncs(spans, _SYNCHRONISED, _RECORDED),
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
