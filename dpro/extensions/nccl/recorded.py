"""Measurements of NCCL's Inspector, added to the tables of a run.

Reads the folder of its logs; writes rows of `collectives` with durations, for
collectives outside deep windows, and rows of `sends` if NCCL's proxies were traced. These rows are separate
from the flight recorder's: NCCL counts per communicator and operation, PyTorch per process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.launch.recording import Launch
from dpro.errors import DproError
from dpro.extensions.nccl.inspector import read_inspector_log
from dpro.extensions.nccl.plugin import INSPECTOR_LOGS
from dpro.schema import COLLECTIVES, SENDS, conform
from dpro.store import write_part

NOTHING = (
    "the NCCL Inspector wrote nothing: the job ran no NCCL collective, its NCCL is older than 2.28, or "
    "the plugin could not be loaded (NCCL_DEBUG=INFO shows why)"
)
_FIRST_ID = 1 << 61  # above the ids of the flight recorder and of windows


def convert_inspector_logs(launch: Launch, processes: Sequence[RecordedProcess]) -> dict[str, Any]:
    """Write the Inspector's measurements of the processes of a launch; see `convert_logs`."""
    return convert_logs(launch, processes, read_inspector_log)


def convert_logs(
    launch: Launch, processes: Sequence[RecordedProcess], read: Callable[[Path], Sequence[Any]]
) -> dict[str, Any]:
    """Write the Inspector's measurements of the processes of a launch.

    Returns:
        Entries for the manifest: `warnings`, `skipped`, `versions`; empty where the Inspector was not used.
    """
    folder = launch.raw / INSPECTOR_LOGS
    if not folder.is_dir():
        return {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    warnings = [] if paths else [NOTHING]
    skipped: list[dict[str, int]] = []
    versions: dict[str, str] = {}
    by_pid = {(process.facts["host"], process.facts["pid"]): process for process in processes}
    frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
    sends: dict[tuple[str, int], list[pl.DataFrame]] = {}
    for path in paths:
        try:
            traces = read(path)
        except DproError as error:
            warnings.append(f"a log of NCCL's Inspector was skipped: {str(error).removeprefix(f'{path}: ')}")
            continue
        for trace in traces:
            (whose,) = trace.frames["workers"].select("host", "pid").rows()
            rows = trace.frames[COLLECTIVES.name]
            sent = trace.frames.get(SENDS.name, SENDS.empty())
            versions |= trace.versions
            skipped.append(trace.skipped)
            if whose in by_pid:
                frames.setdefault(whose, []).append(rows)
                sends.setdefault(whose, []).append(conform(SENDS, sent))
            else:
                skipped.append({"collectives of NCCL's Inspector in processes without a rank": rows.height})
    for whose, measured in frames.items():
        process = by_pid[whose]
        write_part(launch.run, COLLECTIVES, f"{process.part}-nccl", _rows(process, measured))
        sent = pl.concat(sends[whose]).with_columns(rank=pl.lit(process.rank, pl.Int32))
        if sent.height:
            write_part(launch.run, SENDS, f"{process.part}-nccl", sent)
    return {"warnings": warnings, "skipped": skipped, "versions": versions}


def _rows(process: RecordedProcess, measured: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the measured rows of a process under its rank, without those that ran in a deep window."""
    rows = pl.concat([conform(COLLECTIVES, frame) for frame in measured]).with_columns(
        rank=pl.lit(process.rank, pl.Int32),
        collective_id=pl.int_range(pl.len()) + _FIRST_ID,
        window=pl.lit(-1, pl.Int32),
    )
    began_ns = pl.when(pl.col("start_ns") >= 0).then("start_ns").otherwise("enqueued_ns")
    recorded = records.read_records(process.folder / "records.bin")
    windows = [(r.b, r.c) for r in recorded if r.kind == records.WINDOW]
    return rows.filter(
        ~pl.any_horizontal(pl.lit(False), *(began_ns.is_between(*window) for window in windows))
    )
