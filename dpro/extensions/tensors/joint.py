"""Searches for a tensor plan of a run: division, operator fusion, precision and memory together.

Takes an `Analysis`, and what may be changed; returns the best plan that was found, and what was tried for it.

Operator fusion and the division of gradients depend on each other: a fused kernel may end later than the
first of the kernels it replaces, which delays a reduction and those behind it; and where kernels get shorter,
gradients are ready earlier. So the division is searched again on the graph with each fusion, and a fusion
stays in the plan if the step with both is shorter (alternating as in dPRO, Hu et al., MLSys 2022, Algorithm
1, whose Theorem 1 says when fusing two operators and their tensors gains). If memory is short, it is freed
first, by recomputing modules or by accumulating smaller batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.graphs import why_too_large
from dpro.analysis.predictions import trust_and_baseline
from dpro.errors import NothingToChange, Unanswerable
from dpro.extensions.tensors.plan_file import TensorPlan
from dpro.extensions.tensors.search import (
    SHORTER,
    Division,
    Replays,
    as_plan,
    require_reducible,
    search_division,
    uniform_divisions,
)
from dpro.replay.cost.memory import footprint_of, freed_by_recomputing, peaks_of
from dpro.replay.graph import Graph, GraphError
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import GB, Accumulate, Batch, Recompute
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.graph_ops.scope import blocks_of_run
from dpro.replay.whatif.job import ReplayedJob, job_of
from dpro.replay.whatif.predict import slowdowns_of
from dpro.replay.whatif.registry import kind_named
from dpro.replay.whatif.search import can_combine
from dpro.selection import ALL, Selection
from dpro.stages import Progress, ignore
from dpro.units import format_bytes

FUSIONS = ("compile", "optimizer")
MAX_REPLAYS = 150
REPLAYED_NODES = 8_000_000  # in all replays of a search: some seconds
MIN_REPLAYS = 24
MIN_GAIN = 0.002  # of the step: a fusion that gains less is not worth the effort


@dataclass
class PlanSearch:
    """A search for a plan, whose results are available even if it is interrupted.

    Attributes:
        graph: of the job as it is.
        baseline: its `baseline_steps`.
        slowdowns: as `slowdowns_of` returns them.
        reduce_in: half precision that reductions may use; empty for none.
        report: called with the number of divisions replayed, and the expected number.
        budget: of replays.
        tried: edits with which divisions were searched, and the replays.
        is_interrupted: whether it ended early.
    """

    graph: Graph
    baseline: pl.DataFrame
    slowdowns: Sequence[float]
    reduce_in: str
    report: Progress
    budget: int
    tried: list[tuple[tuple[Edit, ...], Replays]] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def made(self) -> int:
        """Number of replayed divisions."""
        return sum(len(replays.steps_ns) for _, replays in self.tried)

    def count(self) -> None:
        """Report one more replay."""
        self.report(self.made, max(self.budget, self.made))

    def best(self) -> tuple[tuple[Edit, ...], Replays]:
        """Return the edits and division with the shortest step; each edit more must gain `MIN_GAIN`."""
        best = self.tried[0]
        for edits, replays in self.tried[1:]:
            more = max(len(edits) - len(best[0]), 0)
            if replays.best_ns < best[1].best_ns * (1 - MIN_GAIN * more):
                best = edits, replays
        return best

    def uniform(self) -> tuple[float, float]:
        """Return the best single bucket size with the plan's edits, in 2**20 bytes, and its step, in ns.

        The step is infinite, and the size 0, where the search was interrupted before any was replayed.
        """
        _, replays = self.best()
        sizes = uniform_divisions(replays.reductions)
        replayed = [
            (replays.steps_ns[division], size)
            for division, size in sizes.items()
            if division in replays.steps_ns
        ]
        step_ns, size = min(replayed, default=(inf, 0.0))
        return size, step_ns

    def under(self, edits: Sequence[Edit], left: int, seeds: Sequence[Division] = ()) -> None:
        """Search for a division with some edits.

        Args:
            left: maximum number of replays.
            seeds: divisions to begin with.

        Raises:
            Unanswerable: the run lacks what an edit or a plan needs.
        """
        before = job_of(self.graph).with_kept_tables()
        job: ReplayedJob = before
        samples = 1.0
        for edit in edits:
            samples *= edit.samples(job.graph)
            job = job.under(edit, in_full=False).job
        replays = Replays(before, job, self.baseline, self.slowdowns, samples, left, self.count)
        if self.reduce_in:
            require_reducible(replays.reductions, self.reduce_in)
        _ = replays.reductions  # raises before the edits count as tried
        before_ns = self.best()[1].best_ns if self.tried else inf
        self.tried.append((tuple(edits), replays))
        same = [seed for seed in seeds if abs(replays.step_ns(seed) / before_ns - 1) < SHORTER]
        if not same:  # if the edits change nothing, the best division stays the same
            search_division(replays, self.reduce_in, seeds)


def make_plan(
    analysis: Analysis,
    reduce_in: str = "",
    memory_gb: float | None = None,
    budget: int | None = None,
    selection: Selection = ALL,
    report: Progress = ignore,
) -> tuple[TensorPlan, PlanSearch]:
    """Search for the best plan; if the keyboard interrupts the search, return the best so far.

    Args:
        reduce_in: half precision that reductions may use.
        memory_gb: memory of the device, 1e9 bytes, if less than the run had.
        budget: of replays.
        selection: the steps whose mean is minimised.

    Raises:
        Unanswerable: the run lacks what a plan needs, or memory cannot be freed; the message says what.
        UsageError: no such steps were recorded in depth.
        KeyboardInterrupt: nothing was replayed yet.
    """
    if why := why_too_large(analysis.run):
        raise Unanswerable(f"a plan needs the whole graph: {why}")
    trust, baseline = trust_and_baseline(analysis, selection)
    graph = analysis.built.predictive
    if budget is None:
        budget = max(min(MAX_REPLAYS, REPLAYED_NODES // max(graph.num_nodes, 1)), MIN_REPLAYS)
    search = PlanSearch(graph, baseline, slowdowns_of(trust), reduce_in, report, budget)
    try:
        _search(search, ways_to_free_memory(graph, memory_gb))
        _, replays = search.best()
        for division in uniform_divisions(replays.reductions):  # beyond the budget: the plan is never worse
            replays.left += 1
            replays.step_ns(division)
    except KeyboardInterrupt:
        if not search.made:
            raise
        search.is_interrupted = True
    edits, replays = search.best()
    made_from = f"{analysis.run.label}, {len(graph.ranks)} ranks, {len(replays.names)} gradients"
    return TensorPlan(as_plan(replays.best, replays.names), tuple(map(str, edits)), made_from), search


def _search(search: PlanSearch, bases: Sequence[tuple[Edit, ...]]) -> None:
    """Search with each way to free memory, and with each fusion on top of the best.

    Raises:
        Unanswerable: no plan can be predicted.
    """
    fusions = list(chain.from_iterable(map(partial(_candidates, search), FUSIONS)))
    shares = 1 + len(bases) + len(fusions)
    refusals: list[Unanswerable] = []
    for base in bases:
        try:
            search.under(base, max(2 * search.budget // shares, 1))
        except (Unanswerable, GraphError) as error:
            refusals.append(Unanswerable(str(error)))
    if not search.tried:
        raise refusals[0]
    for fusion in fusions:
        edits, replays = search.best()
        if can_combine(fusion, edits):
            with suppress(Unanswerable, GraphError):
                search.under((*edits, fusion), max(search.budget // shares, 1), [replays.best])


def _candidates(search: PlanSearch, name: str) -> Sequence[Edit]:
    """Return the fusions of one kind that suit the run."""
    with suppress(Unanswerable, GraphError, NothingToChange):
        return kind_named(name).candidates(facts_of(search.graph, search.baseline))
    return []


def ways_to_free_memory(graph: Graph, memory_gb: float | None) -> list[tuple[Edit, ...]]:
    """Return alternative edits that make a job fit into memory; one without edits where it fits as it is.

    Args:
        memory_gb: of the device, 1e9 bytes; None for that of the run.

    Raises:
        Unanswerable: the run lacks its use of memory, or nothing frees enough.
    """
    if memory_gb is None:
        return [()]
    peak = max(peaks_of(graph.run).values())
    over = peak - round(memory_gb * GB)
    if over <= 0:
        return [()]
    ways: list[tuple[Edit, ...]] = [
        (Recompute(pattern),)
        for pattern, names in sorted(blocks_of_run(graph.run).items())
        if freed_by_recomputing(graph.run, names) >= over
    ]
    if footprint_of(graph.run).within_step_bytes // 2 >= over:
        ways.append((Accumulate(2), Batch(0.5)))
    if not ways:
        raise Unanswerable(
            f"the job takes {format_bytes(peak)}, {format_bytes(over)} more than there are: neither "
            "recomputing modules nor half the batch frees so much"
        )
    return ways
