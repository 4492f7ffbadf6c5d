"""How edits change a job rank by rank, so that one that is too large to be held as a whole answers them.

In: a job of which each rank has a graph of its own, and one joins them, with all transfers. Out: what an edit
does to these. An edit that changes each rank by itself derives from `RankwiseEdit`, one that changes nothing
but transfers from `TransferEdit`: of most, that says it all. `Edit.within_ranks` is for those that change
only some ranks, or have to know what all hold before they change one.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Self

from dpro.replay.graph import Graph, once
from dpro.replay.whatif.edit import Edit, RankChange

if TYPE_CHECKING:
    from dpro.replay.whatif.job import ReplayedJob

Counts = dict[str, float]


@dataclass(frozen=True)
class RankChanges:
    """What an edit does to a job of many ranks.

    Attributes:
        ranks: returns those that it may change, given the graph that joins all; None where it changes that
            graph itself.
        change: returns what it does to the graph of a rank, given the job, whose `map_ranks` asks all ranks;
            None where that is the edit itself.
    """

    ranks: Callable[[Graph], Sequence[int]] | None = attrgetter("ranks")
    change: Callable[[ReplayedJob], RankChange] | None = None


OF_TRANSFERS = RankChanges(ranks=None)


class RankwiseEdit(Edit):
    """An edit that changes each rank by itself, and finds what is worth changing in the graph of one."""

    def within_ranks(self) -> RankChanges | None:
        """The edit itself, in all ranks."""
        return RankChanges()


class TransferEdit(Edit):
    """An edit that changes nothing but transfers."""

    def within_ranks(self) -> RankChanges | None:
        """The edit itself, in the graph that joins the ranks."""
        return OF_TRANSFERS


@dataclass(frozen=True)
class CountedEdit(RankwiseEdit):
    """An edit that changes each rank by itself, for which numbers of the whole job matter.

    Attributes:
        counted: these numbers, the sums of `counts` of all ranks; None where the graph is of the whole job.
    """

    counted: Counts | None = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)

    @abstractmethod
    def counts(self, graph: Graph) -> Counts:
        """What a graph shows, of the whole job or of one of its ranks."""

    def counts_of_job(self, graph: Graph) -> Counts:
        """`counts` of the whole job, of one graph once.

        Args:
            graph: of the job, or of one of its ranks.
        """
        if self.counted is not None:
            return self.counted
        edges = graph.edges
        columns = (*graph.nodes.columns, edges.source, edges.target, edges.kind, graph.run)
        return once(graph, ("counts", self), columns, lambda: self.counts(graph))

    def within_ranks(self) -> RankChanges | None:
        """The edit with what all ranks count."""
        return RankChanges(change=self._with_counts)

    def _with_counts(self, job: ReplayedJob) -> Self:
        counted = Counter[str]()
        for counts in job.map_ranks(self.counts):
            counted.update(counts)
        return dataclasses.replace(self, counted=dict(counted))
