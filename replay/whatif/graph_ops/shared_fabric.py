"""Transfers over the shared cables of a fabric, after a change of the cables or of the paths over them.

Takes a graph, and the load of its communications on links before and after; returns the graph with the new
times of transfers. The bytes of each are those that it moved when recorded, beside the transfers that ran
then: nothing changes where paths and cables stay. A communication that reached most of what its paths allow
is limited by them, and follows them; all others become no faster than the fastest recorded of their kind,
since their limit (a GPU, a protocol) stays. Starts and durations depend on each other: they are iterated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.connections import Meeting, ends_of, known_paths, meetings, moved_by, quantile
from dpro.replay.cost.fabric.flows import Load, crossed, repeated, sprayed
from dpro.replay.cost.fabric.network import between_switches, hashed
from dpro.replay.cost.fabric.placement import Communications, Placed
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.shared_links import moving_shares

ROUNDS = 20
SETTLED_NS = 1000.0
REFUTED = 1.05  # times the recorded time: above, the transfer must have used other paths
CONTRADICTED = 1.2  # times the capacity of the cables: above, the topology is not that of the job
PATH_LIMITED_SHARE = 0.8  # of what paths allow: above, paths are the limit, and headers take the rest
NEVER_ENDS = 1e6  # times the bytes of a run


class Cables(NamedTuple):
    """Load of communications on a fabric, and its capacity.

    Attributes:
        load: on links.
        gbps: [L] of links, 1e9 bytes/s, which is bytes per ns.
    """

    load: Load
    gbps: Floats


class Recorded(NamedTuple):
    """[C] per communication, as recorded: begin of its first and end of its last transfer, ns; and
    bytes that its busiest rank sends, 0 where unknown.
    """

    begin: Floats
    end: Floats
    sent: Floats


class Sending(NamedTuple):
    """[C] sending of communications, as recorded.

    Attributes:
        begin: when each begins to move bytes, ns.
        work: bytes that its busiest rank moves; what it moved beside the others, where its size is not known.
        ceiling: highest rate, bytes per ns; infinite where cables are the only limit.
    """

    begin: Floats
    work: Floats
    ceiling: Floats


class Background(NamedTuple):
    """[O] communications of other jobs, whose beginnings do not depend on this job.

    Attributes:
        kind: index of their load among the kinds after the run's own.
        sending: their bytes and rates.
    """

    kind: Ints
    sending: Sending


class _Moves(NamedTuple):
    """[C] per communication, as recorded: ns before it moves bytes, and ns of moving them."""

    latency: Floats
    moving: Floats


def with_fabric(
    graph: Graph,
    communications: Communications,
    best: Cables,
    before: Cables,
    after: Cables,
    background: Background | None = None,
) -> Graph:
    """Return the graph with the times of transfers over other paths or cables.

    Args:
        best, before, after: load of each kind of communication: by the best existing paths, as recorded, and
            changed. The last may append kinds of communications of other jobs.
        background: these communications; by default one of each such kind, which never ends.

    Raises:
        Unanswerable: transfers were faster than the cables of the topology are.
    """
    nodes = graph.nodes
    timeline = replay(graph)
    if not communications.ops:
        return graph
    share = moving_shares(graph)[communications.transfers]
    lasted = nodes.duration[communications.transfers].astype(np.float64)
    moves = _latency_and_moving(communications, lasted, share)
    _check(communications, moves, _per_communication(best, communications.kind))
    before = _per_communication(before, communications.kind)
    begin, work, ceiling = _sending(communications, moves, timeline.start, before)
    kinds = communications.first.size
    if background is None:
        background = _endless(after.load.indptr.size - 1 - kinds, begin, work)
    of_job = _with_ceilings(before, ceiling)
    after = _per_communication(after, np.append(communications.kind, kinds + background.kind))
    with_others = _with_ceilings(after, np.append(ceiling, background.sending.ceiling))
    expected = ends_of(begin, work, of_job.load, of_job.gbps) - begin
    # Faster than possible over these paths: they took others, and the gain is not known. A communication that
    # no link of the fabric limits takes as long over any path.
    explained = (moves.moving > 0) & (expected > 0) & (expected <= REFUTED * moves.moving)
    duration = nodes.duration
    for _ in range(ROUNDS):
        taken = _beside(begin, work, with_others, background.sending) - begin
        times = np.where(explained, taken / np.where(explained, expected, 1.0), 1.0)[communications.of]
        changed = nodes.duration.copy()
        changed[communications.transfers] = np.rint(lasted * (1 - share + share * times))
        settled = np.abs(changed - duration).max() <= SETTLED_NS
        duration = changed
        if settled:
            break
        begin = _begins(communications, replay(graph.with_durations(duration)).start) + moves.latency
    return graph if np.array_equal(duration, nodes.duration) else graph.with_durations(duration)


def met_between_switches(graph: Graph, placement: Placed) -> list[Meeting]:
    """Return connections that meet on links between switches, by their known paths, else by a hash."""
    choose = known_paths(placement.flows, placement.routes, placement.path_entries).choice(
        hashed(placement.flows.key)
    )
    row, links = crossed(placement.flows, placement.routes, choose)
    inner = between_switches(placement.fabric)[links]
    moved = recorded(graph, placement.communications)
    return meetings(
        placement.flows, row[inner], links[inner], placement.communications.kind, moved.begin, moved.end
    )


def with_links_apart(graph: Graph, placement: Placed) -> Graph:
    """Return the graph as if connections that meet on a link between switches each had a link there.

    Args:
        placement: the run in its fabric; its paths are known.

    Raises:
        Unanswerable: transfers were faster than the cables of the topology are.
    """
    gbps = placement.fabric.gbps
    widened = gbps.copy()
    for meeting in met_between_switches(graph, placement):
        widened[meeting.link] *= len(meeting.connections)
    best, load = Cables(sprayed(placement.flows, placement.routes), gbps), quantile(placement.now, 0.5)
    return with_fabric(graph, placement.communications, best, Cables(load, gbps), Cables(load, widened))


def _per_communication(cables: Cables, kind: Ints) -> Cables:
    """Return the load of each communication from that of its kind."""
    return Cables(repeated(cables.load, kind), cables.gbps)


def _endless(others: int, begin: Floats, work: Floats) -> Background:
    """Return one communication of each kind of other jobs, which begins before and ends after this job's."""
    amount = NEVER_ENDS * max(float(work.max(initial=0.0)), 1.0) * work.size
    first = begin.min(initial=np.inf)
    columns = (np.full(others, value) for value in (first, amount, np.inf))
    return Background(np.arange(others), Sending(*columns))


def _beside(begin: Floats, work: Floats, cables: Cables, others: Sending) -> Floats:
    """Return [C] when communications end beside those of other jobs."""
    return ends_of(np.append(begin, others.begin), np.append(work, others.work), *cables)[: work.size]


def sending(graph: Graph, communications: Communications, cables: Cables) -> Sending:
    """Return the sending of communications, as recorded."""
    timeline = replay(graph)
    share = moving_shares(graph)[communications.transfers]
    moves = _latency_and_moving(
        communications, graph.nodes.duration[communications.transfers].astype(np.float64), share
    )
    return _sending(communications, moves, timeline.start, _per_communication(cables, communications.kind))


def _sending(communications: Communications, moves: _Moves, start: Ints, before: Cables) -> Sending:
    begin = _begins(communications, start) + moves.latency
    ceiling = _ceilings(communications, moves, begin, before)
    limited = _with_ceilings(before, ceiling)
    moved = moved_by(begin, begin + moves.moving, limited.load, limited.gbps)
    return Sending(begin, np.maximum(moved, communications.sent), ceiling)


def recorded(graph: Graph, communications: Communications) -> Recorded:
    """Return when communications begin and end, and their bytes."""
    timeline = replay(graph)
    end = np.zeros(len(communications.ops))
    np.maximum.at(end, communications.of, timeline.end[communications.transfers].astype(np.float64))
    return Recorded(_begins(communications, timeline.start), end, communications.sent)


def _latency_and_moving(communications: Communications, lasted: Floats, share: Floats) -> _Moves:
    """Return latency and moving time of the longest transfer of each, with the least moving share of any."""
    longest, part = np.zeros(len(communications.ops)), np.ones(len(communications.ops))
    np.maximum.at(longest, communications.of, lasted)
    np.minimum.at(part, communications.of, share)
    return _Moves(longest * (1 - part), longest * part)


def _begins(communications: Communications, start: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """Return [C] when the first transfer of each begins, ns."""
    begin = np.full(len(communications.ops), np.inf)
    np.minimum.at(begin, communications.of, start[communications.transfers].astype(np.float64))
    return begin


def _check(communications: Communications, moves: _Moves, best: Cables) -> None:
    """Raise if transfers were much faster than the cables allow on the best paths.

    Raises:
        Unanswerable: there are such transfers.
    """
    speed, alone = _speeds(moves, communications.sent), _alone(best)
    if (speed > CONTRADICTED * alone).any():
        worst = int(np.argmax(speed / alone))
        raise Unanswerable(
            f"{communications.ops[worst]} of {len(communications.members[worst])} ranks moved "
            f"{speed[worst]:.3g} GB/s, and the cables of the topology carry {alone[worst]:.3g}: "
            f"is it this job's topology?"
        )


def _speeds(moves: _Moves, sent: Floats) -> Floats:
    """Return [C] recorded rates, bytes per ns; 0 where unknown."""
    measured = (sent > 0) & (moves.moving > 0)
    speeds: Floats = np.where(measured, sent / np.maximum(moves.moving, 1e-9), 0.0)
    return speeds


def _alone(cables: Cables) -> Floats:
    """Return [C] rates that the cables allow each by itself, bytes per ns."""
    slowest = np.append(cables.gbps[cables.load.links] / cables.load.share, np.inf)
    alone: Floats = np.minimum.reduceat(slowest, cables.load.indptr[:-1])
    return alone


def _ceilings(communications: Communications, moves: _Moves, begin: Floats, before: Cables) -> Floats:
    """Return [C] highest rates, bytes per ns: the largest share of its paths' rate that its kind reached."""
    speed = _speeds(moves, communications.sent)
    allowed = moved_by(begin, begin + moves.moving, *before) / np.maximum(moves.moving, 1e-9)
    reached: dict[tuple[str, tuple[int, ...]], float] = {}
    kinds = list(zip(communications.ops, communications.members))
    for kind, part in zip(kinds, (speed / np.maximum(allowed, 1e-12)).tolist()):
        reached[kind] = max(part, reached.get(kind, 0.0))
    part = np.array([reached[kind] for kind in kinds])
    limited = (speed > 0) & (part < PATH_LIMITED_SHARE)
    ceiling = np.full(part.size, np.inf)
    ceiling[limited] = part[limited] * _alone(before)[limited]
    return ceiling


def _with_ceilings(cables: Cables, ceiling: Floats) -> Cables:
    """Add a private link for each communication with a ceiling; drop links that none crosses."""
    load = cables.load
    used, links = np.unique(load.links, return_inverse=True)
    limited = np.flatnonzero(np.isfinite(ceiling))
    place = np.full(ceiling.size, -1)
    place[limited] = used.size + np.arange(limited.size)
    rows = np.concatenate([np.repeat(np.arange(ceiling.size), np.diff(load.indptr)), limited])
    order = np.argsort(rows, kind="stable")
    indptr = np.searchsorted(rows[order], np.arange(ceiling.size + 1))
    all_links = np.concatenate([links, place[limited]])[order]
    share = np.concatenate([load.share, np.ones(limited.size)])[order]
    return Cables(
        Load(indptr.astype(np.int64), all_links.astype(np.int64), share),
        np.concatenate([cables.gbps[used], ceiling[limited]]),
    )
