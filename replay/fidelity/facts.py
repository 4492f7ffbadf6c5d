"""What some ranks show of how well their replay fits, in sums: those of several ranks add up to those of all.

In: a replay of one rank or of all. Out: a `FitFacts`. Which shares and percentiles follow is said in
`dpro.replay.fidelity.accuracy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.classify import classify
from dpro.replay.fidelity.evidence import StartCounts, count_starts, is_started
from dpro.replay.fidelity.fit import counted, judged_starts, rank_start_errors
from dpro.replay.fidelity.overlap import kernels_beside
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import Timeline, extents_of


@dataclass(frozen=True)
class FitFacts:
    """What ranks show of how well their replay fits.

    Attributes:
        ranks: as from `dpro.replay.fidelity.fit.rank_start_errors`.
        misses: as from `dpro.replay.fidelity.fit.counted`.
        starts: what starts rest on.
        unexplained: ns in which work could have started by all edges, but had not; and ns of the windows.
        gaps: ns of CPU time that no span explains, and of all CPU time.
        classified: ns of GPU work in kernels of a known class, and of all GPU work.
        kernels: as from `dpro.replay.fidelity.overlap.kernels_beside`.
    """

    ranks: pl.DataFrame
    misses: pl.DataFrame
    starts: StartCounts
    unexplained: Ints
    gaps: Ints
    classified: Ints
    kernels: pl.DataFrame


def facts_of(timeline: Timeline, derived: Timeline, on_gpu: bool) -> FitFacts:
    """What the ranks of a graph show.

    Args:
        on_gpu: whether any rank of the run has work on a GPU.
    """
    graph, misses = timeline.graph, judged_starts(derived, on_gpu)
    return FitFacts(
        ranks=rank_start_errors(misses),
        misses=counted(misses),
        starts=count_starts(timeline),
        unexplained=unexplained_ns(graph),
        gaps=_gaps_ns(graph),
        classified=_classified_ns(graph),
        kernels=kernels_beside(graph),
    )


def added(facts: Sequence[FitFacts]) -> FitFacts:
    """What several groups of ranks show together."""
    misses = pl.concat([each.misses for each in facts])
    misses = misses.group_by("window", "step", "miss_ns").agg(pl.col("count").sum())
    return FitFacts(
        ranks=pl.concat([each.ranks for each in facts]),
        misses=misses,
        starts=StartCounts(*(sum(column) for column in zip(*(each.starts for each in facts)))),
        unexplained=np.sum([each.unexplained for each in facts], axis=0),
        gaps=np.sum([each.gaps for each in facts], axis=0),
        classified=np.sum([each.classified for each in facts], axis=0),
        kernels=pl.concat([each.kernels for each in facts]),
    )


def share(parts: Ints) -> float:
    """The first of two sums as a share of the second; 0 of nothing.

    Args:
        parts: [2] ns.
    """
    return float(parts[0]) / float(parts[1]) if parts[1] else 0.0


def unexplained_ns(graph: Graph) -> Ints:
    """[2] ns in which work could have started, by all edges, but had not; and ns of the ranks' windows."""
    nodes, edges = graph.nodes, graph.edges
    started, ready = is_started(graph), nodes.earliest.copy()
    to_work = np.flatnonzero(started[edges.target])
    ended = nodes.measured_end[edges.source[to_work]] + edges.lag[to_work]
    np.maximum.at(ready, edges.target[to_work], ended)
    lag = np.maximum(nodes.measured_start - ready, 0)[started]
    extents = extents_of(graph, ["rank", "window"], nodes.measured_start, nodes.measured_end)
    return np.array([lag.sum(), (extents["end"] - extents["start"]).sum()], np.int64)


def _gaps_ns(graph: Graph) -> Ints:
    duration, kind = graph.nodes.duration, graph.nodes.kind
    cpu = kind <= NodeKind.GAP
    return np.array([duration[kind == NodeKind.GAP].sum(), duration[cpu].sum()], np.int64)


def _classified_ns(graph: Graph) -> Ints:
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.TRANSFER)) & (nodes.duration > 0)
    gpu &= np.isin(nodes.lane, [i for i, (_, what) in enumerate(graph.lanes) if what.startswith("stream")])
    if not gpu.any():
        return np.zeros(2, np.int64)
    known = np.zeros(len(graph.names), np.bool_)
    for name in np.unique(nodes.name[gpu]).tolist():
        known[name] = classify(graph.names[name]).kind != "other"
    return np.array([nodes.duration[gpu & known[nodes.name]].sum(), nodes.duration[gpu].sum()], np.int64)
