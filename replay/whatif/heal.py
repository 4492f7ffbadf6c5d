"""Give a rank the speed of its peers.

The ranks of one job do alike work between one collective and the next. What a rank needs longer for such a
section than its peers typically do, and typically in every step, is what healing takes away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.edit import Edit, key

Ints = NDArray[np.int64]

ON_CPU, ON_GPU = 0, 1


@dataclass(frozen=True)
class Heal(Edit):
    """A rank takes the median of its peers."""

    name = "heal"
    summary = "a rank is as fast as its peers"
    example = "heal:rank=1"
    needs = "ranks that call the same collectives"
    assumes = "its peers do the same work"
    source = "ours: per section between collectives the median over steps, against the median of the peers'"
    rank: int = key("which rank", least=0)
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Scale the rank's work, section by section, down to its peers' median; never up."""
        return graph.with_durations(healed_durations(graph, [self.rank])[:, 0])

    def describe(self) -> str:
        """What is changed."""
        return f"rank {self.rank} is as fast as its peers"

    def how(self) -> str:
        """How to do it."""
        return f"`dpro diagnose` says what holds rank {self.rank} up"


def healed_durations(graph: Graph, ranks: list[int]) -> Ints:
    """Durations with one rank healed at a time.

    For each section of a step, and for CPU and GPU work apart, the rank's typical time (median over steps)
    is compared with its peers' (median over peers of their medians). What it needs more is taken away from
    the work that is longer there than on the peers, told by its name and the annotation around it, by the
    same ratios in every step: noise of single steps is left alone.

    Args:
        graph: the graph.
        ranks: which ranks, one scenario each.

    Returns:
        [N, len(ranks)] ns, nowhere longer than in the graph.

    Raises:
        Unanswerable: a rank is not in the run, or has no peer that went through the same sections.
    """
    work = section_work(graph)
    key = _work_keys(graph)
    durations = np.repeat(graph.nodes.duration[:, None], len(ranks), axis=1)
    for column, rank in enumerate(ranks):
        if rank not in work["rank"]:
            raise Unanswerable(f"rank {rank} is not in the run")
        ratios = _ratios(work, rank)
        mine = np.flatnonzero((key["rank"] == rank).to_numpy())
        factor = (
            key[mine]
            .join(ratios, on=LABEL, how="left", maintain_order="left")["ratio"]
            .fill_null(1.0)
            .to_numpy()
        )
        at = key["node"].to_numpy()[mine]
        durations[at, column] = np.rint(durations[at, column] * factor).astype(np.int64)
    return durations


SECTION = ["position", "resource"]
LABEL = [*SECTION, "name", "around"]


def _work_keys(graph: Graph) -> pl.DataFrame:
    """`node`, `rank`, `step` and what the node is compared by, for all nodes that are work in a step."""
    nodes = graph.nodes
    on_cpu = np.isin(nodes.kind, (*CPU_KINDS, NodeKind.DELAY))  # late launches are the host's work
    on_gpu = np.isin(nodes.kind, GPU_KINDS)
    node = np.flatnonzero((on_cpu | on_gpu) & (nodes.section >= 0) & (nodes.step >= 0))
    same = _names_alike(graph)
    return pl.DataFrame(
        {
            "node": node,
            "rank": nodes.rank[node],
            "step": nodes.step[node],
            "position": nodes.section[node],
            "resource": np.where(on_gpu[node], ON_GPU, ON_CPU),
            "name": same[nodes.name[node]],
            "around": np.where(nodes.around[node] >= 0, same[nodes.around[node]], -1),
        }
    )


def _names_alike(graph: Graph) -> Ints:
    """[len(names)] a code per name; names that differ in numbers only (`ProfilerStep#3`) share one."""
    plain = [re.sub(r"\d+", "0", name) for name in graph.names]
    return np.unique(np.array(plain), return_inverse=True)[1].astype(np.int64)


def section_work(graph: Graph) -> pl.DataFrame:
    """How long each rank worked in each section of each step, waits and transfers left out.

    Returns:
        `rank`, `step`, `position` (of the section in its step), `resource` (CPU 0, GPU 1), `name`, `around`
        (codes of names that are alike), `work_ns`.
    """
    keys = _work_keys(graph)
    return (
        keys.with_columns(work_ns=pl.Series(graph.nodes.duration[keys["node"].to_numpy()]))
        .group_by("rank", "step", *LABEL)
        .agg(pl.col("work_ns").sum())
        .sort("rank", "step", *LABEL)
    )


def _ratios(work: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Columns of `LABEL` and `ratio`, below 1, for the work that makes the rank slower than its peers."""
    peers = peers_of(work, rank)
    if not peers:
        raise Unanswerable(f"rank {rank} has no peer in the run that calls the same collectives")
    section = _excess(work, rank, peers, SECTION).select(*SECTION, whole=pl.col("excess"))
    longer = _excess(work, rank, peers, LABEL).with_columns(parts=pl.col("excess").sum().over(SECTION))
    taken = pl.col("excess") * (pl.col("whole") / pl.col("parts")).clip(upper_bound=1.0)
    return (
        longer.join(section, on=SECTION)
        .with_columns(ratio=1.0 - taken / pl.col("own"))
        .select(*LABEL, "ratio")
        .sort(LABEL)
    )


def _excess(work: pl.DataFrame, rank: int, peers: list[int], by: list[str]) -> pl.DataFrame:
    """What the rank typically needs more than its peers per step: `own` and `excess` ns, where positive.

    A peer that never does a piece of work needs no time for it.
    """
    num_steps = work["step"].n_unique()
    per_step = work.group_by("rank", "step", *by).agg(pl.col("work_ns").sum())
    typical = per_step.group_by("rank", *by).agg(_median_of(num_steps))
    own = typical.filter(pl.col("rank") == rank).rename({"work_ns": "own"}).drop("rank")
    theirs = (
        typical.filter(pl.col("rank").is_in(peers))
        .group_by(by)
        .agg(_median_of(len(peers)))
        .rename({"work_ns": "peer"})
    )
    return (
        own.join(theirs, on=by, how="left", nulls_equal=True)
        .with_columns(excess=pl.col("own") - pl.col("peer").fill_null(0))
        .filter(pl.col("excess") > 0)
    )


def _median_of(count: int) -> pl.Expr:
    """Median of `work_ns` over `count` cases, of which those without a row are 0."""
    falling = pl.col("work_ns").sort(descending=True)
    middle = [falling.get(at, null_on_oob=True).fill_null(0) for at in ((count - 1) // 2, count // 2)]
    return ((middle[0] + middle[1]) / 2).alias("work_ns")


def peers_of(work: pl.DataFrame, rank: int) -> list[int]:
    """Other ranks whose steps fall into as many sections."""
    sections = work.group_by("rank").agg(pl.col("position").max())
    own = sections.filter(pl.col("rank") == rank)["position"]
    same = sections.filter((pl.col("rank") != rank) & pl.col("position").is_in(own.to_list()))
    return sorted(same["rank"].to_list())
