"""The watch of losses and gradient norms: which is not finite first, or jumps, of a job that runs.

In: the records of its processes, with `--watch-loss`. Out: findings, once per look. What is not finite is
kept until it is looked at, and stays a finding; of jumps those in the latest steps are. What else differed
there is left to `dpro diagnose`.
"""

from __future__ import annotations

import time

import polars as pl

from dpro.collectors.convert.tables import losses
from dpro.detect.bad_numbers import find_bad_numbers
from dpro.detect.findings import Finding
from dpro.extensions.watch.job import Job

LOOK_S = 2.0
SHARE = 0.05  # of the time that looks may take


class NumberWatch:
    """Looks for numbers that go bad."""

    def __init__(self) -> None:
        """None is known."""
        self._due_s = 0.0

    def look(self, job: Job) -> list[Finding] | None:
        """Return what holds; None where no look was due, or no number is recorded."""
        recording = [tail for tail in job.tails.values() if tail.has_numbers]
        if time.monotonic() < self._due_s or not recording:
            return None
        begun_s = time.thread_time()
        rows = pl.concat([losses(tail.process, tail.numbers) for tail in recording])
        bad = find_bad_numbers(rows, job.workers)
        self._due_s = time.monotonic() + max(LOOK_S, (time.thread_time() - begun_s) / SHARE)
        return bad
