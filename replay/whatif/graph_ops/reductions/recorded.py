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
from dpro.replay.whatif.graph_ops.shared_links import share_of_own

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
        call_ns: mean time of the thread in a call.
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
        return max((each.parameters for each in self.passes), key=lambda own: int(own.num_bytes.sum()))

    def bytes_of(self, each: Pass, first: int, last: int) -> int:
        """Payload of a bucket.

        Args:
            first, last: its parameters, by the order in which they are ready.
        """
        return round(self.ratio * int(each.parameters.num_bytes[first : last + 1].sum()))

    @property
    def is_recorded(self) -> bool:
        """Whether the run says which gradients are in which reduction; else that is inferred."""
        return all(each.parameters.is_recorded for each in self.passes)

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
        if not all(each.parameters.are_sizes_known for each in self.passes):
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
    found = once(graph, "reduced gradients", columns, lambda: _reduced_or_why_not(graph))
    if isinstance(found, Unanswerable):
        raise Unanswerable(str(found))
    return found


def _reduced_or_why_not(graph: Graph) -> GradientReductions | Unanswerable:
    """As `reduced`, or why there is no answer, which takes as long to find out."""
    try:
        return _reduced(graph)
    except Unanswerable as error:
        return Unanswerable(str(error))


def _reduced(graph: Graph) -> GradientReductions:
    nodes, edges = graph.nodes, graph.edges
    columns = (*nodes.columns, edges.source, edges.target, edges.lag, edges.kind)
    known = (*columns, graph.messages, graph.network, graph.run)
    passes, *costs = kept(graph, "gradient-reductions", known, lambda: _facts(graph), RECORDS)
    end = replayed(graph).end  # what a graph keeps must not hold it
    return GradientReductions(with_facts_alone(graph), end, list(passes), *costs)


def _facts(graph: Graph) -> tuple[Any, ...]:
    """Of `GradientReductions` all but the graph and its replay, in order."""
    passes = gradient_passes(graph)
    timeline = replayed(graph)
    transfers = np.concatenate([each.transfer for each in passes])
    message = graph.messages[int(graph.nodes.message[transfers[0]])]
    said = bool((graph.nodes.bytes[transfers] > 0).all())
    if not said:
        passes = [_timed(graph, each) for each in passes]
    line = fit_costs(graph).get((message.op, message.group)) if said else BYTES_ARE_NS
    missing = line is None
    line = line or _fastest(graph, transfers)
    calls = [float(graph.nodes.duration[pieces].sum()) for each in passes for pieces in each.calls]
    num_bytes = float(sum(each.parameters.num_bytes.sum() for each in passes))
    return (
        tuple(passes),
        message,
        line,
        _slowdowns(graph, timeline, line, passes),
        float(np.mean(calls)),
        float(graph.nodes.bytes[transfers].sum()) / num_bytes if said else 1.0,
        _copying(graph, passes, num_bytes),
        said,
        missing,
    )


BYTES_ARE_NS = LinkCost(0.0, 1.0, 0.0, 0.0, 0, 0.0, bandwidth_only=True)


def _timed(graph: Graph, each: Pass) -> Pass:
    """A pass whose sizes are the times of its reductions, in proportion where they are known, else even."""
    if each.parameters.are_sizes_known:
        parts = np.split(each.parameters.num_bytes, each.closes[:-1] + 1)
        took = graph.nodes.duration[each.transfer].tolist()
        shares = [divided(max(ns, part.size), part.tolist()) for ns, part in zip(took, parts)]
        in_proportion = np.maximum(np.concatenate(shares), 1)
        return dataclasses.replace(
            each, parameters=dataclasses.replace(each.parameters, num_bytes=in_proportion)
        )
    sizes: list[int] = []
    for count, took in zip(np.diff(each.closes, prepend=-1), graph.nodes.duration[each.transfer]):
        sizes += [max(round(int(took) / int(count)), 1)] * int(count)
    unknown = dataclasses.replace(
        each.parameters, num_bytes=np.array(sizes, np.int64), are_sizes_known=each.closes.size == len(sizes)
    )
    return dataclasses.replace(each, parameters=unknown)


def _fastest(graph: Graph, transfers: Ints) -> LinkCost:
    """What reductions cost at most where others were waited for: the bandwidth of the fastest."""
    took = graph.nodes.duration[transfers].astype(np.float64).clip(1)
    fastest = transfers[[int(np.argmax(graph.nodes.bytes[transfers] / took))]]
    return fit_line(
        graph.nodes.bytes[fastest].astype(np.float64), graph.nodes.duration[fastest].astype(np.float64)
    )


def alternatives(known: GradientReductions) -> list[GradientReductions]:
    """How the graph may reduce gradients besides: both ends of each thing that it leaves open.

    Sizes of gradients that are not known may be as uneven as can be, and of what reductions take with missing
    ranks all above the fastest may have been waiting, which goes away.
    """
    found = []
    if not all(each.parameters.are_sizes_known for each in known.passes):
        found += [
            dataclasses.replace(known, passes=[with_other_sizes(each, where) for each in known.passes])
            for where in (0, -1)
        ]
    if known.are_ranks_missing:
        found.append(dataclasses.replace(known, slowdown=np.ones_like(known.slowdown)))
    return found


def plain_reductions(known: GradientReductions, each: Pass, closes: Ints) -> list[Reduction]:
    """Plain reductions of buckets that close after some gradients, each called as soon as it can be.

    Args:
        closes: [B] the last gradient of each bucket.
    """
    found, dtypes, shapes = [], dtypes_of(known, each), each.parameters.shapes
    ends = list(zip([0, *(closes[:-1] + 1).tolist()], closes.tolist()))
    sizes = [known.bytes_of(each, first, last) for first, last in ends]
    for (first, last), size, moving in zip(ends, sizes, known.line.moving_ns(np.array(sizes)).tolist()):
        own = shapes[first : last + 1]
        found.append(
            Reduction(
                *(first, last, size, moving, known.line.latency_ns, known.call_ns, last),
                dtype=dtypes[first],
                shapes=own,
            )
        )
    return found


def dtypes_of(known: GradientReductions, each: Pass) -> list[str]:
    """[P] the element type of each gradient of a pass, empty where not known."""
    of_bucket = [dtype_of(known.graph, transfer) for transfer in each.transfer.tolist()]
    counts = np.diff(each.closes, prepend=-1).tolist()
    return [dtype for dtype, count in zip(of_bucket, counts) for _ in range(count)]


def calling(known: GradientReductions) -> Bools:
    """[N] the calls of reductions, whose time changes with them."""
    calls = np.zeros(known.graph.num_nodes, np.bool_)
    calls[np.concatenate([pieces for each in known.passes for pieces in each.calls])] = True
    return calls


def _copying(graph: Graph, passes: list[Pass], num_bytes: float) -> float:
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
    return spent / num_bytes


def _slowdowns(graph: Graph, timeline: Timeline, line: LinkCost, passes: list[Pass]) -> Floats:
    """[passes] as `GradientReductions.slowdown`."""
    own = np.zeros(graph.num_nodes, np.bool_)
    own[np.concatenate([each.transfer for each in passes])] = True
    alone_ns = graph.nodes.duration * share_of_own(graph, timeline, own)
    shares = [
        float(alone_ns[each.transfer].sum()) / max(float(graph.nodes.duration[each.transfer].sum()), 1.0)
        for each in passes
    ]
    return np.array([_slowdown(graph, timeline, line, each) * share for each, share in zip(passes, shares)])


def _slowdown(graph: Graph, timeline: Timeline, line: LinkCost, each: Pass) -> float:
    """The time in which a pass moved its gradients over what its line says.

    That is the time in which any of its reductions ran: latencies of those that follow each other overlap.
    """
    transfers, sizes = each.transfer, graph.nodes.bytes[each.transfer]
    if (sizes <= 0).any():  # sizes are times
        sizes = np.add.reduceat(each.parameters.num_bytes, np.append(0, each.closes[:-1] + 1))
    busy = union(timeline.start[transfers], timeline.end[transfers])
    expected = line.latency_ns * len(busy) + float(line.moving_ns(sizes).sum())
    return float((busy[:, 1] - busy[:, 0]).sum()) / max(expected, 1.0)


def next_of_rank(known: GradientReductions) -> list[int]:
    """For each pass the next one of its thread and window, -1 for none."""
    lane = known.graph.nodes.lane
    following, seen = [-1] * len(known.passes), dict[tuple[int, int, int], int]()
    for which, each in enumerate(known.passes):
        place = (each.rank, each.window, int(lane[each.ready[0]]))
        before = seen.get(place)
        if before is not None:
            following[before] = which
        seen[place] = which
    return following


def on_stream(known: GradientReductions) -> bool:
    """Whether reductions run on GPUs, not in threads."""
    nodes = known.graph.nodes
    return known.graph.lanes[int(nodes.lane[known.passes[0].transfer[0]])][1].startswith("stream")


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


def surroundings_of(known: GradientReductions) -> list[Surroundings]:
    """For each pass what is linked with its reductions."""
    graph = known.graph
    columns = (*graph.nodes.columns, *graph.edges.columns, graph.lanes, graph.messages, graph.run)
    records, found = {"Surroundings": Surroundings}, lambda: tuple(_surroundings_of(known))
    return list(kept(graph, "surroundings-of-reductions", columns, found, records))


def recorded_reductions(known: GradientReductions) -> Bools:
    """[N] the nodes of the recorded reductions of all passes, with their rendezvous."""
    nodes = known.graph.nodes
    gone = np.zeros(known.graph.num_nodes, np.bool_)
    for each in known.passes:
        gone[each.arrive] = gone[each.transfer] = True
    instances = np.unique(nodes.collective[np.concatenate([each.arrive for each in known.passes])])
    met = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    gone[met[np.isin(nodes.collective[met], instances)]] = True
    return gone


def _surroundings_of(known: GradientReductions) -> list[Surroundings]:
    graph = known.graph
    gone, issued, launched = recorded_reductions(known), _issued(graph), _LaunchedWork(graph)
    leaving = np.flatnonzero(gone[graph.edges.source] & ~gone[graph.edges.target])
    leaving = leaving[np.argsort(graph.edges.source[leaving], kind="stable")]
    ends = _ends_of_steps(graph)
    found = []
    for each in known.passes:
        source = graph.edges.source[leaving]
        bounds = zip(
            np.searchsorted(source, each.transfer), np.searchsorted(source, each.transfer, side="right")
        )
        mine = np.sort(np.concatenate([leaving[first:last] for first, last in bounds]))
        end = ends.get((each.rank, each.window, each.step), -1)
        found.append(_surroundings(graph, each, gone, mine, issued, launched, end))
    return found


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
    drives = np.array([what == MAIN_THREAD for _, what in graph.lanes] + [False], np.bool_)
    mine = np.flatnonzero(drives[nodes.lane])
    if not mine.size:
        return {}
    starts, columns = nodes.measured_start[mine], (nodes.rank[mine], nodes.window[mine], nodes.step[mine])
    runs = np.flatnonzero(differs_from_last(*columns))  # nodes that follow each other are mostly of one step
    latest = np.maximum.reduceat(starts, runs)
    last = np.flatnonzero(starts == np.repeat(latest, np.diff(runs, append=mine.size)))
    last = last[np.lexsort((-last, starts[last]))]  # those that count come last
    places = zip(*(column[last].tolist() for column in columns))
    return dict(zip(places, mine[last].tolist()))


def _surroundings(
    graph: Graph, each: Pass, gone: Bools, leaving: Ints, issued: Ints, launched: _LaunchedWork, end: int
) -> Surroundings:
    """What is linked with the reductions of a pass.

    Args:
        gone: [N] reductions and rendezvous of all passes.
        leaving: edges from transfers of the pass to what is none of these.
        issued: [N] as of `_issued`.
    """
    nodes, edges = graph.nodes, graph.edges
    entering = graph.edges_into(each.arrive)
    of_kind = edges.kind[entering]
    by_call, by_stream, by_event = (
        entering[of_kind == kind] for kind in (EdgeKind.LAUNCH, EdgeKind.STREAM, EdgeKind.EVENT)
    )
    queued = edges.source[by_stream]
    source, target, kinds = edges.source[leaving], edges.target[leaving], edges.kind[leaving]
    called = int(max(nodes.measured_start[pieces].max() for pieces in each.calls))
    needed = (kinds == EdgeKind.SYNC) | (kinds == EdgeKind.EVENT)
    needed &= nodes.measured_start[target] >= called
    bucket, at = np.nonzero(needed & (source == each.transfer[:, None]))
    inputs, launches = launched.on_streams_of(edges.source[by_event], int(nodes.lane[each.ready[0]]))
    lags = (edges.lag[found].tolist() for found in (by_call, by_stream, by_event))
    launch_lag, queue_lag, input_lag = (round(median(own or [0])) for own in lags)
    return Surroundings(
        launch_lag,
        queue_lag,
        input_lag,
        _in_turn(queued[~gone[queued]], issued),
        _in_turn(target[kinds == EdgeKind.STREAM], issued),
        (bucket, target[at], kinds[at]),
        issued,
        inputs,
        launches,
        end,
        bool((nodes.bytes[each.transfer] > 0).all()),
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
        thread, at = nodes.lane[edges.source[launch]], nodes.measured_start[edges.source[launch]]
        order = np.lexsort((at, thread))
        self._lane, self._thread, self._at = nodes.lane, thread[order], at[order]
        self._work = edges.target[launch][order]
        self._found: dict[tuple[int, ...], tuple[Ints, Ints]] = {}

    def on_streams_of(self, sources: Ints, thread: int) -> tuple[Ints, Ints]:
        """Work on the streams of some work that a thread launched, and when it did."""
        if sources.size == 0:
            return sources, sources
        streams = np.unique(self._lane[sources])
        place = (thread, *streams.tolist())
        if place not in self._found:
            first, last = np.searchsorted(self._thread, (thread, thread + 1))
            work, at = self._work[first:last], self._at[first:last]
            on_stream = np.isin(self._lane[work], streams)
            self._found[place] = work[on_stream], at[on_stream]
        return self._found[place]


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
