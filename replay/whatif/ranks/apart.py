"""What detectors ask of the ranks of a condensed job, one rank at a time.

In: a condensed job; functions of the graph of one rank; changes to such graphs. Out: the results of the
functions, and the joined graph of the changed job. A process builds each rank again and applies the changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.sharded.agreed import Spread
from dpro.replay.sharded.joined import inside_of, path_through
from dpro.replay.sharded.share import Share
from dpro.replay.sharded.skeleton import RankSkeleton, skeleton_of_share, skeletons_of_both
from dpro.replay.timeline import Stretch, Timeline, critical_stretches
from dpro.replay.whatif.edit import RankChange
from dpro.replay.whatif.ranks.changed import CondensedJob, with_ranks
from dpro.replay.whatif.ranks.rank import RankWork, rank_under_edits

T = TypeVar("T")
Changes = tuple[RankChange, ...]


@dataclass(frozen=True)
class RanksApart:
    """The ranks of a condensed job.

    Attributes:
        job: the job.
        spread: has the work on ranks done.
        changes: of its ranks, in order, beside its edits.
    """

    job: CondensedJob
    spread: Spread
    changes: Changes = ()

    @property
    def graph(self) -> Graph:
        """Their joined graph."""
        return self.job.joined.graph

    def look(self, look: Callable[[Graph], T], ranks: Iterable[int] | None = None) -> list[T]:
        """What a function returns of the graph of each rank.

        Args:
            look: the function; processes find it by its name.
            ranks: which, all where None.
        """
        return list(self.spread(partial(_look, look, self.changes), self._work(ranks)))

    def under(self, change: RankChange) -> RanksApart:
        """The same ranks under one more change.

        Raises:
            Unanswerable: no rank holds anything that it changes.
        """
        found = list(self.spread(partial(_changed, change, self.changes), self._work()))
        skeletons = [each for each in found if not isinstance(each, str)]
        if not skeletons:
            raise Unanswerable(next(iter(found)))
        job = dataclasses.replace(self.job, joined=with_ranks(self.job, skeletons))
        return RanksApart(job, self.spread, (*self.changes, change))

    def both(self, change: RankChange, ranks: Sequence[int]) -> tuple[Graph, Graph]:
        """Their joined graph as it is, and with ranks changed in how long they work: graphs of one shape."""
        found = list(self.spread(partial(_both, change, self.changes), self._work(ranks)))
        one, other = (with_ranks(self.job, [each[at] for each in found]).graph for at in (0, 1))
        return one, other

    def critical_stretches(self, timeline: Timeline) -> Iterator[Stretch]:
        """As `dpro.replay.timeline.critical_stretches`."""
        inside = inside_of(timeline, lambda rank: _built(self.changes, next(self._work([rank]))))
        return critical_stretches(timeline, path_through(self.job.joined, timeline, inside))

    def _work(self, ranks: Iterable[int] | None = None) -> Iterator[RankWork]:
        return self.job.work_on(self.job.condensed.agreed.ranks if ranks is None else ranks)


def _built(changes: Changes, work: RankWork) -> tuple[Share, Graph]:
    """A rank's share, and its graph under changes; those that change nothing of it are left out."""
    share, graph = rank_under_edits(work)
    for change in changes:
        try:
            graph = change.apply(graph)
        except Unanswerable:  # of this rank
            continue
    return share, graph


def _look(look: Callable[[Graph], T], changes: Changes, work: RankWork) -> T:
    return look(_built(changes, work)[1])


def _changed(change: RankChange, changes: Changes, work: RankWork) -> RankSkeleton | str:
    """The skeleton of a rank under one more change; why there is none where it changes nothing."""
    share, graph = _built(changes, work)
    try:
        return skeleton_of_share(work.own.rank, share, change.apply(graph))
    except Unanswerable as error:
        return str(error)


def _both(change: RankChange, changes: Changes, work: RankWork) -> tuple[RankSkeleton, RankSkeleton]:
    share, graph = _built(changes, work)
    return skeletons_of_both(work.own.rank, share, graph, change.apply(graph).nodes.duration)
