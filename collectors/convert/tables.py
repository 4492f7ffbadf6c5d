"""From the records of a process to its rows of steps, counters, clock samples and workers.

In: the records of a process and its facts. Out: frames of the tables `RECORD_TABLES`, its buckets, and the
calls of models that it met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from dpro.collectors.convert.endings import ending, exception, left_ns
from dpro.collectors.convert.host_facts import device_times, host_counters
from dpro.collectors.convert.meshes import mesh_coordinates
from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.stall import NEVER_NS, stack_of
from dpro.collectors.inside import records
from dpro.collectors.inside.steps.stepping import SOURCES, Boundary, number_steps
from dpro.collectors.sidecar import GONE
from dpro.schema import BUCKETS, CLOCK_SAMPLES, COUNTERS, MODEL_CALLS, STEPS, WORKERS, conform
from dpro.table import Table
from dpro.words import from_json

SOURCE = "dpro recorder"
RECORD_TABLES = (STEPS, COUNTERS, CLOCK_SAMPLES, WORKERS)


def frames_of(
    process: RecordedProcess, recorded: Sequence[records.Record], status: int | None
) -> dict[str, pl.DataFrame]:
    """Convert the records of a process, or the latest of them, to the tables `RECORD_TABLES`.

    Args:
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
        counted_by, gpu_ns = sources.get(source, SOURCES[0]), timed.get(step, -1)
        rows.append((rank, step, window, beside, start, end - start, counted_by, gpu_ns))
    columns = ["rank", "step", "window", "beside", "start_ns", "duration_ns", "source", "gpu_step_ns"]
    return pl.DataFrame(rows, schema={name: STEPS.dtypes[name] for name in columns}, orient="row")


def _kept_open(recorded: Sequence[records.Record]) -> list[tuple[int, int, int]]:
    """Each window, and from when to when Kineto ran for it: until now where it has not been closed."""
    closed = {r.a: max(r.c, r.d) for r in recorded if r.kind == records.WINDOW}
    closed |= {r.a: r.b for r in recorded if r.kind == records.DROPPED}
    opened = {r.a: r.b for r in recorded if r.kind == records.WINDOW}
    opened |= {r.a: r.b for r in recorded if r.kind == records.OPENED}
    return [(window, opened[window], closed.get(window, NEVER_NS)) for window in sorted(opened)]


def _counters(process: RecordedProcess, recorded: Sequence[records.Record]) -> pl.DataFrame:
    ends = {step: boundary for step, (_, boundary) in _boundaries(recorded).items()}
    rank = pl.lit(process.rank, COUNTERS.dtypes["rank"])
    return host_counters(recorded, ends).with_columns(rank=rank, host=pl.lit(process.facts["host"]))


def _clock_samples(rank: int, recorded: Sequence[records.Record]) -> pl.DataFrame:
    own = [(rank, r.a, r.b, -1, 0, 0) for r in recorded if r.kind == records.CLOCK]
    compared = [(rank, r.a, -1, r.b, r.c, r.d) for r in recorded if r.kind == records.PEER]
    return pl.DataFrame(own + compared, schema=CLOCK_SAMPLES.dtypes, orient="row")


def buckets(process: RecordedProcess) -> pl.DataFrame:
    """The gradient buckets that a process recorded, as rows of `buckets`."""
    path = process.folder / "buckets.json"
    modules = from_json(path.read_text()) if path.is_file() else []
    rows = [
        {"rank": process.rank, "module": number, "bucket": bucket, "source": module["source"], **each}
        for number, module in enumerate(modules)
        for bucket, each in enumerate(module["buckets"])
    ]
    return pl.DataFrame(rows, schema={name: BUCKETS.dtypes[name] for name in BUCKETS.columns})


def model_calls(process: RecordedProcess) -> pl.DataFrame:
    """The calls of models that a process met, as rows of `model_calls`."""
    path = process.folder / "model.json"
    met = from_json(path.read_text()) if path.is_file() else {"models": [], "calls": []}
    rows = [
        {"rank": process.rank, "source": SOURCE} | model | call
        for call in met["calls"]
        if (model := met["models"][call["model"]]) is not None
    ]
    return pl.DataFrame(rows, schema={name: MODEL_CALLS.dtypes[name] for name in MODEL_CALLS.columns})


def measured(process: RecordedProcess, table: Table) -> pl.DataFrame:
    """What a probe of `dpro try` measured in a process, as rows of its table.

    Args:
        table: `codecs` or `sensitivities`.
    """
    path = process.folder / f"{table.name}.json"
    rows = from_json(path.read_text()) if path.is_file() else []
    whole = [{"rank": process.rank, **row} for row in rows]
    return pl.DataFrame(whole, schema=table.dtypes).sort(table.sort_by)


def _worker(process: RecordedProcess, recorded: Sequence[records.Record], status: int | None) -> pl.DataFrame:
    row = worker_row(process, recorded, status)
    return pl.DataFrame([row], schema={name: WORKERS.dtypes[name] for name in row})


def worker_row(
    process: RecordedProcess, recorded: Sequence[records.Record], status: int | None
) -> dict[str, Any]:
    """The row of `workers` of a process; arguments as those of `frames_of`.

    Args:
        status: its wait status, None where unknown.
    """
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
