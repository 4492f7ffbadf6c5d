"""Change what the host costs: launches for free, input that is always ready."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.scale import Scale
from dpro.replay.whatif.select import Selection

DATA_LOADING = "enumerate(DataLoader)*"


@dataclass(frozen=True)
class NoLaunch(Edit):
    """Launching GPU work costs the CPU nothing and the work is there at once."""

    name = "no-launch"
    summary = "launching GPU work is free"
    example = "no-launch"
    needs = "launches, or delays of whole operations"
    assumes = "shapes are static and nothing synchronises inside"
    source = "launching calls and launch latencies of 0"
    doubt: float = 0.2

    def apply(self, graph: Graph) -> Graph:
        """Make launching calls and launch latencies free; a latency that was negative stays.

        Launches that were not recorded, only how late work began, go altogether: their order on the host, and
        what the clock's noise made negative, too.
        """
        late = graph.nodes.kind == NodeKind.DELAY
        if late.any():
            return _without_delays(graph, late)
        launch = graph.edges.kind == EdgeKind.LAUNCH
        calls = _launching_calls(graph, launch)
        if not calls.any():
            raise Unanswerable("the run holds no GPU launches")
        duration = np.where(calls, 0, graph.nodes.duration)
        return graph.with_durations(duration).with_lags(
            np.where(launch, np.minimum(graph.edges.lag, 0), graph.edges.lag)
        )

    def describe(self) -> str:
        """What is changed."""
        return "launching GPU work is free"

    def how(self) -> str:
        """How to do it."""
        return "CUDA graphs (torch.compile(mode='reduce-overhead'))"


@dataclass(frozen=True)
class HideInput(Edit):
    """The training loop never waits for its input."""

    name = "hide-input"
    summary = "the step never waits for its DataLoader"
    example = "hide-input"
    needs = "the DataLoader's annotation, which torch.profiler and dpro record"
    assumes = "there are free cores for the workers and a source that can keep up"
    source = "time inside the DataLoader's `__next__` of 0"
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Make the time inside the DataLoader's `__next__` free."""
        return Scale(Selection(within=DATA_LOADING), 0.0).apply(graph)

    def describe(self) -> str:
        """What is changed."""
        return "the input is ready when the step asks for it"

    def how(self) -> str:
        """How to do it."""
        return "DataLoader(num_workers=N, prefetch_factor=…, pin_memory=True) with enough workers"


def _launching_calls(graph: Graph, launch: NDArray[np.bool_]) -> NDArray[np.bool_]:
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[graph.edges.source[launch]] = True
    calls &= graph.nodes.kind == NodeKind.RUNTIME
    return calls


def _without_delays(graph: Graph, late: NDArray[np.bool_]) -> Graph:
    freed = graph.with_durations(np.where(late, 0, graph.nodes.duration))
    freed = freed.with_lags(np.maximum(graph.edges.lag, 0))
    return freed.without_edges(late[graph.edges.source])
