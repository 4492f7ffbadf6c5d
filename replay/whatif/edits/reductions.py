"""What all edits of the reductions of gradients share: what they ask of a run, and what it leaves open.

In: a graph. Out: how it reduces gradients, once as it is and once for each thing that the run does not say.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.cost.transfers import unknown_latencies
from dpro.replay.gradients.buckets import NOT_THERE, framework_of
from dpro.replay.graph import EdgeKind, Edges, Graph, Nodes, once
from dpro.replay.timeline import changed_durations, replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.reductions import (
    STEP,
    GradientReductions,
    Reduction,
    alternatives,
    calling,
    recorded_reductions,
    reduced,
)


class ReductionEdit(Edit):
    """A change to the reductions of gradients."""

    of_training = True

    @abstractmethod
    def changed(self, reductions: GradientReductions) -> Graph:
        """The graph of the changed job, or the same graph where nothing is to change.

        Raises:
            Unanswerable: the run lacks what the edit needs; the message says what.
        """

    def apply(self, graph: Graph) -> Graph:
        reductions = reduced(graph)
        changed = self.changed(reductions)
        return graph if changed is reductions.graph else changed

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """The changed graph at both ends of sizes and waits that the run does not show."""
        return tuple(self.changed(reductions) for reductions in alternatives(reduced(graph)))

    def wanted(self, reductions: GradientReductions) -> Sequence[Sequence[Reduction]]:
        """For each pass the reductions that it has then, where they are known without their order.

        Raises:
            Unanswerable: the run lacks what the edit needs.
        """
        return []

    def bound(self, facts: RunFacts) -> float:
        """What the step is longer than its busiest lane, or than with the calls of reductions alone."""
        reductions = reduced(facts.graph)
        columns = (reductions, facts.baseline, facts.timeline.end)
        idle = once(facts.graph, "idle but for reductions", columns, lambda: _idle(facts, reductions))
        return min(idle, facts.base_ns - _of_calls_alone(facts, reductions, self.wanted(reductions)))

    def bound_with(self, other: Edit, facts: RunFacts) -> float:
        """Two changes to reductions gain no more than none at all."""
        if not isinstance(other, ReductionEdit):
            return math.inf
        return facts.base_ns - _without_any(facts, reduced(facts.graph))

    def bound_on_top(self, before: RunFacts, after: RunFacts) -> float:
        """What the step is longer than without reductions and calls of them, where the nodes are the same."""
        if after.graph.nodes.measured_start is not before.graph.nodes.measured_start:
            return self.bound(after)
        return after.base_ns - _without_any(after, reduced(before.graph))

    def is_proven(self, graph: Graph) -> bool:
        """All pairs are of DDP jobs that recorded which gradients are in which reduction."""
        reductions = reduced(graph)
        return super().is_proven(graph) and reductions.is_recorded and not reductions.parameters.closes_before

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What to write in the job's framework; what is inferred; whose latency is not known."""
        reductions, framework = reduced(graph), framework_of(graph.run)
        said = f"in {framework}: {self.setting(reductions)}" if framework else ""
        return (*filter(None, (said,)), *reductions.notes(), *unknown_latencies(graph))

    def setting(self, reductions: GradientReductions) -> str:
        """How to do it for real in the job's framework, where that is another than DDP."""
        return NOT_THERE


def _idle(facts: RunFacts, reductions: GradientReductions) -> float:
    return facts.idle(facts.communication | calling(reductions))


def _of_calls_alone(
    facts: RunFacts, reductions: GradientReductions, wanted: Sequence[Sequence[Reduction]]
) -> float:
    """The mean step if reductions took no time but that of their calls, ns: moving data only adds to it."""
    graph = facts.graph
    columns = (*graph.nodes.columns, *graph.edges.columns)
    edges, nodes = once(graph, "no reductions", columns, lambda: _without(graph, reductions))
    edges = dataclasses.replace(edges, lag=_with_calls(edges, reductions, wanted))
    alone = dataclasses.replace(graph, nodes=nodes, edges=edges)
    timeline = replay(alone)
    return float(changed_durations(facts.baseline, alone, timeline.end).mean())


def _without_any(facts: RunFacts, reductions: GradientReductions) -> float:
    """The mean step if neither reductions nor calls of them took any time, ns."""
    graph = facts.graph

    def compute() -> float:
        edges, nodes = _without(graph, reductions)
        alone = dataclasses.replace(graph, nodes=nodes, edges=edges)
        timeline = replay(alone)
        return float(changed_durations(facts.baseline, alone, timeline.end).mean())

    columns = (graph.nodes.duration, graph.edges.lag, reductions)
    return once(graph, "a step without reductions", columns, compute)


def _without(graph: Graph, reductions: GradientReductions) -> tuple[Edges, Nodes]:
    """Edges and nodes of a graph whose reductions, and calls of them, take no time."""
    source, target = graph.edges.source, graph.edges.target

    def compute() -> tuple[Bools, Bools, Bools]:
        gone = recorded_reductions(reductions)
        return gone, gone | calling(reductions), gone[source] | gone[target]

    gone, free, waits = once(graph, "nodes and edges of reductions", (reductions, source, target), compute)
    left = graph.without_waits(waits)
    duration = np.where(free, 0, graph.nodes.duration)
    nodes = dataclasses.replace(
        graph.nodes, duration=duration, earliest=np.where(gone, 0, graph.nodes.earliest)
    )
    return left.edges, nodes


def _with_calls(edges: Edges, reductions: GradientReductions, wanted: Sequence[Sequence[Reduction]]) -> Ints:
    """[E] ns, lags with the calls of reductions: a thread goes on after the call that follows a gradient."""
    calls = [
        (int(backward.ready[reduction.called_after]), round(reduction.call_ns))
        for backward, pass_wanted in zip(reductions.passes, wanted)
        for reduction in pass_wanted
        if reduction.called_after != STEP
    ]
    if not calls:
        return edges.lag
    after, takes = np.array(calls, np.int64).T
    on_thread = np.flatnonzero(edges.kind == EdgeKind.THREAD)
    follows = np.full(reductions.graph.num_nodes, -1)
    follows[edges.source[on_thread]] = on_thread
    edge, lag = follows[after], edges.lag.copy()
    np.add.at(lag, edge[edge >= 0], takes[edge >= 0])
    return lag
