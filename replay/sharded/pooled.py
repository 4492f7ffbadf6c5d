"""What follows for all ranks from what each shows: lags, where in steps collectives are, and who meets.

In: the `ShareFacts` of all ranks, in any order. Out: a `Pooled`, of which each rank needs its own part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Ints
from dpro.replay.construction.lags import LagFacts, Lags, merged, pooled
from dpro.replay.construction.phases import Positions, positions_in_steps
from dpro.replay.sharded.share import ShareFacts

# Facts are summed up once there are those of this many ranks, so that they do not pile up.
TOGETHER = 64


@dataclass(frozen=True)
class PooledOfRank:
    """What a rank has to know of all others to be condensed.

    Attributes:
        rank: which.
        lags: of all ranks.
        origin_ns: when the first node of any rank began.
        shared: instances of collectives that several ranks ran, of those that it ran.
        positions: where in its steps its collectives stand.
    """

    rank: int
    lags: Lags
    origin_ns: int
    shared: Ints
    positions: Positions


@dataclass(frozen=True)
class Pooled:
    """What holds for all ranks.

    Attributes:
        lags: of work.
        origin_ns: when the first node of any rank began.
        shared: by rank, instances of collectives that several ranks ran, of those that it ran.
        positions: by rank, where in its steps its collectives stand.
        background: spans that were left out.
        steps_known: whether the run says where steps begin.
        num_nodes: how many nodes all ranks have.
    """

    lags: Lags
    origin_ns: int
    shared: dict[int, Ints]
    positions: dict[int, Positions]
    background: int
    steps_known: bool
    num_nodes: int

    def of(self, rank: int) -> PooledOfRank:
        """What one rank needs.

        Args:
            rank: which.
        """
        positions = self.positions.get(rank, {})
        return PooledOfRank(rank, self.lags, self.origin_ns, self.shared[rank], positions)


def pool(facts: Iterable[ShareFacts]) -> Pooled:
    """Pool what all ranks show; the order in which they come makes no difference.

    Args:
        facts: of every rank.
    """
    waiting: list[LagFacts] = []
    parts: list[ShareFacts] = []
    for each in facts:
        waiting.append(each.lags)
        parts.append(each)
        if len(waiting) == TOGETHER:
            waiting = [merged(waiting)]
    parts.sort(key=lambda each: each.rank)
    found, members = np.unique(np.concatenate([each.instance for each in parts]), return_counts=True)
    several = found[members > 1]
    return Pooled(
        lags=pooled(waiting),
        origin_ns=min(each.begins for each in parts),
        shared={each.rank: each.instance[np.isin(each.instance, several)] for each in parts},
        positions=positions_in_steps(calls for each in parts for calls in each.calls),
        background=sum(each.background for each in parts),
        steps_known=any(each.steps_known for each in parts),
        num_nodes=sum(each.num_nodes for each in parts),
    )
