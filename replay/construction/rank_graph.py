"""The part of one rank in the graph: its nodes, and the edges among them.

Takes a `RankView` and its syncs; returns a `RankGraph`, numbered from 0, with the nodes that edges of other
ranks attach to. Pieces of CPU threads come first, then work on streams and workers. Lags are zero:
`graph_builder.py` pools them over all ranks. Work that comes first on its lane and has no recorded launch
keeps its time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.construction.cpu_threads import ThreadPieces, cut_thread
from dpro.replay.construction.cpu_waits import (
    CpuWaits,
    Threads,
    ended_when_notified,
    hand_over,
    pauses,
    stretches_of,
    threads_of,
    waits_for_collectives,
)
from dpro.replay.construction.data_dependencies import as_spans, between_streams, between_threads
from dpro.replay.construction.dependencies import (
    WORK,
    Dependencies,
    Numbering,
    join,
    links,
    number_nodes,
    resolve,
)
from dpro.replay.construction.gpu_streams import BlockedCall, blocked_calls, event_links, streams_of
from dpro.replay.construction.rank_view import KIND, Names, RankView
from dpro.replay.engine import compiled, distinct
from dpro.replay.graph import EdgeKind, Edges, NodeKind, Nodes

# Precision of GPU clocks: work that begins earlier than this before its call returns did not wait for that.
BEGUN_NS = 100_000


@dataclass(frozen=True)
class RankGraph:
    """Nodes and edges of one rank in one window.

    Attributes:
        begins: [N] start of each node, or of its arrival, in ns; nodes are numbered from 0.
        nodes: writes their columns, and returns the lanes of the part.
        edges: edges between them.
        instance, arrive, transfer: [K] instance and two nodes of each collective that it ran.
    """

    begins: Ints
    nodes: Callable[[Place], Lanes]
    edges: Edges
    instance: Ints
    arrive: Ints
    transfer: Ints


def build_rank_graph(
    view: RankView, syncs: pl.DataFrame, needs: pl.DataFrame, names: Names, positions: Positions | None
) -> RankGraph:
    """Build one rank's part of the graph.

    Args:
        syncs: its rows of the `syncs` table, on the aligned clock.
        needs: its pairs of `dpro.replay.construction.data_dependencies.recorded_dependencies`.
        positions: position of each of its collectives in its step; None where not known yet.
    """
    threads = threads_of(view, names)
    view = ended_when_notified(view, threads, names)
    streams = streams_of(view)
    blocked = blocked_calls(view, streams, threads.segments, syncs, names)
    pairs = as_spans(view, needs)
    handed = between_threads(view, [*threads.segments], *pairs)
    waits = [
        *(hand_over(view, threads, tid, handed) for tid in threads.helpers),
        waits_for_collectives(view, threads, names),
        _waits_in_calls(view, blocked),
    ]
    beside = threads.segments.keys() - {view.main_tid, *threads.helpers}
    waits += [pauses(view, threads, tid, waits) for tid in sorted(beside)]
    released = _released(view, blocked)
    given = [*(wait.links for wait in waits), handed]
    pieces = {tid: _cut(view, threads, tid, waits, given, released) for tid in threads.segments}
    executed = np.flatnonzero((view.instance >= 0) & ~view.on_gpu)
    work = np.concatenate([streams.work, executed[np.argsort(view.start[executed], kind="stable")]])
    numbering = number_nodes(pieces, work, view.instance >= 0)
    dependencies = [
        *given,
        _launches(view, work, released),
        _lane_order(view, work),
        event_links(view, streams, syncs, between_streams(view, streams, *pairs), names),
    ]
    edges = resolve(join(dependencies), numbering)
    nodes = partial(write_nodes, view, threads, numbering, positions)
    ran, instance = view.memberships
    arrive, transfer = numbering.begins[ran], numbering.ends[ran]
    began = np.repeat(view.start[work], numbering.ends[work] - numbering.begins[work] + 1)
    begins = np.concatenate([*(piece.start for piece in pieces.values()), began])
    return RankGraph(begins, nodes, edges, instance, arrive, transfer)


def _waits_in_calls(view: RankView, blocked: list[BlockedCall]) -> CpuWaits:
    """Return calls that were blocked on GPU work, as waits of their threads."""
    rows = np.array([(view.tid[b.call], b.start, b.end) for b in blocked], np.int64).reshape(-1, 3)
    pairs = [(span, view.tid[b.call], b.end, not b.recorded) for b in blocked for span in b.awaited]
    awaited = np.array(pairs, np.int64).reshape(-1, 4)
    span, tid, end, inferred = awaited.T
    dependencies = links(EdgeKind.SYNC, (WORK, span), (tid, end), inferred > 0)
    return CpuWaits(rows[:, 0], rows[:, 1], rows[:, 2], dependencies)


def _released(view: RankView, blocked: list[BlockedCall]) -> Ints:
    """Return [S] ns at which each launching call releases its work.

    A call that launches one piece of GPU work releases it on return, or when it begins to block. A call that
    launches many pieces (a CUDA graph), copies piece by piece, or runs a CPU collective continues after its
    work has begun.
    """
    released = view.end.copy()
    for b in blocked:
        released[b.call] = min(released[b.call], b.releases)
    work = np.flatnonzero(view.launch >= 0)
    call = view.launch[work]
    count = np.bincount(call, minlength=view.start.size)
    began = view.start[work] < view.end[call] - BEGUN_NS
    early = work[(count[call] > 1) | ~view.on_gpu[work] | began]
    np.minimum.at(released, view.launch[early], view.start[early])
    return np.maximum(released, view.start)


def _cut(
    view: RankView,
    threads: Threads,
    tid: int,
    waits: list[CpuWaits],
    given: list[Dependencies],
    released: Ints,
) -> ThreadPieces:
    """Cut a thread where it waits, releases work or hands over, and where steps begin and end."""
    calls = view.calls
    handed = [dependencies.source_at[dependencies.source_thread == tid] for dependencies in given]
    cuts = [released[calls[view.tid[calls] == tid]], view.step_start, [view.steps_end], *handed]
    return cut_thread(threads.segments[tid], np.concatenate(cuts), *stretches_of(tid, waits))


def _launches(view: RankView, work: Ints, released: Ints) -> Dependencies:
    """Return the dependencies of work on its launching call; inferred where released before the call returns.

    Of the work of a CUDA graph only the first on each stream depends on the call: the rest follows it.
    """
    launched = work[view.launch[work] >= 0]
    place = place_of_work(view, launched)
    order = np.lexsort((view.start[launched], place, view.launch[launched]))
    launched, place = launched[order], place[order]
    call = view.launch[launched]
    leads = np.append(True, (call[1:] != call[:-1]) | (place[1:] != place[:-1]))[: launched.size]
    launched, call = launched[leads], call[leads]
    early = released[call] < view.end[call]
    return links(EdgeKind.LAUNCH, (view.tid[call], released[call]), (WORK, launched), early)


def _lane_order(view: RankView, work: Ints) -> Dependencies:
    """Order each piece of work after the previous one on its stream or worker, except messages.

    Work that `_unqueued` finds follows the previous work of its device.
    """
    work = work[~view.is_message[work]]
    source, target = _unqueued(view, work)
    place = place_of_work(view, work)
    ordered = work[np.lexsort((view.end[work], view.start[work], place))]
    place = place_of_work(view, ordered)
    same = np.flatnonzero(place[1:] == place[:-1])
    before, after = np.append(ordered[same], source), np.append(ordered[same + 1], target)
    inferred = np.arange(before.size) >= same.size
    return links(EdgeKind.STREAM, (WORK, before), (WORK, after), inferred)


def _unqueued(view: RankView, work: Ints) -> tuple[Ints, Ints]:
    """Find work of unknown launch that cannot have queued since before the window, the first of its stream.

    It begins when the rank's devices are idle, behind work that was launched in the window.

    Returns:
        The previous work of the rank's devices, and this work: span indices.
    """
    work = work[view.on_gpu[work]]
    work = work[np.argsort(view.start[work], kind="stable")]
    _, first = np.unique(view.stream[work], return_index=True)
    launched = work[view.launch[work] >= 0]
    if not launched.size:
        return launched, launched
    ends = np.maximum.accumulate(view.end[work])
    first = np.sort(first[(first > 0) & (view.launch[work[first]] < 0)])
    begins = view.start[work[first]]
    first = first[(begins >= ends[first - 1]) & (begins >= view.end[launched].min())]
    last = np.searchsorted(ends, ends[first - 1], side="left")
    return work[last], work[first]


STREAM, COMMUNICATION_THREAD = "stream", "communication thread"  # name prefixes of lanes of work
KIND_OF_PIECE = np.full(len(KIND) + 1, NodeKind.GAP, np.int64)  # by kind of the innermost span; -1: no span
KIND_OF_PIECE[KIND["cpu_op"]] = NodeKind.CPU
KIND_OF_PIECE[KIND["runtime"]] = NodeKind.RUNTIME
KIND_OF_PIECE[[KIND["annotation"], KIND["python"]]] = NodeKind.HOST

Block = dict[str, Ints]  # kind, start, end, span, around, caused, lane, anchored: one entry per node
Lanes = list[tuple[int, str]]


@dataclass(frozen=True)
class Place:
    """The place where the nodes of a part are written.

    Attributes:
        nodes: columns of all nodes.
        number: [N] index in them of each node of the part.
        lane: index of the part's first lane.
        no_name: code of the name of nodes without a span.
    """

    nodes: Nodes
    number: Ints
    lane: int
    no_name: int


def write_nodes(
    view: RankView, threads: Threads, numbering: Numbering, positions: Positions | None, into: Place
) -> Lanes:
    """Write the columns of a rank's nodes, and return its lanes.

    Args:
        positions: position of each of its collectives in its step; without them, `phase` is the time at which
            each node was requested, in ns, from which phases are computed later.
    """
    lanes: Lanes = []
    blocks = [_pieces(view, threads, numbering, tid, lanes) for tid in numbering.pieces]
    blocks.append(_work(view, numbering, lanes))
    spans = (view.name, view.span_id, view.instance, view.payload, view.message)
    steps = (view.step_start, view.step_number, np.int64(view.steps_end))
    calls = None if positions is None else known_positions(call_order(view), positions)
    nodes = into.nodes
    first = 0
    for block in blocks:
        number = into.number[first : first + block["kind"].size]
        first += number.size
        given = tuple(block[name] for name in ("kind", "start", "end", "span", "around", "anchored"))
        _describe(number, given, spans, into.no_name, tuple(getattr(nodes, name) for name in DESCRIBED))
        _write_steps(number, block["caused"], steps, nodes.step)
        nodes.lane[number] = block["lane"] + into.lane
        nodes.rank[number], nodes.window[number] = view.rank, view.window
        if calls is None:
            nodes.phase[number] = block["caused"]
        else:
            fill_phases(number, block["caused"], nodes.step, calls, nodes.phase)
    return lanes


DESCRIBED = (
    "kind", "duration", "earliest", "anchored", "name", "around", "span", "collective", "bytes", "message",
    "measured_start", "measured_end",
)  # fmt: skip
ARRIVE, TRANSFER = int(NodeKind.ARRIVE), int(NodeKind.TRANSFER)


@compiled
def _describe(number: Any, given: Any, spans: Any, no_name: int, into: Any) -> None:
    # Write all columns of a node at once, in their final place.
    kind, start, end, span, around, anchored = given
    name, span_id, instance, payload, message = spans
    kinds, duration, earliest, is_anchored, names, arounds, ids, collective, moved, which = into[:10]
    measured_start, measured_end = into[10:]
    for i in range(number.size):
        node, its_span, outer = number[i], span[i], around[i]
        kinds[node], duration[node] = kind[i], end[i] - start[i]
        is_anchored[node], earliest[node] = anchored[i] != 0, start[i] if anchored[i] != 0 else 0
        names[node] = name[its_span] if its_span >= 0 else no_name
        ids[node] = span_id[its_span] if its_span >= 0 else -1
        arounds[node] = name[outer] if outer >= 0 else -1
        moves = kind[i] == TRANSFER
        collective[node] = instance[its_span] if moves or kind[i] == ARRIVE else -1
        moved[node], which[node] = payload[its_span] if moves else -1, message[its_span] if moves else -1
        measured_start[node], measured_end[node] = start[i], end[i]


@compiled
def _write_steps(number: Any, caused: Any, steps: Any, step: Any) -> None:
    # Compute `RankView.step_of`, starting from the last step, since the next node is mostly in the same one.
    begins, steps_number, steps_end = steps
    last = -1
    for i in range(number.size):
        time = caused[i]
        while last + 1 < begins.size and begins[last + 1] <= time:
            last += 1
        while last >= 0 and begins[last] > time:
            last -= 1
        if begins.size == 0:
            step[number[i]] = -2 if steps_end < 0 else -1 if time < steps_end else 0
        elif time >= steps_end:
            step[number[i]] = -2
        else:
            step[number[i]] = steps_number[last] if last >= 0 else -1


def _pieces(view: RankView, threads: Threads, numbering: Numbering, tid: int, lanes: Lanes) -> Block:
    piece = numbering.pieces[tid]
    around = threads.annotations[tid]
    anchored = np.zeros(piece.start.size, np.int64)
    anchored[0] = tid not in threads.helpers  # helpers start when they are given work
    lanes.append((view.rank, "main thread" if tid == view.main_tid else f"thread {tid}"))
    return {
        "kind": KIND_OF_PIECE[np.where(piece.span >= 0, view.kind[np.maximum(piece.span, 0)], -1)],
        "start": piece.start,
        "end": piece.end,
        "span": piece.span,
        "around": around.span[around.at(piece.start)],
        "caused": piece.start,
        "lane": np.full(piece.start.size, len(lanes) - 1),
        "anchored": anchored,
    }


def _work(view: RankView, numbering: Numbering, lanes: Lanes) -> Block:
    """Return one node per kernel or copy, and an arrival and a transfer per collective."""
    work = numbering.work
    collective = view.instance[work] >= 0
    single = np.where(view.kind[work] == KIND["kernel"], NodeKind.KERNEL, NodeKind.COPY)
    moved_from = np.clip(view.rendezvous[work], view.start[work], view.end[work])
    lane, first_on_lane = _lanes_of_work(view, work, lanes)
    before, unqueued = _unqueued(view, work)
    anchored = first_on_lane & (view.launch[work] < 0) & ~np.isin(work, unqueued)
    caused = _when_asked_for(view, work, lane, dict(zip(unqueued.tolist(), before.tolist())))
    first = {
        "kind": np.where(collective, NodeKind.ARRIVE, single),
        "start": view.start[work],
        "end": np.where(collective, view.start[work], view.end[work]),
        "span": work,
        "around": np.full(work.size, -1),
        "caused": caused,
        "lane": lane,
        "anchored": anchored.astype(np.int64),
    }
    second = first | {
        "kind": np.full(work.size, NodeKind.TRANSFER),
        "start": moved_from,
        "end": view.end[work],
        "anchored": np.zeros(work.size, np.int64),
    }
    # An arrival's number is followed by its transfer's.
    moments = np.concatenate([numbering.begins[work], numbering.ends[work][collective]])
    order = np.argsort(moments, kind="stable")
    return {name: np.concatenate([first[name], second[name][collective]])[order] for name in first}


def _lanes_of_work(view: RankView, work: Ints, lanes: Lanes) -> tuple[Ints, Bools]:
    """Return [W] lane of each piece of work, and whether it is the first there; append new lanes."""
    place = place_of_work(view, work)
    lane = np.empty(work.size, np.int64)
    first = np.zeros(work.size, np.bool_)
    for here in np.unique(place).tolist():
        on_lane = np.flatnonzero(place == here)
        lane[on_lane] = len(lanes)
        first[on_lane[np.argmin(view.start[work[on_lane]])]] = True
        one = work[on_lane[0]]
        on_gpu = bool(view.on_gpu[one])
        what = (
            f"{STREAM} {view.stream[one] % 100_000}" if on_gpu else f"{COMMUNICATION_THREAD} {view.tid[one]}"
        )
        lanes.append((view.rank, what))
    return lane, first


def place_of_work(view: RankView, work: Ints) -> Ints:
    """Return [W] a number for the place of each piece of work: a stream, or a thread with collectives.

    Args:
        work: [W] span indices.
    """
    on_gpu = view.on_gpu[work]
    runs_on = np.where(on_gpu, view.stream[work], view.tid[work])
    return 2 * distinct(runs_on)[1] + on_gpu


def _when_asked_for(view: RankView, work: Ints, lane: Ints, follows: Mapping[int, int]) -> Ints:
    """Return [W] ns when each piece of work was launched.

    Without a known launch, the previous known one on its lane is used, or a time before the window. In a
    trace without launches, it is when the work ran; also for what the driver copies by itself, such as the
    migrations of managed memory, on a lane without launches, after the first work that the window launched.

    Args:
        follows: work on another stream that some work follows, as from `_unqueued`: when it ended.
    """
    start, launched = view.start[work], view.launch[work] >= 0
    if not launched.any():
        return start
    copies = view.kind[work] != KIND["kernel"]
    by_the_driver = copies & ~np.isin(lane, lane[launched]) & (start >= start[launched].min())
    called = view.start[np.maximum(view.launch[work], 0)]
    asked = np.where(launched, called, np.where(by_the_driver, start, -1))
    after = np.isin(work, [*follows])
    asked[after] = [view.end[follows[one]] for one in work[after].tolist()]
    order = np.lexsort((start, lane))
    latest = np.maximum.accumulate(np.where(asked[order] >= 0, np.arange(order.size), -1))
    same_lane = (latest >= 0) & (lane[order][np.maximum(latest, 0)] == lane[order])
    result = np.empty(work.size, np.int64)
    result[order] = np.where(same_lane, asked[order][np.maximum(latest, 0)], view.begin - 1)
    return result


# Phases: positions in a step by which the work of ranks can be compared. Ranks of one job call the same
# collectives in the same order, so "the work after the third collective of the step" means the same on all of
# them, independent of their clocks and of how their windows are clipped.

# instance of a collective -> (step, position among the rank's own in it, from 1)
Positions = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class CallOrder:
    """Collectives that a rank called inside a window, in order.

    Attributes:
        instance: [C] instance of each.
        called: [C] ns of the call.
        step: [C] step of the rank during which it was called.
    """

    rank: int
    window: int
    instance: Ints
    called: Ints
    step: Ints


def call_order(view: RankView) -> CallOrder:
    """Return the collectives that the rank called inside the window, in order."""
    ran = np.flatnonzero((view.instance >= 0) & (view.launch >= 0))
    called = view.start[view.launch[ran]]
    order = np.argsort(called, kind="stable")
    called = called[order]
    return CallOrder(view.rank, view.window, view.instance[ran[order]], called, view.step_of(called))


def positions_in_steps(all_calls: Iterable[CallOrder]) -> dict[int, Positions]:
    """Count, for each rank, the collectives with several callers that it called in each step.

    Collectives of other ranks are not counted, since their order relative to its own is random. A step whose
    beginning is cut off by the window has fewer: it is numbered so that its end agrees with whole steps.

    Returns:
        By rank, the step and position of each instance it called.
    """
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    orders: list[tuple[CallOrder, list[int]]] = []
    for calls in all_calls:
        orders.append((calls, calls.instance.tolist()))
        for instance, step in zip(calls.instance.tolist(), calls.step.tolist()):
            steps[instance][step] += 1
    step_of = {call: votes.most_common(1)[0][0] for call, votes in steps.items() if votes.total() > 1}
    by_rank: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for calls, order in orders:
        for instance in order:
            step = step_of.get(instance, -1)
            if step >= 0:
                by_rank[calls.rank].setdefault((calls.window, step), []).append(instance)
    return {rank: _numbered(by_step) for rank, by_step in by_rank.items()}


def _numbered(by_step: dict[tuple[int, int], list[int]]) -> Positions:
    """Return the positions of one rank's collectives, given in order by window and step."""
    counts = Counter(len(instances) for instances in by_step.values())
    usual = max(counts, key=lambda count: (counts[count], count))
    first_steps = {window: min(s for w, s in by_step if w == window) for window, _ in by_step}
    positions: Positions = {}
    for (window, step), instances in by_step.items():
        missing = max(usual - len(instances), 0) if step == first_steps[window] else 0
        positions |= {instance: (step, missing + i + 1) for i, instance in enumerate(instances)}
    return positions


def phases_at(calls: CallOrder, time: Ints, step: Ints, positions: Positions) -> Ints:
    """Return [N] position of the last collective that the rank had called in the step by each time.

    0 where the step had called none yet, -1 outside steps.

    Args:
        time: [N] ns.
        step: [N] step that each belongs to.
        positions: positions of the rank's collectives.
    """
    phase = np.empty(time.size, np.int64)
    fill_phases(np.arange(time.size), time, step, known_positions(calls, positions), phase)
    return phase


def known_positions(calls: CallOrder, positions: Positions) -> tuple[Ints, Ints, Ints]:
    """Return step, position and call time of the collectives with a known position.

    Args:
        calls: calls of the rank in the window, in order.
        positions: positions of the rank's collectives.
    """
    positions_ = [
        (*positions[instance], called)
        for instance, called in zip(calls.instance.tolist(), calls.called.tolist())
        if instance in positions
    ]
    in_step, position, when = np.array(positions_, np.int64).reshape(-1, 3).T.copy()
    return in_step, position, when


@compiled
def fill_phases(number: Any, time: Any, step: Any, positions: Any, phase: Any) -> None:
    """Write `phases_at` of some nodes.

    Args:
        number: [K] nodes.
        time: [K] ns.
        step: [N] steps of all nodes.
        positions: from `known_positions`.
        phase: [N] phases of all nodes, written at `number`.
    """
    in_step, position, when = positions
    last = -1  # the last call before `time[i]`; the next node is mostly in the same phase
    for i in range(number.size):
        node = number[i]
        while last + 1 < when.size and when[last + 1] < time[i]:
            last += 1
        while last >= 0 and when[last] >= time[i]:
            last -= 1
        phase[node] = -1
        if step[node] >= 0:
            phase[node] = position[last] if last >= 0 and in_step[last] == step[node] else 0
