"""Clocks: the wall clock, which all times are on, against one that is never stepped or slewed.

In: a call a second. Out: a record of both at the same moment.
"""

from __future__ import annotations

import time

from . import records
from .recorder import Recorder


def install(recorder: Recorder) -> None:
    """Record the clocks once a second."""
    recorder.listen("second", lambda: sample(recorder))


def sample(recorder: Recorder) -> None:
    """Record both clocks."""
    if recorder.records is None:
        return
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    now = time.time_ns()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    recorder.records.write(records.CLOCK, now, (before + after) // 2)
