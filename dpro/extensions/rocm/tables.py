"""What AMD's profilers record, as tables of ranks: the part that is the same for all their files.

In: calls and ranges, and work of devices, as a file has them: names, times, ids. Out: spans, and a
`RankTrace` per process that used a GPU, with times on the monotonic clock of its host. It reads no file.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpro.errors import InputError
from dpro.ingest.derived import find_iterations
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.nsys import ANNOTATION, EMITTED, find_steps, read_collectives, read_syncs
from dpro.ingest.reading.files import rank_of_name
from dpro.ingest.reading.symbols import demangled
from dpro.ingest.trace import RankTrace, of_rank
from dpro.schema import GPU_WORK_KINDS, ITERATIONS

TIME = {"start": pl.Int64, "end": pl.Int64}
RANGE = "UserMarker"  # the name of the call that a range is recorded as
# What the recorder notes of its own work.
_OVERHEAD = r"::writeRows$|_callback$|^rpdflush$|^BLOCKING$"
# Calls of a runtime; ranges of rocmProfileData's own kind have names of the job's in their place.
_RUNTIME = r"^_*(hip|hsa|cuda|cu[A-Z])"
# Operations of a device that do no work.
_WAITS = r"(?i)marker|barrier|^StreamOperation"
# Waits are known by their calls: none of the files has tables of them.
_RECORDED = pl.DataFrame(
    schema=dict.fromkeys(("process", "correlation", "device", "stream", "event_id"), pl.Int64)
)
_SYNCHRONISED = pl.DataFrame(schema=_RECORDED.schema | {"start_ns": pl.Int64, "duration_ns": pl.Int64})


def traces_of(
    path: Path, source: str, calls: pl.DataFrame, work: pl.DataFrame, rank: int | None, how: str
) -> list[RankTrace]:
    """The ranks of a file.

    Args:
        path: the file; its name gives the rank of a single process.
        source: what recorded it.
        calls: `start`, `end`, `id`, `pid`, `tid`, `called` (`RANGE` of a range), `args` (text of a range),
            and of ranges that are known to be operators `operator`, `seq` and `sizes`.
        work: `start`, `end`, `type` (as `KernelExecution`, `CopyHostToDevice`), `description` (the name of a
            kernel), `device`, `stream` (text), `call`, `size`, and `process`, null where it is not known.
        rank: the rank of the one process, where the caller knows better.
        how: what to record a job with, so that there is GPU work.

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
    """Calls, ranges, and the recorder's own work."""
    is_range = (pl.col("called") == RANGE) | pl.col("operator").is_not_null()
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
    """Kernels, copies and fills; operations that do no work are taken for none.

    What a graph holds is all launched by one call. Streams are numbered in the order of their texts.

    Args:
        processes: those that made calls: work is of the first where nothing says more.
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
    # Work whose call is not there is of the process that used its device.
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
    """Spans without ids, by start and then the longer first; `domain` and `payload` are empty."""
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
    """One process's tables."""
    spans, impossible = drop_impossible(spans)
    spans = spans.with_row_index("span_id").with_columns(
        pl.col("span_id").cast(pl.Int64),
        # Which thread ran forward is not recorded, only that it was another.
        forward_thread=pl.when(pl.col("name").str.starts_with("autograd::")).then(1).otherwise(-1),
        window=pl.lit(0),
    )
    ends = spans["start_ns"] + spans["duration_ns"]
    worker = {"world_size": world_size, "pid": spans["process"][0], "source": source}
    worker |= {"started_ns": spans["start_ns"].min(), "ended_ns": ends.max()}
    # Servers of PyTorch's capture batches that decode; other programs capture all.
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
