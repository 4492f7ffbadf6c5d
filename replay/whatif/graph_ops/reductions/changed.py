"""Gradients reduced in other buckets, at other moments, or in other ways.

In: a graph, its backward passes, and for each the reductions it should have. Out: the graph with these in
place of the ones that were recorded. What they are to be is decided by the edits.

A reduction begins when its call is made and a worker (a stream) is free for it, moves data once all ranks are
there, and ends its own time later. Reductions of one rank share its link: each can use it once the bytes of
those before it have passed, while the fixed parts of their times overlap. Other communication of its workers
keeps its place among the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.gradients.passes import Pass
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.reductions.recorded import (
    STEP,
    GradientReductions,
    Reduction,
    Surroundings,
    recorded_reductions,
    surroundings_of,
)

NOWHERE: Ints = np.empty(0, np.int64)
GLOO_WORKERS = 2  # threads of a gloo process group that run collectives, unless GLOO's options say otherwise


def with_reductions(
    known: GradientReductions, wanted: Sequence[Sequence[Reduction]], awaited: Sequence[int] | None = None
) -> Graph:
    """The graph with other reductions in its backward passes.

    Args:
        wanted: for each pass its reductions in the order of their calls; the same on all ranks of a pass.
        awaited: for each pass the one that waits for its results, -1 for none; itself if not given.
    """
    editor, surroundings = GraphEditor(known.graph), surroundings_of(known)
    editor.gone |= recorded_reductions(known)
    editor.duration[np.concatenate([pieces for each in known.passes for pieces in each.calls])] = 0
    passes = [_of_pass(known, *each) for each in zip(known.passes, known.slowdown, wanted, surroundings)]
    ends = np.cumsum([0, *map(len, wanted)]).tolist()
    own = [slice(*bounds) for bounds in pairwise(ends)]
    arrive, transfer = _insert(editor, known, passes)
    _queue(editor, known, passes, own, arrive, transfer)
    for which, (each, reductions, mine) in enumerate(zip(known.passes, wanted, own)):
        around, put, moved = surroundings[which], passes[which], transfer[mine]
        _beside_others(editor, around, put, arrive[mine], moved)
        needed = which if awaited is None else awaited[which]
        by_default = surroundings[needed].awaited if needed >= 0 else (NOWHERE, NOWHERE, NOWHERE)
        at, target, kind = _needed_at(known.graph, each, around.issued, by_default, reductions, put)
        editor.link_all(moved[at], target, kind)
        for ready, last in zip(put.ready[put.at_end].tolist(), moved[put.at_end].tolist()):
            editor.wait(ready, last)
    return editor.finish()


class _OfPass(NamedTuple):
    """The reductions of a pass, [R] each, in the order of their calls.

    Attributes:
        ready: the nodes that their calls follow.
        called: ns as measured, when they are called.
        at_end: whether the whole step waits for them.
        call_ns: of the calls.
        fixed_ns: the part of their time that overlaps with the transfer before.
        whole_ns: all of their time.
        num_bytes: -1 where the run does not say any.
        arrive, transfer: recorded nodes like which the new ones are.
        launch_lag: usual lag of the pass.
    """

    ready: Ints
    called: Ints
    at_end: Bools
    call_ns: Ints
    fixed_ns: Ints
    whole_ns: Ints
    num_bytes: Ints
    arrive: Ints
    transfer: Ints
    launch_lag: Ints


def _of_pass(
    known: GradientReductions, each: Pass, slowdown: float, wanted: Sequence[Reduction], around: Surroundings
) -> _OfPass:
    """The reductions that a pass is to have.

    Raises:
        Unanswerable: one is the last of the step, and which thread drives the rank is not known.
    """
    columns = [(own.last, own.num_bytes, own.called_after) for own in wanted]
    last, num_bytes, after = np.array(columns, np.int64).reshape(-1, 3).T
    times = [(own.call_ns, own.fixed_ns, own.moving_ns) for own in wanted]
    call_ns, fixed_ns, moving_ns = np.array(times, np.float64).reshape(-1, 3).T
    at_end = after == STEP
    if at_end.any() and around.end < 0:
        raise Unanswerable(f"the run does not show which thread drives rank {each.rank}")
    ready = np.where(at_end, around.end, each.ready[after])
    like = each.closes.searchsorted(last)
    takes = (call_ns, fixed_ns * slowdown, (fixed_ns + moving_ns) * slowdown)
    call, fixed, whole = (np.rint(ns).astype(np.int64) for ns in takes)
    return _OfPass(
        ready,
        known.graph.nodes.measured_end[ready],
        at_end,
        call,
        fixed,
        whole,
        num_bytes if around.are_bytes_known else np.full_like(num_bytes, -1),
        each.arrive[like],
        each.transfer[like],
        np.full_like(last, around.launch_lag),
    )


def _insert(editor: GraphEditor, known: GradientReductions, passes: Sequence[_OfPass]) -> tuple[Ints, Ints]:
    """Put the reductions of all passes in, each with its call and its rendezvous.

    Returns:
        Arrivals and transfers.
    """
    nodes, put = known.graph.nodes, _OfPass(*map(np.concatenate, zip(*passes)))
    counts = [own.ready.size for own in passes]
    names = [int(nodes.name[each.calls[0][0]]) for each in known.passes]
    measured = {"measured_start": put.called, "measured_end": put.called}
    call = editor.insert_all(
        put.ready,
        kind=NodeKind.CPU,
        duration=put.call_ns,
        span=-1,
        name=np.repeat(names, counts),
        **measured,
    )
    begun_with = np.repeat([int(nodes.collective[each.arrive[0]]) for each in known.passes], counts)
    index = np.concatenate([np.arange(count) for count in counts])
    instance, rendezvous = _rendezvous(editor, begun_with, index)
    arrive = editor.add_all(put.arrive, collective=instance, **measured)
    moved = {"bytes": put.num_bytes, "duration": put.whole_ns}
    transfer = editor.add_all(put.transfer, collective=instance, **moved, **measured)
    editor.link_all(call, arrive, EdgeKind.LAUNCH, put.launch_lag)
    editor.link_all(arrive, transfer, EdgeKind.STREAM)
    met = rendezvous >= 0
    editor.link_all(arrive[met], rendezvous[met], EdgeKind.RENDEZVOUS)
    editor.link_all(rendezvous[met], transfer[met], EdgeKind.RENDEZVOUS)
    return arrive, transfer


def _rendezvous(editor: GraphEditor, begun_with: Ints, index: Ints) -> tuple[Ints, Ints]:
    """Instance and rendezvous of each reduction, -1 for none where no other rank was recorded.

    Args:
        begun_with: [K] the recorded collective that its pass began with, which identifies it on all ranks.
        index: [K] which reduction of the pass.
    """
    nodes = editor.graph.nodes
    place = begun_with * (int(index.max(initial=0)) + 1) + index
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    turn = np.argsort(first)  # instances are counted in the order in which they come
    number = np.empty_like(turn)
    number[turn] = np.arange(turn.size)
    instance = int(nodes.collective.max(initial=-1)) + 1 + np.arange(turn.size)
    met = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    old = np.full(int(nodes.collective.max(initial=-1)) + 1, -1)
    old[nodes.collective[met]] = met
    like, rendezvous = old[begun_with[first[turn]]], np.full(turn.size, -1)
    rendezvous[like >= 0] = editor.add_all(like[like >= 0], collective=instance[like >= 0])
    return instance[number[which]], rendezvous[number[which]]


def _queue(
    editor: GraphEditor,
    known: GradientReductions,
    passes: Sequence[_OfPass],
    own: Sequence[slice],
    arrive: Ints,
    transfer: Ints,
) -> None:
    """Queue reductions: one begins when a worker is free, and has the link once those before it have moved.

    Args:
        own: where those of each pass are among all.
    """
    workers, surroundings = workers_of(known.graph), surroundings_of(known)
    queues: dict[tuple[int, int], list[int]] = defaultdict(list)
    for which, each in enumerate(known.passes):
        queues[each.rank, each.window].append(which)
    for (rank, _), members in queues.items():
        row = np.concatenate([np.arange(own[which].start, own[which].stop) for which in members])
        fixed = np.concatenate([passes[which].fixed_ns for which in members])
        lags = [surroundings[which].queue_lag for which in members]
        lag = np.repeat(lags, [passes[which].ready.size for which in members])
        side_by_side = workers[rank]
        ahead, behind = row[:-side_by_side], row[side_by_side:]
        editor.link_all(transfer[ahead], arrive[behind], EdgeKind.STREAM, lag[side_by_side:])
        editor.link_all(transfer[row[:-1]], transfer[row[1:]], EdgeKind.STREAM, -fixed[1:])


def _beside_others(
    editor: GraphEditor, around: Surroundings, put: _OfPass, arrive: Ints, transfer: Ints
) -> None:
    """Have reductions of a pass follow other work that was called before them, and others follow them.

    Args:
        arrive, transfer: [R] their nodes.
    """
    (before_at, before), (after_at, after), lag = around.before, around.after, around.queue_lag
    other, mine = np.nonzero(before_at[:, None] < put.called)
    editor.link_all(before[other], arrive[mine], EdgeKind.STREAM, lag)
    if around.inputs.size:
        last = np.maximum(around.launched.searchsorted(put.called) - 1, 0)
        editor.link_all(around.inputs[last], arrive, EdgeKind.EVENT, around.input_lag)
    for called, ahead in ((put.called, transfer), (before_at, before)):
        for at, node in zip(after_at.tolist(), after.tolist()):
            earlier = ahead[called < at][-1:]  # the last of them is enough: they are in a queue
            editor.link_all(earlier, np.full_like(earlier, node), EdgeKind.STREAM, lag)


def _needed_at(
    graph: Graph,
    each: Pass,
    issued: Ints,
    awaited: tuple[Ints, Ints, Ints],
    wanted: Sequence[Reduction],
    put: _OfPass,
) -> tuple[Ints, Ints, Ints]:
    """Where results are needed: as early as that of any recorded bucket with one of their parameters.

    What comes before its call cannot wait for it: a thread that stood still in between its own calls (for a
    core, say) may seem to have waited for one of them.

    Args:
        issued: [N] as of `Surroundings`.
        awaited: [W] as of `Surroundings`.
        wanted: its reductions: those that say where they are needed, or for which the step waits, are not
            asked for.

    Returns:
        Which reduction, the node that needs it, and by which kind of edge.
    """
    said = [
        (row, node, kind)
        for row, own in enumerate(wanted)
        if own.needed is not None and not put.at_end[row]
        for node, kind in own.needed
    ]
    given = np.array(said, np.int64).reshape(-1, 3).T
    asked = [row for row, own in enumerate(wanted) if own.needed is None and not put.at_end[row]]
    bucket, node, kind = awaited
    if not asked or not node.size:
        return given[0], given[1], given[2]
    start = graph.nodes.measured_start
    later = issued[node] > start[put.ready[asked], None]
    never = np.iinfo(np.int64).max
    needs = np.full((len(asked), int(bucket.max()) + 1), never)  # when each bucket is needed first
    for number in np.unique(bucket).tolist():
        of = bucket == number
        needs[:, number] = np.where(later[:, of], start[node[of]], never).min(axis=1)
    first = each.closes.searchsorted([wanted[row].first for row in asked])
    last = each.closes.searchsorted([wanted[row].last for row in asked])
    number = np.arange(needs.shape[1])
    within = (first[:, None] <= number) & (number <= last[:, None])
    among = np.where(within, needs, never)
    among = np.where((among == never).all(axis=1, keepdims=True), needs, among)
    chosen = later & (bucket == among.argmin(axis=1)[:, None]) & (among.min(axis=1) < never)[:, None]
    row, at = np.nonzero(chosen)
    inferred = np.stack([np.array(asked)[row], node[at], kind[at]])
    row, node, kind = np.concatenate([given, inferred], axis=1)
    return row, node, kind


def workers_of(graph: Graph) -> dict[int, int]:
    """How many reductions a rank can run side by side."""
    nodes = graph.nodes
    moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
    of_gpu = [what.startswith("stream") for _, what in graph.lanes]
    ranks, first = np.unique(nodes.rank[moving], return_index=True)
    lanes = nodes.lane[moving[first]].tolist()
    return {rank: 1 if of_gpu[lane] else GLOO_WORKERS for rank, lane in zip(ranks.tolist(), lanes)}
