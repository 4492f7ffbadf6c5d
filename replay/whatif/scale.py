"""Make any selection of work faster or slower, give it another length, or take it out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key
from dpro.replay.whatif.inside import calls_of, with_inside
from dpro.replay.whatif.select import Selection
from dpro.units import NS_PER_US

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Scale(Edit):
    """Multiply the time of selected work by a factor."""

    name = "scale"
    summary = "selected work takes a multiple of its time"
    example = "scale:name=aten::mm,factor=0.5"
    needs = "work that fits the selection"
    assumes = "nothing else changes"
    source = "duration * factor"
    proof = "layers twice as fast, gloo; a sleep, 4 V100"
    is_advice = False
    selection: Selection
    factor: float = key("multiple of the time that it takes", 0.5, least=0)
    doubt: float = 0.05

    def apply(self, graph: Graph) -> Graph:
        """Scale durations, rounded to whole nanoseconds."""
        return graph.with_durations(scaled(graph, self.selection.chosen(graph), self.factor))

    def describe(self) -> str:
        """What is changed."""
        return f"{self.selection.describe()} takes {self.factor:.0%} of its time"

    def how(self) -> str:
        """How to do it."""
        if self.factor > 1:
            return "nothing to do: it shows what slower work would cost"
        return "a faster implementation of the selected work"


@dataclass(frozen=True)
class Remove(Edit):
    """Take selected work out: its time, what it calls, launches for it alone, waits in its collectives.

    Where kinds of work are asked for, it is those alone, and not what they call.
    """

    name = "remove"
    summary = "selected work is not done, nor what it calls and launches"
    example = "remove:name=*dropout*"
    needs = "work that fits the selection"
    assumes = "nothing else needs its result"
    source = "duration 0 of the work and of calls that launch nothing else; no rendezvous"
    is_advice = False
    selection: Selection
    doubt: float = 0.05

    def apply(self, graph: Graph) -> Graph:
        """The graph without it; nodes stay, so that what came after it still comes after what came before."""
        mask = self.selection.chosen(graph)
        return without(graph, mask if self.selection.kind else with_inside(graph, mask))

    def describe(self) -> str:
        """What is changed."""
        return f"{self.selection.describe()} is not done"

    def how(self) -> str:
        """How to do it."""
        return "leave the work out of the model or the loop"


@dataclass(frozen=True)
class Replace(Edit):
    """Give each selected span another length."""

    name = "replace"
    summary = "selected spans take a given time each"
    example = "replace:name=*softmax*,us=12.5"
    needs = "work that fits the selection"
    assumes = "the replacement was measured on the same hardware, and nothing else changes"
    source = "a given duration"
    is_advice = False
    selection: Selection
    us: float = key("how long each span takes by itself, microseconds", least=0, most=MOST_TIMES * MOST_TIMES)
    doubt: float = 0.05

    def apply(self, graph: Graph) -> Graph:
        """Stretch the nodes of each span so that they last as long together."""
        mask = self.selection.chosen(graph)
        return graph.with_durations(lasting(graph, mask, self.us * NS_PER_US))

    def describe(self) -> str:
        """What is changed."""
        return f"{self.selection.describe()} takes {self.us:g} us each time"

    def how(self) -> str:
        """How to do it."""
        return "put the other implementation in, whose time was measured by itself"


def scaled(graph: Graph, mask: Bools, factor: float | NDArray[np.float64]) -> Ints:
    """[N] durations with those of the masked nodes times a factor, of which there may be one each."""
    duration = graph.nodes.duration.copy()
    duration[mask] = np.rint(duration[mask] * factor).astype(np.int64)
    return duration


def lasting(graph: Graph, mask: Bools, span_ns: float) -> Ints:
    """[N] durations with which the masked nodes of each span last so long together, as they were divided."""
    nodes = graph.nodes
    duration = nodes.duration.copy()
    picked = np.flatnonzero(mask)
    if picked.size == 0:
        return duration
    alone = np.where(nodes.span[picked] >= 0, -1, picked)
    keys = np.stack([nodes.rank[picked], nodes.window[picked], nodes.span[picked], alone])
    _, of = np.unique(keys, axis=1, return_inverse=True)
    of = of.reshape(-1)
    order = np.argsort(of, kind="stable")
    total = np.bincount(of, duration[picked])
    weight = np.where(total[of] > 0, duration[picked], 1)[order]  # a span of no length is divided evenly
    whole = np.bincount(of[order], weight)[of[order]]
    first = np.append(True, np.diff(of[order]) != 0)
    summed = np.cumsum(weight)
    summed -= (summed - weight)[first][np.cumsum(first) - 1]
    # Round where the pieces end, not how long they are: so the sum is exact.
    ends = np.rint(summed * (span_ns / whole)).astype(np.int64)
    duration[picked[order]] = np.where(first, ends, np.diff(ends, prepend=0))
    return duration


def without(graph: Graph, mask: Bools) -> Graph:
    """The graph without the masked work, as `Remove` has it."""
    nodes, edges = graph.nodes, graph.edges
    mask = mask | _arriving(graph, mask)
    gone = mask | calls_of(graph, mask)
    duration = np.where(gone, 0, nodes.duration)
    lag = np.where(gone[edges.target], np.minimum(edges.lag, 0), edges.lag)
    unmet = (edges.kind == EdgeKind.RENDEZVOUS) & (mask[edges.source] | mask[edges.target])
    return graph.with_durations(duration).with_lags(lag).without_edges(unmet)


def _arriving(graph: Graph, mask: Bools) -> Bools:
    """[N] arrivals at collectives whose transfers are masked."""
    nodes = graph.nodes
    member = nodes.collective * (int(nodes.rank.max(initial=0)) + 2) + nodes.rank
    moved = mask & (nodes.kind == NodeKind.TRANSFER)
    arriving: Bools = (nodes.kind == NodeKind.ARRIVE) & np.isin(member, member[moved])
    return arriving
