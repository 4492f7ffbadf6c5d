"""Time against memory: what larger batches, recomputed activations and accumulated gradients make of both.

In: a graph of a run whose allocator reported what it gave out. Out: points, of which some are best: none
other takes less time for a batch of today's size and no more memory. Memory is what a step has allocated at
most beyond what it found; time that of a batch of the size that was recorded.
"""

from __future__ import annotations

from contextlib import suppress

from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.cost.memory import footprint_of, freed_by_recomputing
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import Accumulate, Batch, Recompute
from dpro.replay.whatif.graph_ops.scope import blocks_of_run
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.units import ms

FACTORS = (2, 4)
UNLIMITED_GB = 1e6  # whether it fits is said, not refused


class ParetoPoint(DocumentPart, frozen=True):
    """One way to run the job: its time and its memory.

    Attributes:
        edits: what is changed; empty for the job as it is.
        ms_per_batch: mean time for a batch of the size that was recorded.
        speedup: of throughput, samples per second, to the job as it is.
        within_step_bytes: the most that a step allocates beyond what it found.
        fits: whether there is so much memory; null where the run does not show it.
        best: whether no other point takes less of one and no more of the other.
    """

    edits: list[str]
    ms_per_batch: float
    speedup: float | None
    within_step_bytes: int
    fits: bool | None
    best: bool


def pareto(graph: Graph, trust: Trust) -> list[ParetoPoint]:
    """Time against memory, the least memory first.

    Raises:
        Unanswerable: the run holds no allocations, or no whole step.
    """
    footprint = footprint_of(graph.run)
    baseline = baseline_steps(graph)
    base = float(durations_of(baseline)["duration_ns"].to_numpy().mean())
    ways: list[tuple[tuple[Edit, ...], float, int]] = [((), base, footprint.within_step_bytes)]
    for edits, within in _ways(graph, footprint.within_step_bytes):
        with suppress(Unanswerable):  # what it needs is not in this run
            predicted = predict(graph, baseline, edits, trust)
            ways.append((tuple(edits), predicted.predicted_ns / predicted.samples, within))
    free = footprint.free_bytes
    points = [
        ParetoPoint(
            list(map(str, edits)),
            ms(time),
            base / time if time else None,
            within,
            None if free is None else within - footprint.within_step_bytes <= free,
            best=not any(_beats((other, more), (time, within)) for _, other, more in ways),
        )
        for edits, time, within in ways
    ]
    return sorted(points, key=lambda point: (point.within_step_bytes, point.ms_per_batch))


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _ways(graph: Graph, within: int) -> list[tuple[list[Edit], int]]:
    """Edits, and what a step allocates with them."""
    larger = {factor: Batch(factor, memory_gb=UNLIMITED_GB) for factor in FACTORS}
    ways: list[tuple[list[Edit], int]] = [([Accumulate(factor)], within) for factor in FACTORS]
    ways += [([batch], factor * within) for factor, batch in larger.items()]
    for pattern, names in sorted(blocks_of_run(graph.run).items()):
        left = max(within - freed_by_recomputing(graph.run, names), 0)
        again = Recompute(pattern)
        ways.append(([again], left))
        ways += [([again, batch], factor * left) for factor, batch in larger.items()]
    return ways
