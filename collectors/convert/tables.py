"""Rows of tables from the records and files of a process, except its windows, calls and requests.

Reads the records of a process, its facts and the files of its probes; returns frames of the tables
`RECORD_TABLES` and of others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.collectors.convert.calls import NEVER_NS, stack_of
from dpro.collectors.convert.recorded import RecordedProcess, latest_lines, saved
from dpro.collectors.inside import records
from dpro.collectors.inside.files import CHECKPOINTS as LINES
from dpro.collectors.inside.files import (
    FORWARD,
    LOSS,
    MEMORY,
    PARTS,
    PIPELINE,
    STARTED,
    TENSOR_AXES,
)
from dpro.collectors.inside.files import OPERATIONS as KINDS
from dpro.collectors.inside.stepping import SOURCES, Boundary, number_steps
from dpro.collectors.launch.endings import ending, exception, left_ns
from dpro.collectors.launch.recording import Launch
from dpro.collectors.sidecar import GONE
from dpro.collectors.telemetry.samples import TelemetrySample, read_samples, sample_files
from dpro.members import members_text
from dpro.schema import (
    BUCKETS,
    CHECKPOINTS,
    CLOCK_SAMPLES,
    COUNTERS,
    LOSSES,
    MODEL_CALLS,
    OPERATIONS,
    OUT_OF_MEMORY,
    PASSES,
    RECORDER,
    START_PARTS,
    STARTS,
    STEPS,
    WORKERS,
    conform,
)
from dpro.store import write_part
from dpro.table import Table
from dpro.words import from_json

RECORD_TABLES = (STEPS, PASSES, COUNTERS, CLOCK_SAMPLES, WORKERS)


def frames_of(
    process: RecordedProcess, recorded: Sequence[records.Record], status: int | None
) -> dict[str, pl.DataFrame]:
    """Convert the records of a process, or its latest ones, to the tables `RECORD_TABLES`.

    Args:
        recorded: its records in order, including all that declare what ends steps.
        status: its wait status; None where unknown.
    """
    ends = {step: boundary for step, (_, boundary) in _boundaries(recorded).items()}
    rank = pl.lit(process.rank, COUNTERS.dtypes["rank"])
    taken = [(process.rank, r.a, r.b, -1, 0, 0) for r in recorded if r.kind == records.CLOCK]
    compared = [(process.rank, r.a, -1, r.b, r.c, r.d) for r in recorded if r.kind == records.PEER]
    clock_samples = pl.DataFrame(taken + compared, schema=CLOCK_SAMPLES.dtypes, orient="row")
    row = worker_row(process, recorded, status)
    counters = host_counters(recorded, ends)
    steps = _steps(process.rank, recorded)
    frames = {
        STEPS.name: steps,
        PASSES.name: passes(recorded, steps),
        COUNTERS.name: counters.with_columns(rank=rank, host=pl.lit(process.facts["host"])),
        CLOCK_SAMPLES.name: clock_samples,
        WORKERS.name: pl.DataFrame([row], schema={name: WORKERS.dtypes[name] for name in row}),
    }
    return {table.name: conform(table, frames[table.name]) for table in RECORD_TABLES}


def _boundaries(recorded: Sequence[records.Record]) -> dict[int, tuple[int, Boundary]]:
    """Return time and boundary of the update that ended each step, by step number."""
    updates = [(r.a, r.b, Boundary(r.c, r.d)) for r in recorded if r.kind == records.UPDATE]
    anchors = [(r.a, r.b, r.c) for r in recorded if r.kind == records.ANCHOR]
    return number_steps(updates, anchors)


def _steps(rank: int, recorded: Sequence[records.Record]) -> pl.DataFrame:
    """Return steps from boundary to boundary; the first boundary only begins a step."""
    boundaries = _boundaries(recorded)
    sources = {r.a: SOURCES[r.d] for r in recorded if r.kind == records.ANCHOR}
    timed = device_times(recorded, {step: boundary for step, (_, boundary) in boundaries.items()})
    windows = {r.a: (r.b, r.c) for r in recorded if r.kind == records.WINDOW}
    # Kineto still runs in a window that has not been closed.
    closed = {r.a: max(r.c, r.d) for r in recorded if r.kind == records.WINDOW}
    closed |= {r.a: r.b for r in recorded if r.kind == records.DROPPED}
    opened = {r.a: r.b for r in recorded if r.kind == records.WINDOW}
    opened |= {r.a: r.b for r in recorded if r.kind == records.OPENED}
    kept_open = [(window, opened[window], closed.get(window, NEVER_NS)) for window in sorted(opened)]
    rows = []
    for step, start, end in _extents(boundaries):
        if end < start:  # one of the two times is damaged
            continue
        source, _ = boundaries[step]
        beside = next((index for index, opened, closed in kept_open if opened < end and start < closed), -1)
        first, last = windows.get(beside, (end, start))
        window, beside = (beside, -1) if first <= start and end <= last else (-1, beside)
        counted_by, gpu_ns = sources.get(source, SOURCES[0]), timed.get(step, -1)
        rows.append((rank, step, window, beside, start, end - start, counted_by, gpu_ns))
    columns = ["rank", "step", "window", "beside", "start_ns", "duration_ns", "source", "gpu_step_ns"]
    return pl.DataFrame(rows, schema={name: STEPS.dtypes[name] for name in columns}, orient="row")


def passes(recorded: Sequence[records.Record], steps: pl.DataFrame) -> pl.DataFrame:
    """Return the backward passes of steps at whose start clocks were read, as rows of `passes`.

    Args:
        steps: rows of `steps`, of one rank.
    """
    came_ns = {record.b: record.c for record in recorded if record.kind == records.PASS_ON_GPU}
    rows = []
    for start, end, recorder_ns, *_ in (r for r in recorded if r.kind == records.PASS and r.a <= r.b):
        on_gpu = came_ns.get(start, -1), came_ns.get(end, -1)
        on_gpu = (on_gpu[0], on_gpu[1] - on_gpu[0]) if 0 <= on_gpu[0] <= on_gpu[1] else (-1, -1)
        rows.append((start, end - start, *on_gpu, recorder_ns))
    columns = ["start_ns", "duration_ns", "gpu_start_ns", "gpu_duration_ns", "recorder_ns"]
    begun = pl.DataFrame(rows, {name: PASSES.dtypes[name] for name in columns}, orient="row").sort("start_ns")
    ended_ns = pl.col("start_ns") + pl.col("duration_ns")
    of_steps = steps.select("rank", "step", begun_ns="start_ns", ended_ns=ended_ns).sort("begun_ns")
    within = begun.join_asof(of_steps, left_on="start_ns", right_on="begun_ns")
    return within.filter(pl.col("start_ns") < pl.col("ended_ns")).drop("begun_ns", "ended_ns")


def steps_without_time(recorded: Sequence[records.Record]) -> int:
    """Count the steps that end before they begin; `steps` leaves them out."""
    return sum(end < start for _, start, end in _extents(_boundaries(recorded)))


def _extents(boundaries: Mapping[int, tuple[int, Boundary]]) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each step with both boundaries."""
    for step, (_, boundary) in boundaries.items():
        if step - 1 in boundaries:
            yield step, boundaries[step - 1][1].resume_ns, boundary.end_ns


def buckets(process: RecordedProcess) -> pl.DataFrame:
    """Return the gradient buckets that a process recorded, as rows of `buckets`."""
    modules = saved(process.folder / "buckets.json", [])
    rows = [
        {"rank": process.rank, "module": number, "bucket": bucket, "source": module["source"], **facts}
        for number, module in enumerate(modules)
        for bucket, facts in enumerate(module["buckets"])
    ]
    return pl.DataFrame(rows, schema=BUCKETS.dtypes)


def model_calls(process: RecordedProcess) -> pl.DataFrame:
    """Return the model calls that a process recorded, as rows of `model_calls`."""
    met = saved(process.folder / "model.json", {"models": [], "calls": []})
    rows = [
        {"rank": process.rank, "source": RECORDER} | model | call
        for call in met["calls"]
        if (model := met["models"][call["model"]]) is not None
    ]
    return pl.DataFrame(rows, schema=MODEL_CALLS.dtypes)


def probe_rows(process: RecordedProcess, table: Table) -> pl.DataFrame:
    """Return the measurements of a probe of `dpro try` in a process, as rows of its table.

    Args:
        table: `codecs` or `sensitivities`.
    """
    whole = [{"rank": process.rank, **row} for row in saved(process.folder / f"{table.name}.json", [])]
    return pl.DataFrame(whole, schema=table.dtypes).sort(table.sort_by)


def worker_row(
    process: RecordedProcess, recorded: Sequence[records.Record], status: int | None
) -> dict[str, Any]:
    """Return the row of `workers` of a process; for the arguments see `frames_of`."""
    facts = process.facts
    ended = ending(process.folder, recorded, status)
    # Field with the latest time of each kind of record.
    seen = {records.UPDATE: "c", records.WINDOW: "c", records.CLOCK: "a", records.ENDING: "a"}
    times = [int(getattr(r, seen[r.kind])) for r in recorded if r.kind in seen]
    row = {
        name: facts[name]
        for name in ("rank", "local_rank", "world_size", "host", "pid", "gpu_uuid", "gpu_name")
    }
    row |= {name: facts.get(name, "") for name in ("clock", "gpu_pci", "role")}
    gone = process.folder / GONE
    text = gone.read_text() if gone.is_file() else ""
    times += [int(text)] if text.isdigit() else []  # empty where the disk was full
    row |= {"started_ns": facts["started_ns"], "ended_ns": max(times, default=facts["started_ns"])}
    row |= mesh_coordinates(process.folder / "mesh.json")
    updated_ns = max((r.c for r in recorded if r.kind == records.UPDATE), default=-1)
    row |= {"stack": stack_of(process.folder, updated_ns)} | exception(process.folder, recorded)
    row |= {"left_ns": left_ns(process.folder)}
    return row | {"exit_code": ended.code, "exit_signal": ended.signal, "source": RECORDER}


# Activity of the host in each step, from the recorder's running totals.

_TOTALS = {  # kind of record -> counters of its values after the time
    records.CPU: ("step_cpu_ns", "step_training_thread_cpu_ns", "step_run_queue_ns"),
    records.WORK: ("step_backward_calls", "step_gc_ns", "step_data_wait_ns"),
    records.INPUT: ("step_input_elements",),
    records.CHILDREN: ("step_children_cpu_ns", "step_written_bytes"),
    records.ASIDE: ("step_checkpoint_ns", "step_no_grad_ns", "step_compile_ns"),
}
_SAMPLED = (records.CPU, records.CHILDREN)  # read only at some step ends, where steps are short
_SCHEMA = {name: COUNTERS.dtypes[name] for name in ("device", "counter", "time_ns", "value")}


def host_counters(recorded: Sequence[records.Record], boundaries: Mapping[int, Boundary]) -> pl.DataFrame:
    """Return the counters that a process recorded of its host.

    Returns:
        `[device, counter, time_ns, value]`.
    """
    rows = [row for record in recorded for row in _interval(record)]
    frames = [pl.DataFrame(rows, schema=_SCHEMA, orient="row")]
    for kind, counters in _TOTALS.items():
        totals = np.array([tuple(record[:4]) for record in recorded if record.kind == kind], np.int64)
        if len(totals) and boundaries:
            frames.append(_per_step(totals, boundaries, counters, kind in _SAMPLED))
    return pl.concat(frames)


def device_times(recorded: Sequence[records.Record], boundaries: Mapping[int, Boundary]) -> dict[int, int]:
    """Return the time of steps on the device, in ns, by step number; untimed steps are missing.

    The process numbers steps before it knows for sure what ends them. Its records hold the start and end of a
    step, and count where both are at boundaries. A record over several steps is divided among them in
    proportion to their time on the host; a host that runs ahead of its device has each step timed separately.
    """
    timed = np.array([tuple(record[:3]) for record in recorded if record.kind == records.GPU_STEP], np.int64)
    if not len(timed) or not boundaries:
        return {}
    numbers = np.array(list(boundaries), np.int64)
    ends, resumes = np.array([tuple(boundary) for boundary in boundaries.values()], np.int64).T
    begun, ended = (np.searchsorted(resumes, timed[:, column]) for column in (0, 1))
    at_ends = (ended > begun) & (ended < len(numbers))
    begun, ended, timed = begun[at_ends], ended[at_ends], timed[at_ends]
    follows = (
        (numbers[ended] - numbers[begun] == ended - begun)
        & (timed[:, 0] >= ends[begun])
        & (timed[:, 1] >= ends[ended])
    )
    within, steps, share = _shares(begun[follows], (ended - begun)[follows], ends, resumes)
    times = np.rint(timed[follows, 2][within] * share).astype(np.int64)
    return dict(zip(numbers[steps + 1].tolist(), times.tolist(), strict=True))


def _shares(
    begun: np.ndarray, spans: np.ndarray, ends: np.ndarray, resumes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide measurements over several steps among the steps, in proportion to their time on the host.

    Args:
        begun: [N] boundary at which each span of steps begins.
        spans: [N] number of steps in each span.
        ends, resumes: end of the step before each boundary, and start of the step after it, ns.

    Returns:
        For each step: index of its span, boundary at which it begins, and share, 0 to 1.
    """
    within = np.repeat(np.arange(len(spans)), spans)
    steps = begun[within] + np.arange(len(within)) - (np.cumsum(spans) - spans)[within]
    took = np.maximum(ends[steps + 1] - resumes[steps], 0)
    whole = np.bincount(within, took, len(spans))[within]
    return within, steps, np.where(whole > 0, took / np.maximum(whole, 1), 1 / spans[within])


def _interval(record: records.Record) -> list[tuple[str, str, int, float]]:
    """Return `device`, `counter`, `time_ns`, `value` of a record about one interval; else none."""
    start, duration = record.a, float(record.b)
    if record.kind == records.LOADED:
        worker = "" if record.c < 0 else f"DataLoader worker {record.c}"
        return [(worker, "data_wait_ns", start, duration)]
    if record.kind == records.COLLECTED:
        return [("", "gc_pause_ns", start, duration)]
    if record.kind == records.BEGUN:
        persist = "persistent " if record.d else ""
        return [(f"{record.c} {persist}workers", "loader_start_ns", start, duration)]
    if record.kind == records.SAVED:
        size = [("", "checkpoint_save_bytes", start, float(record.c))] if record.c >= 0 else []
        return [("", "checkpoint_save_ns", start, duration), *size]
    return []


def _per_step(
    totals: np.ndarray, boundaries: Mapping[int, Boundary], counters: Sequence[str], is_sampled: bool
) -> pl.DataFrame:
    """Return the differences of totals from one boundary to the next.

    Args:
        totals: [N, 4] int64: time, then running totals; -1 where unknown.
        is_sampled: divide the difference between two samples among the steps in between, in proportion to
            their time; else only steps with samples at both ends count.
    """
    numbers = np.array(list(boundaries), np.int64)
    ends, resumes = np.array([tuple(boundary) for boundary in boundaries.values()], np.int64).T
    times = totals[:, 0]
    # A boundary has one sample, or two where the recorder's own work was long: the first ends a step, the
    # last begins the next.
    first, last = np.searchsorted(times, ends), np.searchsorted(times, resumes, side="right") - 1
    at = np.flatnonzero(first <= last)
    follows = np.diff(numbers[at]) == np.diff(at)
    if not is_sampled:
        follows &= np.diff(at) == 1
    begun, spans = at[:-1][follows], np.diff(at)[follows]
    within, steps, share = _shares(begun, spans, ends, resumes)
    begin, end = totals[last[begun]][within], totals[first[begun + spans]][within]
    frames = []
    for column, counter in enumerate(counters, start=1):
        counted = (begin[:, column] >= 0) & (end[:, column] >= 0)
        value = ((end[:, column] - begin[:, column]) * share)[counted]
        columns = {
            "device": pl.repeat("", len(value), eager=True),
            "counter": pl.repeat(counter, len(value), eager=True),
            "time_ns": resumes[steps][counted],
            "value": value,
        }
        frames.append(pl.DataFrame(columns, schema=_SCHEMA))
    return pl.concat(frames)


# Losses and norms of gradients.

FLOAT, INTEGER = struct.Struct("<d"), struct.Struct("<q")


def number_of(record: records.Record) -> float:
    """Decode the value of a record of a loss or a gradient norm."""
    return float(FLOAT.unpack(INTEGER.pack(record.b))[0])


def losses(process: RecordedProcess, recorded: Sequence[records.Record]) -> pl.DataFrame:
    """Return the losses and gradient norms of a process, as rows of `losses`."""
    noted = [r for r in recorded if r.kind == records.LOSS and 0 <= r.c < len(records.LOSS_KINDS)]
    boundaries = _boundaries(recorded)
    numbers = np.array([*boundaries, max(boundaries, default=-2) + 1], np.int64)  # and one more
    ends = np.array([boundary.end_ns for _, boundary in boundaries.values()], np.int64)
    times = np.array([r.a for r in noted], np.int64)
    columns = {
        "step": numbers[np.searchsorted(ends, times)],
        "kind": [records.LOSS_KINDS[r.c] for r in noted],
        "time_ns": times,
        "value": [number_of(r) for r in noted],
        "scaled": [bool(r.d) for r in noted],
    }
    return conform(LOSSES, pl.DataFrame(columns).with_columns(rank=pl.lit(process.rank)))


# Coordinates of a rank in the run, from the axis names of device meshes.

AXES: Mapping[str, Sequence[str]] = {
    "dp": ("dp", "ddp", "fsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard"),
    "tp": TENSOR_AXES,
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "cp": ("cp", "context", "context_parallel", "sp", "seq", "sequence", "sequence_parallel", "ulysses"),
    "ep": ("ep", "expert", "expert_parallel"),
}  # fmt: skip


def mesh_coordinates(path: Path) -> dict[str, int]:
    """Return the coordinates of a process on axes whose names imply a kind of parallelism, and their sizes.

    Several axes of one kind in one mesh (replicate and shard of hybrid sharding) form one axis, with the
    first name as the slowest. Of several meshes, the one with the most axes takes precedence.

    Args:
        path: `mesh.json` of the recorder; may be missing.

    Returns:
        Coordinate by axis, and size by `dp_size`, ….
    """
    meshes: list[dict[str, Any]] = saved(path, [])
    coordinates: dict[str, int] = {}
    for mesh in sorted(meshes, key=lambda mesh: -len(mesh["names"])):
        place: dict[str, int] = {}
        for axis_name, size, coordinate in zip(mesh["names"], mesh["sizes"], mesh["coordinate"]):
            axis = next((axis for axis, names in AXES.items() if axis_name.lower() in names), None)
            if axis is not None:
                place[axis] = place.get(axis, 0) * size + coordinate
                place[f"{axis}_size"] = place.get(f"{axis}_size", 1) * size
        coordinates = place | coordinates
    return coordinates


# Start-up, checkpoints and failed allocations of a process, from the files that it wrote.


def starts(process: RecordedProcess, recorded: Sequence[records.Record], launched_ns: int) -> pl.DataFrame:
    """Return the timestamps of a process up to its first step, as a row of `starts`; none where not recorded.

    Args:
        launched_ns: when its launcher started the command; -1 where unknown.
    """
    moments: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        moments = from_json((process.folder / STARTED).read_text())
    if not isinstance(moments, dict) or not moments:
        return STARTS.empty()
    attempt = str(process.facts.get("attempt", ""))
    row = {name: value for name, value in moments.items() if name in STARTS.columns and type(value) is int}
    row |= {"rank": process.rank, "launched_ns": launched_ns}
    row |= {"restart": int(attempt) if attempt.isdigit() else -1}
    row |= {"first_update_ns": min((r.c for r in recorded if r.kind == records.UPDATE), default=-1)}
    return pl.DataFrame([row], schema={name: STARTS.dtypes[name] for name in row})


def start_parts(process: RecordedProcess) -> pl.DataFrame:
    """Return the parts of a process's start-up, as rows of `start_parts`."""
    lines = latest_lines(process.folder / PARTS, lambda line: (int(line["start_ns"]), str(line["name"])))
    texts = [{**line, "group_ranks": members_text(line.pop("ranks", ()))} for line in lines]
    return _rows_of_lines(START_PARTS, process.rank, texts)


def checkpoints(process: RecordedProcess) -> pl.DataFrame:
    """Return the checkpoints that a process saved and loaded, as rows of `checkpoints`."""
    lines = latest_lines(process.folder / LINES, lambda line: (int(line["start_ns"]), str(line["path"])))
    return _rows_of_lines(CHECKPOINTS, process.rank, lines)


def out_of_memory(process: RecordedProcess) -> pl.DataFrame:
    """Return the failed allocations of a process, as rows of `out_of_memory`."""
    lines = latest_lines(process.folder / MEMORY, lambda line: (int(line["time_ns"]), len(line["kinds"])))
    return _rows_of_lines(OUT_OF_MEMORY, process.rank, lines)


def _rows_of_lines(table: Table, rank: int, lines: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return objects with some columns of a table as its rows; missing columns get their defaults."""
    rows = [{"rank": rank, **line} for line in lines]
    return pl.DataFrame(rows, schema=table.dtypes).with_columns(
        pl.col(name).fill_null(column.default)
        for name, column in table.columns.items()
        if column.default is not None
    )


# Each forward and backward of a micro-batch; the time of the loss is added to its forward.

MICRO_BATCH_BITS = 32


def operations(
    process: RecordedProcess, recorded: Sequence[records.Record], steps: pl.DataFrame
) -> pl.DataFrame:
    """Return the operations of a process, as rows of `operations`."""
    facts: dict[str, Any] = saved(process.folder / PIPELINE, {})
    rows = [
        (r.a, r.b, r.c >> MICRO_BATCH_BITS, r.c & ((1 << MICRO_BATCH_BITS) - 1), KINDS[r.d])
        for r in recorded
        if r.kind == records.OPERATION and 0 <= r.d < len(KINDS)
    ]
    if not facts or not rows:
        return OPERATIONS.empty()
    chunks = {int(place): chunk for place, chunk in facts["chunks"].items()}
    frame = pl.DataFrame(rows, _RECORDED, orient="row").sort("start_ns")
    begun = steps.select("step", "duration_ns", begin="start_ns").sort("begin")
    joined = frame.join_asof(begun, left_on="start_ns", right_on="begin", strategy="backward")
    within = pl.col("start_ns") < pl.col("begin") + pl.col("duration_ns")
    in_steps = joined.with_columns(step=pl.when(within).then("step").otherwise(-1).fill_null(-1))
    return _with_losses(in_steps).select(
        "step",
        "place",
        "micro_batch",
        "kind",
        "start_ns",
        rank=pl.lit(process.rank, pl.Int32),
        stage=pl.lit(int(facts["stage"]), pl.Int64),
        chunk=pl.col("place").replace_strict(chunks, default=-1, return_dtype=pl.Int64),
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
        source=pl.lit(str(facts["source"])),
    )


_RECORDED = {
    "start_ns": pl.Int64, "end_ns": pl.Int64, "place": pl.Int64, "micro_batch": pl.Int64, "kind": pl.String,
}  # fmt: skip


def _with_losses(rows: pl.DataFrame) -> pl.DataFrame:
    """Extend forwards to the end of their loss, and drop the losses; those outside steps extend nothing."""
    key = ["step", "place", "micro_batch"]
    losses = rows.filter((pl.col("kind") == LOSS) & (pl.col("step") >= 0))
    until = losses.group_by(key).agg(kind=pl.lit(FORWARD), loss_ns=pl.col("end_ns").max())
    return (
        rows.filter(pl.col("kind") != LOSS)
        .join(until, on=[*key, "kind"], how="left", maintain_order="left")
        .with_columns(end_ns=pl.max_horizontal("end_ns", "loss_ns"))
    )


# Samples of the node.


def convert_samples(launch: Launch, *, whole: bool = False) -> None:
    """Convert the samples of a launch, one part per file; repeated after a crash, with the same parts.

    Args:
        whole: convert only finished files, since the job still runs.
    """
    for path in sample_files(launch.raw, whole=whole):
        host, samples = read_samples(path)
        part = f"{path.name.partition('.')[0]}-{launch.name}"
        write_part(launch.run, COUNTERS, part, counters(host, samples))
        path.unlink()


def counters(host: str, samples: Iterable[TelemetrySample]) -> pl.DataFrame:
    """Return samples as rows of `counters`."""
    rows: dict[str, list[object]] = {"rank": [], "device": [], "counter": [], "time_ns": [], "value": []}
    for sample in samples:
        for counter, value in sample.values.items():
            rows["rank"].append(sample.rank)
            rows["device"].append(sample.device)
            rows["counter"].append(counter)
            rows["time_ns"].append(sample.time_ns)
            rows["value"].append(float(value))
    schema = {name: COUNTERS.dtypes[name] for name in rows}
    return pl.DataFrame(rows, schema=schema).with_columns(host=pl.lit(host))
