"""Gradients reduced in other buckets, at other moments, or in other ways: the part that all such edits share.

In: a graph, its backward passes, and for each the reductions it should have. Out: the graph with these in
place of the ones that were recorded. What they are to be is decided by the edits.

A reduction begins when its call is made and a worker (a stream) is free for it, moves data once all ranks are
there, and ends its own time later. Reductions of one rank share its link: each can use it once the bytes of
those before it have passed, while the fixed parts of their times overlap.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind, once
from dpro.replay.intervals import union
from dpro.replay.models.gradients import MAIN_THREAD, Parameters, Pass, parameters_of, passes_of
from dpro.replay.models.link_costs import LinkCost, fit_costs
from dpro.replay.timeline import Timeline, replay
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor

STEP = -1
COPIES = ("aten::mul", "aten::copy_", "aten::div_")  # by which DDP fills its buckets
GLOO_WORKERS = 2  # threads of a gloo process group that run collectives, unless GLOO's options say otherwise


@dataclass(frozen=True)
class Reduction:
    """One reduction of a backward pass.

    Attributes:
        first, last: its parameters, by the order in which they are ready.
        num_bytes: payload.
        moving_ns: time for the payload.
        fixed_ns: further time, during which others may use the link.
        call_ns: time of the thread that makes the call.
        called_after: the parameter after which it is called; `STEP`: the whole step, which waits for it.
        needed: where its result is needed; None: where those of the recorded reductions are.
    """

    first: int
    last: int
    num_bytes: int
    moving_ns: float
    fixed_ns: float
    call_ns: float
    called_after: int
    needed: tuple[tuple[int, EdgeKind], ...] | None = None


@dataclass(frozen=True)
class Reduced:
    """How the gradients of a graph are reduced.

    Attributes:
        graph: the graph.
        end: [N] ns of the replay.
        parameters: what is reduced.
        passes: backward passes of all ranks.
        message: which kind of communication a reduction is.
        line: what a reduction costs.
        slowdown: [passes] how many times as long the reductions of each took as the line says.
        call_ns: usual time of the thread in a call.
        ratio: bytes that are moved per byte of gradient.
        copy_ns_per_byte: time of a thread to read and write gradients once; 0 where the run does not show it.
    """

    graph: Graph
    end: Ints
    parameters: Parameters
    passes: list[Pass]
    message: Message
    line: LinkCost
    slowdown: Floats
    call_ns: float
    ratio: float
    copy_ns_per_byte: float

    def bytes_of(self, first: int, last: int) -> int:
        """Payload of a bucket.

        Args:
            first, last: its parameters, by the order in which they are ready.
        """
        return round(self.ratio * int(self.parameters.num_bytes[first : last + 1].sum()))


def reduced(graph: Graph) -> Reduced:
    """How a graph reduces gradients.

    Raises:
        Unanswerable: the run lacks something; the message says what is missing.
    """
    edges = graph.edges
    columns = (*graph.nodes.columns, edges.source, edges.lag, edges.kind, graph.messages, graph.network)
    return once(graph, "reduced gradients", columns, lambda: _reduced(graph))


def _reduced(graph: Graph) -> Reduced:
    parameters = parameters_of(graph.run)
    if parameters.hook:
        raise Unanswerable(f"gradients already go through a communication hook ({parameters.hook})")
    passes = passes_of(graph, parameters.num_bytes.size)
    transfers = np.concatenate([each.transfer for each in passes])
    sizes = graph.nodes.bytes[transfers]
    if (sizes <= 0).any():
        raise Unanswerable("the run does not say how many bytes its reductions move")
    timeline = replay(graph)
    message = graph.messages[int(graph.nodes.message[transfers[0]])]
    line = fit_costs(graph, timeline).get((message.op, message.group))
    if line is None:
        raise Unanswerable("too few reductions with all their ranks are in the run to fit what one costs")
    calls = [float(graph.nodes.duration[pieces].sum()) for each in passes for pieces in each.calls]
    return Reduced(
        dataclasses.replace(graph, known={}),  # what a graph keeps must not hold it
        timeline.end,
        parameters,
        passes,
        message,
        line,
        np.array([_slowdown(graph, timeline, line, each.transfer) for each in passes]),
        float(np.median(calls)),
        float(sizes.sum()) / (len(passes) * float(parameters.num_bytes.sum())),
        _copying(graph, parameters, passes),
    )


def calling(known: Reduced) -> Bools:
    """[N] the calls of reductions, whose time changes with them.

    Args:
        known: how a graph reduces.
    """
    calls = np.zeros(known.graph.num_nodes, np.bool_)
    calls[np.concatenate([pieces for each in known.passes for pieces in each.calls])] = True
    return calls


def _copying(graph: Graph, parameters: Parameters, passes: list[Pass]) -> float:
    """What the copies of gradients into their buckets took, per byte."""
    nodes = graph.nodes
    copies = [code for code, name in enumerate(graph.names) if name in COPIES]
    found = np.flatnonzero(np.isin(nodes.name, copies) & (nodes.kind == NodeKind.CPU))
    spent = 0
    for each in passes:
        begin, end = nodes.measured_start[each.ready[0]], nodes.measured_start[each.calls[-1][0]]
        mine = found[nodes.lane[found] == nodes.lane[each.ready[0]]]
        within = (nodes.measured_start[mine] >= begin) & (nodes.measured_start[mine] <= end)
        spent += int(nodes.duration[mine[within]].sum())
    return spent / (len(passes) * float(parameters.num_bytes.sum()))


def _slowdown(graph: Graph, timeline: Timeline, line: LinkCost, transfers: Ints) -> float:
    """The time in which a pass moved its gradients over what its line says.

    That is the time in which any of its reductions ran: latencies of those that follow each other overlap.
    """
    busy = union(timeline.start[transfers], timeline.end[transfers])
    expected = line.latency_ns * len(busy) + float(line.moving_ns(graph.nodes.bytes[transfers]).sum())
    return float((busy[:, 1] - busy[:, 0]).sum()) / max(expected, 1.0)


def with_reductions(
    known: Reduced, wanted: Sequence[Sequence[Reduction]], awaited: Sequence[int] | None = None
) -> Graph:
    """The graph with other reductions in its backward passes.

    Args:
        known: how it reduces.
        wanted: for each pass its reductions in the order of their calls; the same on all ranks of a pass.
        awaited: for each pass the one that waits for its results, -1 for none; itself if not given.
    """
    graph, editor = known.graph, GraphEditor(known.graph)
    registry = _RendezvousRegistry(graph)
    for each in known.passes:
        editor.gone[each.arrive] = editor.gone[each.transfer] = True
        editor.gone[registry.of(graph.nodes.collective[each.arrive])] = True
        editor.duration[np.concatenate(each.calls)] = 0
    workers, leaving = workers_of(graph), np.flatnonzero(editor.gone[graph.edges.source])
    behind: dict[tuple[int, int], list[int]] = defaultdict(list)
    surroundings = [_surroundings(graph, each, editor.gone, leaving) for each in known.passes]
    for which, (each, reductions) in enumerate(zip(known.passes, wanted)):
        around, slowdown = surroundings[which], float(known.slowdown[which])
        if awaited is not None:
            needed = surroundings[awaited[which]].awaited if awaited[which] >= 0 else []
            around = dataclasses.replace(around, awaited=needed)
        transfers = behind[each.rank, each.window]
        for index, reduction in enumerate(reductions):
            _insert(editor, each, around, reduction, index, slowdown, registry, transfers, workers[each.rank])
        for node in around.after if reductions else ():
            editor.link(transfers[-1], node, EdgeKind.STREAM, around.queue_lag)
    return editor.finish()


class _RendezvousRegistry:
    """Rendezvous of the graph, old and new."""

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        met = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
        self._old = dict(zip(nodes.collective[met].tolist(), met.tolist()))
        self._new: dict[tuple[int, int], tuple[int, int]] = {}
        self._next_instance = int(nodes.collective.max(initial=-1)) + 1

    def of(self, instances: Ints) -> list[int]:
        """The old rendezvous of some collectives."""
        return [self._old[instance] for instance in instances.tolist() if instance in self._old]

    def join(self, editor: GraphEditor, instance: int, index: int) -> tuple[int, int]:
        """Instance and rendezvous of a pass's reduction, -1 for none where no other rank was recorded.

        Args:
            editor: the changes to the graph.
            instance: the recorded collective that the pass began with, which identifies it on all ranks.
            index: which reduction of the pass.
        """
        if (instance, index) not in self._new:
            old = self._old.get(instance, -1)
            node = editor.add(old, collective=self._next_instance) if old >= 0 else -1
            self._new[instance, index] = (self._next_instance, node)
            self._next_instance += 1
        return self._new[instance, index]


@dataclass(frozen=True)
class _Surroundings:
    """What is linked with the reductions of a pass.

    Attributes:
        launch_lag, queue_lag, input_lag: usual lags ns of calls, of the worker, of GPU work before.
        before, after: communication before and after the pass, on the same workers.
        awaited: for each recorded bucket where its result is needed.
        inputs: GPU work that gradients may come from, in the order of its launches on the thread.
        launched: ns of these launches.
    """

    launch_lag: int
    queue_lag: int
    input_lag: int
    before: list[int]
    after: list[int]
    awaited: list[list[tuple[int, EdgeKind]]]
    inputs: Ints
    launched: Ints


def _surroundings(graph: Graph, each: Pass, gone: NDArray[np.bool_], leaving: Ints) -> _Surroundings:
    """What is linked with the reductions of a pass.

    Args:
        graph: the graph.
        each: the pass.
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges that leave these.
    """
    nodes, edges = graph.nodes, graph.edges
    entering = np.concatenate([np.arange(graph.indptr[n], graph.indptr[n + 1]) for n in each.arrive.tolist()])
    lags = {}
    for kind in (EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.EVENT):
        mine = edges.lag[entering[edges.kind[entering] == kind]]
        lags[kind] = round(float(np.median(mine))) if mine.size else 0
    queued = edges.source[entering[edges.kind[entering] == EdgeKind.STREAM]]
    leaving = leaving[np.isin(edges.source[leaving], each.transfer) & ~gone[edges.target[leaving]]]
    source, target, kinds = edges.source[leaving], edges.target[leaving], edges.kind[leaving]
    called = int(max(nodes.measured_start[pieces].max() for pieces in each.calls))
    needed = np.isin(kinds, (EdgeKind.SYNC, EdgeKind.EVENT)) & (nodes.measured_start[target] >= called)
    awaited = [
        [(int(target[at]), EdgeKind(kinds[at])) for at in np.flatnonzero(needed & (source == transfer))]
        for transfer in each.transfer.tolist()
    ]
    inputs, launched = _inputs(graph, each, edges.source[entering[edges.kind[entering] == EdgeKind.EVENT]])
    return _Surroundings(
        lags[EdgeKind.LAUNCH],
        lags[EdgeKind.STREAM],
        lags[EdgeKind.EVENT],
        queued[~gone[queued]].tolist(),
        target[kinds == EdgeKind.STREAM].tolist(),
        awaited,
        inputs,
        launched,
    )


def _inputs(graph: Graph, each: Pass, sources: Ints) -> tuple[Ints, Ints]:
    """Work on the streams that reductions waited for, that the pass's thread launched, and when it did."""
    nodes, edges = graph.nodes, graph.edges
    if sources.size == 0:
        return sources, sources
    on_stream = np.isin(nodes.lane[edges.target], np.unique(nodes.lane[sources]))
    launch = np.flatnonzero((edges.kind == EdgeKind.LAUNCH) & on_stream)
    launch = launch[nodes.lane[edges.source[launch]] == nodes.lane[each.ready[0]]]
    at = nodes.measured_start[edges.source[launch]]
    order = np.argsort(at, kind="stable")
    return edges.target[launch][order], at[order]


def _insert(
    editor: GraphEditor,
    each: Pass,
    around: _Surroundings,
    wanted: Reduction,
    index: int,
    slowdown: float,
    registry: _RendezvousRegistry,
    behind: list[int],
    workers: int,
) -> None:
    """Put one reduction of a pass in.

    Args:
        editor: the changes to the graph.
        each: the pass.
        around: what is linked with its reductions.
        wanted: the reduction.
        index: which of the pass.
        slowdown: multiple of the time that a reduction costs.
        registry: rendezvous so far.
        behind: transfers of the rank in this window so far; added to.
        workers: how many run side by side.
    """
    nodes = editor.graph.nodes
    old = int(np.searchsorted(each.closes, wanted.last))
    at_end = wanted.called_after == STEP
    ready = _end_of_step(editor.graph, each) if at_end else int(each.ready[wanted.called_after])
    measured = {
        "measured_start": int(nodes.measured_end[ready]),
        "measured_end": int(nodes.measured_end[ready]),
    }
    name = int(nodes.name[each.calls[0][0]])
    call = editor.insert(
        ready, kind=NodeKind.CPU, duration=round(wanted.call_ns), span=-1, name=name, **measured
    )
    instance, rendezvous = registry.join(editor, int(nodes.collective[each.arrive[0]]), index)
    fixed, whole = round(wanted.fixed_ns * slowdown), round((wanted.fixed_ns + wanted.moving_ns) * slowdown)
    arrive = editor.add(int(each.arrive[old]), collective=instance, **measured)
    transfer = editor.add(
        int(each.transfer[old]), collective=instance, bytes=wanted.num_bytes, duration=whole, **measured
    )
    editor.link(call, arrive, EdgeKind.LAUNCH, around.launch_lag)
    editor.link(arrive, transfer, EdgeKind.STREAM)
    if rendezvous >= 0:
        editor.link(arrive, rendezvous, EdgeKind.RENDEZVOUS)
        editor.link(rendezvous, transfer, EdgeKind.RENDEZVOUS)
    _queue(editor, arrive, transfer, fixed, around, behind, workers)
    if around.inputs.size:
        last = int(np.searchsorted(around.launched, measured["measured_end"])) - 1
        editor.link(int(around.inputs[max(last, 0)]), arrive, EdgeKind.EVENT, around.input_lag)
    behind.append(transfer)
    if at_end:
        editor.wait(ready, transfer)
        return
    needed = _needed_at(editor.graph, each, around, wanted, ready) if wanted.needed is None else wanted.needed
    for target, kind in needed:
        editor.link(transfer, target, kind)


def _queue(
    editor: GraphEditor,
    arrive: int,
    transfer: int,
    fixed_ns: int,
    around: _Surroundings,
    behind: list[int],
    workers: int,
) -> None:
    """Queue a reduction: it begins when a worker is free, and has the link once those before it have moved.

    Args:
        editor: the changes to the graph.
        arrive, transfer: its nodes.
        fixed_ns: the part of its time that overlaps with the transfer before it.
        around: what is linked with the reductions of the pass.
        behind: transfers of the rank in this window so far.
        workers: how many run side by side.
    """
    for node in around.before if len(behind) < workers else behind[-workers:][:1]:
        editor.link(node, arrive, EdgeKind.STREAM, around.queue_lag)
    if behind:
        editor.link(behind[-1], transfer, EdgeKind.STREAM, -fixed_ns)


def _needed_at(
    graph: Graph, each: Pass, around: _Surroundings, wanted: Reduction, ready: int
) -> list[tuple[int, EdgeKind]]:
    """Where a result is needed: as early as that of any recorded bucket with one of its parameters.

    What comes before its call cannot wait for it: a thread that stood still in between its own calls (for a
    core, say) may seem to have waited for one of them.

    Args:
        graph: the graph as recorded.
        each: the pass.
        around: what is linked with its reductions.
        wanted: the reduction.
        ready: the node that its call follows.
    """
    start = graph.nodes.measured_start
    later = [[(at, kind) for at, kind in bucket if start[at] > start[ready]] for bucket in around.awaited]
    first = int(np.searchsorted(each.closes, wanted.first))
    last = int(np.searchsorted(each.closes, wanted.last))
    candidates = [bucket for bucket in later[first : last + 1] if bucket]
    candidates = candidates or [bucket for bucket in later if bucket]
    return min(candidates, key=lambda bucket: min(int(start[at]) for at, _ in bucket), default=[])


def _end_of_step(graph: Graph, each: Pass) -> int:
    """The last node of the step on the thread that drives the rank."""
    nodes = graph.nodes
    lanes = [lane for lane, what in enumerate(graph.lanes) if what == (each.rank, MAIN_THREAD)]  # by window
    here = (nodes.window == each.window) & (nodes.step == each.step)
    mine = np.flatnonzero(np.isin(nodes.lane, lanes) & here)
    return int(mine[np.argmax(nodes.measured_start[mine])])


def next_of_rank(known: Reduced) -> list[int]:
    """For each pass the next one of its rank and window, -1 for none."""
    following, seen = [-1] * len(known.passes), dict[tuple[int, int], int]()
    for which, each in enumerate(known.passes):
        before = seen.get((each.rank, each.window))
        if before is not None:
            following[before] = which
        seen[each.rank, each.window] = which
    return following


def on_stream(known: Reduced) -> bool:
    """Whether reductions run on GPUs, not in threads."""
    nodes = known.graph.nodes
    return known.graph.lanes[int(nodes.lane[known.passes[0].transfer[0]])][1].startswith("stream")


def workers_of(graph: Graph) -> dict[int, int]:
    """How many reductions a rank can run side by side."""
    nodes = graph.nodes
    moving = nodes.kind == NodeKind.TRANSFER
    of_gpu = [what.startswith("stream") for _, what in graph.lanes]
    return {
        int(rank): 1 if of_gpu[nodes.lane[np.argmax(moving & (nodes.rank == rank))]] else GLOO_WORKERS
        for rank in np.unique(nodes.rank[moving])
    }
