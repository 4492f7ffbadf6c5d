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

import numpy as np

from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.models.gradients.passes import Pass
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.reductions.recorded import STEP, GradientReductions, Reduction
from dpro.replay.whatif.graph_ops.reductions.surroundings import (
    Surroundings,
    recorded_reductions,
    surroundings_of,
)

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
    editor.gone |= recorded_reductions(known)
    for each in known.passes:
        editor.duration[np.concatenate(each.calls)] = 0
    workers, surroundings = workers_of(graph), surroundings_of(known)
    behind: dict[tuple[int, int], list[int]] = defaultdict(list)
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


def _insert(
    editor: GraphEditor,
    each: Pass,
    around: Surroundings,
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
    old = each.closes.searchsorted(wanted.last)
    at_end = wanted.called_after == STEP
    ready = _called_behind(around, each, wanted)
    called = int(nodes.measured_end[ready])
    measured = {"measured_start": called, "measured_end": called}
    name = int(nodes.name[each.calls[0][0]])
    call = editor.insert(
        ready, kind=NodeKind.CPU, duration=round(wanted.call_ns), span=-1, name=name, **measured
    )
    instance, rendezvous = registry.join(editor, int(nodes.collective[each.arrive[0]]), index)
    fixed, whole = round(wanted.fixed_ns * slowdown), round((wanted.fixed_ns + wanted.moving_ns) * slowdown)
    arrive = editor.add(int(each.arrive[old]), collective=instance, **measured)
    num_bytes = wanted.num_bytes if around.are_bytes_known else -1
    transfer = editor.add(
        int(each.transfer[old]), collective=instance, bytes=num_bytes, duration=whole, **measured
    )
    editor.link(call, arrive, EdgeKind.LAUNCH, around.launch_lag)
    editor.link(arrive, transfer, EdgeKind.STREAM)
    if rendezvous >= 0:
        editor.link(arrive, rendezvous, EdgeKind.RENDEZVOUS)
        editor.link(rendezvous, transfer, EdgeKind.RENDEZVOUS)
    _queue(editor, arrive, transfer, fixed, around, behind, workers, called)
    if around.inputs.size:
        last = int(around.launched.searchsorted(called)) - 1
        editor.link(int(around.inputs[max(last, 0)]), arrive, EdgeKind.EVENT, around.input_lag)
    behind.append(transfer)
    if at_end:
        editor.wait(ready, transfer)
        return
    needed = _needed_at(editor.graph, each, around, wanted, ready) if wanted.needed is None else wanted.needed
    for target, kind in needed:
        editor.link(transfer, target, kind)


def _called_behind(around: Surroundings, each: Pass, wanted: Reduction) -> int:
    """The node that a reduction's call follows.

    Raises:
        Unanswerable: it is the last of the step, and which thread drives the rank is not known.
    """
    if wanted.called_after != STEP:
        return int(each.ready[wanted.called_after])
    if around.end < 0:
        raise Unanswerable(f"the run does not show which thread drives rank {each.rank}")
    return around.end


def _queue(
    editor: GraphEditor,
    arrive: int,
    transfer: int,
    fixed_ns: int,
    around: Surroundings,
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
    around: Surroundings,
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
    calls = [int(end[_called_behind(around, each, wanted)]) for wanted in reductions]
    for at, node in around.after:
        ahead = [transfer for called, transfer in zip(calls, own) if called < at][-1:]
        ahead += [other for called, other in around.before if called < at][-1:]
        for transfer in ahead:
            editor.link(transfer, node, EdgeKind.STREAM, around.queue_lag)


def _needed_at(
    graph: Graph, each: Pass, around: Surroundings, wanted: Reduction, ready: int
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
    begun = start[ready]

    def later(buckets: list[list[tuple[int, EdgeKind]]]) -> list[list[tuple[int, EdgeKind]]]:
        found = ([(at, kind) for at, kind in bucket if issued[at] > begun] for bucket in buckets)
        return [bucket for bucket in found if bucket]

    first, last = each.closes.searchsorted((wanted.first, wanted.last)).tolist()
    candidates = later(around.awaited[first : last + 1]) or later(around.awaited)
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda bucket: min(int(start[at]) for at, _ in bucket), default=[])


def workers_of(graph: Graph) -> dict[int, int]:
    """How many reductions a rank can run side by side."""
    nodes = graph.nodes
    moving = nodes.kind == NodeKind.TRANSFER
    of_gpu = [what.startswith("stream") for _, what in graph.lanes]
    return {
        int(rank): 1 if of_gpu[nodes.lane[np.argmax(moving & (nodes.rank == rank))]] else GLOO_WORKERS
        for rank in np.unique(nodes.rank[moving])
    }
