"""Runs built, condensed and judged rank by rank, in any processes, with little in memory.

Takes a run; returns a `CondensedRun`: the joined graph of its ranks, the fit of its replay, and the data to
look inside a rank again. Replayed steps, starts and errors equal those of the graph of the whole run, to the
nanosecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from dpro.replay.construction.graph_builder import Built
from dpro.replay.construction.recording_cost import (
    BY_HOSTS,
    BY_STEPS,
    Profiler,
    RecordingCost,
    find_pace,
    join_observations,
    judge_cost,
    profiler_of,
    reference_of,
    steps_of_cells,
)
from dpro.replay.fidelity.accuracy import FitFacts, Trust, add_facts, facts_of, judge
from dpro.replay.graph import EdgeKind, Graph
from dpro.replay.sharded import (
    BareRank,
    JoinedGraph,
    MatchedRun,
    Pooled,
    PooledOfRank,
    RendezvousTimes,
    bare_rank_of,
    build_rank,
    condense_rank,
    inside_of,
    join_skeletons,
    load_rank,
    match_run,
    observe_rank,
    of_collectives,
    path_through,
    pool,
    rank_file,
    rendezvous_of,
    replay_inside,
    with_pooled_lags,
)
from dpro.replay.steps import steps_of
from dpro.replay.timeline import PathTo, Timeline, replay
from dpro.stages import Progress, ignore, progress_counter
from dpro.store import Run

# Ranks, evenly spaced, whose kernels are used to estimate the slowdown by communication.
MAX_COMPARED_RANKS = 64
# Facts are summed up for this many ranks at a time, which bounds the memory they take.
TOGETHER = 64
T = TypeVar("T")


@dataclass(frozen=True)
class CondensedRun:
    """A run as its condensed ranks.

    Attributes:
        matched: collectives and clocks of all ranks.
        pooled: values pooled over all ranks.
        joined: their skeletons as one graph.
        trust: how far to trust its replay.
        misses: see `FitFacts`.
    """

    matched: MatchedRun
    pooled: Pooled
    joined: JoinedGraph
    trust: Trust
    misses: pl.DataFrame

    @property
    def built(self) -> Built:
        """The joined graph and its basis."""
        return _built(self.matched, self.pooled, self.joined)


def condense_run(run: Run, folder: Path, executor: Executor, report: Progress = ignore) -> CondensedRun:
    """Build, condense and judge each rank by itself.

    Args:
        folder: temporary folder of the ranks, visible to the executor's processes.
        report: called with the work done and the work in total.

    Raises:
        Unanswerable: the run has no spans, or its ranks are pretended.
        GraphError: the trace contradicts itself (a cycle).
        OSError: a rank cannot be written.
    """
    matched = match_run(run, executor.map)
    ranks = matched.ranks
    done = progress_counter(1 + 3 * len(ranks), report)
    done()
    work = ((run, matched.of(rank), folder) for rank in ranks)
    pooled = pool(_with(done, executor.map(build_rank, *zip(*work))))
    profiler = profiler_of(run)
    pooled = dataclasses.replace(pooled, has_shapes=profiler is not None and profiler.has_shapes)
    of_ranks = [pooled.of(rank) for rank in ranks]
    folders = [folder] * len(ranks)
    skeletons = list(_with(done, executor.map(condense_rank, folders, of_ranks)))
    joined = join_skeletons(skeletons, matched, pooled, run)
    timeline = replay(joined.graph)
    rendezvous = rendezvous_of(timeline)
    met = [of_collectives(rendezvous, skeleton.instance) for skeleton in skeletons]
    compared = set(ranks[:: -(-len(ranks) // MAX_COMPARED_RANKS)])
    places = [rank in compared for rank in ranks]
    judged = executor.map(fit_of_rank, folders, of_ranks, met, places)
    parts: list[FitFacts] = []
    for of_rank in _with(done, judged):
        parts.append(of_rank)
        if len(parts) == TOGETHER:
            parts = [add_facts(parts)]
    facts = add_facts(parts)
    edges = facts.starts.edges.copy()  # no rank by itself has those at rendezvous
    edges[EdgeKind.RENDEZVOUS] = (np.count_nonzero(joined.graph.edges.kind == EdgeKind.RENDEZVOUS), 0)
    facts = dataclasses.replace(facts, starts=facts.starts._replace(edges=edges))
    built, as_it_runs = _built(matched, pooled, joined), joined

    def condensed_again() -> JoinedGraph:
        again = executor.map(condense_rank, folders, [pooled.of(rank) for rank in ranks])
        return join_skeletons(list(again), matched, pooled, run)

    cost = profiler and _cost_of_recording(run, executor, folder, matched, pooled, profiler)
    if cost is not None:
        pooled = dataclasses.replace(pooled, scales=cost.scales)
        as_it_runs = condensed_again()
    pace = find_pace(as_it_runs.graph, steps_of(run))
    if pace != 1:
        pooled = dataclasses.replace(pooled, pace=pace)
        as_it_runs = condensed_again()
    built = dataclasses.replace(built, recording=cost, pace=pace)
    trust = judge(built, timeline, facts, run.manifest, replay(as_it_runs.graph))
    return CondensedRun(matched, pooled, as_it_runs, trust, facts.misses)


def _cost_of_recording(
    run: Run, executor: Executor, folder: Path, matched: MatchedRun, pooled: Pooled, profiler: Profiler
) -> RecordingCost | None:
    """Return the cost of recording, judged by the observations of ranks; None without any.

    Args:
        pooled: without `scales`.
    """
    reference = reference_of(steps_of(run))
    source = "" if reference is None else reference.source
    ranks = matched.ranks
    of_ranks = [pooled.of(rank) for rank in ranks]
    shown = list(executor.map(observe_rank, [folder] * len(ranks), of_ranks, [source] * len(ranks)))
    ranks_seen = [of_rank for of_rank in shown if of_rank is not None]
    if not ranks_seen:
        return None
    seen = join_observations([of_rank.seen for of_rank in ranks_seen])
    at = None
    if source == BY_HOSTS:
        at = np.concatenate([of_rank.at for of_rank in ranks_seen if of_rank.at is not None], axis=1)
    elif source == BY_STEPS and len(ranks_seen) == len(ranks):
        scaled = zip(*(of_rank.skeletons for of_rank in ranks_seen))
        joined = (join_skeletons(skeletons, matched, pooled) for skeletons in scaled)
        at = np.stack([steps_of_cells(graph.graph, seen.cells) for graph in joined])
    return judge_cost(seen, profiler, reference, at)


def _with(done: Callable[[], None], results: Iterator[T]) -> Iterator[T]:
    for result in results:
        done()
        yield result


def _built(matched: MatchedRun, pooled: Pooled, joined: JoinedGraph) -> Built:
    return Built(joined.graph, matched.matching, matched.alignment, pooled.steps_known)


def fit_of_rank(folder: Path, pooled: PooledOfRank, rendezvous: RendezvousTimes, compared: bool) -> FitFacts:
    """Return what a rank shows of how well the replay fits.

    Args:
        rendezvous: rendezvous of its collectives, from `dpro.replay.sharded.of_collectives`.
        compared: whether its kernels are used to estimate the slowdown by communication.

    Raises:
        OSError: the rank's file is missing or incomplete.
    """
    bare = load_rank(rank_file(folder, pooled.rank))
    timeline = replay_inside(bare, with_pooled_lags(bare, pooled), rendezvous)
    facts = facts_of(timeline, timeline, pooled.on_gpu)
    return facts if compared else dataclasses.replace(facts, kernels=facts.kernels.clear())


def path_of_run(run: Run, condensed: CondensedRun, timeline: Timeline) -> PathTo:
    """Return a function that finds paths in a condensed run; it builds the ranks on a path again.

    Args:
        timeline: the replay of its joined graph.
    """

    def built(rank: int) -> tuple[BareRank, Graph]:
        bare, _ = bare_rank_of(run, condensed.matched.of(rank))
        return bare, with_pooled_lags(bare, condensed.pooled.of(rank))

    return path_through(condensed.joined, timeline, inside_of(timeline, built))
