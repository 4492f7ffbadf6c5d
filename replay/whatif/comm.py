"""Change the network: make it faster, or take communication out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key


def _require_communication(graph: Graph) -> None:
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
        _require_communication(graph)
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
    """Collectives move their data faster; who waits for whom stays as it is."""

    name = "network"
    summary = "collectives move their data faster"
    example = "network:bandwidth=2"
    needs = "collectives"
    assumes = "transfer time is all bandwidth, so small messages gain less than predicted"
    source = "transfer / bandwidth; transfer told from waiting as by Lin et al., OSDI 2025, section 3.2"
    bandwidth: float = key("how many times as fast", 2.0, least=1 / MOST_TIMES)
    doubt: float = 0.25

    def apply(self, graph: Graph) -> Graph:
        """Divide transfer times by the factor."""
        _require_communication(graph)
        transfer = graph.nodes.kind == NodeKind.TRANSFER
        duration = graph.nodes.duration.copy()
        duration[transfer] = np.rint(duration[transfer] / self.bandwidth).astype(np.int64)
        return graph.with_durations(duration)

    def describe(self) -> str:
        """What is changed."""
        return f"a network {self.bandwidth:g} times as fast"

    def how(self) -> str:
        """How to do it."""
        if self.bandwidth < 1:
            return "nothing to do: it shows what a slower network would cost"
        return "faster links, or fewer bytes (gradient compression, bf16 reduction)"
