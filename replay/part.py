"""One rank's share of the graph: its nodes and the edges among them.

In: a `Local` and its syncs. Out: a `Part` in numbering of its own, with the nodes that other ranks' edges
attach to. Lags are left at zero: they are pooled over all ranks by `dpro.replay.build`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import EdgeKind, Edges, NodeKind, Nodes
from dpro.replay.local import KIND, Local
from dpro.replay.sections import Positions, sections
from dpro.replay.streams import Streams, Wait, cpu_waits, event_edges, streams_of
from dpro.replay.threads import NOTHING, Pieces, Segments, bursts, cut_thread, thread_segments, top_level

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A thread that waited for a CPU collective goes on within this time of its end, or within this share of the
# time it did nothing else: woken threads share their cores with the ones that woke them.
CPU_WAKE_UP_NS = 500_000
CPU_WAKE_UP_SHARE = 0.2
# Work that nothing in the trace explains the start of is tied to what came before it by the time between.
UNEXPLAINED_NS = 50_000

QUIET = (KIND["annotation"], KIND["python"])
NODE_KIND_OF_SPAN = {
    KIND["cpu_op"]: NodeKind.CPU,
    KIND["runtime"]: NodeKind.RUNTIME,
    KIND["annotation"]: NodeKind.HOST,
    KIND["python"]: NodeKind.HOST,
}
AUTOGRAD = r"^autograd::engine::evaluate_function"
BACKWARD = "dpro::backward"
COMMUNICATION_THREAD = "communication thread"


@dataclass(frozen=True)
class Part:
    """Nodes and edges of one rank in one window.

    Attributes:
        nodes, edges: numbered from 0 within the part.
        lanes: lanes of the part.
        instance, arrive, transfer: [K] for each collective it ran, the two nodes of it.
        background: spans on threads that touch neither a stream nor a collective, left out.
    """

    nodes: Nodes
    edges: Edges
    lanes: list[tuple[int, str]]
    instance: Ints
    arrive: Ints
    transfer: Ints
    background: int


@dataclass
class _Thread:
    """A CPU thread being cut: where it waits, and which edges lead into the end of a wait."""

    segments: Segments
    annotations: Segments
    cuts: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _EdgeList:
    """Edges being collected."""

    source: list[Ints] = field(default_factory=list)
    target: list[Ints] = field(default_factory=list)
    kind: list[Ints] = field(default_factory=list)
    inferred: list[Bools] = field(default_factory=list)

    def add(self, source: Ints, target: Ints, kind: EdgeKind | Ints, inferred: bool | Bools = False) -> None:
        """Add edges; those with an end of -1 do not exist, those from a node to itself say nothing."""
        source, target = np.atleast_1d(source), np.atleast_1d(target)
        real = (source >= 0) & (target >= 0) & (source != target)
        self.source.append(source[real])
        self.target.append(target[real])
        self.kind.append(np.broadcast_to(np.asarray(kind, np.int64), source.shape)[real])
        self.inferred.append(np.broadcast_to(inferred, source.shape)[real])


def build_part(local: Local, syncs: pl.DataFrame, names: pl.Series, positions: Positions) -> Part:
    """Build one rank's share of the graph.

    Args:
        local: the rank's spans.
        syncs: its rows of the `syncs` table, on the aligned clock.
        names: the graph's names by code.
        positions: where in its step each collective stands.
    """
    streams = streams_of(local)
    autograd = names.str.contains(AUTOGRAD).to_numpy()[local.name]
    threads, helpers, background = _threads(local, autograd)
    handovers = [_hand_over(local, threads, tid) for tid in helpers]
    blocked = cpu_waits(local, streams, names)
    for wait in blocked:
        if wait.tid in threads:
            threads[wait.tid].waits.append((wait.start, wait.end))
    released = _released(local, blocked)
    for tid, thread in threads.items():
        calls = np.unique(local.launch[local.launch >= 0])
        thread.cuts += released[calls[local.tid[calls] == tid]].tolist()
        thread.cuts += [*local.step_start.tolist(), local.steps_end]
    executed = np.flatnonzero((local.instance >= 0) & ~local.on_gpu)
    results = _wait_for_cpu_collectives(local, threads, executed, names)

    pieces = {tid: _cut(thread) for tid, thread in threads.items()}
    first_node = dict(zip(pieces, np.cumsum([0] + [p.start.size for p in pieces.values()]).tolist()))
    num_cpu = sum(p.start.size for p in pieces.values())
    work = np.concatenate([streams.work, executed[np.argsort(local.start[executed], kind="stable")]])
    begins, ends, count = _work_nodes(local, work, num_cpu)

    edges = _EdgeList()
    for tid, piece in pieces.items():
        node = first_node[tid] + np.arange(piece.start.size)
        edges.add(node[:-1], node[1:], EdgeKind.THREAD)
    for tid, handover in zip(helpers, handovers):
        _hand_over_edges(local, pieces, first_node, tid, handover, edges)
    launched = _launch_edges(local, pieces, first_node, work, begins, released, edges)
    _work_edges(local, streams, executed, begins, ends, edges)
    pairs, kinds, inferred = event_edges(local, streams, syncs, names)
    edges.add(ends[pairs[:, 0]], begins[pairs[:, 1]], kinds, inferred)
    for wait in blocked:
        if wait.tid in pieces:
            woken = first_node[wait.tid] + pieces[wait.tid].starting_from(np.array([wait.end]))
            edges.add(ends[wait.awaited], np.repeat(woken, len(wait.awaited)), EdgeKind.SYNC)
    for span, tid, time, is_inferred in results:
        woken = first_node[tid] + pieces[tid].starting_from(np.array([time]))
        edges.add(ends[[span]], woken, EdgeKind.SYNC, is_inferred)

    nodes, lanes = _nodes(local, threads, pieces, helpers, streams, work, count, begins, launched, positions)
    collective = work[local.instance[work] >= 0]
    joined = Edges(
        np.concatenate(edges.source or [NOTHING]),
        np.concatenate(edges.target or [NOTHING]),
        np.zeros(sum(s.size for s in edges.source), np.int64),
        np.concatenate(edges.kind or [NOTHING]),
        np.concatenate(edges.inferred or [np.empty(0, np.bool_)]),
    )
    return Part(
        nodes, joined, lanes, local.instance[collective], begins[collective], ends[collective], background
    )


def _threads(local: Local, autograd: Bools) -> tuple[dict[int, _Thread], list[int], int]:
    """The threads that matter, which of them are backward threads, and how many spans are on others.

    A thread matters if it drives the loop, puts work on a stream or worker, or runs backward.
    """
    cpu = np.flatnonzero(local.on_cpu)
    calls = np.unique(local.launch[local.launch >= 0])
    active = set(local.tid[calls].tolist()) | set(local.tid[cpu[autograd[cpu]]].tolist()) | {local.main_tid}
    threads: dict[int, _Thread] = {}
    background = 0
    for tid in np.unique(local.tid[cpu]).tolist():
        spans = cpu[local.tid[cpu] == tid]
        if tid not in active:
            background += spans.size
            continue
        ranges = spans[local.kind[spans] == KIND["annotation"]]
        threads[tid] = _Thread(
            thread_segments(local.start[spans], local.end[spans], spans, local.begin, local.finish),
            thread_segments(local.start[ranges], local.end[ranges], ranges, local.begin, local.finish),
        )
    helpers = [tid for tid in threads if tid != local.main_tid and autograd[cpu[local.tid[cpu] == tid]].any()]
    return threads, helpers, background


@dataclass(frozen=True)
class _HandOver:
    begin: Ints
    finish: Ints
    contained: Bools


def _hand_over(local: Local, threads: dict[int, _Thread], tid: int) -> _HandOver:
    """The caller waits while a backward thread works, and the backward thread waits in between."""
    cpu = np.flatnonzero(local.on_cpu & (local.tid == tid))
    outer = cpu[top_level(local.start[cpu], local.end[cpu])]
    owner, helper = threads[local.main_tid], threads[tid]
    begin, finish, contained = bursts(owner.segments, local.start[outer], local.end[outer])
    owner.waits += list(zip(begin[contained].tolist(), finish[contained].tolist()))
    owner.cuts += begin.tolist()
    idle_from = np.append(local.begin, finish)
    idle_to = np.append(begin, local.finish)
    helper.waits += list(zip(idle_from.tolist(), idle_to.tolist()))
    return _HandOver(begin, finish, contained)


def _hand_over_edges(
    local: Local,
    pieces: dict[int, Pieces],
    first_node: dict[int, int],
    tid: int,
    handover: _HandOver,
    edges: _EdgeList,
) -> None:
    owner, helper = pieces[local.main_tid], pieces[tid]
    at = first_node[local.main_tid]
    called = owner.ending_by(handover.begin)
    edges.add(
        np.where(called >= 0, at + called, -1),
        first_node[tid] + helper.starting_from(handover.begin),
        EdgeKind.HANDOVER,
        ~handover.contained,
    )
    done = handover.contained
    edges.add(
        first_node[tid] + helper.ending_by(handover.finish[done]),
        at + owner.starting_from(handover.finish[done]),
        EdgeKind.HANDOVER,
    )


def _wait_for_cpu_collectives(
    local: Local, threads: dict[int, _Thread], executed: Ints, names: pl.Series
) -> list[tuple[int, int, int, bool]]:
    """Where the thread that called a CPU collective needs its result.

    If the collective ends while its caller is in no operator, and the caller goes on soon after, the caller
    was waiting. If it ends while the caller computes, its result is needed at the end of the backward pass
    that called it, or (inferred) at the end of the step.

    Returns:
        (span, thread, time from which the thread depends on it, inferred).
    """
    is_backward = local.on_cpu & names.is_in([BACKWARD]).to_numpy()[local.name]
    results = []
    for span in executed.tolist():
        call = int(local.launch[span])
        if call < 0 or int(local.tid[call]) not in threads:
            continue
        tid = int(local.tid[call])
        thread = threads[tid]
        end = int(local.end[span])
        at = int(thread.segments.at(np.array([end]))[0])
        begin, finish = int(thread.segments.start[at]), int(thread.segments.end[at])
        inner = int(thread.segments.span[at])
        quiet = (inner < 0 or local.kind[inner] in QUIET) and begin < end
        if quiet and finish - end <= max(CPU_WAKE_UP_NS, CPU_WAKE_UP_SHARE * (finish - begin)):
            thread.waits.append((max(begin, int(local.end[call])), end))
            results.append((span, tid, end, True))
        elif quiet:
            results.append((span, tid, finish, True))
        else:
            results.append((span, tid, *_needed_by(local, is_backward, call, end)))
    return results


def _needed_by(local: Local, is_backward: Bools, call: int, end: int) -> tuple[int, bool]:
    around = np.flatnonzero(
        is_backward
        & (local.tid == local.tid[call])
        & (local.start <= local.start[call])
        & (local.end >= local.end[call])
    )
    if around.size and int(local.end[around].min()) >= end:
        return int(local.end[around].min()), False
    later = local.step_start[local.step_start >= end]
    return (int(later[0]) if later.size else local.finish), True


def _cut(thread: _Thread) -> Pieces:
    waits = np.array(thread.waits, np.int64).reshape(-1, 2)
    return cut_thread(thread.segments, np.array(thread.cuts, np.int64), waits[:, 0], waits[:, 1])


def _work_nodes(local: Local, work: Ints, first: int) -> tuple[Ints, Ints, int]:
    """Number the nodes of GPU work and collectives: one each, two (arrive, transfer) for a collective.

    Returns:
        [S] first and last node of each span, -1 for spans that are not such work, and the number of nodes.
    """
    begins, ends = np.full(local.start.size, -1, np.int64), np.full(local.start.size, -1, np.int64)
    size = np.where(local.instance[work] >= 0, 2, 1)
    begins[work] = first + np.cumsum(size) - size
    ends[work] = begins[work] + size - 1
    return begins, ends, int(size.sum())


def _released(local: Local, blocked: list[Wait]) -> Ints:
    """[S] when each launching call lets go of what it launches.

    A call that launches one piece of GPU work lets go when it returns, or when it begins to block. One that
    launches many (a CUDA graph), and the call of a CPU collective, may return after the work has begun.
    """
    released = local.end.copy()
    for wait in blocked:
        released[wait.call] = min(released[wait.call], wait.start)
    work = np.flatnonzero(local.launch >= 0)
    count = np.bincount(local.launch[work], minlength=local.start.size)
    early = work[(count[local.launch[work]] > 1) | ~local.on_gpu[work]]
    np.minimum.at(released, local.launch[early], local.start[early])
    return np.maximum(released, local.start)


def _launch_edges(
    local: Local,
    pieces: dict[int, Pieces],
    first_node: dict[int, int],
    work: Ints,
    begins: Ints,
    released: Ints,
    edges: _EdgeList,
) -> Bools:
    """Edges from the piece of the launching call that ends when it lets go, to the work.

    Of the work of a CUDA graph only the first on each stream is bound to the call: the rest follows it.

    Returns:
        [W] whether the trace tells what launched each piece of work.
    """
    lane = np.where(local.on_gpu[work], local.stream[work], -1 - local.tid[work])
    order = np.lexsort((local.start[work], lane, local.launch[work]))
    repeats = (np.diff(local.launch[work][order]) == 0) & (np.diff(lane[order]) == 0)
    leads = np.ones(work.size, np.bool_)
    leads[order[1:][repeats]] = False
    has = np.zeros(work.size, np.bool_)
    for tid, piece in pieces.items():
        mine = np.flatnonzero(
            (local.launch[work] >= 0) & (local.tid[np.maximum(local.launch[work], 0)] == tid)
        )
        at = piece.ending_by(released[local.launch[work[mine]]])
        source = np.where((at >= 0) & leads[mine], first_node[tid] + at, -1)
        edges.add(source, begins[work[mine]], EdgeKind.LAUNCH)
        has[mine] = at >= 0
    return has


def _work_edges(
    local: Local, streams: Streams, executed: Ints, begins: Ints, ends: Ints, edges: _EdgeList
) -> None:
    """Order on streams and workers, and from a collective's arrival to its transfer."""
    edges.add(
        np.where(streams.before >= 0, ends[np.maximum(streams.before, 0)], -1),
        begins[streams.work],
        EdgeKind.STREAM,
    )
    for tid in np.unique(local.tid[executed]).tolist():
        lane = executed[local.tid[executed] == tid]
        lane = lane[np.argsort(local.start[lane], kind="stable")]
        edges.add(ends[lane[:-1]], begins[lane[1:]], EdgeKind.STREAM)
    collective = np.flatnonzero((local.instance >= 0) & (begins >= 0))
    edges.add(begins[collective], ends[collective], EdgeKind.STREAM)


def _nodes(
    local: Local,
    threads: dict[int, _Thread],
    pieces: dict[int, Pieces],
    helpers: list[int],
    streams: Streams,
    work: Ints,
    count: int,
    begins: Ints,
    launched: Bools,
    positions: Positions,
) -> tuple[Nodes, list[tuple[int, str]]]:
    """The columns of all nodes: CPU pieces thread by thread, then work."""
    columns: dict[str, list[Ints]] = {
        name: [] for name in ("kind", "start", "end", "span", "around", "lane", "anchored")
    }
    lanes: list[tuple[int, str]] = []
    for tid, piece in pieces.items():
        kind = np.array([NodeKind.GAP] * len(KIND))
        for code, node_kind in NODE_KIND_OF_SPAN.items():
            kind[code] = node_kind
        inner = np.maximum(piece.span, 0)
        columns["kind"].append(np.where(piece.span >= 0, kind[local.kind[inner]], NodeKind.GAP))
        columns["start"].append(piece.start)
        columns["end"].append(piece.end)
        columns["span"].append(piece.span)
        around = threads[tid].annotations
        columns["around"].append(around.span[around.at(piece.start)])
        columns["lane"].append(np.full(piece.start.size, len(lanes)))
        anchored = np.zeros(piece.start.size, np.int64)
        anchored[0] = tid not in helpers  # a backward thread starts when it is handed work
        columns["anchored"].append(anchored)
        lanes.append((local.rank, "main thread" if tid == local.main_tid else f"thread {tid}"))
    num_cpu = sum(p.start.size for p in pieces.values())
    at = begins[work] - num_cpu
    block = {name: np.zeros(count, np.int64) for name in columns}
    block["around"] -= 1
    is_collective = local.instance[work] >= 0
    arrive, transfer = at[is_collective], at[is_collective] + 1
    spans = work[is_collective]
    block["kind"][at] = np.where(local.kind[work] == KIND["kernel"], NodeKind.KERNEL, NodeKind.COPY)
    block["start"][at], block["end"][at], block["span"][at] = local.start[work], local.end[work], work
    moved_from = np.clip(local.rendezvous[spans], local.start[spans], local.end[spans])
    block["kind"][arrive], block["kind"][transfer] = NodeKind.ARRIVE, NodeKind.TRANSFER
    block["end"][arrive] = local.start[spans]
    block["start"][transfer], block["end"][transfer], block["span"][transfer] = (
        moved_from,
        local.end[spans],
        spans,
    )
    lane_names = {**{int(s): f"stream {s % 100_000}" for s in streams.by_stream}}
    lane_of = np.where(local.on_gpu[work], local.stream[work], -1 - local.tid[work])
    for lane in np.unique(lane_of).tolist():
        here = lane_of == lane
        block["lane"][at[here]] = len(lanes)
        block["lane"][at[here & is_collective] + 1] = len(lanes)
        lanes.append((local.rank, lane_names.get(lane, f"{COMMUNICATION_THREAD} {-1 - lane}")))
    _anchor_work(local, streams, work, at, launched, block)
    for name in columns:
        columns[name].append(block[name])
    flat = {name: np.concatenate(parts).astype(np.int64) for name, parts in columns.items()}
    return _finish_nodes(local, flat, num_cpu, work, positions), lanes


def _anchor_work(
    local: Local, streams: Streams, work: Ints, at: Ints, launched: Bools, block: dict[str, Ints]
) -> None:
    """Work without a launch that comes first on its lane has no cause in the trace: it keeps its time."""
    before = np.full(local.start.size, -1, np.int64)
    before[streams.work] = streams.before
    gpu = local.on_gpu[work]
    block["anchored"][at[gpu & ~launched & (before[work] < 0)]] = 1
    first_on_worker = np.zeros(work.size, np.bool_)
    worker = np.flatnonzero(~gpu)
    first_on_worker[worker[np.unique(local.tid[work[worker]], return_index=True)[1]]] = True
    block["anchored"][at[~gpu & ~launched & first_on_worker]] = 1


def _finish_nodes(
    local: Local, flat: dict[str, Ints], num_cpu: int, work: Ints, positions: Positions
) -> Nodes:
    """Add step, section and the rest to the columns."""
    span = flat["span"]
    total = span.size
    caused = flat["start"].copy()  # when the work was asked for: decides its step and section
    is_work = np.arange(total) >= num_cpu
    asked = np.where(local.launch[work] >= 0, local.start[np.maximum(local.launch[work], 0)], -1)
    asked_by_span = np.full(local.start.size, -1, np.int64)
    asked_by_span[work] = _filled_along_lanes(local, work, asked)
    caused[is_work] = asked_by_span[span[is_work]]
    step = local.step_of(caused)
    collective = np.full(total, -1, np.int64)
    collective[is_work] = local.instance[span[is_work]]
    anchored = flat["anchored"].astype(np.bool_)
    return Nodes(
        kind=flat["kind"],
        duration=flat["end"] - flat["start"],
        earliest=np.where(anchored, flat["start"], 0),
        anchored=anchored,
        rank=np.full(total, local.rank),
        window=np.full(total, local.window),
        step=step,
        lane=flat["lane"],
        name=np.where(span >= 0, local.name[np.maximum(span, 0)], -1),
        around=np.where(flat["around"] >= 0, local.name[np.maximum(flat["around"], 0)], -1),
        span=np.where(span >= 0, local.span_id[np.maximum(span, 0)], -1),
        collective=collective,
        section=sections(local, caused, step, positions),
        measured_start=flat["start"],
        measured_end=flat["end"],
    )


def _filled_along_lanes(local: Local, work: Ints, asked: Ints) -> Ints:
    """When each piece of work was asked for; where unknown, as the work before it on its lane, else before
    the window.
    """
    lane = np.where(local.on_gpu[work], local.stream[work], -1 - local.tid[work])
    order = np.lexsort((local.start[work], lane))
    first = np.append(True, lane[order][1:] != lane[order][:-1])[: order.size]
    known = np.where(asked[order] >= 0, np.arange(order.size), -1)
    lane_number = np.cumsum(first)
    latest = np.maximum.accumulate(np.where(known >= 0, known, -1)) if known.size else known
    valid = (latest >= 0) & (lane_number[np.maximum(latest, 0)] == lane_number)
    filled = np.where(valid, asked[order][np.maximum(latest, 0)], local.begin - 1)
    result = np.empty(work.size, np.int64)
    result[order] = filled
    return result
