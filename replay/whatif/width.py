"""More or fewer data-parallel ranks, by symmetry: each does what those that were recorded do.

In: a graph of a job whose ranks are all in one group. Out: the same ranks of a wider or narrower job: what
its collectives cost follows from the formulas of their algorithm, and each waits for the slowest of more.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.algorithms import FLAT, RING, cost, link_of, time_ns
from dpro.replay.costs import MAD_TO_DEVIATION, fit_costs, sorts, untold
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.algorithm import recorded_algorithm
from dpro.replay.whatif.comm import require_communication
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.heal import ON_GPU, section_work

Floats = NDArray[np.float64]

FEWEST = 4  # durations that noise is taken from


@dataclass(frozen=True)
class Width(Edit):
    """The job has another number of data-parallel ranks."""

    name = "width"
    summary = "another number of data-parallel ranks, each with the same work"
    example = "width:dp=16"
    needs = "ranks that are all in one group, and transfers of known size in it"
    assumes = (
        "further ranks are like the recorded ones and on a like network, their noise is independent and "
        "normal, and the batch of each rank stays: that of the job grows with it"
    )
    source = (
        "costs of ring, tree or halving for so many ranks (Thakur et al., IJHPCA 2005); waiting for the "
        "slowest: the expected largest of n normal deviates (Blom, 1958) times the noise of work between "
        "collectives"
    )
    dp: int = key("how many data-parallel ranks", least=2)
    now: str = key("which algorithm runs; ring without", "", choices=FLAT)
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Scale the transfers, and let each begin later by what the slowest of so many is later."""
        (changed,) = self._with_noise(graph, 1.0)
        return changed

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """With no more noise than now, and with twice what is expected."""
        return self._with_noise(graph, 0.0, 2.0)

    def _with_noise(self, graph: Graph, *times: float) -> tuple[Graph, ...]:
        """The wider job with multiples of the noise that is expected."""
        ranks = _one_group(graph)
        if ranks == self.dp:
            return (graph,) * len(times)
        scaled = graph.with_durations(self._transfers(graph, ranks))
        later = (largest_of(self.dp) - largest_of(ranks)) * _noise_before(graph)
        lag = graph.edges.lag
        return tuple(scaled.with_lags(lag + np.rint(each * later).astype(np.int64)) for each in times)

    def _transfers(self, graph: Graph, ranks: int) -> NDArray[np.int64]:
        """[N] ns, with transfers that take what they do among so many ranks."""
        nodes, lines, duration = graph.nodes, fit_costs(graph), graph.nodes.duration.copy()
        for sort, messages in sorts(graph).items():
            if sort not in lines:
                raise Unanswerable(f"too few transfers of known size to tell what {sort[0]} costs")
            mine = np.flatnonzero(np.isin(nodes.message, messages) & (nodes.bytes > 0))
            algorithm = recorded_algorithm(graph, sort[0]) or self.now or RING
            spent = cost(sort[0], algorithm, ranks)
            link, num_bytes = link_of(lines[sort], spent), nodes.bytes[mine].astype(np.float64)
            after = time_ns(cost(sort[0], algorithm, self.dp), link, num_bytes)
            ratio = after / np.maximum(time_ns(spent, link, num_bytes), 1e-9)
            duration[mine] = np.rint(duration[mine] * ratio).astype(np.int64)
        return duration

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def describe(self) -> str:
        """What is changed."""
        return f"{self.dp} data-parallel ranks"

    def how(self) -> str:
        """How to do it."""
        return f"torchrun with {self.dp} processes in all; look after the learning rate"


def _one_group(graph: Graph) -> int:
    """How many ranks the job's one group has.

    Raises:
        Unanswerable: there are several, or it is not told.
    """
    require_communication(graph)
    groups = {(message.group, message.num_ranks) for message in graph.messages}
    if len(groups) > 1:
        raise Unanswerable("ranks talk in several groups: which are data-parallel is not told apart")
    ((_, ranks),) = groups
    if ranks < 2:
        raise Unanswerable("how many ranks are in the group is not known")
    return ranks


def largest_of(count: int) -> float:
    """What the largest of so many normal deviates is expected to be, in standard deviations (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _noise_before(graph: Graph) -> Floats:
    """[E] ns, on edges from a rendezvous to its transfers: how the work before it varies; 0 on others."""
    nodes, edges = graph.nodes, graph.edges
    spread = np.zeros(graph.edges.lag.size)
    deviation = _deviation_of_sections(graph)
    met = (edges.kind == EdgeKind.RENDEZVOUS) & (nodes.kind[edges.target] == NodeKind.TRANSFER)
    arrives = (edges.kind == EdgeKind.RENDEZVOUS) & (nodes.kind[edges.source] == NodeKind.ARRIVE)
    section = np.full(graph.num_nodes, -1)
    section[edges.target[arrives]] = nodes.section[edges.source[arrives]]
    spread[met] = [deviation.get(at, 0.0) for at in section[edges.source[met]].tolist()]
    return spread


def _deviation_of_sections(graph: Graph) -> dict[int, float]:
    """Of each section of a step how long its work deviates from what its rank usually takes, ns."""
    work = section_work(graph)
    if (work["resource"] == ON_GPU).any():
        work = work.filter(pl.col("resource") == ON_GPU)
    whole = work.group_by("rank", "step", "position").agg(pl.col("work_ns").sum())
    usual = pl.col("work_ns").median().over("rank", "position")
    spread = (
        whole.with_columns(off=(pl.col("work_ns") - usual).abs())
        .group_by("position")
        .agg(mad=pl.col("off").median(), count=pl.len())
        .filter(pl.col("count") >= FEWEST)
    )
    return {
        int(at): MAD_TO_DEVIATION * float(mad) for at, mad in spread.select("position", "mad").iter_rows()
    }
