"""What changing the inside of iterations does to their cost: the graph of deep windows, replayed.

In: the graph of a server's run, its iterations, and edits of `dpro.replay.whatif`. Out: how many times as
long iterations take, those with prompts and those that only decode. Requests are not scheduled here:
`predict` does that again with the changed cost. Batches that no deep window holds are taken to change like
those of their kind; a kind of which windows hold too few is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.timeline import (
    AFTER_STEPS,
    BEFORE_STEPS,
    changed_step_times,
    durations_of,
    replay,
    step_ends,
)
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.job import with_kept_tables
from dpro.replay.whatif.predict import apply_all

MIN_ITERATIONS = 2  # iterations of a kind


class ChangedIterations(NamedTuple):
    """How many times as long iterations take.

    Attributes:
        prompts: those with prompts.
        decodes: those that only decode.
        doubt: how far both are off, as a standard deviation of their logarithm.
    """

    prompts: float
    decodes: float
    doubt: float


def changed_iterations(graph: Graph, iterations: pl.DataFrame, edits: Sequence[Edit]) -> ChangedIterations:
    """What edits do to iterations.

    Args:
        graph: of the deep windows of a server's run.
        iterations: rows of table `iterations` of one rank, with known tokens.

    Raises:
        Unanswerable: an edit needs what the run lacks, or windows hold too few iterations.
    """
    ordered = iterations.sort("start_ns")
    by_iteration = with_kept_tables(_steps_are_iterations(graph, ordered))
    changed = apply_all(by_iteration, edits).graphs[-1]
    before, after = replay(by_iteration), replay(changed)
    baseline = step_ends(by_iteration, before.start, before.end)
    times = durations_of(baseline).join(
        changed_step_times(baseline, changed, after.end), on=["window", "step"], suffix="_after"
    )
    has_prompts = ordered["prefill_tokens"].to_numpy()[times["step"].to_numpy()] > 0
    kinds = [times.filter(pl.Series(kind)) for kind in (has_prompts, ~has_prompts)]
    if max(kind.height for kind in kinds) < MIN_ITERATIONS:
        raise Unanswerable(
            f"deep windows hold {times.height} iterations: {MIN_ITERATIONS} of a kind are needed to say "
            "what changes in them; record more windows"
        )
    prompts, decodes = map(_times_as_long, kinds)
    assumed = max((edit.doubt for edit in edits), default=0.0)
    return ChangedIterations(prompts, decodes, assumed * max(abs(np.log(prompts)), abs(np.log(decodes))))


def _steps_are_iterations(graph: Graph, iterations: pl.DataFrame) -> Graph:
    """The graph with the number of the iteration as the step of each node, by when it began as recorded."""
    starts = iterations["start_ns"].to_numpy() - graph.origin_ns
    last = starts[-1] + iterations["duration_ns"][-1] if starts.size else 0
    began = graph.nodes.measured_start
    number = np.searchsorted(starts, began, side="right") - 1
    number = np.where(began >= last, AFTER_STEPS, np.where(number < 0, BEFORE_STEPS, number))
    return replace(graph, nodes=replace(graph.nodes, step=number.astype(np.int64)))


def _times_as_long(durations: pl.DataFrame) -> float:
    """How many times as long iterations of a kind take; 1 where there are too few."""
    before, after = (int(durations[name].to_numpy().sum()) for name in ("duration_ns", "duration_ns_after"))
    return after / before if durations.height >= MIN_ITERATIONS and before and after else 1.0
