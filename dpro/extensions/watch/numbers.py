"""The watch of losses and gradient norms: finds the first that is not finite, and jumps, in a running job.

Takes the records of its processes, with `--watch-loss`; returns findings, once per look. Numbers that are not
finite are kept until a look, and remain findings; jumps are findings only within the latest steps. Other
differences are left to `dpro diagnose`.
"""

from __future__ import annotations

import time

import polars as pl

from dpro.collectors.convert.tables import losses
from dpro.detect.bad_numbers import find_bad_numbers
from dpro.detect.findings import Finding
from dpro.extensions.watch.job import Job

LOOK_S = 2.0
SHARE = 0.05  # share of the time that looks may take


class NumberWatch:
    """Looks for losses and gradient norms that are not finite, or jump."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def look(self, job: Job) -> list[Finding] | None:
        """Return current findings; None if no look was due, or no number is recorded."""
        recording = [tail for tail in job.tails.values() if tail.has_numbers]
        if time.monotonic() < self._due_s or not recording:
            return None
        begun_s = time.thread_time()
        rows = pl.concat([losses(tail.process, tail.numbers) for tail in recording])
        bad = find_bad_numbers(rows, job.workers)
        self._due_s = time.monotonic() + max(LOOK_S, (time.thread_time() - begun_s) / SHARE)
        return bad
