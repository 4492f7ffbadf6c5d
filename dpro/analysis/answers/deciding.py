"""What a replay shows of nodes inside ranks, be the graph held as a whole or its ranks condensed.

In: an `Analysis`. Out: errors of starts, and critical paths in the nodes of the whole graph. Of condensed
ranks those are replayed again that a path goes through.
"""

from __future__ import annotations

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.replay.fidelity.accuracy import counted, has_gpu_work, judged_starts
from dpro.replay.fidelity.by_rank import path_of_run
from dpro.replay.timeline import critical_path, critical_path_of_steps


def start_misses(analysis: Analysis) -> pl.DataFrame:
    """By how much starts are off that are judged, as `dpro.replay.fidelity.accuracy.counted` has it."""
    if analysis.condensed is not None:
        return analysis.condensed.misses
    return counted(judged_starts(analysis.timeline, has_gpu_work(analysis.built.graph)))


def deciding_work(analysis: Analysis, steps: pl.DataFrame | None = None) -> pl.DataFrame:
    """What decides when windows end, or when some steps do, as `dpro.replay.timeline.critical_path` has it.

    Args:
        steps: `window` and `step` of each; None for whole windows.
    """
    timeline, condensed = analysis.outline_timeline, analysis.condensed
    path_to = None if condensed is None else path_of_run(analysis.run, condensed, timeline)
    if steps is None:
        return critical_path(timeline, path_to)
    return critical_path_of_steps(timeline, steps, path_to=path_to)
