"""How a graph reduces gradients: the part that all edits of reductions share.

In: a graph. Out: its backward passes with what each reduces, what a reduction costs, and plain reductions of
buckets that close where an edit says. `changed.py` puts reductions into the graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.curves import LinkCost, fit_line
from dpro.replay.cost.transfers import fit_costs
from dpro.replay.gradients.buckets import dtype_of, gradient_passes
from dpro.replay.gradients.inferred import divided, with_other_sizes
from dpro.replay.gradients.passes import MAIN_THREAD, Launches, Parameters, Pass
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind, once
from dpro.replay.intervals import union
from dpro.replay.kept import kept, with_facts_alone
from dpro.replay.timeline import Timeline, differs_from_last, replayed
from dpro.replay.whatif.graph_ops.shared_links import share_without_others

STEP = -1
RECORDS = {"Parameters": Parameters, "Pass": Pass, "Message": Message, "LinkCost": LinkCost}
COPIES = ("aten::mul", "aten::copy_", "aten::div_")  # by which DDP fills its buckets


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
        dtype: element type of its gradients, empty where not known.
        shapes: of its gradients; empty where they are not known.
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
    """How the gradients of a graph are reduced.

    Attributes:
        graph: the graph.
        end: [N] ns of the replay.
        passes: backward passes of all ranks.
        message: which kind of communication a reduction is.
        line: what a reduction costs.
        slowdown: [passes] how many times as long the reductions of each took as the line says, without what
            others on their link took from them.
        call_ns: usual time of the thread in a call.
        ratio: bytes that are moved per byte of gradient.
        copy_ns_per_byte: time of a thread to read and write gradients once; 0 where the run does not show it.
        are_bytes_known: whether the run says any bytes; else sizes are ns that moving them takes.
        are_ranks_missing: whether what reductions take may be waiting for ranks that were not recorded.
    """

    graph: Graph
    end: Ints
    passes: list[Pass]
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
        """What the pass with most bytes reduces, the first of several."""
        return max(
            (backward.parameters for backward in self.passes),
            key=lambda gradients: int(gradients.num_bytes.sum()),
        )

    def bytes_of(self, backward: Pass, first: int, last: int) -> int:
        """Payload of a bucket.

        Args:
            first, last: its parameters, by the order in which they are ready.
        """
        return round(self.ratio * int(backward.parameters.num_bytes[first : last + 1].sum()))

    @property
    def is_recorded(self) -> bool:
        """Whether the run says which gradients are in which reduction; else that is inferred."""
        return all(backward.parameters.is_recorded for backward in self.passes)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank gets its shard of the sums only."""
        return self.message.op == "reduce_scatter"

    def notes(self) -> tuple[str, ...]:
        """What was inferred of the reductions, a line each."""
        said = []
        if not self.is_recorded:
            said.append(
                "which gradients are in which reduction is inferred from calls, bytes and autograd's spans"
            )
        if not all(backward.parameters.are_sizes_known for backward in self.passes):
            said.append(
                "sizes of single gradients are not known: the interval holds any division of a bucket"
            )
        if self.are_ranks_missing:
            said.append(
                "ranks are missing: reductions are taken to cost no more than the fastest of their size"
            )
        return tuple(said)


def reduced(graph: Graph) -> GradientReductions:
    """How a graph reduces gradients, as recorded or inferred.

    Raises:
        Unanswerable: the run lacks something; the message says what is missing.
    """
    edges = graph.edges
    columns = (*graph.nodes.columns, edges.source, edges.lag, edges.kind, graph.messages, graph.network)
    reductions = once(graph, "reduced gradients", columns, lambda: _reduced_or_why_not(graph))
    if isinstance(reductions, Unanswerable):
        raise Unanswerable(str(reductions))
    return reductions


def _reduced_or_why_not(graph: Graph) -> GradientReductions | Unanswerable:
    """As `reduced`, or why there is no answer, which takes as long to find out."""
    try:
        return _reduced(graph)
    except Unanswerable as error:
        return Unanswerable(str(error))


def _reduced(graph: Graph) -> GradientReductions:
    nodes, edges = graph.nodes, graph.edges
    columns = (*nodes.columns, edges.source, edges.target, edges.lag, edges.kind)
    inputs = (*columns, graph.messages, graph.network, graph.run)
    passes, *costs = kept(graph, "gradient-reductions", inputs, lambda: _facts(graph), RECORDS)
    end = replayed(graph).end  # what a graph keeps must not hold it
    return GradientReductions(with_facts_alone(graph), end, list(passes), *costs)


def _facts(graph: Graph) -> tuple[Any, ...]:
    """Of `GradientReductions` all but the graph and its replay, in order."""
    passes = gradient_passes(graph)
    timeline = replayed(graph)
    transfers = np.concatenate([backward.transfer for backward in passes])
    message = graph.messages[int(graph.nodes.message[transfers[0]])]
    are_bytes_known = bool((graph.nodes.bytes[transfers] > 0).all())
    if not are_bytes_known:
        passes = [_timed(graph, backward) for backward in passes]
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
        float(np.median(calls)),
        float(graph.nodes.bytes[transfers].sum()) / num_bytes if are_bytes_known else 1.0,
        _copying(graph, passes, num_bytes),
        are_bytes_known,
        are_ranks_missing,
    )


BYTES_ARE_NS = LinkCost(0.0, 1.0, 0.0, 0.0, 0, 0.0, bandwidth_only=True)


def _timed(graph: Graph, backward: Pass) -> Pass:
    """A pass whose sizes are the times of its reductions, in proportion where they are known, else even."""
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
    """What reductions cost at most where others were waited for: the bandwidth of the fastest."""
    duration_ns = graph.nodes.duration[transfers].astype(np.float64).clip(1)
    fastest = transfers[[int(np.argmax(graph.nodes.bytes[transfers] / duration_ns))]]
    return fit_line(
        graph.nodes.bytes[fastest].astype(np.float64), graph.nodes.duration[fastest].astype(np.float64)
    )


def alternatives(reductions: GradientReductions) -> list[GradientReductions]:
    """How the graph may reduce gradients besides: both ends of each thing that it leaves open.

    Sizes of gradients that are not known may be as uneven as can be, and of what reductions take with missing
    ranks all above the fastest may have been waiting, which goes away.
    """
    assumed = []
    if not all(backward.parameters.are_sizes_known for backward in reductions.passes):
        assumed += [
            dataclasses.replace(
                reductions, passes=[with_other_sizes(backward, where) for backward in reductions.passes]
            )
            for where in (0, -1)
        ]
    if reductions.are_ranks_missing:
        assumed.append(dataclasses.replace(reductions, slowdown=np.ones_like(reductions.slowdown)))
    return assumed


def plain_reductions(reductions: GradientReductions, backward: Pass, closes: Ints) -> list[Reduction]:
    """Plain reductions of buckets that close after some gradients, each called as soon as it can be.

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
    """[P] the element type of each gradient of a pass, empty where not known."""
    of_bucket = [dtype_of(reductions.graph, transfer) for transfer in backward.transfer.tolist()]
    counts = np.diff(backward.closes, prepend=-1).tolist()
    return [dtype for dtype, count in zip(of_bucket, counts) for _ in range(count)]


def calling(reductions: GradientReductions) -> Bools:
    """[N] the calls of reductions, whose time changes with them."""
    calls = np.zeros(reductions.graph.num_nodes, np.bool_)
    calls[np.concatenate([pieces for backward in reductions.passes for pieces in backward.calls])] = True
    return calls


def _copying(graph: Graph, passes: list[Pass], num_bytes: float) -> float:
    """What the copies of gradients into their buckets took, per byte."""
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
    """[passes] as `GradientReductions.slowdown`."""
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
    """The time in which a pass moved its gradients over what its line says.

    That is the time in which any of its reductions ran: latencies of those that follow each other overlap.
    """
    transfers, sizes = backward.transfer, graph.nodes.bytes[backward.transfer]
    if (sizes <= 0).any():  # sizes are times
        sizes = np.add.reduceat(backward.parameters.num_bytes, np.append(0, backward.closes[:-1] + 1))
    busy = union(timeline.start[transfers], timeline.end[transfers])
    expected = line.latency_ns * len(busy) + float(line.moving_ns(sizes).sum())
    return float((busy[:, 1] - busy[:, 0]).sum()) / max(expected, 1.0)


def next_of_rank(reductions: GradientReductions) -> list[int]:
    """For each pass the next one of its thread and window, -1 for none."""
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
    """Whether reductions run on GPUs, not in threads."""
    nodes = reductions.graph.nodes
    return reductions.graph.lanes[int(nodes.lane[reductions.passes[0].transfer[0]])][1].startswith("stream")


# What is linked with the reductions of backward passes: what others call, what waits, which work is before.


@dataclass(frozen=True)
class Surroundings:
    """What is linked with the reductions of a pass.

    Attributes:
        launch_lag, queue_lag, input_lag: usual lags ns of calls, of the worker, of GPU work before.
        before, after: [K] when other communication on the same workers was called, and its transfer or
            arrival, in this order; some of it may be between reductions of the pass.
        awaited: [W] where results are needed: of which recorded bucket, by which node and kind of edge.
        issued: [N] as of `_issued`.
        inputs: GPU work that gradients may come from, in the order of its launches on the thread.
        launched: ns of these launches.
        end: the last node of the step on the thread that drives the rank, -1 where none is known.
        are_bytes_known: whether each of its transfers says how many bytes it moves.
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
    """For each pass what is linked with its reductions."""
    graph = reductions.graph
    columns = (*graph.nodes.columns, *graph.edges.columns, graph.lanes, graph.messages, graph.run)
    records, compute = {"Surroundings": Surroundings}, lambda: tuple(_surroundings_of(reductions))
    return list(kept(graph, "surroundings-of-reductions", columns, compute, records))


def recorded_reductions(reductions: GradientReductions) -> Bools:
    """[N] the nodes of the recorded reductions of all passes, with their rendezvous."""
    nodes = reductions.graph.nodes
    gone = np.zeros(reductions.graph.num_nodes, np.bool_)
    for backward in reductions.passes:
        gone[backward.arrive] = gone[backward.transfer] = True
    instances = np.unique(
        nodes.collective[np.concatenate([backward.arrive for backward in reductions.passes])]
    )
    rendezvous = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    gone[rendezvous[np.isin(nodes.collective[rendezvous], instances)]] = True
    return gone


def _surroundings_of(reductions: GradientReductions) -> list[Surroundings]:
    graph = reductions.graph
    gone, issued, launched = recorded_reductions(reductions), _issued(graph), _LaunchedWork(graph)
    leaving = np.flatnonzero(gone[graph.edges.source] & ~gone[graph.edges.target])
    leaving = leaving[np.argsort(graph.edges.source[leaving], kind="stable")]
    ends = _ends_of_steps(graph)
    surroundings = []
    for backward in reductions.passes:
        source = graph.edges.source[leaving]
        bounds = zip(
            np.searchsorted(source, backward.transfer),
            np.searchsorted(source, backward.transfer, side="right"),
        )
        of_pass = np.sort(np.concatenate([leaving[first:last] for first, last in bounds]))
        end = ends.get((backward.rank, backward.window, backward.step), -1)
        surroundings.append(_surroundings(graph, backward, gone, of_pass, issued, launched, end))
    return surroundings


def _issued(graph: Graph) -> Ints:
    """[N] ns as measured, when each node was issued: GPU work and communication by a thread, earlier."""
    nodes, edges, launches = graph.nodes, graph.edges, Launches(graph)
    issued = nodes.measured_start.copy()
    launch = edges.kind == EdgeKind.LAUNCH
    issued[edges.target[launch]] = nodes.measured_start[edges.source[launch]]
    moved = launches.transfer >= 0
    issued[launches.transfer[moved]] = issued[launches.arrive[moved]]
    return issued


def _ends_of_steps(graph: Graph) -> dict[tuple[int, int, int], int]:
    """By rank, window and step, the last node of the thread that drives the rank; the first of several."""
    nodes = graph.nodes
    drives = np.array([label == MAIN_THREAD for _, label in graph.lanes] + [False], np.bool_)
    driving = np.flatnonzero(drives[nodes.lane])
    if not driving.size:
        return {}
    starts, columns = (
        nodes.measured_start[driving],
        (nodes.rank[driving], nodes.window[driving], nodes.step[driving]),
    )
    runs = np.flatnonzero(differs_from_last(*columns))  # nodes that follow each other are mostly of one step
    latest = np.maximum.reduceat(starts, runs)
    last = np.flatnonzero(starts == np.repeat(latest, np.diff(runs, append=driving.size)))
    last = last[np.lexsort((-last, starts[last]))]  # those that count come last
    places = zip(*(column[last].tolist() for column in columns))
    return dict(zip(places, driving[last].tolist()))


def _surroundings(
    graph: Graph, backward: Pass, gone: Bools, leaving: Ints, issued: Ints, launched: _LaunchedWork, end: int
) -> Surroundings:
    """What is linked with the reductions of a pass.

    Args:
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges from transfers of the pass to what is none of these.
        issued: [N] as of `_issued`.
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
    """[K] when each node was issued, and the nodes, in this order."""
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
        """Work on the streams of some work that a thread launched, and when it did."""
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
    """The last parameter of each bucket: a bucket closes once it holds the cap or more.

    Args:
        num_bytes: [P] sizes of gradients in the order in which they are ready.
        first_cap, cap: bytes, of the first bucket and of the others.
        closes_before: whether it closes before a parameter with which it would hold more.
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
