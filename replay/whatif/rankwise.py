"""Edits rank by rank, so that jobs too large for one graph can answer them.

Takes a job with a graph for each rank, and one that joins them, with all transfers; describes what an edit
changes in these. An edit that changes each rank separately derives from `RankwiseEdit`, one that changes only
transfers from `TransferEdit`: most need nothing else. `Edit.within_ranks` is for edits that change only some
ranks, or need facts of all ranks before they change one.
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
    """Effect of an edit on a job of many ranks.

    Attributes:
        ranks: returns the ranks that it may change, given the graph that joins all; None where it changes
            that graph itself.
        change: returns the change of each rank's graph, given the job, whose `map_ranks` reads all ranks;
            None where that is the edit itself.
    """

    ranks: Callable[[Graph], Sequence[int]] | None = attrgetter("ranks")
    change: Callable[[ReplayedJob], RankChange] | None = None


OF_TRANSFERS = RankChanges(ranks=None)


class RankwiseEdit(Edit):
    """An edit that changes each rank separately, and finds its candidates in the graph of one."""

    def within_ranks(self) -> RankChanges | None:
        """Return the edit itself, for all ranks."""
        return RankChanges()


class TransferEdit(Edit):
    """An edit that changes only transfers."""

    def within_ranks(self) -> RankChanges | None:
        """Return the edit itself, for the graph that joins the ranks."""
        return OF_TRANSFERS


@dataclass(frozen=True)
class CountedEdit(RankwiseEdit):
    """An edit that changes each rank separately, given counts over the whole job.

    Attributes:
        counted: sums of `counts` over all ranks; None where the graph is of the whole job.
    """

    counted: Counts | None = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)

    @abstractmethod
    def counts(self, graph: Graph) -> Counts:
        """Return the counts of a graph, of the whole job or of one of its ranks."""

    def counts_of_job(self, graph: Graph) -> Counts:
        """Return `counts` of the whole job, computed once per graph.

        Args:
            graph: of the job, or of one of its ranks.
        """
        if self.counted is not None:
            return self.counted
        return once(graph, ("counts", self), self.counts)

    def within_ranks(self) -> RankChanges | None:
        """Return the edit with the counts of all ranks."""
        return RankChanges(change=self._with_counts)

    def _with_counts(self, job: ReplayedJob) -> Self:
        counted = Counter[str]()
        for counts in job.map_ranks(self.counts):
            counted.update(counts)
        return dataclasses.replace(self, counted=dict(counted))
