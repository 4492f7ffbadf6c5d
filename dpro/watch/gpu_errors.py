"""Errors that GPUs of a job report while it runs, for what is said of hangs.

In: findings, and the files that samplers append to. Out: the findings, with these errors. Only what the nodes
of the ranks that are named have sampled lately is read: the files of all nodes of a large job are much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import polars as pl

from dpro.collectors.launch import launches
from dpro.collectors.telemetry.samples import read_samples, sample_files
from dpro.collectors.telemetry.tables import counters
from dpro.detect.findings import Finding
from dpro.detect.machine.gpu_state import needed_for_errors, with_errors
from dpro.errors import DproError
from dpro.schema import COUNTERS
from dpro.watch.tail import Tail, steps_of, workers_of

MAX_NODES = 8  # whose files are read


def with_gpu_errors(findings: Sequence[Finding], run: Path, tails: Sequence[Tail]) -> list[Finding]:
    """What hangs, with errors of GPUs; as it is where these cannot be read.

    Args:
        findings: what hangs.
        run: the run directory, which is still written.
        tails: the processes of the job.
    """
    if not findings:
        return []
    named = {rank for each in findings for rank in each.ranks}
    hosts = sorted({tail.process.facts["host"] for tail in tails if tail.process.rank in named})
    with suppress(DproError, OSError, ValueError, LookupError, pl.exceptions.PolarsError):
        rows = pl.concat([COUNTERS.empty(), *_sampled(run, hosts[:MAX_NODES])])
        return with_errors(findings, steps_of(tails), rows, workers_of(tails))
    return list(findings)


def _sampled(run: Path, hosts: Sequence[str]) -> Iterator[pl.DataFrame]:
    """Errors in the latest file of each launch on some hosts."""
    for launch in launches(run):
        if launch.facts()["host"] in hosts:
            for path in sample_files(launch.raw)[-1:]:
                host, samples = read_samples(path)
                frame = counters(host, samples)
                yield needed_for_errors(frame.select(*COUNTERS.columns))
