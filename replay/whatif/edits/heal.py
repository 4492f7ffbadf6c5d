"""The edit that gives a rank, a host or a stage the speed of its peers.

Ranks of one role do the same work between one collective and the next. Healing removes the time by which a
rank's phases are typically longer than those of its peers, in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.errors import NothingToChange, Unanswerable, UsageError
from dpro.replay.graph import Graph, once
from dpro.replay.peers import (
    LABEL,
    PHASE,
    peer_medians,
    peers_of,
    phase_work,
    ranks_of_teams,
    teams_by_work,
    work_keys,
)
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import check, key
from dpro.replay.whatif.graph_ops.selected import absence_reason, ranks_at
from dpro.replay.whatif.rankwise import RankChanges

_NO_PEER = "rank {} has no peer in the run that calls the same collectives"


@dataclass(frozen=True)
class RanksAt:
    """A rank, all ranks of a host, or those of a pipeline stage; one of them must be given."""

    rank: int | None = key("rank number", None, least=0)
    host: str = key("pattern for the host", "")
    stage: int | None = key("pipeline stage; its peers are the other stages", None, least=0)

    def __post_init__(self) -> None:
        """Raise for ranks and stages below 0."""
        check(self, "ranks")

    def require_one(self, label: str) -> None:
        """Raise unless exactly one of rank, host and stage is given."""
        if sum([self.rank is not None, self.host != "", self.stage is not None]) != 1:
            raise UsageError(f"{label} needs one of rank=, host= and stage=, as in {label}:rank=1")

    def ranks(self, graph: Graph) -> list[int]:
        """Return the ranks.

        Raises:
            NothingToChange: there are none.
            Unanswerable: the run does not record where its ranks are.
        """
        ranks = ranks_at(graph, self.rank, self.host, self.stage)
        if not ranks:
            raise NothingToChange(absence_reason(graph, self.describe()))
        return ranks

    def describe(self) -> str:
        """Describe the given one in words."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"host {self.host}" if self.host else f"stage {self.stage}"


@dataclass(frozen=True)
class Heal(Edit):
    """A rank, all ranks of a host, or a pipeline stage take the median of their peers."""

    name = "heal"
    summary = "make a rank, host or stage as fast as its peers"
    example = "heal:rank=1"
    needs = "ranks that call the same collectives; for host=, other hosts; for stage=, other stages"
    assumes = "its peers do the same work"
    source = "ours: for each phase between collectives, the median over steps against the median of its peers"
    proof = "slow ranks of DDP, FSDP2 and tensor parallelism, 2 and 4 on gloo; a sleep, 4 V100"
    is_advice = False  # it says what a rank costs; what to do about it is in the finding
    effort = "code"
    place: RanksAt
    doubt: float = 0.1

    def __post_init__(self) -> None:
        """Raise unless exactly one of rank, host and stage is given."""
        super().__post_init__()
        self.place.require_one(self.name)

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return ranks that findings name or that decide most of the path; for stages, see edit `balance`."""
        if not facts.deciding_ranks:
            raise Unanswerable("the run has only one rank, so there are no peers")
        return [cls(RanksAt(rank)) for rank in facts.deciding_ranks]

    def bound(self, facts: RunFacts) -> float:
        return facts.of_ranks_on_path(self.place.ranks(facts.graph))

    def apply(self, graph: Graph) -> Graph:
        """Scale the work, phase by phase, down to the peers' median; never up."""
        return self._shortened(graph, phase_work(graph)).apply(graph)

    def within_ranks(self) -> RankChanges | None:
        return RankChanges(self.place.ranks, lambda job: self._shortened(job.graph, job.work))

    def _shortened(self, graph: Graph, work: pl.DataFrame) -> Shortened:
        ranks = self.place.ranks(graph)
        compared = healing_of_stages if self.place.stage is not None else healing
        return Shortened(compared(graph, ranks, work, apart=ranks))

    def on_operations(self) -> bool:
        """Return whether a stage is given: stages are compared by the work of their micro-batches."""
        return self.place.stage is not None

    def is_proven(self, graph: Graph) -> bool:
        """Return whether a rank is given: only single ranks were recorded before and after."""
        return self.place.rank is not None

    def describe(self) -> str:
        return f"{self.place.describe()} is as fast as its peers"

    def how(self) -> str:
        if self.place.stage is not None:
            return (
                f"give stage {self.place.stage} fewer layers, or split it, to match the work of other stages"
            )
        return f"run `dpro diagnose` to find what slows {self.place.describe()} down"


@dataclass(frozen=True)
class Shortened:
    """Work that is reduced to a share of its time.

    Attributes:
        ratios: `ratio`, and columns of `work_keys` that identify the work.
    """

    ratios: pl.DataFrame

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with these durations, rounded to whole nanoseconds."""
        return graph.with_durations(self.durations(graph))

    def durations(self, graph: Graph) -> Ints:
        """Return [N] the reduced durations of a graph's nodes, in ns."""
        by = [name for name in self.ratios.columns if name != "ratio"]
        keys = work_keys(graph, self.ratios["rank"].unique().to_list())
        joined = keys.join(self.ratios, on=by, maintain_order="left")
        durations, work = graph.nodes.duration.copy(), joined["node"].to_numpy()
        durations[work] = np.rint(durations[work] * joined["ratio"].to_numpy()).astype(np.int64)
        return durations

    def of(self, rank: int) -> Shortened:
        """Return the reductions of one rank only."""
        return Shortened(self.ratios.filter(pl.col("rank") == rank))


def healing(
    graph: Graph, ranks: Sequence[int], work: pl.DataFrame, apart: Collection[int] = ()
) -> pl.DataFrame:
    """Return the share of its time that each piece of work takes on healed ranks, for `Shortened`.

    For each phase of a step, and for CPU and GPU work separately, the rank's typical time (median over steps)
    is compared with its peers' (median over peers of their medians). The excess is removed from work that is
    longer than on the peers, identified by its name and the annotation around it, by one ratio for all steps:
    noise of single steps is left alone.

    Args:
        ranks: those to heal, each by itself: healing a rank changes no node of another.
        work: as from `phase_work`, of the steps that show what is typical.
        apart: ranks that do not count as peers.

    Returns:
        `rank`, the columns of `LABEL`, and `ratio`, below 1.

    Raises:
        Unanswerable: a rank is not in the run, or has no peer that went through the same phases.
    """
    return _healing(graph, ranks, work, ranks_of_teams(teams_by_work(work), apart))


def healing_of_stages(
    graph: Graph, ranks: Sequence[int], work: pl.DataFrame, apart: Collection[int]
) -> pl.DataFrame:
    """Return ratios of `healing` against all ranks of other stages, by kinds of work in the whole step.

    Args:
        work: as from `phase_work`.
        apart: ranks that do not count as peers.
    """
    whole_steps = work.with_columns(position=pl.lit(0, pl.Int64)).group_by("rank", "step", *LABEL)
    everyone = ranks_of_teams([work["rank"].unique().to_list()], apart)
    return _healing(graph, ranks, whole_steps.agg(pl.col("work_ns").sum()), everyone).drop("position")


def healing_in_each_step(rank: int, work: pl.DataFrame) -> pl.DataFrame:
    """Return ratios of healing in each step separately, for work that is longer in changing places.

    The excess of a rank's work over its peers' in the same step, in sum, is removed from the phases that are
    longer, in proportion; CPU and GPU work separately. Shorter phases count against it: noise is not a gain.

    Args:
        work: as from `phase_work`, of the steps that count.

    Raises:
        Unanswerable: the rank has no peer that went through the same phases.
    """
    peers, place = peers_of(teams_by_work(work), rank), ["step", *PHASE]
    if not peers:
        raise Unanswerable(_NO_PEER.format(rank))
    sums = work.group_by("rank", *place).agg(pl.col("work_ns").sum())
    of_rank = sums.filter(pl.col("rank") == rank).select("rank", *place, own="work_ns")
    of_peers = sums.filter(pl.col("rank").is_in(peers)).group_by(place).agg(_median_of(len(peers)))
    excess = pl.col("own") - pl.col("work_ns").fill_null(0)
    longer, excess_sum = excess.clip(lower_bound=0), excess.sum().over("step", "resource")
    taken = longer * (excess_sum / longer.sum().over("step", "resource")).clip(lower_bound=0.0)
    ratios = of_rank.join(of_peers, on=place, how="left").with_columns(ratio=1.0 - (taken / pl.col("own")))
    return ratios.select("rank", *place, pl.col("ratio").fill_nan(1.0))


def _healing(graph: Graph, ranks: Sequence[int], work: pl.DataFrame, peers: pl.DataFrame) -> pl.DataFrame:
    """Compute `healing` for given peers.

    Args:
        work: `phase_work`, of the steps that count.
        peers: all ranks, as from `ranks_of_teams`.
    """
    others = dict(peers.select("rank", "others").iter_rows())
    for rank in ranks:
        if rank not in others:
            raise Unanswerable(absence_reason(graph, f"rank {rank}"))
        if not others[rank]:
            raise Unanswerable(_NO_PEER.format(rank))
    phases = once(graph, "typical work of phases", lambda _: _typical(work, PHASE), (work,))
    labels = once(graph, "typical work by its names", lambda _: _typical(work, LABEL), (work,))
    is_healed = pl.col("rank").is_in(list(ranks))
    compared = peers.filter(pl.col("team").is_in(peers.filter(is_healed)["team"].unique().implode()))
    phase = _excess(phases, compared, PHASE).select("rank", *PHASE, whole=pl.col("excess"))
    parts = pl.col("excess").sum().over("rank", *PHASE)
    longer = _excess(labels, compared, LABEL).filter(is_healed).sort("rank", *LABEL).with_columns(parts=parts)
    # Below 1 for work that makes a rank slower than its peers.
    taken = pl.col("excess") * (pl.col("whole") / pl.col("parts")).clip(upper_bound=1.0) / pl.col("own")
    return longer.join(phase, on=["rank", *PHASE]).select("rank", *LABEL, ratio=1.0 - taken)


def _typical(work: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Return the typical time of each rank per step: `rank`, `work_ns` and the columns of `by`."""
    num_steps = work["step"].n_unique()
    per_step = work.group_by("rank", "step", *by).agg(pl.col("work_ns").sum())
    return per_step.group_by("rank", *by).agg(_median_of(num_steps))


def _excess(typical: pl.DataFrame, peers: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Return each rank's typical excess over its peers per step: `own` and `excess` ns, where positive.

    A peer that never does a piece of work needs no time for it.

    Args:
        typical: as from `_typical`.
        peers: the compared ranks and their peers, as from `ranks_of_teams`.
        by: the columns that identify pieces of work.
    """
    rows = typical.join(peers, on="rank")
    pieces = rows.select("team", *by).unique().with_row_index("piece")
    rows = rows.join(pieces, on=["team", *by], maintain_order="left")
    peer = peer_medians(*(rows[name].to_numpy() for name in ("piece", "work_ns", "counts", "others")))
    excess = rows.select("rank", *by, own="work_ns", excess=pl.col("work_ns") - pl.Series(peer))
    return excess.filter(pl.col("excess") > 0)


def _median_of(count: int) -> pl.Expr:
    """Return the median of `work_ns` over `count` cases, where cases without a row are 0."""
    falling = pl.col("work_ns").sort(descending=True)
    middle = [falling.get(place, null_on_oob=True).fill_null(0) for place in ((count - 1) // 2, count // 2)]
    return ((middle[0] + middle[1]) / 2).alias("work_ns")
