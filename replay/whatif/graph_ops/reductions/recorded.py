"""How a graph reduces gradients: the part that all edits of reductions share.

In: a graph. Out: its backward passes with what each reduces, what a reduction costs, and plain reductions of
buckets that close where an edit says. `changed.py` puts reductions into the graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, Message, NodeKind, once
from dpro.replay.intervals import union
from dpro.replay.kept import kept, with_facts_alone
from dpro.replay.models.gradients.buckets import dtype_of, gradient_passes
from dpro.replay.models.gradients.inferred import divided, with_other_sizes
from dpro.replay.models.gradients.passes import Parameters, Pass
from dpro.replay.models.link_costs import LinkCost, fit_costs, fit_line
from dpro.replay.timeline import Timeline, replayed
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
        float(np.median(calls)),
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
