"""One rank's share of the graph: its nodes and the edges among them.

In: a `Local` and its syncs. Out: a `Part` in numbering of its own, with the nodes that other ranks' edges
attach to. Lags are left at zero: they are pooled over all ranks by `dpro.replay.build`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.columns import Lanes, node_columns, place_of_work
from dpro.replay.cpu import Threads, Waits, hand_over, threads_of
from dpro.replay.dataflow import as_spans, between_streams, between_threads
from dpro.replay.graph import EdgeKind, Edges, Nodes
from dpro.replay.links import WORK, Links, join, links, number_nodes, resolve
from dpro.replay.local import Local
from dpro.replay.results import ended_when_told, results_of_collectives
from dpro.replay.sections import Positions
from dpro.replay.streams import Blocked, blocked_calls, event_links, streams_of
from dpro.replay.threads import Pieces, cut_thread

Ints = NDArray[np.int64]

# GPU clocks are read to about this: work that begins longer before its call returns did not wait for that.
BEGUN_NS = 100_000


@dataclass(frozen=True)
class Part:
    """Nodes and edges of one rank in one window.

    Attributes:
        begins: [N] ns, when each node began, or its arrival; nodes are numbered from 0.
        nodes: makes their columns and the lanes of the part. All parts' at once would be large.
        edges: between them.
        instance, arrive, transfer: [K] for each collective it ran, the two nodes of it.
        background: spans on threads that touch neither a stream nor a collective, left out.
    """

    begins: Ints
    nodes: Callable[[], tuple[Nodes, Lanes]]
    edges: Edges
    instance: Ints
    arrive: Ints
    transfer: Ints
    background: int


def build_part(
    local: Local, syncs: pl.DataFrame, needs: pl.DataFrame, names: pl.Series, positions: Positions
) -> Part:
    """Build one rank's share of the graph.

    Args:
        local: the rank's spans.
        syncs: its rows of the `syncs` table, on the aligned clock.
        needs: its pairs of `dpro.replay.dataflow.told_dependencies`.
        names: the graph's names by code.
        positions: where in its step each of its collectives stands.
    """
    threads = threads_of(local, names)
    local = ended_when_told(local, threads, names)
    streams = streams_of(local)
    blocked = blocked_calls(local, streams, syncs, names)
    told = as_spans(local, needs)
    handed = between_threads(local, [*threads.segments], *told)
    waits = [
        *(hand_over(local, threads, tid, handed) for tid in threads.backward),
        results_of_collectives(local, threads, names),
        _waits_in_calls(local, blocked),
    ]
    released = _released(local, blocked)
    given = [*(wait.links for wait in waits), handed]
    pieces = {tid: _cut(local, threads, tid, waits, given, released) for tid in threads.segments}
    executed = np.flatnonzero((local.instance >= 0) & ~local.on_gpu)
    work = np.concatenate([streams.work, executed[np.argsort(local.start[executed], kind="stable")]])
    numbering = number_nodes(pieces, work, local.instance >= 0)
    found = [
        *given,
        _launches(local, work, released),
        _lane_order(local, work),
        event_links(local, streams, syncs, between_streams(local, streams, *told), names),
    ]
    edges = resolve(join(found), numbering)
    nodes = partial(node_columns, local, threads, numbering, positions)
    ran, instance = local.meetings
    arrive, transfer = numbering.begins[ran], numbering.ends[ran]
    began = np.repeat(local.start[work], numbering.ends[work] - numbering.begins[work] + 1)
    begins = np.concatenate([*(piece.start for piece in pieces.values()), began])
    return Part(begins, nodes, edges, instance, arrive, transfer, threads.background)


def _waits_in_calls(local: Local, blocked: list[Blocked]) -> Waits:
    """Calls that were blocked on GPU work, as waits of their threads."""
    rows = np.array([(local.tid[b.call], b.start, b.end) for b in blocked], np.int64).reshape(-1, 3)
    pairs = [(span, local.tid[b.call], b.end, not b.told) for b in blocked for span in b.awaited]
    awaited = np.array(pairs, np.int64).reshape(-1, 4)
    found = links(EdgeKind.SYNC, (WORK, awaited[:, 0]), (awaited[:, 1], awaited[:, 2]), awaited[:, 3] > 0)
    return Waits(rows[:, 0], rows[:, 1], rows[:, 2], found)


def _released(local: Local, blocked: list[Blocked]) -> Ints:
    """[S] ns when each launching call lets go of what it launches.

    A call that launches one piece of GPU work lets go when it returns, or when it begins to block. One that
    launches many (a CUDA graph), one that copies piece by piece, and the call of a CPU collective go on after
    the work has begun.
    """
    released = local.end.copy()
    for b in blocked:
        released[b.call] = min(released[b.call], b.start)
    work = np.flatnonzero(local.launch >= 0)
    call = local.launch[work]
    count = np.bincount(call, minlength=local.start.size)
    began = local.start[work] < local.end[call] - BEGUN_NS
    early = work[(count[call] > 1) | ~local.on_gpu[work] | began]
    np.minimum.at(released, local.launch[early], local.start[early])
    return np.maximum(released, local.start)


def _cut(
    local: Local, threads: Threads, tid: int, waits: list[Waits], given: list[Links], released: Ints
) -> Pieces:
    """Cut a thread where it waits, where it lets go of work or hands over, and where steps begin and end."""
    calls = local.calls
    handed = [each.source_at[each.source_thread == tid] for each in given]
    cuts = [released[calls[local.tid[calls] == tid]], local.step_start, [local.steps_end], *handed]
    mine = [wait.tid == tid for wait in waits]
    return cut_thread(
        threads.segments[tid],
        np.concatenate(cuts),
        np.concatenate([wait.start[m] for wait, m in zip(waits, mine)]),
        np.concatenate([wait.end[m] for wait, m in zip(waits, mine)]),
    )


def _launches(local: Local, work: Ints, released: Ints) -> Links:
    """From the moment a call lets go to the work it launched; inferred where that is before it returns.

    Of the work of a CUDA graph only the first on each stream is bound to the call: the rest follows it.
    """
    launched = work[local.launch[work] >= 0]
    place = place_of_work(local, launched)
    order = np.lexsort((local.start[launched], place, local.launch[launched]))
    launched, place = launched[order], place[order]
    call = local.launch[launched]
    leads = np.append(True, (call[1:] != call[:-1]) | (place[1:] != place[:-1]))[: launched.size]
    launched, call = launched[leads], call[leads]
    early = released[call] < local.end[call]
    return links(EdgeKind.LAUNCH, (local.tid[call], released[call]), (WORK, launched), early)


def _lane_order(local: Local, work: Ints) -> Links:
    """Each piece of work after the one before it on its stream or worker; messages wait for nobody there."""
    work = work[~local.is_message[work]]
    place = place_of_work(local, work)
    ordered = work[np.lexsort((local.end[work], local.start[work], place))]
    place = place_of_work(local, ordered)
    same = np.flatnonzero(place[1:] == place[:-1])
    return links(EdgeKind.STREAM, (WORK, ordered[same]), (WORK, ordered[same + 1]))
