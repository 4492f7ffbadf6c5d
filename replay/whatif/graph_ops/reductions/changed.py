"""Gradients reduced in other buckets, at other moments, or in other ways.

In: a graph, its backward passes, and for each the reductions it should have. Out: the graph with these in
place of the ones that were recorded. What they are to be is decided by the edits.

A reduction begins when its call is made and a worker (a stream) is free for it, moves data once all ranks are
there, and ends its own time later. Reductions of one rank share its link: each can use it once the bytes of
those before it have passed, while the fixed parts of their times overlap. Other communication of its workers
keeps its place among the calls.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.models.gradients.passes import MAIN_THREAD, Launches, Pass
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.reductions.recorded import STEP, GradientReductions, Reduction

GLOO_WORKERS = 2  # threads of a gloo process group that run collectives, unless GLOO's options say otherwise


def with_reductions(
    known: GradientReductions, wanted: Sequence[Sequence[Reduction]], awaited: Sequence[int] | None = None
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
    issued = _issued(graph)
    surroundings = [_surroundings(graph, each, editor.gone, leaving, issued) for each in known.passes]
    for which, (each, reductions) in enumerate(zip(known.passes, wanted)):
        around, slowdown = surroundings[which], float(known.slowdown[which])
        if awaited is not None:
            needed = surroundings[awaited[which]].awaited if awaited[which] >= 0 else []
            around = dataclasses.replace(around, awaited=needed)
        transfers = behind[each.rank, each.window]
        for index, reduction in enumerate(reductions):
            _insert(editor, each, around, reduction, index, slowdown, registry, transfers, workers[each.rank])
        _go_on(editor, around, known.graph, each, reductions, transfers)
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
        before, after: when other communication on the same workers was called, and its transfer or arrival;
            some of it may be between reductions of the pass.
        awaited: for each recorded bucket where its result is needed.
        issued: [N] as of `_issued`.
        inputs: GPU work that gradients may come from, in the order of its launches on the thread.
        launched: ns of these launches.
    """

    launch_lag: int
    queue_lag: int
    input_lag: int
    before: list[tuple[int, int]]
    after: list[tuple[int, int]]
    awaited: list[list[tuple[int, EdgeKind]]]
    issued: Ints
    inputs: Ints
    launched: Ints


def _issued(graph: Graph) -> Ints:
    """[N] ns as measured, when each node was issued: GPU work and communication by a thread, earlier."""
    nodes, edges, launches = graph.nodes, graph.edges, Launches(graph)
    issued = nodes.measured_start.copy()
    launch = edges.kind == EdgeKind.LAUNCH
    issued[edges.target[launch]] = nodes.measured_start[edges.source[launch]]
    moved = launches.transfer >= 0
    issued[launches.transfer[moved]] = issued[launches.arrive[moved]]
    return issued


def _surroundings(
    graph: Graph, each: Pass, gone: NDArray[np.bool_], leaving: Ints, issued: Ints
) -> _Surroundings:
    """What is linked with the reductions of a pass.

    Args:
        graph: the graph.
        each: the pass.
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges that leave these.
        issued: [N] as of `_issued`.
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
        sorted((int(issued[node]), node) for node in queued[~gone[queued]].tolist()),
        sorted((int(issued[node]), node) for node in target[kinds == EdgeKind.STREAM].tolist()),
        awaited,
        issued,
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
    num_bytes = wanted.num_bytes if (nodes.bytes[each.transfer] > 0).all() else -1
    transfer = editor.add(
        int(each.transfer[old]), collective=instance, bytes=num_bytes, duration=whole, **measured
    )
    editor.link(call, arrive, EdgeKind.LAUNCH, around.launch_lag)
    editor.link(arrive, transfer, EdgeKind.STREAM)
    if rendezvous >= 0:
        editor.link(arrive, rendezvous, EdgeKind.RENDEZVOUS)
        editor.link(rendezvous, transfer, EdgeKind.RENDEZVOUS)
    _queue(editor, arrive, transfer, fixed, around, behind, workers, int(nodes.measured_end[ready]))
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
    called: int,
) -> None:
    """Queue a reduction: it begins when a worker is free, and has the link once those before it have moved.

    Args:
        editor: the changes to the graph.
        arrive, transfer: its nodes.
        fixed_ns: the part of its time that overlaps with the transfer before it.
        around: what is linked with the reductions of the pass.
        behind: transfers of the rank in this window so far.
        workers: how many run side by side.
        called: ns as measured, when the call is made.
    """
    for at, node in around.before:
        if at < called:
            editor.link(node, arrive, EdgeKind.STREAM, around.queue_lag)
    if len(behind) >= workers:
        editor.link(behind[-workers], arrive, EdgeKind.STREAM, around.queue_lag)
    if behind:
        editor.link(behind[-1], transfer, EdgeKind.STREAM, -fixed_ns)


def _go_on(
    editor: GraphEditor,
    around: _Surroundings,
    graph: Graph,
    each: Pass,
    reductions: Sequence[Reduction],
    transfers: list[int],
) -> None:
    """Let other communication of the workers follow what was called before it, on its own side as before.

    Args:
        editor: the changes to the graph.
        around: what is linked with the reductions of the pass.
        graph: the graph as recorded.
        each: the pass.
        reductions: in the order of their calls.
        transfers: of the rank in this window so far; those of the pass are last.
    """
    end = graph.nodes.measured_end
    own = transfers[len(transfers) - len(reductions) :]
    calls = [
        int(
            end[_end_of_step(graph, each) if wanted.called_after == STEP else each.ready[wanted.called_after]]
        )
        for wanted in reductions
    ]
    for at, node in around.after:
        ahead = [transfer for called, transfer in zip(calls, own) if called < at][-1:]
        ahead += [other for called, other in around.before if called < at][-1:]
        for transfer in ahead:
            editor.link(transfer, node, EdgeKind.STREAM, around.queue_lag)


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
    start, issued = graph.nodes.measured_start, around.issued
    later = [[(at, kind) for at, kind in bucket if issued[at] > start[ready]] for bucket in around.awaited]
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


def workers_of(graph: Graph) -> dict[int, int]:
    """How many reductions a rank can run side by side."""
    nodes = graph.nodes
    moving = nodes.kind == NodeKind.TRANSFER
    of_gpu = [what.startswith("stream") for _, what in graph.lanes]
    return {
        int(rank): 1 if of_gpu[nodes.lane[np.argmax(moving & (nodes.rank == rank))]] else GLOO_WORKERS
        for rank in np.unique(nodes.rank[moving])
    }
