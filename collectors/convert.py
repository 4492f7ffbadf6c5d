"""From the recorder's files to the tables of a run.

In: the folder a launch wrote to, and two functions that read Kineto traces and flight recorder dumps. Out:
Parquet parts, and what the manifest should say. Doing it again after a crash gives the same parts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from dpro.collectors import calls
from dpro.collectors.cost import window_costs
from dpro.collectors.cut import cut
from dpro.collectors.endings import ending, exception, left_ns
from dpro.collectors.host_facts import device_times, host_counters
from dpro.collectors.inside import records
from dpro.collectors.inside.stepping import SOURCES, Boundary, number_steps
from dpro.collectors.launch import Launch
from dpro.collectors.lost import TAIL, lost_in, sentences
from dpro.collectors.merge import merge_window
from dpro.collectors.meshes import mesh_coordinates
from dpro.collectors.sidecar import GONE, process_facts
from dpro.collectors.stall import NEVER_NS, message_rows, messages_in_window, process_groups, stack_of
from dpro.errors import DproError
from dpro.schema import (
    BUCKETS,
    CLOCK_SAMPLES,
    COLLECTIVES,
    COUNTERS,
    DEPENDENCIES,
    PROCESS_GROUPS,
    SPANS,
    STEPS,
    SYNCS,
    TABLES,
    WORKERS,
    conform,
)
from dpro.store import write_part

SOURCE = "dpro recorder"
MISSED = "deep windows of a rank that learned of them too late"
OCCUPIED = "deep windows not begun, since another profiler ran"
UNFINISHED = "deep windows begun and never ended"
DROPPED = "deep windows dropped, since another profiler or a process was started meanwhile"
RECORD_TABLES = (STEPS, COUNTERS, CLOCK_SAMPLES, WORKERS)
WINDOW_TABLES = (SPANS, COLLECTIVES, SYNCS, DEPENDENCIES, COUNTERS)
_ID_COLUMNS = ("span_id", "launch_span_id", "collective_id", "source_span_id", "target_span_id")
_WINDOW_IDS = 1 << 32  # ids of window w lie in [(w + 1) * this, (w + 2) * this); those of calls below


class Trace(Protocol):
    """What a reader returns; see `dpro.ingest.trace.RankTrace`."""

    frames: dict[str, pl.DataFrame]
    versions: dict[str, str]
    skipped: dict[str, int]
    warnings: list[str]


class TraceReader(Protocol):
    """Reads one window of one rank, as `dpro.ingest.kineto.read_trace`."""

    def __call__(self, path: Path, *, rank: int | None = None, window: int = 0) -> Any:
        """Read a Kineto file."""


class DumpReader(Protocol):
    """Reads one dump of one rank, as `dpro.ingest.flight_recorder.read_dump`."""

    def __call__(self, path: Path, *, rank: int | None = None) -> Any:
        """Read a flight recorder dump."""


class LogReader(Protocol):
    """Reads one log of NCCL's Inspector, as `dpro.ingest.nccl.inspector.read_inspector_log`."""

    def __call__(self, path: Path) -> Sequence[Any]:
        """Read a log: a trace per process."""


class ExecutionReader(Protocol):
    """Adds to a window what an execution trace of the same steps knows."""

    def __call__(self, trace: Any, path: Path, *, rank: int) -> Any:
        """Read an execution trace."""


@dataclass(frozen=True)
class Readers:
    """How to read what PyTorch and NCCL wrote; handed in: importers are none of the recorder's business."""

    trace: TraceReader
    dump: DumpReader
    log: LogReader
    execution: ExecutionReader


@dataclass(frozen=True)
class Process:
    """One recorded process of the job: its folder and what it said about itself."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.facts["rank"])

    @property
    def part(self) -> str:
        """Beginning of the names of its parts; the pid tells a restarted rank from the one before."""
        return f"rank{self.rank:05d}-{self.facts['pid']}"


def processes(launch: Launch) -> list[Process]:
    """The processes that recorded, by rank and then by start."""
    found = []
    for path in launch.raw.glob("*/facts.json"):
        with suppress(ValueError):
            found.append(Process(path.parent, process_facts(path.parent)))
    return sorted(found, key=lambda process: (process.rank, process.facts["started_ns"]))


def unreadable(launch: Launch) -> list[str]:
    """The folders of processes whose facts are damaged, as after a power failure."""
    known = {process.folder for process in processes(launch)}
    return sorted(path.parent.name for path in launch.raw.glob("*/facts.json") if path.parent not in known)


def convert_waiting(run: Path, process: Process, readers: Readers) -> None:
    """Convert what a process has saved so far, while it may still run."""
    dumped_ns = calls.latest_dump_ns(process.folder)
    recorded = records.read_records(process.folder / "records.bin")
    _keep_dumps(process, readers)
    # A window is joined with calls: the dump that has them comes a moment after it.
    _convert_windows(run, process, readers, dumped_ns if dumped_ns >= 0 else None)
    calls.write_calls(run, process.part, process.folder, _first_window_ns(process, recorded))


def _keep_dumps(process: Process, readers: Readers) -> None:
    calls.keep_dumps(process.folder, lambda dump: readers.dump(dump, rank=process.rank).frames)


def _first_window_ns(process: Process, recorded: Sequence[records.Record]) -> int:
    """When the first window began that is open or still to be converted; the end of time for none."""
    over = {r.a for r in recorded if r.kind in (records.WINDOW, records.DROPPED)}
    over -= {int(path.stem.removeprefix("window")) for path in process.folder.glob("**/window*.json")}
    begun = [r.b for r in recorded if r.kind == records.OPENED and r.a not in over]
    return min(begun, default=(1 << 63) - 1)


def _convert_windows(run: Path, process: Process, readers: Readers, until_ns: int | None) -> None:
    """Convert the deep windows that were saved before a moment, a batch of them into one part per table.

    A batch is a folder: one that an interrupted conversion left behind gives the same parts again.
    """
    saved = sorted(process.folder.glob("window*.json"))
    waiting = [path for path in saved if until_ns is None or path.stat().st_mtime_ns < until_ns]
    if waiting:
        batch = process.folder / f"batch-{waiting[0].stem}"
        batch.mkdir()
        for path in waiting:
            beside = [path.with_name(path.name.replace("window", what)) for what in ("trace", "messages")]
            for each in (*beside, path):  # in this order: a window in a batch has all that belongs to it
                if each.exists():
                    each.rename(batch / each.name)
    for batch in sorted(process.folder.glob("batch-*")):
        _convert_batch(run, process, batch, readers)
        shutil.rmtree(batch.rename(batch.with_name(f"done-{batch.name}")))


def _convert_batch(run: Path, process: Process, batch: Path, readers: Readers) -> None:
    paths = sorted(batch.glob("window*.json"))
    recorded = records.read_records(process.folder / "records.bin")
    steps_of = {r.a: (r.b, r.c) for r in recorded if r.kind == records.CUT}
    unseen = {r.a for r in recorded if r.kind == records.CUT and not r.d}
    entries = calls.entries(process.folder)
    frames, notes = [], []
    for path in paths:
        window = int(path.stem.removeprefix("window"))
        try:
            trace = readers.trace(path, rank=process.rank, window=window)
            execution = path.with_name(path.name.replace("window", "trace"))
            if execution.exists():
                trace = readers.execution(trace, execution, rank=process.rank)
        except DproError as error:
            notes.append(
                {"warnings": [f"rank {process.rank}: window {window} is lost: {_cause(error, path)}"]}
            )
            continue
        sent = messages_in_window(
            path.with_name(path.name.replace("window", "messages")), process.rank, window
        )
        frames.append(_window_frames(trace, window, pl.concat([entries, sent]), steps_of.get(window)))
        lost = lost_in(frames[-1][SPANS.name]) if process.facts["gpu_name"] else []
        lost += [TAIL] if window in unseen else []
        notes.append(
            {"warnings": trace.warnings, "skipped": trace.skipped, "versions": trace.versions}
            | {"lost": {what: [window] for what in lost}}
        )
    for table in WINDOW_TABLES if frames else ():
        whole = pl.concat([each[table.name] for each in frames], how="vertical")
        write_part(run, table, f"{process.part}-{batch.name}", whole)
    (process.folder / f"notes-{batch.name}.json").write_text(json.dumps(notes))


def _window_frames(
    trace: Trace, window: int, entries: pl.DataFrame, steps: tuple[int, int] | None
) -> dict[str, pl.DataFrame]:
    """One window's tables, with ids of their own and what is known of its collectives besides.

    Args:
        trace: as it was read.
        window: its number.
        entries: of flight recorders.
        steps: when its steps began and ended, where more than these was recorded.
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
    """What a reader found wrong, without the name of the file, which is gone, and without its advice."""
    return str(error).removeprefix(f"{path}: ").partition(";")[0]


def _renumbered(frame: pl.DataFrame, first: int) -> pl.DataFrame:
    """Ids that are unique within a window made unique within the rank; -1 stays none."""
    columns = [pl.col(name) for name in _ID_COLUMNS if name in frame.columns]
    return frame.with_columns(
        pl.when(column >= 0).then(column + first).otherwise(-1).name.keep() for column in columns
    )


def convert_process(run: Path, process: Process, readers: Readers, status: int | None) -> dict[str, Any]:
    """Convert everything of a process that has ended.

    Args:
        run: the run directory.
        process: the process.
        readers: how to read what PyTorch wrote.
        status: its wait status, None where unknown.

    Returns:
        What is to be said of it in the manifest: `warnings`, `skipped`, `versions`, `windows`.
    """
    recorded = records.read_records(process.folder / "records.bin")
    frames = frames_of(process, recorded, status)
    for table in RECORD_TABLES:
        write_part(run, table, process.part, frames[table.name])
    write_part(run, BUCKETS, process.part, _buckets(process))
    _keep_dumps(process, readers)
    _convert_windows(run, process, readers, None)
    _convert_calls(run, process, frames)
    notes = [
        note for path in sorted(process.folder.glob("notes-*.json")) for note in json.loads(path.read_text())
    ]
    return {
        "warnings": [warning for note in notes for warning in note.get("warnings", [])]
        + _lost(process, notes),
        "skipped": [
            calls.lost_calls(process.folder),
            _missed(recorded),
            *(note.get("skipped", {}) for note in notes),
        ],
        "windows": window_costs(frames[STEPS.name]),
        "versions": {k: v for note in notes for k, v in note.get("versions", {}).items()}
        | process.facts["versions"],
    }


def _lost(process: Process, notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the deep windows of a process lack of its GPU's work."""
    found = [(what, window) for note in notes for what, of in note.get("lost", {}).items() for window in of]
    lost = {what: [window for each, window in found if each == what] for what, _ in found}
    return sentences(process.rank, process.facts["gpu_name"] or "its GPU", lost)


def _convert_calls(run: Path, process: Process, frames: Mapping[str, pl.DataFrame]) -> None:
    """The calls that no window saw, and messages; what a process that failed stood still in is unfinished."""
    worker, folder = frames[WORKERS.name].row(0, named=True), process.folder
    well = worker["exit_code"] == 0
    stepped_ns = frames[STEPS.name].select((pl.col("start_ns") + pl.col("duration_ns")).max()).item() or -1
    last_ns = calls.entries(folder)["enqueued_ns"].max()
    stalls = None if well else calls.latest_stall(folder, stepped_ns)
    calls.write_calls(run, process.part, folder, None, stalls)
    stood_ns = NEVER_NS if well else max(stepped_ns, last_ns if isinstance(last_ns, int) else -1)
    messages = message_rows(folder, process.rank, stood_ns)
    write_part(run, COLLECTIVES, f"{process.part}-messages", messages)
    write_part(run, PROCESS_GROUPS, process.part, process_groups(folder, process.rank))


def frames_of(
    process: Process, recorded: Sequence[records.Record], status: int | None
) -> dict[str, pl.DataFrame]:
    """What the records of a process tell, or the latest of them: the tables `RECORD_TABLES`.

    Args:
        process: the process.
        recorded: its records, in order, with all that announce what ends steps.
        status: its wait status, None where unknown.
    """
    frames = {
        STEPS.name: _steps(process.rank, recorded),
        COUNTERS.name: _counters(process, recorded),
        CLOCK_SAMPLES.name: _clock_samples(process.rank, recorded),
        WORKERS.name: _worker(process, recorded, status),
    }
    return {table.name: conform(table, frames[table.name]) for table in RECORD_TABLES}


def _missed(recorded: Sequence[records.Record]) -> dict[str, int]:
    """Deep windows that this rank did not take, or did not keep."""
    missed = [r.c for r in recorded if r.kind == records.MISSED]
    opened, kept, dropped = (
        {r.a for r in recorded if r.kind == kind}
        for kind in (records.OPENED, records.WINDOW, records.DROPPED)
    )
    counts = {MISSED: missed.count(1), OCCUPIED: missed.count(0), DROPPED: len(dropped)}
    counts[UNFINISHED] = len(opened - kept - dropped)
    return {reason: count for reason, count in counts.items() if count}


def move_process(run: Path, process: Process, to: Path) -> None:
    """Move the parts that a process has so far to another run: its steps happened again later."""
    for name in TABLES if to != run else ():
        for part in (run / name).glob(f"{process.part}-*.parquet"):
            (to / name).mkdir(parents=True, exist_ok=True)
            part.rename(to / name / part.name)


def _boundaries(recorded: Sequence[records.Record]) -> dict[int, tuple[int, Boundary]]:
    """What ended each step, and when, by number of the step."""
    updates = [(r.a, r.b, Boundary(r.c, r.d)) for r in recorded if r.kind == records.UPDATE]
    anchors = [(r.a, r.b, r.c) for r in recorded if r.kind == records.ANCHOR]
    return number_steps(updates, anchors)


def _steps(rank: int, recorded: Sequence[records.Record]) -> pl.DataFrame:
    """Steps from boundary to boundary; the first step has no beginning that anything announces."""
    boundaries = _boundaries(recorded)
    sources = {r.a: SOURCES[r.d] for r in recorded if r.kind == records.ANCHOR}
    timed = device_times(recorded, {step: boundary for step, (_, boundary) in boundaries.items()})
    windows = {r.a: (r.b, r.c) for r in recorded if r.kind == records.WINDOW}
    kept_open = _kept_open(recorded)
    rows = []
    for step, (source, boundary) in boundaries.items():
        if step - 1 not in boundaries:
            continue
        start, end = boundaries[step - 1][1].resume_ns, boundary.end_ns
        beside = next((index for index, opened, closed in kept_open if opened < end and start < closed), -1)
        first, last = windows.get(beside, (end, start))
        window, beside = (beside, -1) if first <= start and end <= last else (-1, beside)
        told, gpu_ns = sources.get(source, SOURCES[0]), timed.get(step, -1)
        rows.append((rank, step, window, beside, start, end - start, told, gpu_ns))
    columns = ["rank", "step", "window", "beside", "start_ns", "duration_ns", "source", "gpu_step_ns"]
    return pl.DataFrame(rows, schema={name: STEPS.dtypes[name] for name in columns}, orient="row")


def _kept_open(recorded: Sequence[records.Record]) -> list[tuple[int, int, int]]:
    """Each window, and from when to when Kineto ran for it: until now where it has not been closed."""
    closed = {r.a: max(r.c, r.d) for r in recorded if r.kind == records.WINDOW}
    closed |= {r.a: r.b for r in recorded if r.kind == records.DROPPED}
    opened = {r.a: r.b for r in recorded if r.kind == records.WINDOW}
    opened |= {r.a: r.b for r in recorded if r.kind == records.OPENED}
    return [(window, opened[window], closed.get(window, NEVER_NS)) for window in sorted(opened)]


def _counters(process: Process, recorded: Sequence[records.Record]) -> pl.DataFrame:
    ends = {step: boundary for step, (_, boundary) in _boundaries(recorded).items()}
    rank = pl.lit(process.rank, COUNTERS.dtypes["rank"])
    return host_counters(recorded, ends).with_columns(rank=rank, host=pl.lit(process.facts["host"]))


def _clock_samples(rank: int, recorded: Sequence[records.Record]) -> pl.DataFrame:
    own = [(rank, r.a, r.b, -1, 0, 0) for r in recorded if r.kind == records.CLOCK]
    compared = [(rank, r.a, -1, r.b, r.c, r.d) for r in recorded if r.kind == records.PEER]
    return pl.DataFrame(own + compared, schema=CLOCK_SAMPLES.dtypes, orient="row")


def _buckets(process: Process) -> pl.DataFrame:
    path = process.folder / "buckets.json"
    modules = json.loads(path.read_text()) if path.is_file() else []
    rows = [
        {"rank": process.rank, "module": number, "bucket": bucket, "source": module["source"], **each}
        for number, module in enumerate(modules)
        for bucket, each in enumerate(module["buckets"])
    ]
    return pl.DataFrame(rows, schema={name: BUCKETS.dtypes[name] for name in BUCKETS.columns})


def _worker(process: Process, recorded: Sequence[records.Record], status: int | None) -> pl.DataFrame:
    row = worker_row(process, recorded, status)
    return pl.DataFrame([row], schema={name: WORKERS.dtypes[name] for name in row})


def worker_row(process: Process, recorded: Sequence[records.Record], status: int | None) -> dict[str, Any]:
    """The row of `workers` of a process; arguments as those of `frames_of`."""
    facts = process.facts
    ended = ending(process.folder, recorded, status)
    # UPDATE and WINDOW records end with a time, CLOCK and ENDING records begin with one.
    seen = {records.UPDATE: "c", records.WINDOW: "c", records.CLOCK: "a", records.ENDING: "a"}
    times = [int(getattr(r, seen[r.kind])) for r in recorded if r.kind in seen]
    row = {
        name: facts[name]
        for name in ("rank", "local_rank", "world_size", "host", "pid", "gpu_uuid", "gpu_name")
    }
    row |= {name: facts.get(name, "") for name in ("clock", "gpu_pci")}
    gone = process.folder / GONE
    text = gone.read_text() if gone.is_file() else ""
    times += [int(text)] if text.isdigit() else []  # empty where the disk was full
    row |= {"started_ns": facts["started_ns"], "ended_ns": max(times, default=facts["started_ns"])}
    row |= mesh_coordinates(process.folder / "mesh.json")
    updated_ns = max((r.c for r in recorded if r.kind == records.UPDATE), default=-1)
    row |= {"stack": stack_of(process.folder, updated_ns)} | exception(process.folder)
    row |= {"left_ns": left_ns(process.folder)}
    return row | {"exit_code": ended.code, "exit_signal": ended.signal, "source": SOURCE}
