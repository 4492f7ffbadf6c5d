"""Transfers that share a link, after an edit has moved them: those that now overlap take longer, others less.

Takes a graph, and the graph that an edit made of it; returns the latter, with the times of transfers adjusted
to those that then run beside them. Transfers of one group of ranks share each rank's link evenly, as flows
over one port do (processor sharing; Kleinrock, Queueing Systems II (1976), section 4.4): while the running
ones would fill the link n times, each advances at 1/n of its speed. The work of each is how far it advanced
when recorded: nothing changes where nothing moves. A transfer that no longer meets any other takes the time
of others of its kind and size that met none, where there are some: it may have been queued. Transfers that an
edit queued have their link in sequence, and share it as one flow with those of other streams; a group whose
transfers run on one stream shares nothing.

Starts depend on durations, and durations on starts: both are found by iteration. The time of a transfer
depends only on what begins before it ends, so each round settles more of the graph, from its beginning on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.cost.transfers import fit_costs, messages_by_kind
from dpro.replay.engine import compiled
from dpro.replay.graph import EdgeKind, Graph, NodeKind, computed_once
from dpro.replay.kept import kept_as
from dpro.replay.timeline import Timeline, replay, replayed

ROUNDS = 40
SETTLED_NS = 1000  # smaller changes count as settled
ROUNDING_NS = 2  # difference of two sums over a timeline
MIN_APART = 3  # transfers that met no other, needed for a median


def with_shared_links(graph: Graph, changed: Graph) -> Graph:
    """Return the changed graph, with its transfers' times adjusted to the links that they share."""
    if changed is graph:
        return changed
    links = _links(changed)
    if not links:
        return changed
    recorded = _recorded(graph)
    demand, work = _queued_shares(changed), changed.nodes.duration.astype(np.float64)
    by_itself = np.full(changed.num_nodes, np.nan)
    node = np.concatenate(links)
    original = _originals(changed, node, graph, recorded.nodes)
    node, original = node[original >= 0], original[original >= 0]
    times = work[node] / graph.nodes.duration[recorded.nodes[original]]  # factor on its time by the edit
    demand[node] = recorded.demand[original]
    work[node], by_itself[node] = times * recorded.alone[original], times * recorded.uncontended[original]
    return _settled(changed, links, demand, work, by_itself)


def unqueued_ns(graph: Graph) -> Floats:
    """Return [N] ns of each transfer for its own bytes: without its time in the queue, where known."""
    recorded = _recorded(graph)
    ns = graph.nodes.duration.astype(np.float64)
    queued = ~np.isnan(recorded.uncontended)
    ns[recorded.nodes[queued]] = recorded.uncontended[queued]
    return ns


class _Recorded(NamedTuple):
    """Transfers of a graph that need their links, [T] each.

    Attributes:
        nodes: of the graph, ascending.
        demand: the share of its time for which each needs its link.
        alone: ns that it takes alone, by the shares.
        uncontended: ns of others of its kind and size that met none; nan where it met none itself, or too few
            others did.
    """

    nodes: Ints
    demand: Floats
    alone: Floats
    uncontended: Floats


@kept_as("links-as-recorded", {"_Recorded": _Recorded})
def _recorded(graph: Graph) -> _Recorded:
    """Return the demand of a graph's transfers on their links, and their times alone."""
    timeline, demand = replayed(graph), moving_shares(graph)
    transfers = np.flatnonzero(demand > 0)
    alone, uncontended = (estimated(graph, timeline, demand) for estimated in (_alone, _uncontended))
    return _Recorded(transfers, demand[transfers], alone[transfers], uncontended[transfers])


def _originals(changed: Graph, transfers: Ints, graph: Graph, recorded: Ints) -> Ints:
    """Return [K] the recorded transfer that each transfer is, or is a copy of; -1 for new ones.

    Args:
        transfers: [K] nodes of `changed`.
        recorded: [T] nodes of `graph`.
    """
    if not recorded.size:
        return np.full(transfers.size, -1)
    new, old = changed.nodes, graph.nodes
    instances = int(old.collective.max(initial=-1)) + 1
    collective = new.collective[transfers] % instances  # copies of steps continue the numbering
    places = (new.rank[transfers], old.rank[recorded]), (new.window[transfers], old.window[recorded])
    key = np.concatenate([collective, old.collective[recorded]]) + 1
    for place in map(np.concatenate, places):
        key += (place - place.min(initial=0)) * (int(key.max(initial=0)) + 1)
    transfer_key, recorded_key = key[: transfers.size], key[transfers.size :]
    order = np.argsort(recorded_key, kind="stable")
    position = np.searchsorted(recorded_key, transfer_key, side="right", sorter=order) - 1
    original = order[np.maximum(position, 0)]
    number = {message: number for number, message in enumerate(graph.messages)}
    means = np.array([number.get(message, -2) for message in changed.messages] + [-2])
    meant = np.array([number[message] for message in graph.messages] + [-1])
    node = recorded[original]
    is_copy = (
        (position >= 0) & (recorded_key[original] == transfer_key) & (new.bytes[transfers] == old.bytes[node])
    )
    is_copy &= new.measured_start[transfers] == old.measured_start[node]
    is_copy &= means[new.message[transfers]] == meant[old.message[node]]
    return np.where(is_copy, original, -1)


def _settled(changed: Graph, links: list[Ints], demand: Floats, work: Floats, by_itself: Floats) -> Graph:
    """Iterate durations and starts until they are consistent.

    Args:
        demand: [N] of each transfer, 0 where it shares nothing.
        work: [N] ns that each takes alone.
        by_itself: [N] ns that each takes where it meets no other, nan where that is its work.
    """
    given, queue = changed.nodes.duration, queued(changed)
    duration = given
    for _ in range(ROUNDS):
        start = replay(changed.with_durations(duration)).start
        settled, moved = duration.copy(), 0
        for nodes in links:
            sharing = nodes[demand[nodes] > 0]
            takes = shared_ns(
                start[sharing].astype(np.float64), work[sharing], demand[sharing], queue[sharing]
            )
            shortest = np.where(np.isnan(by_itself[sharing]), takes, by_itself[sharing])
            meets = _meets(start[sharing], start[sharing] + shortest)
            lasts = np.rint(np.where(meets, takes, shortest)).astype(np.int64)
            settled[sharing] = np.where(np.abs(lasts - given[sharing]) <= ROUNDING_NS, given[sharing], lasts)
            moved = max(moved, int(np.abs(settled[sharing] - duration[sharing]).max(initial=0)))
        duration = settled
        if moved <= SETTLED_NS:
            break
    return changed if np.array_equal(duration, given) else changed.with_durations(duration)


def _links(graph: Graph) -> list[Ints]:
    """Return the transfers of each link with several streams: of one rank, window and set of ranks.

    Queued transfers count as one stream, whatever their lanes.
    """
    transfers, link, stream = _on_links(graph)
    moves = graph.nodes.duration[transfers] > 0
    transfers, link, stream = transfers[moves], link[moves], stream[moves]
    several = np.flatnonzero(np.bincount(_distinct_pairs(link, stream)[0]) > 1)
    return [transfers[link == number] for number in several.tolist()]


def _distinct_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Return the distinct pairs of numbers from -1 on."""
    width = int(second.max(initial=0)) + 2
    pairs = np.unique((first + 1) * width + second + 1)
    return pairs // width - 1, pairs % width - 1


@computed_once
def _on_links(graph: Graph) -> tuple[Ints, Ints, Ints]:
    """Return all transfers, the link of each, and its stream: -1 if an edit queued it."""
    nodes = graph.nodes
    transfers = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    groups = _groups(graph)
    group = groups[nodes.message[transfers]] if transfers.size else transfers
    places = (nodes.rank[transfers], nodes.window[transfers], group)
    link = np.zeros_like(transfers)
    for place in places:
        link = link * (int(place.max(initial=0)) + 2) + place + 1
    link = np.unique(link, return_inverse=True)[1]
    return transfers, link, np.where(queued(graph)[transfers], -1, nodes.lane[transfers])


@computed_once
def _groups(graph: Graph) -> Ints:
    """Return [messages] the number of each one's group; groups of equal recorded ranks share a number."""
    nodes = graph.nodes
    names = {name: number for number, name in enumerate({message.group for message in graph.messages})}
    group = np.array([names[message.group] for message in graph.messages], np.int64)
    with_message = nodes.message >= 0
    of, rank = _distinct_pairs(group[nodes.message[with_message]], nodes.rank[with_message])
    members = {number: tuple(rank[of == number].tolist()) for number in np.unique(of).tolist()}
    numbers = {ranks: number for number, ranks in members.items()}
    return np.array([numbers.get(members.get(number, ()), number) for number in group.tolist()], np.int64)


def queued(graph: Graph) -> Bools:
    """Return [N] a mask of transfers in queues that edits made: one waits for another on their link."""
    return _queues(graph)[0]


def _queued_shares(graph: Graph) -> Floats:
    """Return [N] the share of its time for which a queued transfer needs its link; 0 for others.

    The rest is its latency, by which it begins before the end of the one ahead.
    """
    is_queued, fixed = _queues(graph)
    duration, shares = graph.nodes.duration, np.zeros(graph.num_nodes)
    transfers = np.flatnonzero(is_queued & (duration > 0))
    shares[transfers] = 1 - np.minimum(fixed[transfers], duration[transfers]) / duration[transfers]
    return shares


@computed_once
def _queues(graph: Graph) -> tuple[Bools, Ints]:
    """Return [N] whether a transfer is in a queue, and by how many ns it overlaps there."""
    nodes, edges = graph.nodes, graph.edges
    into = graph.edges_into(np.flatnonzero(nodes.kind == NodeKind.TRANSFER))
    queue = into[edges.kind[into] == EdgeKind.STREAM]
    queue = queue[nodes.kind[edges.source[queue]] == NodeKind.TRANSFER]  # edges are sorted by target
    is_queued, fixed = np.zeros(graph.num_nodes, np.bool_), np.zeros(graph.num_nodes, np.int64)
    for end in (edges.source, edges.target):  # the first in a queue has no lag: it takes that of the next
        is_queued[end[queue]] = True
        fixed[end[queue]] = np.maximum(-edges.lag[queue], 0)
    return is_queued, fixed


def moving_shares(graph: Graph) -> Floats:
    """Return [N] the share of its time for which a transfer needs its link: all but its latency.

    Where no curve shows that, all of its time; 0 for other nodes.
    """
    nodes = graph.nodes
    demand: Floats = ((nodes.kind == NodeKind.TRANSFER) & (nodes.duration > 0)).astype(np.float64)
    curves = fit_costs(graph)
    sized = np.flatnonzero((nodes.message >= 0) & (nodes.bytes > 0) & (nodes.duration > 0))
    for kind, messages in messages_by_kind(graph).items():
        if kind in curves:
            transfers = sized[np.isin(nodes.message[sized], messages)]
            size = nodes.bytes[transfers]
            demand[transfers] = curves[kind].moving_ns(size) / np.maximum(curves[kind].time_ns(size), 1e-9)
    return demand


def _alone(graph: Graph, timeline: Timeline, demand: Floats) -> Floats:
    """Return [N] ns that each transfer would have taken alone on its link."""
    alone, queue = graph.nodes.duration.astype(np.float64), queued(graph)
    for nodes in _links(graph):
        sharing = nodes[demand[nodes] > 0]
        if sharing.size == 0:
            continue
        start, end = timeline.start[sharing].astype(np.float64), timeline.end[sharing].astype(np.float64)
        times = np.concatenate([start, _until_next(start, end, queue[sharing])])
        order = np.argsort(times, kind="stable")
        load = np.cumsum(np.concatenate([demand[sharing], -demand[sharing]])[order])
        advanced = np.append(0.0, np.cumsum(np.diff(times[order]) / np.maximum(load[:-1], 1)))
        breaks = times[order]
        alone[sharing] = np.interp(end, breaks, advanced) - np.interp(start, breaks, advanced)
        alone[sharing] += np.maximum(end - breaks[-1], 0)
    return alone


def _until_next(start: Floats, end: Floats, queue: Bools) -> Floats:
    """Return [T] ends of transfers; queued ones end no later than the next in the queue begins."""
    until, order = end.copy(), np.flatnonzero(queue)
    order = order[np.argsort(start[order], kind="stable")]
    until[order[:-1]] = np.minimum(end[order[:-1]], start[order[1:]])
    return until


def share_without_others(graph: Graph, timeline: Timeline, chosen: Bools) -> Floats:
    """Return [N] the ratio of transfers' times without others on their links to their times.

    Args:
        chosen: [N] transfers; 1 for others.
    """
    demand = moving_shares(graph)
    without = np.where(chosen, demand, 0.0)
    ratio = _alone(graph, timeline, demand) / np.maximum(_alone(graph, timeline, without), 1)
    return np.where(chosen, np.minimum(ratio, 1.0), 1.0)


def _uncontended(graph: Graph, timeline: Timeline, demand: Floats) -> Floats:
    """Return [N] ns of transfers of equal kind and size that meet no other; nan where a transfer met none.

    A transfer that waited in a queue does not show, by its share of the link, its time without others.
    """
    nodes, ns, queue = graph.nodes, np.full(graph.num_nodes, np.nan), queued(graph)
    for transfers in _links(graph):
        sharing = transfers[demand[transfers] > 0]
        start, takes = timeline.start[sharing], nodes.duration[sharing].astype(np.float64)
        meets = _meets(start, start + takes) | queue[sharing]
        kind = np.unique(
            np.stack([nodes.message[sharing], nodes.bytes[sharing]]), axis=1, return_inverse=True
        )[1]
        shortest = takes.copy()
        for number in np.unique(kind[meets]).tolist():
            is_apart = (kind == number) & ~meets
            if is_apart.sum() >= MIN_APART and nodes.bytes[sharing[is_apart][0]] > 0:
                shortest[(kind == number) & meets] = np.median(takes[is_apart])
        meets &= _meets(start, start + shortest) & (shortest < takes)  # else it was apart all the same
        ns[sharing[meets]] = shortest[meets]
    return ns


def _meets(start: NDArray[Any], end: NDArray[Any]) -> Bools:
    """Return [T] whether each interval overlaps any other."""
    order = np.lexsort((end, start))
    begins, ends = start[order], end[order]
    earlier = np.append(False, np.maximum.accumulate(ends)[:-1] > begins[1:])  # an earlier one lasts into it
    overlaps = np.zeros(start.size, np.bool_)
    overlaps[order] = earlier | np.append(begins[1:] < ends[:-1], False)  # or the next begins within it
    return overlaps


def shared_ns(start: Floats, work: Floats, demand: Floats, queue: Bools) -> Floats:
    """Return [T] ns of transfers that share a link.

    Args:
        start: [T] ns.
        work: [T] ns that each takes alone.
        demand: [T] share of the link that each needs.
        queue: [T] those that have the link in sequence: of the running ones, the largest demand counts.
    """
    left, took = work.copy(), np.zeros(start.size)
    coming = np.argsort(-start, kind="stable")[::-1].copy()
    running = np.empty(start.size, np.int64)
    _share(start, demand, queue, coming, left, running, took)
    return took


@compiled
def _share(start: Any, demand: Any, queue: Any, coming: Any, left: Any, running: Any, took: Any) -> None:
    count = 0  # running transfers, in the order in which they began
    begun = 0
    now = 0.0
    while begun < coming.size or count > 0:
        line, others = 0.0, 0.0
        first = 0
        for place in range(count):
            transfer = running[place]
            if queue[transfer]:
                line = max(line, demand[transfer])
            else:
                others += demand[transfer]
            if left[transfer] < left[running[first]]:
                first = place
        slower = max(others + line, 1.0)
        ends = now + slower * left[running[first]] if count > 0 else np.inf
        upto = ends
        if begun < coming.size:
            upto = min(ends, start[coming[begun]])
        for place in range(count):
            left[running[place]] -= (upto - now) / slower
        now = upto
        if ends <= now:
            transfer = running[first]
            took[transfer] = now - start[transfer]
            count -= 1
            for place in range(first, count):
                running[place] = running[place + 1]
        else:
            running[count] = coming[begun]
            begun += 1
            count += 1
