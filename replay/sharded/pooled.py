"""What follows for all ranks from what each shows: lags, and where in steps collectives are.

In: the `ShareFacts` of all ranks, in any order. Out: a `Pooled`, of which each rank needs its own part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
        positions: where in its steps its collectives stand.
        on_gpu: whether any rank has work on a GPU.
    """

    rank: int
    lags: Lags
    origin_ns: int
    positions: Positions
    on_gpu: bool


@dataclass(frozen=True)
class Pooled:
    """What holds for all ranks.

    Attributes:
        lags: of work.
        origin_ns: when the first node of any rank began.
        positions: by rank, where in its steps its collectives stand.
        background: spans that were left out.
        steps_known: whether the run says where steps begin.
        on_gpu: whether any rank has work on a GPU.
        num_nodes, num_edges: how many all ranks have, without those of rendezvous.
    """

    lags: Lags
    origin_ns: int
    positions: dict[int, Positions]
    background: int
    steps_known: bool
    on_gpu: bool
    num_nodes: int
    num_edges: int

    def of(self, rank: int) -> PooledOfRank:
        """What one rank needs."""
        positions = self.positions.get(rank, {})
        return PooledOfRank(rank, self.lags, self.origin_ns, positions, self.on_gpu)


def pool(facts: Iterable[ShareFacts]) -> Pooled:
    """Pool what all ranks show; the order in which they come makes no difference."""
    waiting: list[LagFacts] = []
    parts: list[ShareFacts] = []
    for each in facts:
        waiting.append(each.lags)
        parts.append(each)
        if len(waiting) == TOGETHER:
            waiting = [merged(waiting)]
    parts.sort(key=lambda each: each.rank)
    return Pooled(
        lags=pooled(waiting),
        origin_ns=min(each.begins for each in parts),
        positions=positions_in_steps(calls for each in parts for calls in each.calls),
        background=sum(each.background for each in parts),
        steps_known=any(each.steps_known for each in parts),
        on_gpu=any(each.on_gpu for each in parts),
        num_nodes=sum(each.num_nodes for each in parts),
        num_edges=sum(each.num_edges for each in parts),
    )
