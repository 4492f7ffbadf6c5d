"""Change the network: its bandwidth and latency, or take communication out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.costs import fit_costs, sorts, untold
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key
from dpro.units import NS_PER_US


def require_communication(graph: Graph) -> None:
    """Refuse a run without communication."""
    if not (graph.nodes.kind == NodeKind.TRANSFER).any():
        raise Unanswerable("the run holds no communication")


@dataclass(frozen=True)
class NoCommunication(Edit):
    """Collectives take no time and nobody waits in them: the bound for all communication work."""

    name = "no-comm"
    summary = "no communication at all: a bound"
    example = "no-comm"
    needs = "collectives"
    assumes = "nothing else changes"
    source = "the graph without its rendezvous; no formula"
    is_advice = False
    doubt: float = 0.0

    def apply(self, graph: Graph) -> Graph:
        """Make transfers free and take out the rendezvous: each rank runs by itself."""
        require_communication(graph)
        duration = np.where(graph.nodes.kind == NodeKind.TRANSFER, 0, graph.nodes.duration)
        return graph.with_durations(duration).without_edges(graph.edges.kind == EdgeKind.RENDEZVOUS)

    def describe(self) -> str:
        """What is changed."""
        return "no communication at all"

    def how(self) -> str:
        """How to do it."""
        return "cannot be done: it bounds what any change to communication can gain"


@dataclass(frozen=True)
class Network(Edit):
    """Collectives take less for their bytes, or for beginning; who waits for whom stays as it is."""

    name = "network"
    summary = "another bandwidth and latency of the network"
    example = "network:bandwidth=2,latency=1"
    needs = "collectives; to tell latency from bandwidth, sizes that vary twofold or more"
    assumes = "all groups share one network; where sizes do not vary, that transfer time is all bandwidth"
    source = (
        "Hockney 1994: time = latency + bytes / bandwidth, fitted to the run's own transfers; these told "
        "from waiting as by Lin et al., OSDI 2025, section 3.2"
    )
    proof = "links of 200, 500 and 1000 Mbit/s, gloo"
    is_advice = False
    bandwidth: float = key("multiple of the bandwidth", 2.0, least=1 / MOST_TIMES)
    latency: float = key("multiple of the latency", 1.0, least=0.0)
    doubt: float = 0.15

    def apply(self, graph: Graph) -> Graph:
        """Scale the two parts of each transfer, and the time by which transfers of one link may overlap."""
        require_communication(graph)
        nodes = graph.nodes
        transfer = nodes.kind == NodeKind.TRANSFER
        fixed = np.minimum(latencies(graph), nodes.duration)[transfer]
        duration = nodes.duration.copy()
        moving = (duration[transfer] - fixed) / self.bandwidth
        duration[transfer] = np.rint(self.latency * fixed + moving).astype(np.int64)
        changed = graph.with_durations(duration)
        if self.latency == 1:
            return changed
        overlap = _side_by_side(graph)
        lag = np.where(overlap, np.rint(graph.edges.lag * self.latency), graph.edges.lag)
        return changed.with_lags(lag.astype(np.int64))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def describe(self) -> str:
        """What is changed."""
        words = f"a network {self.bandwidth:g} times as fast"
        return words if self.latency == 1 else f"{words}, with {self.latency:g} times the latency"

    def how(self) -> str:
        """How to do it."""
        if self.bandwidth < 1 or self.latency > 1:
            return "nothing to do: it shows what a slower network would cost"
        return "faster links, or fewer bytes (gradient compression, bf16 reduction)"


@dataclass(frozen=True)
class Delay(Edit):
    """Collectives and messages take longer, whatever their size: a longer way."""

    name = "delay"
    summary = "a longer way: each transfer takes longer, whatever its size"
    example = "delay:us=500"
    needs = "collectives"
    assumes = (
        "large transfers take as much longer as small ones, where an algorithm that sends them in pieces may "
        "hide a part of the way"
    )
    source = "Hockney 1994: time = latency + bytes / bandwidth, with more latency"
    proof = "1 ms each way, gloo"
    is_advice = False
    us: float = key("what a small transfer takes longer, microseconds", least=0.0)
    doubt: float = 0.5

    def apply(self, graph: Graph) -> Graph:
        """Lengthen each transfer; those of one link are on their way at the same time."""
        require_communication(graph)
        added = round(NS_PER_US * self.us)
        duration = np.where(graph.nodes.kind == NodeKind.TRANSFER, added, 0) + graph.nodes.duration
        lag = np.where(_side_by_side(graph), graph.edges.lag - added, graph.edges.lag)
        return graph.with_durations(duration).with_lags(lag)

    def describe(self) -> str:
        """What is changed."""
        return f"each transfer takes {self.us:g} us longer"

    def how(self) -> str:
        """How to do it."""
        return "nothing to do: it shows what hosts further apart would cost"


def _side_by_side(graph: Graph) -> NDArray[np.bool_]:
    """[E] edges that say by how much a transfer may begin before the one ahead of it on its link ends."""
    nodes, edges = graph.nodes, graph.edges
    transfer = nodes.kind == NodeKind.TRANSFER
    between = transfer[edges.source] & transfer[edges.target] & (edges.kind == EdgeKind.STREAM)
    return np.asarray(between & (edges.lag < 0))


def latencies(graph: Graph) -> NDArray[np.int64]:
    """[N] ns of each transfer that do not depend on its bytes, as far as the run tells; else 0."""
    fixed = np.zeros(graph.num_nodes, np.int64)
    lines = fit_costs(graph)
    for sort, messages in sorts(graph).items():
        if sort in lines:
            fixed[np.isin(graph.nodes.message, messages)] = round(lines[sort].latency_ns)
    return fixed
