"""Change the network: make it faster, or take communication out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.errors import Unanswerable, UsageError
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import number

MOST_TIMES = 1e6  # beyond that times leave the range of int64 nanoseconds


def _require_communication(graph: Graph) -> None:
    if not (graph.nodes.kind == NodeKind.TRANSFER).any():
        raise Unanswerable("the run holds no communication")


@dataclass(frozen=True)
class NoCommunication:
    """Collectives take no time and nobody waits in them: the bound for all communication work."""

    doubt: float = 0.0

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        return "no-comm"

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
class Network:
    """Collectives move their data faster; who waits for whom stays as it is."""

    bandwidth: float = 2.0
    doubt: float = 0.25

    def __post_init__(self) -> None:
        """Refuse a bandwidth that is not positive."""
        least, most = 1 / MOST_TIMES, MOST_TIMES
        if not least <= self.bandwidth <= most:
            raise UsageError(f"network: bandwidth must be from {least:g} to {most:g}, not {self.bandwidth:g}")

    def __str__(self) -> str:
        """As `--edit` accepts it."""
        return f"network:bandwidth={number(self.bandwidth)}"

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
            return "nothing to do: it shows what a slower network would cost; assumes that all is bandwidth"
        return (
            "faster links, or fewer bytes (gradient compression, bf16 reduction); assumes that transfer time "
            "is all bandwidth, so small messages gain less than predicted"
        )
