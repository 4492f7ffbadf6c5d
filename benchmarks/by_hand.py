"""torch.profiler switched on by hand for the steps of deep windows, to compare the cost of recording with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

EVERY, WINDOW_STEPS, SKIP = 200, 2, 5  # the recorder's defaults


def profiled_by_hand() -> Callable[[], None]:
    """Record the steps of the default windows with torch.profiler; return the function that ends a step."""
    from torch.profiler import ProfilerAction, profile

    folder = tempfile.mkdtemp()

    def schedule(step: int) -> ProfilerAction:
        place = (step - SKIP) % EVERY
        if step < SKIP or place >= WINDOW_STEPS:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if place == WINDOW_STEPS - 1 else ProfilerAction.RECORD

    profiler = profile(
        schedule=schedule,
        on_trace_ready=lambda each: each.export_chrome_trace(f"{folder}/{os.getpid()}-{each.step_num}.json"),
    )
    profiler.start()
    return profiler.step
