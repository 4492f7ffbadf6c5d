"""Time against memory: what larger batches, recomputed activations and accumulated gradients make of both.

In: a graph of a run whose allocator reported what it gave out. Out: points, of which some are best: none
other takes less time for a batch of today's size and no more memory. Memory is what a step has allocated at
most beyond what it found; time that of a batch of the size that was recorded.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph
from dpro.replay.models.memory import MODULE, footprint_of, freed_by_recomputing
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import Accumulate, Batch, Recompute
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.schema import SPANS
from dpro.store import Run

FACTORS = (2, 4)
UNLIMITED_GB = 1e6  # whether it fits is said, not refused
NUMBERED = re.compile(r"(?:.*\.)?\d+")


@dataclass(frozen=True)
class Point:
    """A way to run the job.

    Attributes:
        edits: what is changed; nothing for the job as it is.
        ns_per_batch: mean time for a batch of the size that was recorded.
        within_step_bytes: the most that a step has allocated beyond what it found.
        fits: whether there is so much memory; None where the run does not say.
        best: whether nothing else takes less time and no more memory, or less memory and no more time.
    """

    edits: tuple[Edit, ...]
    ns_per_batch: float
    within_step_bytes: int
    fits: bool | None
    best: bool


def pareto(graph: Graph, trust: Trust) -> list[Point]:
    """Time against memory, the least memory first.

    Args:
        graph: the unchanged graph.
        trust: how well its replay fits.

    Raises:
        Unanswerable: the run holds no allocations, or no whole step.
    """
    footprint = footprint_of(graph.run)
    baseline = baseline_steps(graph)
    base = float(durations_of(baseline)["duration_ns"].to_numpy().mean())
    found: list[tuple[tuple[Edit, ...], float, int]] = [((), base, footprint.within_step_bytes)]
    for edits, batches, within in _ways(graph, footprint.within_step_bytes):
        with suppress(Unanswerable):  # what it needs is not in this run
            predicted = predict(graph, baseline, edits, trust).predicted_ns
            found.append((tuple(edits), predicted / batches, within))
    free = footprint.free_bytes
    points = [
        Point(
            edits,
            time,
            within,
            None if free is None else within - footprint.within_step_bytes <= free,
            best=not any(_beats((other, more), (time, within)) for _, other, more in found),
        )
        for edits, time, within in found
    ]
    return sorted(points, key=lambda point: (point.within_step_bytes, point.ns_per_batch))


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _ways(graph: Graph, within: int) -> list[tuple[list[Edit], float, int]]:
    """Edits, how many batches of today's size a step has with them, and what it allocates."""
    larger = {factor: Batch(factor, memory_gb=UNLIMITED_GB) for factor in FACTORS}
    ways: list[tuple[list[Edit], float, int]] = [([Accumulate(factor)], factor, within) for factor in FACTORS]
    ways += [([batch], factor, factor * within) for factor, batch in larger.items()]
    for pattern, names in sorted(blocks_of_run(graph.run).items()):
        left = max(within - freed_by_recomputing(graph.run, names), 0)
        again = Recompute(pattern)
        ways.append(([again], 1, left))
        ways += [([again, batch], factor, factor * left) for factor, batch in larger.items()]
    return ways


def blocks_of_run(run: Run | None) -> dict[str, list[str]]:
    """Patterns for modules that are numbered side by side (`layers.*`), each with the names of its blocks."""
    if run is None:
        return {}
    names = run.table(SPANS, ["name"])["name"].unique()
    modules = names.filter(names.str.starts_with(MODULE)).str.strip_prefix(MODULE).sort().to_list()
    found: dict[str, list[str]] = {}
    for name in modules:
        if NUMBERED.fullmatch(name):
            found.setdefault(re.sub(r"\d+$", "*", name), []).append(name)
    return {pattern: names for pattern, names in found.items() if len(names) > 1}
