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
    reductions: GradientReductions,
    wanted: Sequence[Sequence[Reduction]],
    awaited: Sequence[int] | None = None,
) -> Graph:
    """The graph with other reductions in its backward passes.

    Args:
        wanted: for each pass its reductions in the order of their calls; the same on all ranks of a pass.
        awaited: for each pass the one that waits for its results, -1 for none; itself if not given.
    """
    editor, surroundings = GraphEditor(reductions.graph), surroundings_of(reductions)
    editor.gone |= recorded_reductions(reductions)
    editor.duration[
        np.concatenate([pieces for backward in reductions.passes for pieces in backward.calls])
    ] = 0
    passes = [
        _pass_reductions(reductions, *columns)
        for columns in zip(reductions.passes, reductions.slowdown, wanted, surroundings)
    ]
    ends = np.cumsum([0, *map(len, wanted)]).tolist()
    rows_of_pass = [slice(*bounds) for bounds in pairwise(ends)]
    arrive, transfer = _insert(editor, reductions, passes)
    _queue(editor, reductions, passes, rows_of_pass, arrive, transfer)
    for number, (backward, pass_wanted, rows) in enumerate(zip(reductions.passes, wanted, rows_of_pass)):
        around, inserted, moved = surroundings[number], passes[number], transfer[rows]
        _beside_others(editor, around, inserted, arrive[rows], moved)
        needed = number if awaited is None else awaited[number]
        by_default = surroundings[needed].awaited if needed >= 0 else (NOWHERE, NOWHERE, NOWHERE)
        reduction, target, kind = _needed_at(
            reductions.graph, backward, around.issued, by_default, pass_wanted, inserted
        )
        editor.link_all(moved[reduction], target, kind)
        for ready, last in zip(inserted.ready[inserted.at_end].tolist(), moved[inserted.at_end].tolist()):
            editor.wait(ready, last)
    return editor.finish()


class _PassReductions(NamedTuple):
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


def _pass_reductions(
    reductions: GradientReductions,
    backward: Pass,
    slowdown: float,
    wanted: Sequence[Reduction],
    around: Surroundings,
) -> _PassReductions:
    """The reductions that a pass is to have.

    Raises:
        Unanswerable: one is the last of the step, and which thread drives the rank is not known.
    """
    columns = [(reduction.last, reduction.num_bytes, reduction.called_after) for reduction in wanted]
    last, num_bytes, after = np.array(columns, np.int64).reshape(-1, 3).T
    times = [(reduction.call_ns, reduction.fixed_ns, reduction.moving_ns) for reduction in wanted]
    call_ns, fixed_ns, moving_ns = np.array(times, np.float64).reshape(-1, 3).T
    at_end = after == STEP
    if at_end.any() and around.end < 0:
        raise Unanswerable(f"the run does not show which thread drives rank {backward.rank}")
    ready = np.where(at_end, around.end, backward.ready[after])
    like = backward.closes.searchsorted(last)
    takes = (call_ns, fixed_ns * slowdown, (fixed_ns + moving_ns) * slowdown)
    call, fixed, whole = (np.rint(ns).astype(np.int64) for ns in takes)
    return _PassReductions(
        ready,
        reductions.graph.nodes.measured_end[ready],
        at_end,
        call,
        fixed,
        whole,
        num_bytes if around.are_bytes_known else np.full_like(num_bytes, -1),
        backward.arrive[like],
        backward.transfer[like],
        np.full_like(last, around.launch_lag),
    )


def _insert(
    editor: GraphEditor, reductions: GradientReductions, passes: Sequence[_PassReductions]
) -> tuple[Ints, Ints]:
    """Put the reductions of all passes in, each with its call and its rendezvous.

    Returns:
        Arrivals and transfers.
    """
    nodes, inserted = reductions.graph.nodes, _PassReductions(*map(np.concatenate, zip(*passes)))
    counts = [of_pass.ready.size for of_pass in passes]
    names = [int(nodes.name[backward.calls[0][0]]) for backward in reductions.passes]
    measured = {"measured_start": inserted.called, "measured_end": inserted.called}
    call = editor.insert_all(
        inserted.ready,
        kind=NodeKind.CPU,
        duration=inserted.call_ns,
        span=-1,
        name=np.repeat(names, counts),
        **measured,
    )
    begun_with = np.repeat(
        [int(nodes.collective[backward.arrive[0]]) for backward in reductions.passes], counts
    )
    index = np.concatenate([np.arange(count) for count in counts])
    instance, rendezvous = _rendezvous(editor, begun_with, index)
    arrive = editor.add_all(inserted.arrive, collective=instance, **measured)
    moved = {"bytes": inserted.num_bytes, "duration": inserted.whole_ns}
    transfer = editor.add_all(inserted.transfer, collective=instance, **moved, **measured)
    editor.link_all(call, arrive, EdgeKind.LAUNCH, inserted.launch_lag)
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
    reductions: GradientReductions,
    passes: Sequence[_PassReductions],
    rows_of_pass: Sequence[slice],
    arrive: Ints,
    transfer: Ints,
) -> None:
    """Queue reductions: one begins when a worker is free, and has the link once those before it have moved.

    Args:
        rows_of_pass: where those of each pass are among all.
    """
    workers, surroundings = workers_of(reductions.graph), surroundings_of(reductions)
    queues: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, backward in enumerate(reductions.passes):
        queues[backward.rank, backward.window].append(number)
    for (rank, _), members in queues.items():
        row = np.concatenate(
            [np.arange(rows_of_pass[number].start, rows_of_pass[number].stop) for number in members]
        )
        fixed = np.concatenate([passes[number].fixed_ns for number in members])
        lags = [surroundings[number].queue_lag for number in members]
        lag = np.repeat(lags, [passes[number].ready.size for number in members])
        side_by_side = workers[rank]
        ahead, behind = row[:-side_by_side], row[side_by_side:]
        editor.link_all(transfer[ahead], arrive[behind], EdgeKind.STREAM, lag[side_by_side:])
        editor.link_all(transfer[row[:-1]], transfer[row[1:]], EdgeKind.STREAM, -fixed[1:])


def _beside_others(
    editor: GraphEditor, around: Surroundings, inserted: _PassReductions, arrive: Ints, transfer: Ints
) -> None:
    """Have reductions of a pass follow other work that was called before them, and others follow them.

    Args:
        arrive, transfer: [R] their nodes.
    """
    (before_issued, before), (after_issued, after), lag = around.before, around.after, around.queue_lag
    other, row = np.nonzero(before_issued[:, None] < inserted.called)
    editor.link_all(before[other], arrive[row], EdgeKind.STREAM, lag)
    if around.inputs.size:
        last = np.maximum(around.launched.searchsorted(inserted.called) - 1, 0)
        editor.link_all(around.inputs[last], arrive, EdgeKind.EVENT, around.input_lag)
    for called, ahead in ((inserted.called, transfer), (before_issued, before)):
        for issued, node in zip(after_issued.tolist(), after.tolist()):
            earlier = ahead[called < issued][-1:]  # the last of them is enough: they are in a queue
            editor.link_all(earlier, np.full_like(earlier, node), EdgeKind.STREAM, lag)


def _needed_at(
    graph: Graph,
    backward: Pass,
    issued: Ints,
    awaited: tuple[Ints, Ints, Ints],
    wanted: Sequence[Reduction],
    inserted: _PassReductions,
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
    stated = [
        (row, node, kind)
        for row, reduction in enumerate(wanted)
        if reduction.needed is not None and not inserted.at_end[row]
        for node, kind in reduction.needed
    ]
    given = np.array(stated, np.int64).reshape(-1, 3).T
    asked = [
        row for row, reduction in enumerate(wanted) if reduction.needed is None and not inserted.at_end[row]
    ]
    bucket, node, kind = awaited
    if not asked or not node.size:
        return given[0], given[1], given[2]
    start = graph.nodes.measured_start
    later = issued[node] > start[inserted.ready[asked], None]
    never = np.iinfo(np.int64).max
    needs = np.full((len(asked), int(bucket.max()) + 1), never)  # when each bucket is needed first
    for number in np.unique(bucket).tolist():
        of_bucket = bucket == number
        needs[:, number] = np.where(later[:, of_bucket], start[node[of_bucket]], never).min(axis=1)
    first = backward.closes.searchsorted([wanted[row].first for row in asked])
    last = backward.closes.searchsorted([wanted[row].last for row in asked])
    number = np.arange(needs.shape[1])
    within = (first[:, None] <= number) & (number <= last[:, None])
    among = np.where(within, needs, never)
    among = np.where((among == never).all(axis=1, keepdims=True), needs, among)
    chosen = later & (bucket == among.argmin(axis=1)[:, None]) & (among.min(axis=1) < never)[:, None]
    row, column = np.nonzero(chosen)
    inferred = np.stack([np.array(asked)[row], node[column], kind[column]])
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
