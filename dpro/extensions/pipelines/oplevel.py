"""Operation-level traces of pipeline-parallel jobs: one Parquet file of all ranks, as spans and collectives.

Reads a Parquet file with one row per operation (forward-compute, forward-send, grads-reduce-scatter, …) of
one rank per tensor-parallel group, and the `meta-*.yaml` beside it, where there is one. Returns a `RankTrace`
per rank: operations as kernels on streams of device 0, communication also as `collectives`, and consecutive
steps. There are no CPU spans: such a trace does not record launches.

The format is that of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError, first_line
from dpro.ingest.reading.files import read_bytes
from dpro.ingest.trace import RankTrace
from dpro.limits import MAX_RANKS, MAX_ROWS_PER_BYTE, MIN_ROWS
from dpro.schema.members import texts_of_lists
from dpro.table import why_unreadable
from dpro.units import NS_PER_S

SOURCE = "op-level parquet"

COMPUTE_STREAM = 0
COLLECTIVE_STREAM = 5
# Operation -> stream, kind of collective, and partner: offset in stages to its peer, or extent of its group.
# All other operations compute.
_POINT_TO_POINT = {
    "forward-send": (1, "send", 1),
    "forward-recv": (2, "recv", -1),
    "backward-send": (3, "send", -1),
    "backward-recv": (4, "recv", 1),
}
_COLLECTIVES = {
    "params-all-gather": ("all_gather", "stage"),
    "grads-reduce-scatter": ("reduce_scatter", "stage"),
    "embedding-grads-all-reduce": ("all_reduce", "dp"),
    "optimizer-clip-main-grad": ("all_reduce", "all"),
    "layernorm-grads-all-reduce": ("all_reduce", "tp"),  # only one of its members is recorded
}
_COMPUTE = ("forward-compute", "backward-compute", "gc", "optimizer")

_REQUIRED = ("rank", "step", "optype", "start_ts", "duration")
_OPTIONAL = ("dp_rank", "stage", "seq_id", "mc", "mb_id")


def is_oplevel(head: bytes) -> bool:
    """Return whether a file is Parquet; its columns are at its end, so `read_oplevel` checks them."""
    return head.startswith(b"PAR1")


def read_oplevel(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read all ranks of a file.

    Raises:
        InputError: the file is damaged, lacks the columns of such a trace, or has no operation.
    """
    rows = _operations(path)
    operations = rows.filter(pl.col("start_ns").is_not_null() & (pl.col("duration_ns") >= 0))
    if operations.is_empty():
        raise InputError(f"{path}: no operation with a time in it; export the trace again")
    if odd := operations.filter(~pl.col("rank").is_between(0, MAX_RANKS))["rank"].head(1).to_list():
        raise InputError(f"{path}: an operation of rank {odd[0]}, which no job has; export the trace again")
    operations, steps = _laid_out(operations)
    world_size = _meta(path).get("world_size", -1)
    end = pl.col("start_ns") + pl.col("duration_ns")
    workers = (
        operations.group_by("rank")
        .agg(
            dp=pl.col("dp_rank").max(),
            pp=pl.col("stage").max(),
            started_ns=pl.col("start_ns").min(),
            ended_ns=end.max(),
        )
        .sort("rank")
        .with_columns(pl.col("rank").cast(pl.Int32), source=pl.lit(SOURCE))
        .with_columns(world_size=pl.lit(world_size))
    )
    frames = {"spans": _spans(operations), "collectives": _collectives(operations), "workers": workers}
    by_rank = {name: frame.partition_by("rank", as_dict=True) for name, frame in frames.items()}
    traces = []
    num_ranks, represents = workers.height, _represents(workers, world_size)
    for number in workers["rank"]:
        of_rank = {name: parts[(number,)] for name, parts in by_rank.items() if (number,) in parts}
        of_rank["steps"] = steps.with_columns(rank=pl.lit(number, pl.Int32))
        traces.append(RankTrace(number, world_size, of_rank, represents=represents))
    # Warnings and counts of the whole file go to one trace.
    recorded = (
        f"{num_ranks} of {world_size} ranks are" if world_size > num_ranks else f"{num_ranks} ranks are"
    )
    warnings = traces[0].warnings
    if world_size != num_ranks:
        none = "; none is missing" if num_ranks * represents >= world_size else ""
        warnings.append(f"{path.name}: {recorded} recorded, one per tensor-parallel group{none}")
    taken: tuple[Any, ...] = (*_POINT_TO_POINT, *_COLLECTIVES, *_COMPUTE)
    unknown = operations.filter(~pl.col("optype").is_in(taken))["optype"].unique().sort().to_list()
    if unknown:
        warnings.append(f"{path.name}: unknown operations are taken as compute: {', '.join(unknown)}")
    if operations.height < rows.height:
        traces[0].skipped["operations without a time"] = rows.height - operations.height
    return traces


def _represents(workers: pl.DataFrame, world_size: int) -> int:
    """Return how many ranks each recorded one represents: 1 where stages or data-parallel ranks are missing.

    Args:
        workers: one row per recorded rank, with its place `dp`, `pp`.
        world_size: number of ranks of the job; -1 where only the highest rank shows it.
    """
    places = set(workers.select("dp", "pp").rows())
    num_dp, num_stages = (1 + max(numbers) for numbers in zip(*places))
    if not len(places) == workers.height == num_dp * num_stages:
        return 1
    size: int = max(world_size, 1 + workers["rank"].to_list()[-1])
    return math.ceil(size / workers.height)


def _operations(path: Path) -> pl.DataFrame:
    """Return all rows in wide types (products of int8 overflow), times in ns since the step's start."""
    frame = _read_parquet(path)
    missing = [name for name in _REQUIRED if name not in frame.columns]
    if missing:
        raise InputError(
            f"{path}: not an operation-level trace (no column {', '.join(missing)}); leave it out"
        )
    ids = [pl.col(name) if name in frame.columns else pl.lit(-1).alias(name) for name in _OPTIONAL]
    try:
        return frame.select(
            pl.col("rank", "step").cast(pl.Int64),
            *(column.cast(pl.Int64).fill_null(-1) for column in ids),
            pl.col("optype").cast(pl.String).fill_null(""),
            start_ns=_nanoseconds("start_ts"),
            duration_ns=_nanoseconds("duration"),
        ).drop_nulls(["rank", "step"])
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: a column of the wrong type ({first_line(error)})") from error


def _read_parquet(path: Path) -> pl.DataFrame:
    """Read the relevant columns of a file, and no others, since the file is not trusted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            most = max(MIN_ROWS, MAX_ROWS_PER_BYTE * path.stat().st_size)
            if file.metadata.num_rows > most:
                raise InputError(f"{path}: claims to have {file.metadata.num_rows} rows, more than {most}")
            names = [name for name in (*_REQUIRED, *_OPTIONAL) if name in file.schema_arrow.names]
            if nested := [name for name in names if pa.types.is_nested(file.schema_arrow.field(name).type)]:
                raise InputError(f"{path}: a column of the wrong type ({', '.join(nested)})")
            return pl.DataFrame(pl.from_arrow(file.read(names)))
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as Parquet ({why_unreadable(error)})") from error


def _nanoseconds(seconds: str) -> pl.Expr:
    exact = (pl.col(seconds).cast(pl.Float64) * NS_PER_S).round()
    return pl.when(exact.is_finite()).then(exact).cast(pl.Int64)


def _laid_out(operations: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Lay steps one after the other on a single time line, since each is recorded from 0.

    A step lasts, on every rank, from the first operation of any rank to the end of the last.

    Returns:
        Rows by rank and time, with the `position` of their step; and the steps, without ranks.
    """
    end = pl.col("start_ns") + pl.col("duration_ns")
    extents = operations.group_by("step").agg(begin=pl.col("start_ns").min(), length=end.max()).sort("step")
    length = pl.col("length") - pl.col("begin")
    steps = extents.with_row_index("position").select(
        "step",
        "begin",
        pl.col("position").cast(pl.Int64),
        start=length.cum_sum() - length,
        duration=length,
    )
    moved = operations.join(steps, on="step", how="left").with_columns(
        start_ns=pl.col("start_ns") - pl.col("begin") + pl.col("start")
    )
    order = ["rank", "start_ns", "duration_ns", "optype", "seq_id"]
    placed = moved.sort(order).with_columns(span_id=pl.int_range(pl.len()).over("rank"))
    rows = steps.select(
        "step", start_ns="start", duration_ns="duration", source=pl.lit("op-level step"), window=pl.lit(0)
    )
    return placed.drop("begin", "start", "duration"), rows


def _spans(operations: pl.DataFrame) -> pl.DataFrame:
    streams = {name: stream for name, (stream, _, _) in _POINT_TO_POINT.items()}
    streams |= dict.fromkeys(_COLLECTIVES, COLLECTIVE_STREAM)
    return operations.select(
        "span_id",
        pl.col("rank").cast(pl.Int32),
        "start_ns",
        "duration_ns",
        kind=pl.lit("kernel"),
        name="optype",
        device=pl.lit(0),
        stream=pl.col("optype").replace_strict(streams, default=COMPUTE_STREAM, return_dtype=pl.Int64),
        micro_batch="mb_id",
        model_chunk="mc",
    )


def _collectives(operations: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `collectives` of all ranks: messages with their peer, the others with their group."""
    ran = pl.concat([_sends_and_receives(operations), _in_groups(operations)])
    ran = ran.with_columns(texts_of_lists(ran["group_ranks"]))
    per_step = pl.col("seq_id").max() + 1  # sequence numbers restart at each step
    return ran.sort("rank", "span_id").select(
        pl.int_range(pl.len()).over("rank").alias("collective_id"),
        pl.col("rank").cast(pl.Int32),
        pl.lit(0).alias("window"),
        "op",
        "group",
        "group_ranks",
        pl.when(pl.col("seq_id") >= 0)
        .then(pl.col("position") * per_step + pl.col("seq_id"))
        .otherwise(-1)
        .alias("sequence"),
        pl.col("peer").cast(pl.Int32),
        "start_ns",
        "duration_ns",
        "span_id",
        pl.lit(SOURCE).alias("source"),
    )


def _sends_and_receives(operations: pl.DataFrame) -> pl.DataFrame:
    """Add the peer: the next or previous stage of the same data-parallel rank, cyclic from last to first."""
    rows = operations.filter(pl.col("optype").is_in(list(_POINT_TO_POINT)))
    ops = {name: op for name, (_, op, _) in _POINT_TO_POINT.items()}
    away = {name: step for name, (_, _, step) in _POINT_TO_POINT.items()}
    num_stages = operations["stage"].max() + 1  # type: ignore[operator]
    places = (
        operations.filter(pl.col("stage") >= 0).select("dp_rank", peer_stage="stage", peer="rank").unique()
    )
    unambiguous = places.unique(
        ["dp_rank", "peer_stage"], keep="none"
    )  # without coordinates peers are unknown
    peers = rows.with_columns(
        op=pl.col("optype").replace_strict(ops, return_dtype=pl.String),
        group=pl.col("optype").str.split("-").list.first(),
        peer_stage=(pl.col("stage") + pl.col("optype").replace_strict(away, return_dtype=pl.Int64))
        % max(num_stages, 1),
    ).join(unambiguous, on=["dp_rank", "peer_stage"], how="left")
    pair = pl.concat_list("rank", "peer").list.sort()
    return peers.with_columns(
        pl.col("peer").fill_null(-1),
        group_ranks=pl.when(pl.col("peer").is_not_null()).then(pair).otherwise(pl.lit([], pl.List(pl.Int64))),
    ).drop("peer_stage")


def _in_groups(operations: pl.DataFrame) -> pl.DataFrame:
    """Add the group: all ranks that ran the operation within a stage, a data-parallel rank, or the job."""
    rows = operations.filter(pl.col("optype").is_in(list(_COLLECTIVES))).with_columns(
        op=pl.col("optype").replace_strict(
            {name: op for name, (op, _) in _COLLECTIVES.items()}, return_dtype=pl.String
        ),
        reach=pl.col("optype").replace_strict(
            {name: reach for name, (_, reach) in _COLLECTIVES.items()}, return_dtype=pl.String
        ),
        peer=pl.lit(-1, pl.Int64),
    )
    place = (
        pl.when(pl.col("reach") == "stage")
        .then(pl.format(" stage {}", "stage"))
        .when(pl.col("reach") == "dp")
        .then(pl.format(" dp {}", "dp_rank"))
        .when(pl.col("reach") == "tp")
        .then(pl.format(" dp {} stage {}", "dp_rank", "stage"))
        .otherwise(pl.lit(""))
    )
    named = rows.with_columns(group=pl.col("optype") + place)
    members = named.group_by("group").agg(group_ranks=pl.col("rank").unique().sort())
    no_ranks = pl.lit([], pl.List(pl.Int64))
    return (
        named.join(members, on="group", how="left")
        .with_columns(
            pl.when(pl.col("reach") == "tp").then(no_ranks).otherwise("group_ranks").alias("group_ranks")
        )
        .select([*operations.columns, "op", "group", "peer", "group_ranks"])
    )


def _meta(path: Path) -> dict[str, int]:
    """Return whole numbers of the `meta-NAME.yaml` beside `trace-NAME.parquet`; empty where there is none."""
    _, dash, name = path.name.removesuffix(".parquet").partition("-")
    for suffix in (".yaml", ".yaml.gz"):
        meta = path.with_name(f"meta{dash}{name}{suffix}")
        if meta.is_file():
            text = read_bytes(meta).decode("utf-8", errors="replace")
            return {key: int(value) for key, value in re.findall(r"(?m)^(\w+):\s*(\d+)\s*$", text)}
    return {}
