"""Reductions of gradients in a graph, and the graph with other reductions in their place.

Takes a graph; returns its backward passes with their gradients, the cost of a reduction, plain reductions of
buckets that close where an edit wants; and the graph with given reductions in each pass. The edits decide
what these are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.curves import LinkCost, fit_line
from dpro.replay.cost.transfers import fit_costs
from dpro.replay.gradient_buckets import divided, dtype_of, gradient_passes, with_other_sizes
from dpro.replay.gradient_passes import MAIN_THREAD, Launches, Parameters, Pass
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind, computed_once
from dpro.replay.intervals import union
from dpro.replay.kept import kept_as
from dpro.replay.timeline import Timeline, differs_from_last, replayed
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.shared_links import share_without_others

STEP = -1
RECORDS = {"Parameters": Parameters, "Pass": Pass, "Message": Message, "LinkCost": LinkCost}
COPIES = ("aten::mul", "aten::copy_", "aten::div_")  # operators with which DDP fills its buckets


@dataclass(frozen=True)
class Reduction:
    """One reduction of a backward pass.

    Attributes:
        first, last: its parameters, in the order in which they are ready.
        num_bytes: payload.
        moving_ns: time for the payload.
        fixed_ns: further time, during which others may use the link.
        call_ns: time of the calling thread.
        called_after: the parameter after which it is called; `STEP`: at the end of the step, which waits.
        needed: nodes that wait for its result, with kinds of edges; None: as for the recorded reductions.
        dtype: element type of its gradients, empty where not known.
        shapes: of its gradients; empty where not known.
    """

    first: int
    last: int
    num_bytes: int
    moving_ns: float
    fixed_ns: float
    call_ns: float
    called_after: int
    needed: tuple[tuple[int, EdgeKind], ...] | None = None
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class GradientReductions:
    """Reductions of a graph's gradients.

    Attributes:
        graph: the graph.
        end: [N] ns of the replay.
        passes: backward passes of all ranks.
        message: kind of communication of the reductions.
        line: cost of a reduction.
        slowdown: [passes] time of each pass's reductions over that by the line, without delays by others on
            their link.
        call_ns: mean time of a call on the thread.
        ratio: moved bytes per byte of gradient.
        copy_ns_per_byte: time of a thread to read and write gradients once; 0 where the run does not show it.
        are_bytes_known: whether the run records bytes; if not, sizes are ns of moving them.
        are_ranks_missing: whether times of reductions may include waits for ranks that were not recorded.
    """

    graph: Graph
    end: Ints
    passes: Sequence[Pass]
    message: Message
    line: LinkCost
    slowdown: Floats
    call_ns: float
    ratio: float
    copy_ns_per_byte: float
    are_bytes_known: bool = True
    are_ranks_missing: bool = False

    @property
    def parameters(self) -> Parameters:
        """Parameters of the pass with most bytes, the first of several."""
        return max(
            (backward.parameters for backward in self.passes),
            key=lambda gradients: int(gradients.num_bytes.sum()),
        )

    def bytes_of(self, backward: Pass, first: int, last: int) -> int:
        """Return the payload of a bucket, in bytes.

        Args:
            first, last: its parameters, in the order in which they are ready.
        """
        return round(self.ratio * int(backward.parameters.num_bytes[first : last + 1].sum()))

    @property
    def is_recorded(self) -> bool:
        """Whether the run records the gradients of each reduction; if not, they are inferred."""
        return all(backward.parameters.is_recorded for backward in self.passes)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank receives only its shard of the sums."""
        return self.message.op == "reduce_scatter"

    def notes(self) -> tuple[str, ...]:
        """Return what was inferred about the reductions, a line each."""
        said = []
        if not self.is_recorded:
            said.append(
                "which gradients are in which reduction is inferred from calls, bytes and autograd's spans"
            )
        if not all(backward.parameters.are_sizes_known for backward in self.passes):
            said.append(
                "sizes of single gradients are not known: the interval covers any division of a bucket"
            )
        if self.are_ranks_missing:
            said.append(
                "ranks are missing: reductions are assumed to cost no more than the fastest of their size"
            )
        return tuple(said)


def reductions_of(graph: Graph) -> GradientReductions:
    """Return the reductions of a graph's gradients, as recorded or inferred.

    Raises:
        Unanswerable: the run lacks something; the message says what.
    """
    fields = _fields_or_why_not(graph)
    if isinstance(fields, Unanswerable):
        raise Unanswerable(str(fields))
    return GradientReductions(graph, *fields)


@computed_once
def _fields_or_why_not(graph: Graph) -> tuple[Any, ...] | Unanswerable:
    """Return the fields behind the graph, or the error, which takes as long to find and is worth keeping."""
    try:
        costs = _costs(graph)  # first: most reasons against it do not follow from durations
        return replayed(graph).end, *costs
    except Unanswerable as error:
        return Unanswerable(str(error))


@kept_as("gradient-reductions", RECORDS)
def _costs(graph: Graph) -> tuple[Any, ...]:
    """Compute the fields of `GradientReductions` except the graph and its replay, in order."""
    passes = gradient_passes(graph)
    timeline = replayed(graph)
    transfers = np.concatenate([backward.transfer for backward in passes])
    message = graph.messages[int(graph.nodes.message[transfers[0]])]
    are_bytes_known = bool((graph.nodes.bytes[transfers] > 0).all())
    if not are_bytes_known:
        passes = [_sized_by_time(graph, backward) for backward in passes]
    line = fit_costs(graph).get((message.op, message.group)) if are_bytes_known else BYTES_ARE_NS
    are_ranks_missing = line is None
    line = line or _fastest(graph, transfers)
    calls = [float(graph.nodes.duration[pieces].sum()) for backward in passes for pieces in backward.calls]
    num_bytes = float(sum(backward.parameters.num_bytes.sum() for backward in passes))
    return (
        tuple(passes),
        message,
        line,
        _slowdowns(graph, timeline, line, passes),
        float(np.mean(calls)),
        float(graph.nodes.bytes[transfers].sum()) / num_bytes if are_bytes_known else 1.0,
        _copying(graph, passes, num_bytes),
        are_bytes_known,
        are_ranks_missing,
    )


BYTES_ARE_NS = LinkCost(0.0, 1.0, 0.0, 0.0, 0, 0.0, bandwidth_only=True)


def _sized_by_time(graph: Graph, backward: Pass) -> Pass:
    """Return a pass sized by the times of its reductions, in proportion to known sizes, else evenly."""
    if backward.parameters.are_sizes_known:
        parts = np.split(backward.parameters.num_bytes, backward.closes[:-1] + 1)
        duration_ns = graph.nodes.duration[backward.transfer].tolist()
        shares = [divided(max(ns, part.size), part.tolist()) for ns, part in zip(duration_ns, parts)]
        in_proportion = np.maximum(np.concatenate(shares), 1)
        return dataclasses.replace(
            backward, parameters=dataclasses.replace(backward.parameters, num_bytes=in_proportion)
        )
    sizes: list[int] = []
    for count, duration_ns in zip(
        np.diff(backward.closes, prepend=-1), graph.nodes.duration[backward.transfer]
    ):
        sizes += [max(round(int(duration_ns) / int(count)), 1)] * int(count)
    estimated = dataclasses.replace(
        backward.parameters,
        num_bytes=np.array(sizes, np.int64),
        are_sizes_known=backward.closes.size == len(sizes),
    )
    return dataclasses.replace(backward, parameters=estimated)


def _fastest(graph: Graph, transfers: Ints) -> LinkCost:
    """Return an upper bound of the cost where ranks may have waited: the bandwidth of the fastest."""
    duration_ns = graph.nodes.duration[transfers].astype(np.float64).clip(1)
    fastest = [int(np.argmax(graph.nodes.bytes[transfers] / duration_ns))]
    return fit_line(graph.nodes.bytes[transfers[fastest]].astype(np.float64), duration_ns[fastest])


def alternatives(reductions: GradientReductions) -> list[GradientReductions]:
    """Return other possible reductions of the graph: both ends of everything that it leaves open.

    Unknown sizes of gradients may be as uneven as possible; and with missing ranks, all time of a reduction
    above that of the fastest may have been waiting, which disappears.
    """
    assumed = []
    if not all(backward.parameters.are_sizes_known for backward in reductions.passes):
        assumed += [
            dataclasses.replace(
                reductions, passes=[with_other_sizes(backward, end) for backward in reductions.passes]
            )
            for end in (0, -1)
        ]
    if reductions.are_ranks_missing:
        assumed.append(dataclasses.replace(reductions, slowdown=np.ones_like(reductions.slowdown)))
    return assumed


def plain_reductions(reductions: GradientReductions, backward: Pass, closes: Ints) -> list[Reduction]:
    """Return plain reductions of buckets that close after given gradients, each called as early as possible.

    Args:
        closes: [B] the last gradient of each bucket.
    """
    plain, dtypes, shapes = [], dtypes_of(reductions, backward), backward.parameters.shapes
    ends = list(zip([0, *(closes[:-1] + 1).tolist()], closes.tolist()))
    sizes = [reductions.bytes_of(backward, first, last) for first, last in ends]
    for (first, last), size, moving in zip(ends, sizes, reductions.line.moving_ns(np.array(sizes)).tolist()):
        bucket_shapes = shapes[first : last + 1]
        plain.append(
            Reduction(
                *(first, last, size, moving, reductions.line.latency_ns, reductions.call_ns, last),
                dtype=dtypes[first],
                shapes=bucket_shapes,
            )
        )
    return plain


def dtypes_of(reductions: GradientReductions, backward: Pass) -> list[str]:
    """Return [P] the element type of each gradient of a pass, empty where not known."""
    of_bucket = [dtype_of(reductions.graph, transfer) for transfer in backward.transfer.tolist()]
    counts = np.diff(backward.closes, prepend=-1).tolist()
    return [dtype for dtype, count in zip(of_bucket, counts) for _ in range(count)]


def calling(graph: Graph, passes: Sequence[Pass]) -> Bools:
    """Return [N] a mask of the calls of reductions, whose time changes with them."""
    calls = np.zeros(graph.num_nodes, np.bool_)
    calls[np.concatenate([pieces for backward in passes for pieces in backward.calls])] = True
    return calls


def _copying(graph: Graph, passes: list[Pass], num_bytes: float) -> float:
    """Return the time of copying gradients into their buckets, in ns per byte."""
    nodes = graph.nodes
    copies = [code for code, name in enumerate(graph.names) if name in COPIES]
    copying = np.flatnonzero(np.isin(nodes.name, copies) & (nodes.kind == NodeKind.CPU))
    spent = 0
    for backward in passes:
        begin, end = nodes.measured_start[backward.ready[0]], nodes.measured_start[backward.calls[-1][0]]
        of_thread = copying[nodes.lane[copying] == nodes.lane[backward.ready[0]]]
        within = (nodes.measured_start[of_thread] >= begin) & (nodes.measured_start[of_thread] <= end)
        spent += int(nodes.duration[of_thread[within]].sum())
    return spent / num_bytes


def _slowdowns(graph: Graph, timeline: Timeline, line: LinkCost, passes: list[Pass]) -> Floats:
    """Return [passes] `GradientReductions.slowdown`."""
    is_reduction = np.zeros(graph.num_nodes, np.bool_)
    is_reduction[np.concatenate([backward.transfer for backward in passes])] = True
    alone_ns = graph.nodes.duration * share_without_others(graph, timeline, is_reduction)
    shares = [
        float(alone_ns[backward.transfer].sum())
        / max(float(graph.nodes.duration[backward.transfer].sum()), 1.0)
        for backward in passes
    ]
    return np.array(
        [_slowdown(graph, timeline, line, backward) * share for backward, share in zip(passes, shares)]
    )


def _slowdown(graph: Graph, timeline: Timeline, line: LinkCost, backward: Pass) -> float:
    """Return the time in which a pass moved its gradients over that by its line.

    Counts the time in which any of its reductions ran, since latencies of successive ones overlap.
    """
    transfers, sizes = backward.transfer, graph.nodes.bytes[backward.transfer]
    if (sizes <= 0).any():  # sizes are times
        sizes = np.add.reduceat(backward.parameters.num_bytes, np.append(0, backward.closes[:-1] + 1))
    busy = union(timeline.start[transfers], timeline.end[transfers])
    expected = line.latency_ns * len(busy) + float(line.moving_ns(sizes).sum())
    return float((busy[:, 1] - busy[:, 0]).sum()) / max(expected, 1.0)


def next_of_rank(reductions: GradientReductions) -> list[int]:
    """Return the next pass of each one's thread and window, -1 for none."""
    lane = reductions.graph.nodes.lane
    following, latest = [-1] * len(reductions.passes), dict[tuple[int, int, int], int]()
    for number, backward in enumerate(reductions.passes):
        place = (backward.rank, backward.window, int(lane[backward.ready[0]]))
        previous = latest.get(place)
        if previous is not None:
            following[previous] = number
        latest[place] = number
    return following


def on_stream(reductions: GradientReductions) -> bool:
    """Return whether reductions run on GPUs, not in threads."""
    nodes = reductions.graph.nodes
    return reductions.graph.lanes[int(nodes.lane[reductions.passes[0].transfer[0]])][1].startswith("stream")


# Links of the reductions with other work: calls of others, waits, preceding GPU work.


@dataclass(frozen=True)
class Surroundings:
    """Links of the reductions of a pass with other work.

    Attributes:
        launch_lag, queue_lag, input_lag: median lags, ns, after calls, in the worker's queue, and after
            preceding GPU work.
        before, after: [K] call times, and transfers or arrivals, of other communication on the same workers,
            in this order; some of it may be between reductions of the pass.
        awaited: [W] uses of results: recorded bucket, waiting node and kind of edge.
        issued: [N] as from `_issued`.
        inputs: GPU work that gradients may come from, in the order of its launches on the thread.
        launched: ns of these launches.
        end: the last node of the step on the thread that drives the rank, -1 where none is known.
        are_bytes_known: whether each transfer of the pass has its bytes.
    """

    launch_lag: int
    queue_lag: int
    input_lag: int
    before: tuple[Ints, Ints]
    after: tuple[Ints, Ints]
    awaited: tuple[Ints, Ints, Ints]
    issued: Ints
    inputs: Ints
    launched: Ints
    end: int
    are_bytes_known: bool


def surroundings_of(reductions: GradientReductions) -> list[Surroundings]:
    """Return the links of each pass's reductions with other work."""
    return list(_surroundings_of(reductions.graph))


def recorded_reductions(graph: Graph, passes: Sequence[Pass]) -> Bools:
    """Return [N] a mask of the recorded reductions of all passes, with their rendezvous."""
    nodes = graph.nodes
    gone = np.zeros(graph.num_nodes, np.bool_)
    for backward in passes:
        gone[backward.arrive] = gone[backward.transfer] = True
    instances = np.unique(nodes.collective[np.concatenate([backward.arrive for backward in passes])])
    rendezvous = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    gone[rendezvous[np.isin(nodes.collective[rendezvous], instances)]] = True
    return gone


@kept_as("surroundings-of-reductions", {"Surroundings": Surroundings})
def _surroundings_of(graph: Graph) -> tuple[Surroundings, ...]:
    passes = gradient_passes(graph)
    gone, issued, launched = recorded_reductions(graph, passes), _issued(graph), _LaunchedWork(graph)
    leaving = np.flatnonzero(gone[graph.edges.source] & ~gone[graph.edges.target])
    leaving = leaving[np.argsort(graph.edges.source[leaving], kind="stable")]
    ends = _ends_of_steps(graph)
    surroundings = []
    for backward in passes:
        source = graph.edges.source[leaving]
        bounds = zip(
            np.searchsorted(source, backward.transfer),
            np.searchsorted(source, backward.transfer, side="right"),
        )
        of_pass = np.sort(np.concatenate([leaving[first:last] for first, last in bounds]))
        end = ends.get((backward.rank, backward.window, backward.step), -1)
        surroundings.append(_surroundings(graph, backward, gone, of_pass, issued, launched, end))
    return tuple(surroundings)


def _issued(graph: Graph) -> Ints:
    """Return [N] measured ns at which each node was issued: GPU work and communication by its call."""
    nodes, edges, launches = graph.nodes, graph.edges, Launches(graph)
    issued = nodes.measured_start.copy()
    launch = edges.kind == EdgeKind.LAUNCH
    issued[edges.target[launch]] = nodes.measured_start[edges.source[launch]]
    moved = launches.transfer >= 0
    issued[launches.transfer[moved]] = issued[launches.arrive[moved]]
    return issued


def _ends_of_steps(graph: Graph) -> dict[tuple[int, int, int], int]:
    """Return the last node of the rank's driving thread, by rank, window and step; the first of several."""
    nodes = graph.nodes
    drives = np.array([label == MAIN_THREAD for _, label in graph.lanes] + [False], np.bool_)
    driving = np.flatnonzero(drives[nodes.lane])
    if not driving.size:
        return {}
    starts, columns = (
        nodes.measured_start[driving],
        (nodes.rank[driving], nodes.window[driving], nodes.step[driving]),
    )
    runs = np.flatnonzero(differs_from_last(*columns))  # consecutive nodes are mostly of one step
    latest = np.maximum.reduceat(starts, runs)
    last = np.flatnonzero(starts == np.repeat(latest, np.diff(runs, append=driving.size)))
    last = last[np.lexsort((-last, starts[last]))]  # later entries of the dictionary win
    places = zip(*(column[last].tolist() for column in columns))
    return dict(zip(places, driving[last].tolist()))


def _surroundings(
    graph: Graph, backward: Pass, gone: Bools, leaving: Ints, issued: Ints, launched: _LaunchedWork, end: int
) -> Surroundings:
    """Return the links of a pass's reductions with other work.

    Args:
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges from transfers of the pass to other nodes.
        issued: [N] as from `_issued`.
        launched: GPU work by launching thread.
        end: the last node of the step, -1 where unknown.
    """
    nodes, edges = graph.nodes, graph.edges
    entering = graph.edges_into(backward.arrive)
    of_kind = edges.kind[entering]
    by_call, by_stream, by_event = (
        entering[of_kind == kind] for kind in (EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.EVENT)
    )
    queued = edges.source[by_stream]
    source, target, kinds = edges.source[leaving], edges.target[leaving], edges.kind[leaving]
    called = int(max(nodes.measured_start[pieces].max() for pieces in backward.calls))
    needed = (kinds == EdgeKind.SYNC) | (kinds == EdgeKind.EVENT)
    needed &= nodes.measured_start[target] >= called
    bucket, edge = np.nonzero(needed & (source == backward.transfer[:, None]))
    inputs, launches = launched.on_streams_of(edges.source[by_event], int(nodes.lane[backward.ready[0]]))
    lags = (edges.lag[group].tolist() for group in (by_call, by_stream, by_event))
    launch_lag, queue_lag, input_lag = (round(median(lags_ns or [0])) for lags_ns in lags)
    return Surroundings(
        launch_lag,
        queue_lag,
        input_lag,
        _in_turn(queued[~gone[queued]], issued),
        _in_turn(target[kinds == EdgeKind.STREAM], issued),
        (bucket, target[edge], kinds[edge]),
        issued,
        inputs,
        launches,
        end,
        bool((nodes.bytes[backward.transfer] > 0).all()),
    )


def _in_turn(nodes: Ints, issued: Ints) -> tuple[Ints, Ints]:
    """Return [K] issue times, and the nodes, both sorted by them."""
    nodes = nodes[np.lexsort((nodes, issued[nodes]))]
    return issued[nodes], nodes


class _LaunchedWork:
    """GPU work by the thread that launched it, in the order of the launches."""

    def __init__(self, graph: Graph) -> None:
        nodes, edges = graph.nodes, graph.edges
        launch = np.flatnonzero(edges.kind == EdgeKind.LAUNCH)
        thread, launched = nodes.lane[edges.source[launch]], nodes.measured_start[edges.source[launch]]
        order = np.lexsort((launched, thread))
        self._lane, self._thread, self._launched = nodes.lane, thread[order], launched[order]
        self._work = edges.target[launch][order]
        self._by_streams: dict[tuple[int, ...], tuple[Ints, Ints]] = {}

    def on_streams_of(self, sources: Ints, thread: int) -> tuple[Ints, Ints]:
        """Return work on the streams of `sources` that a thread launched, and its launch times."""
        if sources.size == 0:
            return sources, sources
        streams = np.unique(self._lane[sources])
        place = (thread, *streams.tolist())
        if place not in self._by_streams:
            first, last = np.searchsorted(self._thread, (thread, thread + 1))
            work, launched = self._work[first:last], self._launched[first:last]
            on_stream = np.isin(self._lane[work], streams)
            self._by_streams[place] = work[on_stream], launched[on_stream]
        return self._by_streams[place]


def closing(num_bytes: Ints, first_cap: int, cap: int, closes_before: bool = False) -> Ints:
    """Return the last parameter of each bucket, where a bucket closes once it has the cap or more.

    Args:
        num_bytes: [P] sizes of gradients in the order in which they are ready.
        first_cap, cap: bytes, of the first bucket and of the others.
        closes_before: whether a bucket closes before a parameter that would take it over the cap.
    """
    closes: list[int] = []
    held = 0
    for parameter, size in enumerate(num_bytes.tolist()):
        if closes_before and held and held + size > (cap if closes else first_cap):
            closes.append(parameter - 1)
            held = 0
        held += size
        if held >= (cap if closes else first_cap):
            closes.append(parameter)
            held = 0
    if not closes or closes[-1] != num_bytes.size - 1:
        closes.append(num_bytes.size - 1)
    return np.array(closes, np.int64)


# Gradients reduced in other buckets, at other moments, or in other ways. A reduction begins when its call is
# made and a worker (a stream) is free for it, moves data once all ranks have arrived, and ends its own time
# later. Reductions of one rank share its link: each can use it once the bytes of those before it have passed,
# while the fixed parts of their times overlap. Other communication of its workers keeps its position among
# the calls.

NOWHERE: Ints = np.empty(0, np.int64)
GLOO_WORKERS = 2  # threads of a gloo process group that run collectives, unless GLOO's options differ


def with_reductions(
    reductions: GradientReductions,
    wanted: Sequence[Sequence[Reduction]],
    awaited: Sequence[int] | None = None,
    ends_step: bool = True,
) -> Graph:
    """Return the graph with other reductions in its backward passes.

    Args:
        wanted: reductions of each pass in the order of their calls; equal on all ranks of a pass.
        awaited: for each pass, the pass whose consumers wait for its results, -1 for none; by default itself.
        ends_step: whether a step waits for reductions that are called at its end.
    """
    editor, surroundings = GraphEditor(reductions.graph), surroundings_of(reductions)
    editor.gone |= recorded_reductions(reductions.graph, reductions.passes)
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
        at_end = inserted.at_end & ends_step
        for ready, last in zip(inserted.ready[at_end].tolist(), moved[at_end].tolist()):
            editor.wait(ready, last)
    return editor.finish()


class _PassReductions(NamedTuple):
    """Reductions of a pass, [R] each, in the order of their calls.

    Attributes:
        ready: the nodes that their calls follow.
        called: measured ns at which they are called.
        at_end: whether the end of the step waits for them.
        call_ns: of the calls.
        fixed_ns: the part of their time that overlaps with the transfer before.
        whole_ns: all of their time.
        num_bytes: -1 where the run does not record bytes.
        arrive, transfer: recorded nodes to copy.
        launch_lag: median lag of the pass.
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
    """Return the wanted reductions of a pass as arrays.

    Raises:
        Unanswerable: one is the last of the step, and the thread that drives the rank is not known.
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
    """Insert the reductions of all passes, each with its call and its rendezvous.

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
    """Return instance and rendezvous of each reduction; rendezvous is -1 where no other rank was recorded.

    Args:
        begun_with: [K] the first recorded collective of its pass, which identifies the pass on all ranks.
        index: [K] of the reduction in the pass.
    """
    nodes = editor.graph.nodes
    place = begun_with * (int(index.max(initial=0)) + 1) + index
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    turn = np.argsort(first)  # instances are numbered in order of first occurrence
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
    """Queue reductions: each begins when a worker is free, and gets the link once those before it have moved.

    Args:
        rows_of_pass: positions of each pass's reductions among all.
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
    """Make reductions of a pass follow other work called before them, and other work follow the reductions.

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
            earlier = ahead[called < issued][-1:]  # the last is enough, since they are queued
            editor.link_all(earlier, np.full_like(earlier, node), EdgeKind.STREAM, lag)


def _needed_at(
    graph: Graph,
    backward: Pass,
    issued: Ints,
    awaited: tuple[Ints, Ints, Ints],
    wanted: Sequence[Reduction],
    inserted: _PassReductions,
) -> tuple[Ints, Ints, Ints]:
    """Return where results are needed: as early as that of any recorded bucket with one of their parameters.

    Nodes before its call cannot wait for a reduction: a thread that stalls between its own calls (waiting for
    a core, say) may seem to have waited for one of them.

    Args:
        issued: [N] as in `Surroundings`.
        awaited: [W] as in `Surroundings`.
        wanted: its reductions; those with `needed`, or at the end of the step, are not inferred.

    Returns:
        The reduction, the node that needs it, and the kind of edge.
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
    needs = np.full((len(asked), int(bucket.max()) + 1), never)  # first need of each bucket
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
    """Return the number of concurrent reductions of each rank."""
    nodes = graph.nodes
    moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
    of_gpu = [what.startswith("stream") for _, what in graph.lanes]
    ranks, first = np.unique(nodes.rank[moving], return_index=True)
    lanes = nodes.lane[moving[first]].tolist()
    return {rank: 1 if of_gpu[lane] else GLOO_WORKERS for rank, lane in zip(ranks.tolist(), lanes)}
