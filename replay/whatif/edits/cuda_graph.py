"""The edit that captures CUDA graphs, with the host time that a capture removes according to the trace.

A capture contains GPU work launched by operators, and removes their dispatch and launches. It cannot contain
synchronisation, copies between host and device, or data loading. Host time outside operators may be Python
between two operators, which a capture removes, or logging, which it does not: the trace does not show which,
so the prediction keeps it, and its interval extends to its removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.errors import NothingToChange
from dpro.replay.construction.cpu_threads import merge_intervals
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, is_one_of, once
from dpro.replay.kept import kept
from dpro.replay.timeline import differs_from_last
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.host import LAUNCHES, free_host, num_launches, require_launches
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING, OPTIMIZER, nesting_of, rows_of
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.rankwise import CountedEdit, Counts
from dpro.units import format_duration

MAX_PAUSE_NS = 1_000_000  # longer code outside operators does work that a capture does not remove
# Launching a graph of 2,534 kernels took 1.4 to 2.2 us per kernel on an H200, under a profiler.
MAX_NODE_NS = 2_200
# Calls that fail while a stream is captured, and launches of existing graphs.
NOT_CAPTURED = (
    *("*StreamSynchronize*", "*EventSynchronize*", "*DeviceSynchronize*", "*CtxSynchronize*"),
    "*ThreadSynchronize*",
    *("cudaMemcpy", "hipMemcpy", "cudaMemcpy_v*", "hipMemcpyWithStream", "*GraphLaunch*"),
)
# Copies between host and device: their host addresses change from step to step.
HOST_COPIES = ("*HtoD*", "*DtoH*", "*HostToDevice*", "*DeviceToHost*", "*Host -> *", "*-> Host*")
# Ranges of frameworks around code that a capture contains.
FRAMEWORK = (
    *("Optimizer.step#*", "Optimizer.zero_grad#*", "dpro::backward"),
    *("Torch-Compiled Region*", "## Call CompiledFxGraph*"),
)


OF_OPTIMIZER = NodeSelection(module=f"{OPTIMIZER}*")
SHARE_OF_OPTIMIZER = 0.05  # of the step: host work of the optimizer that is worth a graph for it alone


@dataclass(frozen=True)
class CudaGraph(CountedEdit):
    """GPU work that operators launch between two uncapturable points becomes one CUDA graph."""

    name = "cuda-graph"
    of_torch = True
    summary = "launch capturable operators as CUDA graphs"
    example = "cuda-graph"
    needs = "launches"
    assumes = (
        "shapes are static, and launching a graph costs as much as its first launch; the interval "
        "extends to 2.2 us more per kernel, and to capturing host code outside of operators, too"
    )
    source = (
        "ours: between two calls that cannot be captured (synchronisation, copies between host and "
        "device, data loading), launching operators take no CPU time from the first launch to the last"
    )
    effort = "line"
    selection: NodeSelection
    doubt: float = 0.3

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits of all capturable work; and of the optimizer alone, where the step waits for it."""
        require_launches(facts.graph)
        return [cls(NodeSelection()), *([cls(OF_OPTIMIZER)] if _awaits_optimizer(facts) else [])]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(facts.on_cpu & self.selection.mask(facts.graph))

    def counts(self, graph: Graph) -> Counts:
        """Return the host time in total, captured, and not known to be captured or to stay, ns."""
        nodes = graph.nodes
        inside = is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0)
        columns = {name: getattr(nodes, name)[inside] for name in ("rank", "window", "step")}
        begins = differs_from_last(*columns.values())
        steps = pl.DataFrame({name: column[begins] for name, column in columns.items()})
        counts = {LAUNCHES: num_launches(graph), "steps": steps.n_unique(), "taken": 0.0, "open": 0.0}
        counts["whole"] = float(nodes.duration[inside].sum())
        with suppress(NothingToChange):
            host_time = self._captured(graph)
            for name, mask in (("taken", host_time.taken), ("open", host_time.open)):
                counts[name] = float(nodes.duration[mask & inside].sum())
        return counts

    def apply(self, graph: Graph) -> Graph:
        """Make the CPU time of captured operators free, after the first launch of each graph."""
        host_time = self._captured(graph)
        return graph.with_durations(np.where(host_time.taken, 0, graph.nodes.duration))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return graphs with slow graph launches, and with all host code between launches captured."""
        host_time = self._captured(graph)
        duration = np.where(host_time.taken, 0, graph.nodes.duration)
        return (
            graph.with_durations(duration + host_time.launching),
            graph.with_durations(np.where(host_time.open, 0, duration)),
        )

    def limit(self, graph: Graph) -> Graph | None:
        """Return the graph of a host that takes no time, which no CUDA graph can beat."""
        return free_host(graph, self.counts_of_job(graph))

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the host time that is captured, stays, and is not known to be either."""
        counts = self.counts_of_job(graph)
        per = max(counts["steps"], 1)
        taken, left_open, whole = (counts[name] / per for name in ("taken", "open", "whole"))
        stays = format_duration(whole - taken - left_open)
        return (
            f"of {format_duration(whole)} of host time per step and rank {format_duration(taken)} is in "
            f"operators that can be captured, {stays} stays (data, synchronising calls, copies, what comes "
            f"before a graph), and {format_duration(left_open)} is in no operator that launches: the "
            "interval covers both cases",
        )

    def _captured(self, graph: Graph) -> CapturedHostTime:
        """Return the host time that CUDA graphs remove, computed once per graph."""
        if str(self.selection):
            return once(graph, self, lambda graph: captured(graph, self.selection.chosen(graph)))
        records = {"CapturedHostTime": CapturedHostTime}
        return kept(
            graph, "captured-host-time", lambda graph: captured(graph, NodeSelection().chosen(graph)), records
        )

    def describe(self) -> str:
        if self.selection == OF_OPTIMIZER:
            return "the optimizer's operators are launched as CUDA graphs"
        selected = f" ({self.selection.describe()})" if str(self.selection) else ""
        return f"operators are launched as CUDA graphs{selected}"

    def how(self) -> str:
        if self.selection == OF_OPTIMIZER:
            return (
                "torch.compile(optimizer.step, mode='reduce-overhead'), or capturable=True and a graph of it"
            )
        return "torch.compile(mode='reduce-overhead'), or torch.cuda.make_graphed_callables"


def _awaits_optimizer(facts: RunFacts) -> bool:
    """Return whether the host's work in the optimizer's step is a large part of the critical path."""
    if not any(name.startswith(OPTIMIZER) for name in facts.graph.names):
        return False
    inside = facts.on_cpu & OF_OPTIMIZER.mask(facts.graph)
    return facts.on_path(inside) >= SHARE_OF_OPTIMIZER * facts.base_ns


@dataclass(frozen=True)
class CapturedHostTime:
    """Effect of CUDA graphs on host time, each [N].

    Attributes:
        taken: CPU work that a graph removes.
        open: CPU work between launches outside launching operators: the trace does not show its effect.
        launching: ns by which launching a graph may take longer than its first launch did, at that node.
    """

    taken: Bools
    open: Bools
    launching: Ints


def captured(graph: Graph, chosen: Bools) -> CapturedHostTime:
    """Return the host time that CUDA graphs of the chosen work would remove.

    Args:
        chosen: [N] work that may be captured.

    Raises:
        NothingToChange: nothing can be captured.
    """
    require_launches(graph)
    nodes, edges = graph.nodes, graph.edges
    calls, fixed = _calls(graph)
    calls &= chosen & (nodes.step >= 0)
    dispatching, staying = _operators(graph, calls, fixed)
    pause = is_one_of(nodes.kind, (NodeKind.HOST, NodeKind.GAP)) & (nodes.duration > MAX_PAUSE_NS)
    order, stretch, first, behind = _stretches(graph, calls & ~staying, staying | pause)
    inside = np.zeros(graph.num_nodes, np.bool_)
    inside[order[behind]] = True
    inside &= chosen
    if not inside.any():
        raise NothingToChange(
            "nowhere are two launches that can be captured without a wait, a copy from or to the host, or "
            "a synchronising call between them: record with GPU activities; of operation-level traces "
            "no-launch predicts what launches cost"
        )
    taken = inside & (dispatching | (nodes.kind == NodeKind.RUNTIME))
    launched = np.bincount(edges.source[edges.kind == EdgeKind.LAUNCH], minlength=graph.num_nodes)
    size = first.size
    kernels = np.bincount(stretch, (launched * taken)[order], minlength=size)
    saved = np.bincount(stretch, (nodes.duration * taken)[order], minlength=size)
    launching = np.zeros(graph.num_nodes, np.int64)
    begun = first < order.size
    launching[order[first[begun]]] = np.minimum(MAX_NODE_NS * kernels, saved)[begun].astype(np.int64)
    return CapturedHostTime(taken, inside & ~taken, launching)


def _calls(graph: Graph) -> tuple[Bools, Bools]:
    """Return [N] masks of calls that launch capturable GPU work, and of calls that no graph can contain."""
    nodes, edges = graph.nodes, graph.edges
    on_stream = np.array([what.startswith("stream ") for _, what in graph.lanes] + [False], np.bool_)
    copies = (nodes.kind == NodeKind.COPY) & _named(graph, HOST_COPIES)
    begun = (is_one_of(nodes.kind, GPU_KINDS) | on_stream[nodes.lane]) & ~copies
    launch = edges.kind == EdgeKind.LAUNCH
    some, others = np.zeros((2, graph.num_nodes), np.bool_)
    some[edges.source[launch & begun[edges.target]]] = True
    others[edges.source[launch & ~begun[edges.target]]] = True  # host copies, and work that is not on a GPU
    runtime = nodes.kind == NodeKind.RUNTIME
    fixed = is_one_of(nodes.kind, CPU_KINDS) & (others | (runtime & _named(graph, NOT_CAPTURED)))
    return some & runtime & ~fixed, fixed


def _named(graph: Graph, patterns: tuple[str, ...]) -> Bools:
    fits = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in graph.names]
    mask: Bools = np.array(fits, np.bool_)[graph.nodes.name]
    return mask


def _operators(graph: Graph, calls: Bools, fixed: Bools) -> tuple[Bools, Bools]:
    """Return [N] masks of CPU work in operators that make these calls, and of work that stays.

    An operator that makes a fixed call and launches nothing else stays as a whole. Without the run's spans,
    operators are those of the graph's own nodes.
    """
    nodes = graph.nodes
    if graph.run is None:
        return nodes.kind == NodeKind.CPU, fixed
    nesting, rows = nesting_of(graph), rows_of(graph)
    spans, start, end = nesting.rows("kind", "name"), nesting.start, nesting.end
    makes, is_fixed = (np.zeros(spans.height + 1, np.bool_) for _ in range(2))
    makes[rows[calls]] = is_fixed[rows[fixed]] = True
    launches, stuck = (_held_by(start, end, spans_of[:-1] & nesting.on_cpu) for spans_of in (makes, is_fixed))
    operator, annotation = ((spans["kind"] == kind).to_numpy() for kind in ("cpu_op", "annotation"))
    dispatches = (operator & launches) | (annotation & _fitting(spans["name"], FRAMEWORK))
    stays = (operator & stuck & ~launches) | (annotation & _fitting(spans["name"], (DATA_LOADING,)))
    dispatching, held = (
        np.append(nesting.on_cpu & _inside(start, *merge_intervals(start[spans_of], end[spans_of])), False)[
            rows
        ]
        for spans_of in (dispatches, stays)
    )
    return dispatching, fixed | (held & is_one_of(nodes.kind, CPU_KINDS))


def _held_by(start: Ints, end: Ints, marked: Bools) -> Bools:
    """Return [S] a mask of spans that contain a marked one or are marked."""
    marks = np.sort(start[marked])
    holds: Bools = np.searchsorted(marks, end, "left") > np.searchsorted(marks, start, "left")
    return holds


def _inside(time: Ints, begin: Ints, end: Ints) -> Bools:
    """Return [T] whether each time is in one of these intervals, which are disjoint and ascending."""
    if begin.size == 0:
        return np.zeros(time.size, np.bool_)
    place = np.searchsorted(begin, time, "right") - 1
    is_inside: Bools = (place >= 0) & (time < end[np.maximum(place, 0)])
    return is_inside


def _fitting(names: pl.Series, patterns: tuple[str, ...]) -> Bools:
    unique_names = names.unique().to_list()
    fitting = [name for name in unique_names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return names.is_in(fitting).to_numpy()


def _stretches(graph: Graph, calls: Bools, outside: Bools) -> tuple[Ints, Ints, Ints, Bools]:
    """Return CPU work in the order of its threads, cut where a thread waits or does what cannot be captured.

    Returns:
        [C] nodes in order, [C] the stretch of each, [S] the position of the first launch of each stretch (C
        without one), [C] whether a node comes after the first launch, up to the last.
    """
    nodes, edges = graph.nodes, graph.edges
    woken = np.zeros(graph.num_nodes, np.bool_)
    woken[edges.target[edges.kind == EdgeKind.SYNC]] = True
    on_cpu = np.flatnonzero(is_one_of(nodes.kind, CPU_KINDS))
    order = on_cpu[
        np.lexsort((on_cpu, nodes.measured_start[on_cpu], nodes.lane[on_cpu], nodes.window[on_cpu]))
    ]
    columns = (nodes.lane[order], nodes.window[order], nodes.step[order], outside[order])
    opens = np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0)) | woken[order]
    stretch = np.cumsum(opens) - 1
    place = np.arange(order.size)
    launching = calls[order]
    first = np.full(int(stretch[-1]) + 1 if stretch.size else 0, order.size)
    np.minimum.at(first, stretch[launching], place[launching])
    last = np.full(first.size, -1)
    np.maximum.at(last, stretch[launching], place[launching])
    return order, stretch, first, (place > first[stretch]) & (place <= last[stretch]) & ~outside[order]
