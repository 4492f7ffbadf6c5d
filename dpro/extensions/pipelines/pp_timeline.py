"""Pipeline timelines: forward and backward of each stage and micro-batch, as spans and steps.

Reads JSON of one of three forms, distinguished by content: MegatronApp's events of one rank (`rel_ts` in ns
since the iteration began), MegatronApp's events of all ranks (`ts` in us), and Primus' lists of times by
iteration (ms). Returns a `RankTrace` per rank: forward and backward as kernels on one stream, communication
on separate streams. Such a trace does not record launches or dependencies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dpro.classify import operation
from dpro.errors import InputError
from dpro.ingest.reading.files import rank_of_name, read_bytes, read_head
from dpro.ingest.trace import RankTrace
from dpro.units import NS_PER_MS, NS_PER_US

SOURCE = "pipeline timeline"
COMPUTE_STREAM = 0
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_WORK = {
    "rank": pl.Int64,
    "step": pl.Int64,
    "name": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "micro_batch": pl.Int64,
    "model_chunk": pl.Int64,
}


class _Args(msgspec.Struct):
    """Fields of a MegatronApp event besides its time; in a rank's own file these are fields of the event."""

    microbatch: int = -1
    model_chunk: int = -1
    pp_rank: int = -1
    iteration: int = -1


class _Event(_Args):
    """A MegatronApp event: begin, end or instant."""

    name: str = ""
    ph: str = ""
    rel_ts: float | None = None
    ts: float | None = None
    pid: int = -1
    pad_before: int = 0
    duration_wall: int | None = None
    args: _Args = msgspec.field(default_factory=_Args)


class _Times(msgspec.Struct):
    """An iteration of Primus: ms since it began, in the order in which micro-batches ran."""

    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float]
    bwd_end: list[float]
    total: float


@dataclass(frozen=True)
class _Timeline:
    """Content of a file.

    Attributes:
        work: columns `_WORK`.
        steps: `rank`, `step`, `start_ns`, `duration_ns`.
        stages: pipeline stage of each rank; -1 unknown.
        num_stages: stages of the job; -1 unknown.
        skipped, warnings: see `RankTrace`; once per file.
    """

    work: pl.DataFrame
    steps: pl.DataFrame
    stages: dict[int, int]
    num_stages: int
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def is_pp_timeline(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a pipeline timeline."""
    start = head.lstrip()[:1]
    if start == b"{" and all(key in head for key in (b'"fwd_start"', b'"fwd_end"', b'"bwd_start"')):
        return True
    return start == b"[" and re.search(rb'"(microbatch|pad_before)"\s*:', head) is not None


def read_pp_timeline(path: Path, *, rank: int | None = None) -> list[RankTrace]:
    """Read the ranks of a file.

    Args:
        path: the file; its name gives the rank where its content does not. For Primus, the other ranks' files
            in its folder give the duration of each iteration of the job.
        rank: the rank of a file of one rank, where the caller knows better.

    Raises:
        InputError: the file is damaged, is not a pipeline timeline, or has no work.
    """
    data = read_bytes(path)
    try:
        if data.lstrip().startswith(b"{"):
            timeline = _primus(msgspec.json.decode(data, type=dict[str, _Times]), path)
        else:
            timeline = _megatron(msgspec.json.decode(data, type=list[_Event]), path)
    except _UNREADABLE as error:
        raise InputError(
            f"{path}: not a pipeline timeline, or cut short ({error}); export it again"
        ) from error
    if timeline.work.is_empty():
        raise InputError(f"{path}: no forward or backward in it; export it again")
    ranks = timeline.work["rank"].unique().sort().to_list()
    one = rank if rank is not None and len(ranks) == 1 else None
    traces = [_trace(timeline, recorded, recorded if one is None else one) for recorded in ranks]
    traces[0].warnings.extend(timeline.warnings)
    traces[0].skipped.update(timeline.skipped)
    return traces


def _trace(timeline: _Timeline, recorded: int, rank: int) -> RankTrace:
    """Return one rank's tables.

    Args:
        recorded: the rank in the timeline.
        rank: the rank in the result.
    """
    stage = timeline.stages[recorded]
    work = timeline.work.filter(pl.col("rank") == recorded).sort("start_ns", "duration_ns", "name")
    work = work.with_row_index("span_id").with_columns(pl.col("span_id").cast(pl.Int64), rank=pl.lit(rank))
    ops = {name: _communication(name) for name in work["name"].unique().sort()}
    streams = {name: place for place, name in enumerate(filter(ops.get, ops), start=1)}
    spans = work.select(
        *("span_id", "rank", "name", "start_ns", "duration_ns", "micro_batch", "model_chunk"),
        kind=pl.lit("kernel"),
        device=pl.lit(0),
        stream=pl.col("name").replace_strict(streams, default=COMPUTE_STREAM, return_dtype=pl.Int64),
    )
    steps = timeline.steps.filter(pl.col("rank") == recorded).with_columns(
        rank=pl.lit(rank), window=pl.lit(0), source=pl.lit("iteration")
    )
    end = work["start_ns"] + work["duration_ns"]
    worker = {"rank": rank, "world_size": timeline.num_stages, "pp": stage, "source": SOURCE}
    worker |= {"started_ns": work["start_ns"].min(), "ended_ns": end.max()}
    peers = {name: _peer(name, op, stage, timeline.num_stages) for name, op in ops.items()}
    frames = {
        "spans": spans,
        "collectives": spans.filter(pl.col("stream") != COMPUTE_STREAM).select(
            *("span_id", "rank", "start_ns", "duration_ns"),
            collective_id=pl.int_range(pl.len()),
            window=pl.lit(0),
            op=pl.col("name").replace_strict(ops, return_dtype=pl.String),
            peer=pl.col("name").replace_strict(peers, return_dtype=pl.Int64),
            source=pl.lit(SOURCE),
        ),
        "steps": steps,
        "workers": pl.DataFrame([worker]),
    }
    return RankTrace(rank=rank, world_size=timeline.num_stages, frames=frames)


def _communication(name: str) -> str:
    """Return the kind of communication between stages, by an operation's name; empty for compute."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    sends, receives = "send" in words, bool(words & {"recv", "receive"})
    if sends or receives:
        return "send_recv" if sends and receives else "send" if sends else "recv"
    return operation(name)


def _peer(name: str, op: str, stage: int, num_stages: int) -> int:
    """Return the peer stage of a send or receive: forward goes up, backward down, cyclic; else -1."""
    if op not in ("send", "recv") or stage < 0 or num_stages < 1:
        return -1
    up = (op == "send") == ("backward" not in name.lower())
    return (stage + (1 if up else -1)) % num_stages


def _megatron(events: list[_Event], path: Path) -> _Timeline:
    """Join begins with ends, whether of one rank or of all.

    Where times are relative to their iteration, iterations are laid out by their wall-clock duration and the
    pause before them: those sums are equal on all ranks, unlike those of the GPU's clock.
    """
    of_all = any(event.ts is not None for event in events)
    stages_named = sorted({event.pp_rank for event in events if event.pp_rank >= 0})
    if not of_all and len(stages_named) > 1:
        raise InputError(
            f"{path}: events of several pipeline ranks without a common clock; give a file of each"
        )
    named, stage = rank_of_name(path.name), stages_named[0] if stages_named else -1
    rank = named if named >= 0 else stage
    # In a rank's own file, `time_ns` counts from the start of the iteration.
    facts = [event.args if of_all else event for event in events]
    times = [event.ts if of_all else event.rel_ts for event in events]
    frame = pl.DataFrame(
        {
            "name": pl.Series([event.name for event in events], dtype=pl.String),
            "ph": pl.Series([event.ph for event in events], dtype=pl.String),
            "time": pl.Series(times, dtype=pl.Float64, strict=False),
            "rank": pl.Series([event.pid if of_all else rank for event in events], dtype=pl.Int64),
            "step": pl.Series([event.iteration for event in facts], dtype=pl.Int64),
            "micro_batch": pl.Series([event.microbatch for event in facts], dtype=pl.Int64),
            "model_chunk": pl.Series([event.model_chunk for event in facts], dtype=pl.Int64),
            "pad_before": pl.Series([event.pad_before for event in events], dtype=pl.Int64),
            "duration_wall": pl.Series([event.duration_wall for event in events], dtype=pl.Int64),
        },
    ).with_columns(time_ns=(pl.col("time") * (NS_PER_US if of_all else 1)).round().cast(pl.Int64))
    whole, broken = _joined(frame if of_all else _on_one_clock(frame))
    instants = frame.filter(pl.col("ph") == "i")
    bounds = instants.filter(pl.col("name").str.contains("^iteration (begin|end)$"))
    moments = [bounds.select("rank", "step", at="time_ns")]
    moments += [whole.select("rank", "step", at=column) for column in ("start_ns", "end_ns")]
    steps = (
        pl.concat(moments)
        .group_by("rank", "step")
        .agg(start_ns=pl.col("at").min(), end_ns=pl.col("at").max())
    )
    lost = {"events without an end": broken, "instants": instants.height - bounds.height}
    work = whole.filter(pl.col("name") != "iteration").select(pl.col(n).cast(t) for n, t in _WORK.items())
    stages = {event.pid: event.args.pp_rank for event in events if event.args.pp_rank >= 0}
    return _Timeline(
        work=work,
        steps=steps.sort("rank", "step").select(
            "rank", "step", "start_ns", duration_ns=pl.col("end_ns") - pl.col("start_ns")
        ),
        stages=dict.fromkeys(work["rank"], -1) | (stages if of_all else {rank: stage}),
        num_stages=max(stages.values(), default=-1) + 1 if of_all else _config(path).get("pp_size", -1),
        skipped={reason: count for reason, count in lost.items() if count},
    )


def _joined(events: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Join each begin with its end; also return the number of begins without one.

    The n-th begin of a name in a step matches the n-th end: events of one name do not nest.
    """
    key = ["rank", "step", "name", "nth"]
    nth = pl.int_range(pl.len()).over("rank", "step", "name").alias("nth")
    begun, ended = (events.filter(pl.col("ph") == phase).with_columns(nth) for phase in ("B", "E"))
    ends = ended.select(*key, "micro_batch", "model_chunk", end_ns="time_ns")
    joined = begun.select(*key, start_ns="time_ns").join(ends, on=key, how="left")
    whole = joined.filter(pl.col("end_ns") >= pl.col("start_ns"))
    duration = pl.col("end_ns") - pl.col("start_ns")
    return whole.with_columns(duration_ns=duration), joined.height - whole.height


def _on_one_clock(events: pl.DataFrame) -> pl.DataFrame:
    """Count one rank's iterations from 0 and lay them one after the other."""
    marks = pl.col("name") == "iteration"
    numbered = events.with_columns(step=(marks & (pl.col("ph") == "B")).cast(pl.Int64).cum_sum() - 1)
    lengths = numbered.group_by("step").agg(
        pad=pl.col("pad_before").max(),
        length=pl.coalesce(pl.col("duration_wall").max(), pl.col("time_ns").max()),
    )
    lengths = lengths.sort("step").with_columns(
        base=pl.col("pad").cum_sum() + pl.col("length").cum_sum() - pl.col("length")
    )
    placed = numbered.join(lengths, on="step", how="left", maintain_order="left")
    begins, ends = marks & (pl.col("ph") == "B"), marks & (pl.col("ph") == "E")
    since = pl.when(begins).then(0).when(ends).then("length").otherwise("time_ns")
    return placed.with_columns(time_ns=pl.col("base") + since).drop("pad", "length", "base")


def _primus(iterations: dict[str, _Times], path: Path) -> _Timeline:
    """Lay one rank's iterations one after the other, each as long as on the slowest rank."""
    rank, config = rank_of_name(path.name), _config(path)
    uneven = [
        number
        for number, times in iterations.items()
        if len(times.fwd_start) != len(times.fwd_end) or len(times.bwd_start) != len(times.bwd_end)
    ]
    if uneven or not all(number.isdecimal() for number in iterations):
        what = (
            f"iteration {uneven[0]} has unequal numbers of starts and ends"
            if uneven
            else "unnumbered iterations"
        )
        raise InputError(f"{path}: {what}; export it again")
    steps = _extents(path, iterations).with_columns(rank=pl.lit(rank, pl.Int64))
    base = dict(steps.select("step", "start_ns").iter_rows())
    parts = [pl.DataFrame(schema=_WORK)]
    for number, times in iterations.items():
        step = int(number)
        parts.append(_numbered(rank, step, "forward", times.fwd_start, times.fwd_end, base[step]))
        parts.append(_numbered(rank, step, "backward", times.bwd_start, times.bwd_end, base[step]))
    work = pl.concat(parts)
    whole = work.filter(pl.col("duration_ns") >= 0)
    warnings = []
    if config.get("vp_size", 1) > 1:
        # The lists then have several chunks of each micro-batch, in an unknown order.
        whole = whole.with_columns(micro_batch=pl.lit(-1, pl.Int64))
        warnings.append(f"{path.name}: with virtual stages the micro-batch of each span is not known")
    if config.get("world_size", 0) > config.get("pp_size", 0):
        warnings.append(f"{path.name}: one rank of each pipeline stage is recorded, numbered by stage")
    broken = work.height - whole.height
    return _Timeline(
        work=whole,
        steps=steps,
        stages={rank: rank},
        num_stages=config.get("pp_size", -1),
        skipped={"work that ends before it begins": broken} if broken else {},
        warnings=warnings,
    )


def _numbered(
    rank: int, step: int, name: str, begins: list[float], ends: list[float], base_ns: int
) -> pl.DataFrame:
    """Return the k-th entry of a list as the k-th micro-batch: without virtual stages they run in order."""
    start, end = (
        (pl.Series(times, dtype=pl.Float64) * NS_PER_MS).round().cast(pl.Int64, strict=False)
        for times in (begins, ends)
    )
    return pl.DataFrame({"start_ns": start + base_ns, "duration_ns": end - start}).select(
        rank=pl.lit(rank, pl.Int64),
        step=pl.lit(step, pl.Int64),
        name=pl.lit(name),
        start_ns="start_ns",
        duration_ns="duration_ns",
        micro_batch=pl.int_range(pl.len(), dtype=pl.Int64),
        model_chunk=pl.lit(-1, pl.Int64),
    )


def _extents(path: Path, iterations: dict[str, _Times]) -> pl.DataFrame:
    """Return start and duration of each iteration: the job continues when the slowest rank has ended it.

    A rank's own total ends with its own last backward, so the other ranks' files are read for theirs.
    """
    slowest = {number: times.total for number, times in iterations.items()}
    others = (other for other in sorted(path.parent.iterdir()) if other != path and other.is_file())
    for other in others:
        for number, total in _totals(other).items():
            slowest[number] = max(total, slowest.get(number, 0.0))
    numbers = sorted(slowest, key=int)
    length = [round(slowest[number] * NS_PER_MS) for number in numbers]
    extents = pl.DataFrame(
        {"step": [int(number) for number in numbers], "duration_ns": length},
        schema={"step": pl.Int64, "duration_ns": pl.Int64},
    ).with_columns(start_ns=pl.col("duration_ns").cum_sum() - pl.col("duration_ns"))
    return extents.filter(pl.col("step").is_in([int(number) for number in iterations]))


class _Total(msgspec.Struct):
    total: float
    fwd_start: msgspec.Raw  # required in an iteration; not parsed


def _totals(path: Path) -> dict[str, float]:
    """Return the duration of each iteration (ms) in another rank's file; empty for a file of another kind."""
    try:
        if b'"fwd_start"' not in read_head(path):
            return {}
        totals = msgspec.json.decode(read_bytes(path), type=dict[str, _Total])
    except (InputError, *_UNREADABLE):
        return {}
    return {number: times.total for number, times in totals.items() if number.isdecimal()}


def _config(path: Path) -> dict[str, int]:
    """Return sizes of the job from the `config.json` beside the file; empty where there is none."""
    for name in ("config.json", "config.json.gz"):
        beside = path.with_name(name)
        if beside.is_file():
            try:
                config: Any = msgspec.json.decode(read_bytes(beside))
            except (InputError, *_UNREADABLE):
                return {}
            sizes = config.items() if isinstance(config, dict) else ()
            return {key: value for key, value in sizes if isinstance(value, int)}
    return {}
