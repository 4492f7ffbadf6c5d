"""All records of one process converted to the tables of a run.

Reads the folder of a process, with readers for Kineto traces and flight recorder dumps; writes Parquet parts
and returns entries for the manifest. Repeating the conversion after a crash gives the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.convert import calls
from dpro.collectors.convert.calls import NEVER_NS, as_delivered, message_rows, process_groups
from dpro.collectors.convert.pretended import calls_outside_windows, is_pretended
from dpro.collectors.convert.recorded import Readers, RecordedProcess
from dpro.collectors.convert.served import iterations, requests
from dpro.collectors.convert.tables import (
    RECORD_TABLES,
    buckets,
    checkpoints,
    frames_of,
    losses,
    model_calls,
    operations,
    out_of_memory,
    probe_rows,
    start_parts,
    starts,
    steps_without_time,
)
from dpro.collectors.convert.windows import convert_windows, first_window_ns, recording_costs, sentences
from dpro.collectors.inside import records
from dpro.schema import (
    BUCKETS,
    CHECKPOINTS,
    CODECS,
    COLLECTIVES,
    ITERATIONS,
    LOSSES,
    MODEL_CALLS,
    OPERATIONS,
    OUT_OF_MEMORY,
    PASSES,
    PROCESS_GROUPS,
    REQUESTS,
    SENSITIVITIES,
    START_PARTS,
    STARTS,
    STEPS,
    TABLES,
    WORKERS,
)
from dpro.store import part_files, write_part
from dpro.words import from_json

WITHOUT_TIME = "steps that end before they begin: their times are damaged"
MISSED = "deep windows that a rank was notified of too late"
OCCUPIED = "deep windows not started, since another profiler ran"
STUCK = "deep windows not started, since CUPTI was not detached in time after an earlier one"
UNPREPARED = "deep windows not started, since the main thread ran no Python to prepare them"
UNFINISHED = "deep windows begun and never ended"
ON_REQUEST = "dpro attach RUN --steps 3"
DROPPED = "deep windows dropped, since another profiler or a process was started meanwhile"


def convert_so_far(run: Path, process: RecordedProcess, readers: Readers) -> None:
    """Convert what a process has saved so far; the process may still run."""
    dumped_ns = calls.latest_dump_ns(process.folder)
    recorded = records.read_records(process.folder / "records.bin")
    _keep_dumps(process, readers)
    # A window is joined with calls, and the dump that contains them is written a moment after the window.
    convert_windows(run, process, readers, dumped_ns if dumped_ns >= 0 else None)
    calls.write_calls(run, process.part, process.folder, first_window_ns(process, recorded))


def _keep_dumps(process: RecordedProcess, readers: Readers) -> None:
    calls.keep_dumps(process.folder, lambda dump: readers.dump(dump, rank=process.rank).frames)


def convert_process(
    run: Path, process: RecordedProcess, readers: Readers, status: int | None, launched_ns: int = -1
) -> dict[str, Any]:
    """Convert all records of a process that has ended.

    Args:
        status: its wait status; None where unknown.
        launched_ns: when its launcher started the command; -1 where unknown.

    Returns:
        Entries for the manifest: `warnings`, `skipped`, `versions`, `windows`.
    """
    recorded = records.read_records(process.folder / "records.bin")
    frames = frames_of(process, recorded, status)
    for table in RECORD_TABLES:
        write_part(run, table, process.part, frames[table.name])
    write_part(run, OPERATIONS, process.part, operations(process, recorded, frames[STEPS.name]))
    write_part(run, ITERATIONS, process.part, iterations(process, recorded))
    write_part(run, REQUESTS, process.part, requests(process))
    write_part(run, BUCKETS, process.part, buckets(process))
    write_part(run, MODEL_CALLS, process.part, model_calls(process))
    write_part(run, STARTS, process.part, starts(process, recorded, launched_ns))
    write_part(run, START_PARTS, process.part, start_parts(process))
    write_part(run, CHECKPOINTS, process.part, checkpoints(process))
    rare = [(table, probe_rows(process, table)) for table in (CODECS, SENSITIVITIES)]
    rare += [(LOSSES, losses(process, recorded)), (OUT_OF_MEMORY, out_of_memory(process))]
    for table, rows in rare:
        if rows.height:
            write_part(run, table, process.part, rows)
    _keep_dumps(process, readers)
    convert_windows(run, process, readers, None)
    _convert_calls(run, process, frames)
    notes = [
        note for path in sorted(process.folder.glob("notes-*.json")) for note in from_json(path.read_text())
    ]
    return {
        "warnings": [warning for note in notes for warning in note.get("warnings", [])]
        + _lost_gpu_work(process, notes)
        + _budget_warning(recorded)
        + _detaching_warning(recorded),
        "skipped": [
            calls.lost_calls(process.folder),
            _missed_windows(recorded),
            {WITHOUT_TIME: backward} if (backward := steps_without_time(recorded)) else {},
            *(note.get("skipped", {}) for note in notes),
        ],
        "windows": recording_costs(frames[STEPS.name], frames[PASSES.name]),
        "versions": {k: v for note in notes for k, v in note.get("versions", {}).items()}
        | process.facts["versions"],
    }


def _lost_gpu_work(process: RecordedProcess, notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Word which GPU work the deep windows of a process lack."""
    pairs = [(what, window) for note in notes for what, of in note.get("lost", {}).items() for window in of]
    lost = {what: [window for kind, window in pairs if kind == what] for what, _ in pairs}
    return sentences(process.rank, process.facts["gpu_name"] or "its GPU", lost)


def _convert_calls(run: Path, process: RecordedProcess, frames: Mapping[str, pl.DataFrame]) -> None:
    """Write the calls outside windows, and messages; stalled calls of a failed process stay unfinished."""
    worker, folder = frames[WORKERS.name].row(0, named=True), process.folder
    well = worker["exit_code"] == 0
    stepped_ns = frames[STEPS.name].select((pl.col("start_ns") + pl.col("duration_ns")).max()).item() or -1
    last_ns = calls.entries(folder)["enqueued_ns"].max()
    stalls = None if well else calls.latest_stall(folder, stepped_ns)
    calls.write_calls(run, process.part, folder, None, stalls)
    stalled_ns = NEVER_NS if well else max(stepped_ns, last_ns if isinstance(last_ns, int) else -1)
    messages = message_rows(folder, process.rank, stalled_ns)
    messages = as_delivered(messages) if well else messages
    write_part(run, COLLECTIVES, f"{process.part}-messages", messages)
    if is_pretended(folder):
        write_part(run, COLLECTIVES, f"{process.part}-pretended", calls_outside_windows(folder, process.rank))
    write_part(run, PROCESS_GROUPS, process.part, process_groups(folder, process.rank))


def _missed_windows(recorded: Sequence[records.Record]) -> dict[str, int]:
    """Count the deep windows that this rank did not record or did not keep, by reason."""
    missed = [r.c for r in recorded if r.kind == records.MISSED]
    opened, kept, dropped = (
        {r.a for r in recorded if r.kind == kind}
        for kind in (records.OPENED, records.WINDOW, records.DROPPED)
    )
    counts = {
        MISSED: missed.count(records.MISSED_LATE),
        OCCUPIED: missed.count(records.MISSED_OCCUPIED),
        UNPREPARED: missed.count(records.MISSED_UNPREPARED),
        STUCK: missed.count(records.MISSED_STUCK),
        DROPPED: len(dropped),
    }
    counts[UNFINISHED] = len(opened - kept - dropped)
    return {reason: count for reason, count in counts.items() if count}


def _budget_warning(recorded: Sequence[records.Record]) -> list[str]:
    """Return at most one warning: that the budget stopped automatic deep windows, for good or for a while."""
    changes = [r for r in recorded if r.kind in (records.STOPPED, records.RESUMED)]
    stops = [place for place, change in enumerate(changes) if change.kind == records.STOPPED]
    if not stops:
        return []
    stop, *later = changes[stops[-1] :]
    often = f" {len(stops)} times, the last time" if len(stops) > 1 else ""
    cost = f"having cost {stop.b / max(stop.c, 1):.1%} of the time"
    when = f"automatic deep windows stopped{often} at step {stop.a:,}, {cost}"
    if later:
        longer = f"steps took {later[0].d / 1e6:.0%} longer for a while than before the first one"
        return [f"{when}, and resumed at step {later[0].a:,}: {longer}"]
    longer = f"steps take {stop.d / 1e6:.0%} longer than before the first one"
    return [f"{when}: {longer}; `{ON_REQUEST}` records one on request"]


def _detaching_warning(recorded: Sequence[records.Record]) -> list[str]:
    """Return at most one warning: how often CUPTI was detached after a window, and whether that failed."""
    detached = [r for r in recorded if r.kind == records.DETACHED]
    if not detached:
        return []
    longest_ms = max(r.b for r in detached) / 1e6
    how = f"CUPTI was detached {len(detached):,} times (--detach), in at most {longest_ms:,.1f} ms"
    late = [r.a for r in detached if r.c]
    return [f"{how}; at step {late[0]:,} not in time: no deep window follows" if late else how]


def move_process(run: Path, process: RecordedProcess, to: Path) -> None:
    """Move the parts that a process has so far to another run, because its steps were run again later.

    Args:
        to: the run that receives them; `run` itself changes nothing.
    """
    for table in TABLES.values() if to != run else ():
        for part in part_files(run, table, f"{process.part}-"):
            (to / table.name).mkdir(parents=True, exist_ok=True)
            part.rename(to / table.name / part.name)
