"""The memory watch: finds hosts and GPUs of a running job whose memory grows from step to step.

Takes the files of samplers, and the steps of the job's processes; returns findings, once per look. In a large
job each look reads the files of some hosts only, in turn; findings on other hosts remain.
"""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl

from dpro.collectors.convert.tables import counters
from dpro.collectors.launch.recording import launches
from dpro.collectors.telemetry.samples import read_samples, sample_files
from dpro.detect.findings import Finding
from dpro.detect.machine.memory_growth import detect_growth
from dpro.extensions.watch.job import Job, steps_of
from dpro.replay.steps import step_series
from dpro.schema import COUNTERS

LOOK_S = 30.0
SHARE = 0.05  # share of the time that looks may take
MAX_HOSTS = 8  # whose files are read in one look
FILES = 2  # latest files of a host to read; each covers an hour, or 1 MB


class MemoryWatch:
    """Looks for memory that grows without end."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._turn = 0
        self._found: dict[Path, list[Finding]] = {}

    def look(self, job: Job) -> list[Finding] | None:
        """Return current findings; None if no look was due."""
        if time.monotonic() < self._due_s:
            return None
        begun_s, recorded = time.thread_time(), launches(job.run)
        series = step_series(steps_of(job.tails.values()))
        for place in range(min(MAX_HOSTS, len(recorded))):
            launch = recorded[(self._turn + place) % len(recorded)]
            step_ns = series.typical_ns if series else 0.0
            self._found[launch.raw] = find_growth(launch.raw, job.workers, step_ns)
        self._turn += MAX_HOSTS
        self._due_s = time.monotonic() + max(LOOK_S, (time.thread_time() - begun_s) / SHARE)
        return [finding for growing in self._found.values() for finding in growing]


def find_growth(raw: Path, workers: pl.DataFrame, step_ns: float) -> list[Finding]:
    """Return findings of growing memory by the latest samples in a folder of records.

    Args:
        workers: rows of that table.
        step_ns: duration of a step; 0 if unknown.
    """
    sampled = [counters(*read_samples(path)) for path in sample_files(raw)[-FILES:]]
    rows = pl.concat([COUNTERS.empty(), *(frame.select(*COUNTERS.columns) for frame in sampled)])
    first, last = rows["time_ns"].min(), rows["time_ns"].max()
    if not isinstance(first, int) or not isinstance(last, int):
        return []
    return detect_growth(rows, workers, (first, last), step_ns)
