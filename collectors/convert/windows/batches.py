"""Deep windows of one process into tables, a batch of them at a time.

In: the Kineto files that a process has saved, execution traces and messages beside them. Out: a Parquet part
per table and batch, and notes for the manifest. A batch that was interrupted gives the same parts again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from dpro.collectors.convert import calls
from dpro.collectors.convert.pretended import with_pretended_calls
from dpro.collectors.convert.readers import Readers, ReadTrace
from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.stall import messages_in_window
from dpro.collectors.convert.windows.cut import cut
from dpro.collectors.convert.windows.lost import TAIL, lost_in
from dpro.collectors.convert.windows.merge import merge_window
from dpro.collectors.inside import records
from dpro.collectors.inside.names import PRETENDED
from dpro.errors import DproError
from dpro.schema import (
    COLLECTIVES,
    COUNTERS,
    DEPENDENCIES,
    SPANS,
    SYNCS,
    conform,
)
from dpro.store import write_part

WINDOW_TABLES = (SPANS, COLLECTIVES, SYNCS, DEPENDENCIES, COUNTERS)
_BESIDE = ("trace", "messages", PRETENDED)  # files of a window, named as its own
_ID_COLUMNS = ("span_id", "launch_span_id", "collective_id", "source_span_id", "target_span_id")
_WINDOW_IDS = 1 << 32  # ids of window w lie in [(w + 1) * this, (w + 2) * this); those of calls below


def first_window_ns(process: RecordedProcess, recorded: Sequence[records.Record]) -> int:
    """When the first window began that is open or still to be converted; the end of time for none."""
    over = {r.a for r in recorded if r.kind in (records.WINDOW, records.DROPPED)}
    over -= {int(path.stem.removeprefix("window")) for path in process.folder.glob("**/window*.json")}
    begun = [r.b for r in recorded if r.kind == records.OPENED and r.a not in over]
    return min(begun, default=(1 << 63) - 1)


def convert_windows(run: Path, process: RecordedProcess, readers: Readers, until_ns: int | None) -> None:
    """Convert the deep windows that were saved before a moment, a batch of them into one part per table.

    A batch is a folder: one that an interrupted conversion left behind gives the same parts again.

    Args:
        until_ns: windows saved since then wait, ns since 1970; None converts all.
    """
    saved = sorted(process.folder.glob("window*.json"))
    waiting = [path for path in saved if until_ns is None or path.stat().st_mtime_ns < until_ns]
    if waiting:
        batch = process.folder / f"batch-{waiting[0].stem}"
        batch.mkdir()
        for path in waiting:
            beside = [path.with_name(path.name.replace("window", what)) for what in _BESIDE]
            for each in (*beside, path):  # in this order: a window in a batch has all that belongs to it
                if each.exists():
                    each.rename(batch / each.name)
    for batch in sorted(process.folder.glob("batch-*")):
        convert_batch(run, process, batch, readers)
        shutil.rmtree(batch.rename(batch.with_name(f"done-{batch.name}")))


def convert_batch(run: Path, process: RecordedProcess, batch: Path, readers: Readers) -> None:
    """Write the tables of a batch of windows, and what the manifest should say of them."""
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
        found = _window_frames(trace, window, pl.concat([entries, sent]), steps_of.get(window))
        calls_of = path.with_name(path.name.replace("window", PRETENDED))
        first = (window + 1) * _WINDOW_IDS
        frames.append(with_pretended_calls(found, calls_of, process.rank, window, first))
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
    trace: ReadTrace, window: int, entries: pl.DataFrame, steps: tuple[int, int] | None
) -> dict[str, pl.DataFrame]:
    """One window's tables, with ids of their own and what is known of its collectives besides.

    Args:
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
