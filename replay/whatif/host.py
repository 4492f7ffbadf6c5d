"""Change what the host costs: launches, the CPU's speed, and its waits for the GPU.

Its input is the business of `dpro.replay.whatif.input`, its garbage of `dpro.replay.whatif.garbage`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key, nearest
from dpro.replay.whatif.input import DATA_LOADING
from dpro.replay.whatif.inside import inside_spans
from dpro.replay.whatif.scale import scaled
from dpro.replay.whatif.select import Selection, fitting

Bools = NDArray[np.bool_]


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


LONGEST_PAUSE_NS = 1_000_000  # of Python between two launches that a graph takes in


@dataclass(frozen=True)
class CudaGraph(Edit):
    """What the host launches between two waits becomes one CUDA graph, launched once."""

    name = "cuda-graph"
    summary = "between two waits the host launches once"
    example = "cuda-graph"
    needs = "launches"
    assumes = (
        "shapes are static, what the host does between launches is part of what is captured, but for code in "
        "no operator that takes more than 1 ms, and replaying it costs what its first launch did"
    )
    source = "CPU time from the end of the first launch to the end of the last, between two waits, is 0"
    selection: Selection
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Make the CPU time behind the first launch of each stretch free, up to the last launch."""
        chosen = self.selection.chosen(graph)
        replayed = _captured(graph, chosen)
        if not replayed.any():
            raise Unanswerable(
                "nowhere are two launches selected without a wait between them: record with GPU activities; "
                "of operation-level traces no-launch tells what launches cost"
            )
        return graph.with_durations(np.where(replayed, 0, graph.nodes.duration))

    def describe(self) -> str:
        """What is changed."""
        return "one launch per CUDA graph, from wait to wait"

    def how(self) -> str:
        """How to do it."""
        return "torch.compile(mode='reduce-overhead'), or torch.cuda.make_graphed_callables by hand"


def _captured(graph: Graph, chosen: Bools) -> Bools:
    """[N] CPU work behind the first and up to the last chosen launch between two waits on a thread."""
    nodes, edges = graph.nodes, graph.edges
    calls = _launching_calls(graph, edges.kind == EdgeKind.LAUNCH) & chosen
    woken = np.zeros(graph.num_nodes, np.bool_)
    woken[edges.target[edges.kind == EdgeKind.SYNC]] = True
    outside = (nodes.around >= 0) & fitting(graph.names, DATA_LOADING)[nodes.around]
    host = np.isin(nodes.kind, (NodeKind.HOST, NodeKind.GAP))
    outside |= host & (nodes.duration > LONGEST_PAUSE_NS)  # it does something, not just the next launch
    on_cpu = np.flatnonzero(np.isin(nodes.kind, CPU_KINDS))
    order = on_cpu[
        np.lexsort((on_cpu, nodes.measured_start[on_cpu], nodes.lane[on_cpu], nodes.window[on_cpu]))
    ]
    same = (nodes.lane[order], nodes.window[order], nodes.step[order], outside[order])
    opens = np.append(True, np.any([np.diff(column) != 0 for column in same], axis=0)) | woken[order]
    stretch = np.cumsum(opens) - 1
    at = np.arange(order.size)
    launching = calls[order]
    first = np.full(order.size, order.size)
    np.minimum.at(first, stretch[launching], at[launching])
    last = np.full(order.size, -1)
    np.maximum.at(last, stretch[launching], at[launching])
    inside = (at > first[stretch]) & (at <= last[stretch]) & ~outside[order]
    captured = np.zeros(graph.num_nodes, np.bool_)
    captured[order[inside]] = True
    return captured & chosen


@dataclass(frozen=True)
class Cpu(Edit):
    """The host's CPU works faster, launches included."""

    name = "cpu"
    summary = "the host's CPU is faster"
    example = "cpu:factor=2"
    needs = "CPU work, or launch delays of whole operations"
    assumes = "all CPU work speeds up alike, and the GPU and the network do not"
    source = "CPU durations / factor"
    factor: float = key("how many times as fast", 2.0, least=1 / MOST_TIMES)
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Divide the durations of all CPU work."""
        mask = np.isin(graph.nodes.kind, (*CPU_KINDS, NodeKind.DELAY)) & (graph.nodes.rank >= 0)
        if not mask.any():
            raise Unanswerable("the run holds no CPU work: record with CPU activities")
        return graph.with_durations(scaled(graph, mask, 1 / self.factor))

    def describe(self) -> str:
        """What is changed."""
        return f"a CPU {self.factor:g} times as fast"

    def how(self) -> str:
        """How to do it."""
        if self.factor < 1:
            return "nothing to do: it shows what a slower CPU would cost"
        return "faster cores, ranks bound to cores of their own, OMP_NUM_THREADS, fewer Python calls per step"


@dataclass(frozen=True)
class NoSync(Edit):
    """The CPU does not wait for the GPU in selected calls."""

    name = "no-sync"
    summary = "selected calls do not wait for the GPU"
    example = "no-sync:within=aten::item"
    needs = "calls that wait for GPU work"
    assumes = "nothing on the host depends on what was waited for, or it is read some steps later"
    source = "the edges from GPU work to the CPU in those calls are gone"
    within: str = key("pattern for the call that waits, or any operator or range around it; all without", "")
    doubt: float = 0.1

    def apply(self, graph: Graph) -> Graph:
        """Take the waits away."""
        waits = _waits_for_gpu(graph)
        if not waits.any():
            raise Unanswerable("the CPU waits for the GPU in no call of the run")
        dropped = waits & _waiting_in(graph, self.within) if self.within else waits
        if not dropped.any():
            calls = {graph.names[name] for name in graph.nodes.name[graph.edges.target[waits]]}
            near = nearest(self.within, sorted(calls))
            raise Unanswerable(f"the CPU waits for the GPU nowhere in {self.within!r}{near}")
        return graph.without_edges(dropped)

    def describe(self) -> str:
        """What is changed."""
        return f"the CPU does not wait for the GPU {'in ' + self.within if self.within else 'anywhere'}"

    def how(self) -> str:
        """How to do it."""
        return (
            "keep losses and metrics on the GPU and read them every N steps; copy with non_blocking=True "
            "from pinned memory; leave out torch.cuda.synchronize()"
        )


def _waits_for_gpu(graph: Graph) -> Bools:
    """[E] edges from work on a GPU stream to the CPU that waits for it."""
    nodes, edges = graph.nodes, graph.edges
    on_stream = np.array([what.startswith("stream ") for _, what in graph.lanes] + [False], np.bool_)
    works = np.isin(nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER)) & on_stream[nodes.lane]
    waits: Bools = (edges.kind == EdgeKind.SYNC) & works[edges.source]
    return waits


def _waiting_in(graph: Graph, pattern: str) -> Bools:
    """[E] edges that end a wait in a span that fits, or in something inside one.

    The wait lies between two pieces of its thread. The later is what is left of the call that waited; where
    nothing is left of it, the earlier is the operator around it.
    """
    nodes, edges = graph.nodes, graph.edges
    inside = inside_spans(graph, pattern)
    before = np.full(graph.num_nodes, -1)
    thread = edges.kind == EdgeKind.THREAD
    before[edges.target[thread]] = edges.source[thread]
    earlier = (before >= 0) & inside[before] & (nodes.kind != NodeKind.RUNTIME)
    waiting: Bools = (inside | earlier)[edges.target]
    return waiting


def _launching_calls(graph: Graph, launch: NDArray[np.bool_]) -> NDArray[np.bool_]:
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[graph.edges.source[launch]] = True
    calls &= graph.nodes.kind == NodeKind.RUNTIME
    return calls


def _without_delays(graph: Graph, late: NDArray[np.bool_]) -> Graph:
    freed = graph.with_durations(np.where(late, 0, graph.nodes.duration))
    freed = freed.with_lags(np.maximum(graph.edges.lag, 0))
    return freed.without_edges(late[graph.edges.source])
