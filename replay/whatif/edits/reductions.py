"""What all edits of the reductions of gradients share: what they ask of a run, and what it leaves open.

In: a graph. Out: how it reduces gradients, once as it is and once for each thing that the run does not say.
"""

from __future__ import annotations

from abc import abstractmethod

from dpro.replay.graph import Graph
from dpro.replay.models.link_costs import unknown_latencies
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.reductions.recorded import (
    GradientReductions,
    alternatives,
    calling,
    reduced,
)


class ReductionEdit(Edit):
    """A change to the reductions of gradients."""

    @abstractmethod
    def changed(self, known: GradientReductions) -> Graph:
        """The graph of the changed job, or the same graph where nothing is to change.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    def apply(self, graph: Graph) -> Graph:
        known = reduced(graph)
        changed = self.changed(known)
        return graph if changed is known.graph else changed

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """The changed graph at both ends of sizes and waits that the run does not show."""
        return tuple(self.changed(known) for known in alternatives(reduced(graph)))

    def bound(self, facts: RunFacts) -> float:
        return facts.idle(facts.communication | calling(reduced(facts.graph)))

    def is_proven(self, graph: Graph) -> bool:
        """All pairs are of DDP jobs that recorded which gradients are in which reduction."""
        known = reduced(graph)
        return super().is_proven(graph) and known.is_recorded and not known.parameters.closes_before

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What is inferred of the reductions, and of which operations the latency is not known."""
        return (*reduced(graph).notes(), *unknown_latencies(graph))
