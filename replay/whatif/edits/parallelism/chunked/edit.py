"""What edits share that cut stretches of work and collectives into chunks: what is cut, and what it costs.

In: a graph. Out: the graph with its segments as pipelines of chunks, once with what a chunk is expected to
cost besides, once with nothing, and once with the most.
"""

from __future__ import annotations

from abc import abstractmethod

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind, once
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.parallelism.chunked.costs import costs_of
from dpro.replay.whatif.edits.parallelism.chunked.rebuild import cut_nodes, with_chunks
from dpro.replay.whatif.edits.parallelism.chunked.segments import Segment
from dpro.replay.whatif.facts import RunFacts


class ChunkedEdit(Edit):
    """Segments of a graph cut into chunks that overlap."""

    chunks: int

    @abstractmethod
    def find(self, graph: Graph) -> list[Segment]:
        """The segments to cut; none where the run holds none."""

    @abstractmethod
    def why_none(self, graph: Graph) -> str:
        """Why there is nothing to cut."""

    def segments(self, graph: Graph) -> list[Segment]:
        """What is cut.

        Raises:
            Unanswerable: there is nothing to cut.
        """
        columns = (*graph.nodes.columns, graph.edges.source, graph.edges.lag, graph.messages)
        found: list[Segment] = once(graph, (self.name, self), columns, lambda: self.find(graph))
        if not found:
            raise Unanswerable(self.why_none(graph))
        return found

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def is_proven(self, graph: Graph) -> bool:
        """All pairs are of jobs on CPUs: what kernels beside a collective lose, they do not show."""
        return super().is_proven(graph) and not (graph.nodes.kind == NodeKind.KERNEL).any()

    def apply(self, graph: Graph) -> Graph:
        """Cut up all segments."""
        return self._with(graph, 0)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """With chunks that cost nothing besides, and with the most that they may cost."""
        return (self._with(graph, 1), self._with(graph, 2))

    def _with(self, graph: Graph, which: int) -> Graph:
        segments = self.segments(graph)
        if self.chunks == 1:
            return graph
        costs = costs_of(graph, *cut_nodes(segments, graph.num_nodes), self.chunks)
        return with_chunks(graph, segments, costs[which])
