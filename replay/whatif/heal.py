"""Give a rank the speed of its peers.

The ranks of one job do alike work between one collective and the next. What a rank needs longer for such a
section than its peers typically do, and typically in every step, is what healing takes away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph

Ints = NDArray[np.int64]

ON_CPU, ON_GPU = 0, 1


@dataclass(frozen=True)
class Heal:
    """A rank takes the median of its peers."""

    rank: int
    doubt: float = 0.1

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        return f"heal:rank={self.rank}"

    def apply(self, graph: Graph) -> Graph:
        """Scale the rank's work, section by section, down to its peers' median; never up."""
        return graph.with_durations(healed_durations(graph, [self.rank])[:, 0])

    def describe(self) -> str:
        """What is changed."""
        return f"rank {self.rank} is as fast as its peers"

    def how(self) -> str:
        """How to do it."""
        return f"`dpro diagnose` says what holds rank {self.rank} up; assumes its peers do the same work"


def healed_durations(graph: Graph, ranks: list[int]) -> Ints:
    """Durations with one rank healed at a time.

    For each section of a step, and for CPU and GPU work apart, the rank's typical time (median over steps)
    is compared with its peers' (median over peers of their medians). Where it is longer, all the rank's work
    there is scaled by the same ratio in every step: noise of single steps is left alone.

    Args:
        graph: the graph.
        ranks: which ranks, one scenario each.

    Returns:
        [N, len(ranks)] ns, nowhere longer than in the graph.

    Raises:
        Unanswerable: a rank is not in the run, or has no peer that went through the same sections.
    """
    totals = section_times(graph)
    present = set(totals["rank"].to_list())
    durations = np.repeat(graph.nodes.duration[:, None], len(ranks), axis=1)
    place, position = _resource(graph), graph.nodes.section
    counted = (place >= 0) & (graph.nodes.section >= 0)
    for column, rank in enumerate(ranks):
        if rank not in present:
            raise Unanswerable(f"rank {rank} is not in the run")
        ratios = _ratios(totals, rank)
        mine = counted & (graph.nodes.rank == rank)
        table = np.ones((2, int(position.max()) + 1))
        table[ratios["resource"].to_numpy(), ratios["position"].to_numpy()] = ratios["ratio"].to_numpy()
        factor = table[place[mine], position[mine]]
        durations[mine, column] = np.rint(durations[mine, column] * factor).astype(np.int64)
    return durations


def section_times(graph: Graph) -> pl.DataFrame:
    """How long each rank worked in each section of each step.

    Returns:
        `rank`, `step`, `position` (of the section in its step), `resource` (CPU 0, GPU 1), `work_ns`: time in
        nodes, without waits and transfers.
    """
    place = _resource(graph)
    counted = (place >= 0) & (graph.nodes.section >= 0) & (graph.nodes.step >= 0)
    return (
        pl.DataFrame(
            {
                "rank": graph.nodes.rank[counted],
                "step": graph.nodes.step[counted],
                "position": graph.nodes.section[counted],
                "resource": place[counted],
                "work_ns": graph.nodes.duration[counted],
            }
        )
        .group_by("rank", "step", "position", "resource")
        .agg(pl.col("work_ns").sum())
        .sort("rank", "step", "position", "resource")
    )


def _resource(graph: Graph) -> Ints:
    kind = graph.nodes.kind
    return np.where(np.isin(kind, CPU_KINDS), ON_CPU, np.where(np.isin(kind, GPU_KINDS), ON_GPU, -1))


def _ratios(totals: pl.DataFrame, rank: int) -> pl.DataFrame:
    """`position`, `resource`, `ratio` below 1 where the rank needs longer than its peers typically do."""
    typical = totals.group_by("rank", "position", "resource").agg(pl.col("work_ns").median())
    peers = _peers(totals, rank)
    if not peers:
        raise Unanswerable(f"rank {rank} has no peer in the run that calls the same collectives")
    theirs = (
        typical.filter(pl.col("rank").is_in(peers))
        .group_by("position", "resource")
        .agg(peer_ns=pl.col("work_ns").median())
    )
    own = typical.filter(pl.col("rank") == rank).join(theirs, on=["position", "resource"])
    return (
        own.filter(pl.col("work_ns") > pl.col("peer_ns"))
        .with_columns(ratio=pl.col("peer_ns") / pl.col("work_ns"))
        .sort("position", "resource")
    )


def _peers(totals: pl.DataFrame, rank: int) -> list[int]:
    """Other ranks whose steps fall into as many sections."""
    sections = totals.group_by("rank").agg(pl.col("position").max())
    own = sections.filter(pl.col("rank") == rank)["position"]
    same = sections.filter((pl.col("rank") != rank) & (pl.col("position") == own.first()))
    return sorted(same["rank"].to_list())
