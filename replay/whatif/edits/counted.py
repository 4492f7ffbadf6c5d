"""Edits that change each rank by itself, once something was counted on all of them.

Of a graph that is held as a whole all of it is counted at once; of condensed ranks each is counted by itself,
and the sums are what each is changed by.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from dpro.replay.graph import Graph, once
from dpro.replay.whatif.edit import Edit

Counts = dict[str, float]


class CountedEdit(Edit):
    """An edit for which numbers of the whole job matter, which are the sums of those of its ranks."""

    acts_on: ClassVar[Literal["transfers", "ranks", "peers", "job"]] = "ranks"

    @abstractmethod
    def counts(self, graph: Graph) -> Counts:
        """What a graph shows, of the whole job or of one of its ranks."""

    @abstractmethod
    def change(self, graph: Graph, counts: Counts) -> Graph:
        """The graph, of the whole job or of one of its ranks, as it is then.

        Raises:
            NothingToChange: it stays as it is.
            Unanswerable: the run lacks what the edit needs.
        """

    def ends(self, graph: Graph, counts: Counts) -> tuple[Graph, ...]:
        """As `bounds`."""
        return ()

    def least(self, graph: Graph, counts: Counts) -> Graph | None:
        """As `limit`."""
        return None

    def lines(self, counts: Counts) -> tuple[str, ...]:
        """As `notes`, of what was counted."""
        return ()

    def apply(self, graph: Graph) -> Graph:
        return self.change(graph, self._counted(graph))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        return self.ends(graph, self._counted(graph))

    def limit(self, graph: Graph) -> Graph | None:
        return self.least(graph, self._counted(graph))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        return self.lines(self._counted(graph))

    def _counted(self, graph: Graph) -> Counts:
        """`counts`, of one graph once."""
        edges = graph.edges
        columns = (*graph.nodes.columns, edges.source, edges.target, edges.kind, graph.run)
        return once(graph, ("counts", self), columns, lambda: self.counts(graph))
