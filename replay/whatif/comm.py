"""Change the network: its bandwidth and latency, or take communication out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.costs import fit_costs, sorts, untold
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key


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
    example = "network:bandwidth=2,latency=1,added_us=0"
    needs = "collectives; to tell latency from bandwidth, sizes that vary twofold or more"
    assumes = "all groups share one network; where sizes do not vary, that transfer time is all bandwidth"
    source = (
        "Hockney 1994: time = latency + bytes / bandwidth, fitted to the run's own transfers; these told "
        "from waiting as by Lin et al., OSDI 2025, section 3.2"
    )
    bandwidth: float = key("multiple of the bandwidth", 2.0, least=1 / MOST_TIMES)
    latency: float = key("multiple of the latency", 1.0, least=0.0)
    added_us: float = key("what each transfer takes longer, us: of a small one, as measured", 0.0, least=0.0)
    doubt: float = 0.15

    def apply(self, graph: Graph) -> Graph:
        """Scale the two parts of each transfer, and the time by which transfers of one link may overlap."""
        require_communication(graph)
        nodes, edges = graph.nodes, graph.edges
        transfer = nodes.kind == NodeKind.TRANSFER
        fixed = np.minimum(latencies(graph), nodes.duration)[transfer]
        duration = nodes.duration.copy()
        moving = (duration[transfer] - fixed) / self.bandwidth
        added = round(1000 * self.added_us)
        duration[transfer] = np.rint(self.latency * fixed + moving).astype(np.int64) + added
        changed = graph.with_durations(duration)
        overlap = transfer[edges.source] & transfer[edges.target] & (edges.kind == EdgeKind.STREAM)
        overlap &= edges.lag < 0
        lag = np.where(overlap, np.rint(edges.lag * self.latency) - added, edges.lag).astype(np.int64)
        return changed if np.array_equal(lag, edges.lag) else changed.with_lags(lag)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def describe(self) -> str:
        """What is changed."""
        words = f"a network {self.bandwidth:g} times as fast"
        words += "" if self.latency == 1 else f", with {self.latency:g} times the latency"
        return f"{words}, {self.added_us:g} us further" if self.added_us else words

    def how(self) -> str:
        """How to do it."""
        if self.bandwidth < 1 or self.latency > 1 or self.added_us:
            return "nothing to do: it shows what a slower network would cost"
        return "faster links, or fewer bytes (gradient compression, bf16 reduction)"


def latencies(graph: Graph) -> NDArray[np.int64]:
    """[N] ns of each transfer that do not depend on its bytes, as far as the run tells; else 0."""
    fixed = np.zeros(graph.num_nodes, np.int64)
    lines = fit_costs(graph)
    for sort, messages in sorts(graph).items():
        if sort in lines:
            fixed[np.isin(graph.nodes.message, messages)] = round(lines[sort].latency_ns)
    return fixed
