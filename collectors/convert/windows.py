"""Deep windows of one process converted to tables, one batch at a time.

Reads the Kineto files that a process has saved, and the execution traces, messages and pretended calls beside
them; writes a Parquet part per table and batch, and notes for the manifest. A batch that was interrupted is
converted to the same parts again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.convert import calls
from dpro.collectors.convert.actors import with_actor_calls
from dpro.collectors.convert.calls import messages_in_window
from dpro.collectors.convert.pretended import with_pretended_calls
from dpro.collectors.convert.recorded import Readers, RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.inside.files import PRETENDED
from dpro.errors import DproError
from dpro.plugins import extended
from dpro.schema import (
    COLLECTIVES,
    COUNTERS,
    DEPENDENCIES,
    GPU_WORK_KINDS,
    SPANS,
    SYNCS,
    conform,
)
from dpro.schema.members import num_members
from dpro.store import write_part
from dpro.timed import with_times
from dpro.words import first_few

WINDOW_TABLES = (SPANS, COLLECTIVES, SYNCS, DEPENDENCIES, COUNTERS)
_BESIDE = ("trace", "messages", PRETENDED)  # other files of a window, numbered like its Kineto file
_ID_COLUMNS = ("span_id", "launch_span_id", "collective_id", "source_span_id", "target_span_id")
_WINDOW_IDS = 1 << 32  # ids of window w are in [(w + 1) * this, (w + 2) * this); those of calls are below


def first_window_ns(process: RecordedProcess, recorded: Sequence[records.Record]) -> int:
    """Return the start of the first window that is open or not yet converted, ns; maximum int64 for none."""
    over = {r.a for r in recorded if r.kind in (records.WINDOW, records.DROPPED)}
    over -= {int(path.stem.removeprefix("window")) for path in process.folder.glob("**/window*.json")}
    begun = [r.b for r in recorded if r.kind == records.OPENED and r.a not in over]
    return min(begun, default=(1 << 63) - 1)


def convert_windows(run: Path, process: RecordedProcess, readers: Readers, until_ns: int | None) -> None:
    """Convert the deep windows saved before a moment, a batch of them into one part per table.

    A batch is a folder, so an interrupted conversion is repeated with the same windows and parts.

    Args:
        until_ns: windows saved at or after this time wait, ns since 1970; None converts all.
    """
    saved = sorted(process.folder.glob("window*.json"))
    waiting = [path for path in saved if until_ns is None or path.stat().st_mtime_ns < until_ns]
    if waiting:
        batch = process.folder / f"batch-{waiting[0].stem}"
        batch.mkdir()
        for path in waiting:
            beside = [path.with_name(path.name.replace("window", what)) for what in _BESIDE]
            for file in (*beside, path):  # the window last: one in a batch has all its files
                if file.exists():
                    file.rename(batch / file.name)
    for batch in sorted(process.folder.glob("batch-*")):
        convert_batch(run, process, batch, readers)
        shutil.rmtree(batch.rename(batch.with_name(f"done-{batch.name}")))


def convert_batch(run: Path, process: RecordedProcess, batch: Path, readers: Readers) -> None:
    """Write the tables of a batch of windows, and notes on them for the manifest."""
    paths = sorted(batch.glob("window*.json"))
    recorded = records.read_records(process.folder / "records.bin")
    steps_of = {r.a: (r.b, r.c) for r in recorded if r.kind == records.CUT}
    unseen = {r.a for r in recorded if r.kind == records.CUT and not r.d}
    begun = {r.a: r.b for r in recorded if r.kind in (records.WINDOW, records.CUT)}
    entries = calls.entries(process.folder)
    frames, notes = [], []
    for path in paths:
        window = int(path.stem.removeprefix("window"))
        try:
            trace = extended("window", readers.trace(path, rank=process.rank, window=window), path)
        except DproError as error:
            notes.append(
                {"warnings": [f"rank {process.rank}: window {window} is lost: {_cause(error, path)}"]}
            )
            continue
        sent = messages_in_window(
            path.with_name(path.name.replace("window", "messages")), process.rank, window
        )
        tables = _window_frames(trace, window, pl.concat([entries, sent]), steps_of.get(window))
        calls_of = path.with_name(path.name.replace("window", PRETENDED))
        first = (window + 1) * _WINDOW_IDS
        tables = with_pretended_calls(tables, calls_of, process.rank, window, first)
        spans = with_actor_calls(tables[SPANS.name], process, window, first, begun.get(window))
        frames.append(tables | {SPANS.name: spans})
        lost = lost_in(frames[-1][SPANS.name]) if process.facts["gpu_name"] else []
        lost += [TAIL] if window in unseen else []
        notes.append(
            {"warnings": trace.warnings, "skipped": trace.skipped, "versions": trace.versions}
            | {"lost": {what: [window] for what in lost}}
        )
    for table in WINDOW_TABLES if frames else ():
        whole = pl.concat([tables[table.name] for tables in frames], how="vertical")
        write_part(run, table, f"{process.part}-{batch.name}", whole)
    (process.folder / f"notes-{batch.name}.json").write_text(json.dumps(notes))


def _window_frames(
    trace: Any, window: int, entries: pl.DataFrame, steps: tuple[int, int] | None
) -> dict[str, pl.DataFrame]:
    """Return the tables of a window, with unique ids and the flight recorder's facts about its collectives.

    Args:
        steps: start and end of its steps, ns, where Kineto recorded more than these; else None.
    """
    first = (window + 1) * _WINDOW_IDS
    frames = {
        table.name: conform(table, trace.frames.get(table.name, table.empty())) for table in WINDOW_TABLES
    }
    frames = cut(frames, *steps) if steps else frames
    frames = {name: _renumbered(frame, first) for name, frame in frames.items()}
    frames[COLLECTIVES.name] = merge_window(frames[COLLECTIVES.name], frames[SPANS.name], entries)
    return frames


def _cause(error: DproError, path: Path) -> str:
    """Return a reader's message without the name of the file, which will be deleted, and without advice."""
    return str(error).removeprefix(f"{path}: ").partition(";")[0]


def _renumbered(frame: pl.DataFrame, first: int) -> pl.DataFrame:
    """Make ids that are unique within a window unique within the rank; -1 stays none."""
    columns = [pl.col(name) for name in _ID_COLUMNS if name in frame.columns]
    return frame.with_columns(
        pl.when(column >= 0).then(column + first).otherwise(-1).name.keep() for column in columns
    )


# A recording of Kineto that is longer than its window, cut to the window's steps.

_GPU = pl.col("kind").is_in([*GPU_WORK_KINDS, "gpu_annotation"])
_END = pl.col("start_ns") + pl.col("duration_ns").clip(0)


def cut(frames: Mapping[str, pl.DataFrame], start_ns: int, end_ns: int) -> dict[str, pl.DataFrame]:
    """Remove from the tables of a window everything outside its steps.

    Args:
        frames: `spans`, `collectives`, `syncs`, `dependencies`, `counters` of one rank and window.
    """
    spans = frames[SPANS.name]
    host = _host(spans.filter(~_GPU), start_ns, end_ns)
    gpu = _gpu(spans, host, start_ns, end_ns)
    kept = pl.concat([host, gpu])
    ids = kept["span_id"].implode()
    source, target = pl.col("source_span_id").is_in(ids), pl.col("target_span_id").is_in(ids)
    rows = frames[COUNTERS.name]
    before = rows.filter(pl.col("time_ns") < start_ns).sort("time_ns", maintain_order=True)
    held = before.unique(["host", "device", "counter"], keep="last", maintain_order=True)
    within = rows.filter(pl.col("time_ns").is_between(start_ns, end_ns, closed="left"))
    return {
        **frames,
        SPANS.name: kept.sort(SPANS.sort_by, maintain_order=True),
        COLLECTIVES.name: _collectives(frames[COLLECTIVES.name], ids, start_ns, end_ns),
        SYNCS.name: frames[SYNCS.name].filter(pl.col("span_id").is_in(ids)),
        DEPENDENCIES.name: frames[DEPENDENCIES.name].filter(source & target),
        COUNTERS.name: pl.concat([held.with_columns(time_ns=pl.lit(start_ns, pl.Int64)), within]),
    }


def _host(spans: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """Return host spans that began during the steps, clipped as if recording had ended with the steps.

    A Python function called before the steps is clipped to their start, as where recording begins there.
    """
    python = pl.col("kind") == "python"
    begun = (pl.col("start_ns") >= start_ns) | (python & _END.gt(start_ns))
    within = spans.filter(begun & (pl.col("start_ns") < end_ns))
    start, end = pl.col("start_ns").clip(start_ns), pl.min_horizontal(_END, pl.lit(end_ns))
    lasting = pl.when(pl.col("duration_ns") >= 0)
    return within.with_columns(start_ns=start, duration_ns=lasting.then(end - start).otherwise("duration_ns"))


def _gpu(spans: pl.DataFrame, host: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """Return the GPU work that host calls launched; of work without a known launch, what ran meanwhile."""
    work = spans.filter(_GPU)
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    launched = pl.col("correlation").is_in(calls["correlation"].implode())
    from_host = pl.col("correlation").is_in(host.filter(pl.col("kind") == "runtime")["correlation"].implode())
    caused = work.filter((pl.col("correlation") >= 0) & from_host)
    first, last = caused["start_ns"].min(), caused.select(_END.max()).item()
    meanwhile = (pl.col("start_ns") >= (start_ns if first is None else first)) & (
        pl.col("start_ns") < (end_ns if last is None else last)
    )
    return pl.concat([caused, work.filter(~launched & meanwhile)])


def _collectives(rows: pl.DataFrame, ids: pl.Series, start_ns: int, end_ns: int) -> pl.DataFrame:
    linked = (pl.col("span_id") >= 0) | (pl.col("launch_span_id") >= 0)
    issued = pl.col("span_id").is_in(ids) | pl.col("launch_span_id").is_in(ids)
    return rows.filter(
        pl.when(linked).then(issued).otherwise(pl.col("start_ns").is_between(start_ns, end_ns))
    )


# One row per collective: observations of the deep window joined with the flight recorder's entry.

SLACK_NS = 50_000  # an entry's timestamp may exceed the end of its call by this much
LAUNCH_NS = 100_000_000  # maximum time from an entry to the launch of its kernel
KERNEL = "kineto kernel"  # source of window rows of GPU kernels
# Collectives that gloo implements by another one, by their name in the flight recorder.
_GLOO_RUNS_AS = {"reduce_scatter": "all_reduce"}
_FACTS = ("group", "group_ranks", "sequence", "bytes_in", "bytes_out", "dtype", "peer", "state")


def merge_window(collectives: pl.DataFrame, spans: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """Add the flight recorder's facts to a window's collectives.

    Args:
        entries: flight recorder entries of the rank, with their final `collective_id`.

    Returns:
        The rows; a row with a matching entry has its `collective_id`, the others keep theirs.
    """
    if collectives.is_empty() or entries.is_empty():
        return collectives
    met = pl.concat([_met_by_calls(collectives, spans, entries), _met_by_kernels(collectives, entries)])
    met = met.unique("entry", keep="first", maintain_order=True).unique(
        "row", keep="first", maintain_order=True
    )
    recorded = entries.select(
        pl.col("collective_id").alias("entry"), *(pl.col(n).alias(f"{n}_fr") for n in ("op", *_FACTS))
    )
    joined = (
        collectives.rename({"collective_id": "row"})
        .join(met, on="row", how="left", maintain_order="left")
        .join(recorded, on="entry", how="left", maintain_order="left")
    )
    # A reduce-scatter that ran as an all-reduce of its whole input returns one part of it.
    part = pl.col("bytes_out_fr") // num_members("group_ranks_fr").clip(lower_bound=1)
    same = pl.col("op") == pl.col("op_fr")
    joined = joined.with_columns(bytes_out_fr=pl.when(same).then("bytes_out_fr").otherwise(part))
    facts = [pl.coalesce(_known(f"{name}_fr", entries.schema[name]), name).alias(name) for name in _FACTS]
    merged = joined.with_columns(*facts, collective_id=pl.coalesce("entry", "row"))
    return merged.select(collectives.columns)


def _known(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a column with null for its unknown values: empty text or negative numbers."""
    column = pl.col(name)
    return pl.when(column != "" if dtype == pl.String else column >= 0).then(column)


def _met_by_calls(collectives: pl.DataFrame, spans: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """Match entries to the CPU calls during which they were made, as for gloo: pairs of `row` and `entry`."""
    calls = (
        collectives.filter((pl.col("source") != KERNEL) & (pl.col("launch_span_id") >= 0))
        .join(
            spans.select(launch_span_id="span_id", begin="start_ns", length="duration_ns"),
            on="launch_span_id",
        )
        .select("op", "begin", row="collective_id", end=pl.col("begin") + pl.col("length") + SLACK_NS)
    )
    other = calls.filter(pl.col("op").is_in(list(_GLOO_RUNS_AS))).with_columns(
        pl.col("op").replace(_GLOO_RUNS_AS)
    )
    calls = pl.concat([calls, other]).sort("begin", "row")
    made = entries.select("op", "enqueued_ns", entry="collective_id").sort("enqueued_ns", "entry")
    pairs = made.join_asof(calls, left_on="enqueued_ns", right_on="begin", by="op", check_sortedness=False)
    # Messages are recorded after their call has returned, by its thread, and so before its next call.
    inside = (pl.col("enqueued_ns") <= pl.col("end")) | pl.col("op").is_in(("send", "recv"))
    return pairs.filter(inside).drop_nulls("row").sort("entry").select("row", "entry")


def _met_by_kernels(collectives: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
    """Match each kernel to the last entry before its launch, as for NCCL: pairs of `row` and `entry`.

    If one kernel carries several messages, the last row takes the last entry, the row before it the entry
    before.
    """
    launched = (
        collectives.filter((pl.col("source") == KERNEL) & (pl.col("enqueued_ns") >= 0))
        .select("op", launched="enqueued_ns", row="collective_id")
        .sort("launched", "row")
        .with_columns(
            after=pl.len().over("op", "launched") - 1 - pl.int_range(pl.len()).over("op", "launched")
        )
    )
    made = entries.select("op", "enqueued_ns", entry="collective_id").sort("enqueued_ns", "entry")
    made = made.with_columns(place=pl.int_range(pl.len()).over("op"))
    latest = launched.join_asof(
        made.drop("entry"),
        left_on="launched",
        right_on="enqueued_ns",
        by="op",
        tolerance=LAUNCH_NS,
        check_sortedness=False,
    ).drop_nulls("place")
    wanted = latest.select("op", "row", place=pl.col("place") - pl.col("after").cast(pl.Int64))
    return wanted.join(made, on=["op", "place"], maintain_order="left").select("row", "entry")


# Cost of recording, from the times of its steps.


def recording_costs(steps: pl.DataFrame, passes: pl.DataFrame) -> dict[str, float]:
    """Return the cost of the recorder at step ends and backward passes, and of deep windows.

    Args:
        steps, passes: rows of these tables, of one rank.

    Returns:
        `ends_share`: share of the time from the first step to the last spent at passes and at ends of steps
            that no window disturbs;
        `count`, `cost_ms` (median of one) and `share` (of all) of windows, where there were any.
        Empty where all steps are in windows.
    """
    ordered = (
        with_times(steps)
        .sort("step")
        .with_columns(
            own_ns=pl.col("start_ns") - pl.col("start_ns").shift() - pl.col("duration_ns").shift(),
            recorded=pl.max_horizontal("window", "beside"),
        )
        .with_columns(after=pl.col("recorded").shift(fill_value=-1))
    )
    disturbed = pl.max_horizontal("recorded", "after")
    timed = pl.col("time_ns") > 0
    plain_ns = ordered.filter(timed & (disturbed < 0))["time_ns"].median()
    if not isinstance(plain_ns, float | int):
        return {}
    ends = ordered["start_ns"] + ordered["duration_ns"]
    total_ns = max(int(ends[-1]) - int(ordered["start_ns"][0]), 1)
    at_ends_ns = int(ordered.filter(disturbed < 0)["own_ns"].clip(0).sum()) + int(passes["recorder_ns"].sum())
    shares = {"ends_share": at_ends_ns / total_ns}
    slower_ns = pl.col("time_ns").filter(timed).sum() - timed.sum() * plain_ns
    costs = (
        ordered.filter(disturbed >= 0)
        .group_by(number=disturbed)
        .agg(cost_ns=pl.col("own_ns").clip(0).sum() + pl.max_horizontal(slower_ns, pl.lit(0.0)))
    )["cost_ns"]
    if costs.is_empty():
        return shares
    return shares | {
        "count": costs.len(),
        "cost_ms": float(str(costs.median())) / 1e6,
        "share": float(costs.sum()) / total_ns,
    }


def worst(costs: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the costs of the rank that they slowed most; empty without costs."""
    return max(costs, key=lambda cost: cost.get("share", 0.0) + cost.get("ends_share", -1.0), default={})


# GPU work missing from deep windows.

KERNELS, CALLS, TAIL = "kernels", "calls", "tail"
_SILENT = 0.25  # no GPU call in this last share of a window is suspicious,
_LONGER = 3.0  # if it is this many times the longest gap between GPU calls before,
_OPERATORS = 20  # and at least this many operators began in it
_NAMED = 8
_SENTENCES = {
    KERNELS: (
        "{windows} no work of {gpu}: either its steps ran on the CPU, or CUPTI was refused, "
        "by another profiler that is attached (Nsight, DCGM), by the driver's "
        "NVreg_RestrictProfilingToAdminUsers=1, or by MPS or MIG"
    ),
    CALLS: (
        "{windows} no call to {gpu} near the end, though operators continue: the profiler's "
        "buffers were full; record fewer steps with --window-steps"
    ),
    TAIL: (
        "{windows} perhaps not all work of {gpu}, which was still running ten steps later, or "
        "when the next window began or the job ended: its last work may be missing"
    ),
}


def lost_in(spans: pl.DataFrame) -> list[str]:
    """Return what a window lacks of a process that uses a GPU: `KERNELS`, `CALLS`, or nothing."""
    operators = spans.filter(pl.col("kind") == "cpu_op")
    if operators.is_empty():
        return []
    if spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS)).is_empty():
        return [KERNELS]
    return [CALLS] if _calls_stop(spans, operators["start_ns"]) else []


def _calls_stop(spans: pl.DataFrame, begun: pl.Series) -> bool:
    """Return whether calls to the GPU end long before operators do."""
    calls = spans.filter(pl.col("kind") == "runtime")["start_ns"].sort()
    if calls.is_empty():
        return False
    first, last, end = int(calls[0]), int(calls[-1]), int(begun.max())  # type: ignore[arg-type]
    silent = end - last
    before = calls.diff().max()
    longest = before if isinstance(before, int) else 0
    return (
        silent > _SILENT * (end - min(first, int(begun.min())))  # type: ignore[arg-type]
        and silent > _LONGER * longest
        and int((begun > last).sum()) >= _OPERATORS
    )


def sentences(rank: int, gpu: str, lost: Mapping[str, Sequence[int]]) -> list[str]:
    """Word what is missing in the windows of a rank."""
    return [
        said.format(windows=_have(lost[what], rank), gpu=gpu)
        for what, said in _SENTENCES.items()
        if lost.get(what)
    ]


def _have(windows: Sequence[int], rank: int) -> str:
    named = first_few(sorted(windows), _NAMED)
    if len(windows) == 1:
        return f"deep window {named} of rank {rank} has"
    return f"{len(windows)} deep windows ({named}) of rank {rank} have"
