"""Transfers that share the cables of a fabric, once the cables, or the paths over them, are others.

In: a graph, and what its communications load on links before and after. Out: the graph with transfers as
long as they then take. What each has to move is what it moved when recorded, beside those that ran then:
nothing changes where paths and cables stay. What reached most of what its paths allow is limited by them, and
follows them; all else becomes no faster than the fastest of its kind was recorded, since what limits that (a
GPU, a protocol) stays. Starts follow from durations, and durations from starts: both are found in turns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.connections import Meeting, known_paths, meetings, quantile
from dpro.replay.cost.fabric.fairness import ends_of, moved_by
from dpro.replay.cost.fabric.flows import Load, crossed, repeated, sprayed
from dpro.replay.cost.fabric.network import between_switches, hashed
from dpro.replay.cost.fabric.placement import Communications, Placed
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay
from dpro.replay.whatif.graph_ops.shared_links import moving_shares

ROUNDS = 20
SETTLED_NS = 1000.0
REFUTED = 1.05  # times the recorded time: paths over which it cannot have been that fast
CONTRADICTED = 1.2  # times what the cables carry: the topology is not that of the job
LIMITED = 0.8  # of what paths allow: beyond that they are the limit, and headers take the rest
NEVER_ENDS = 1e6  # times all that a run moves


class Cables(NamedTuple):
    """What communications load on a fabric.

    Attributes:
        load: on links.
        gbps: [L] of links, 1e9 bytes/s, which is bytes per ns.
    """

    load: Load
    gbps: Floats


class Recorded(NamedTuple):
    """[C] per communication, as recorded: when its first transfer begins and its last ends, ns; and what its
    busiest rank sends, bytes, 0 where unknown.
    """

    begin: Floats
    end: Floats
    sent: Floats


class Sending(NamedTuple):
    """[C] what communications send, as recorded.

    Attributes:
        begin: when each begins to move bytes, ns.
        work: bytes that its busiest rank moves; what it moved beside the others, where its size is not known.
        ceiling: bytes per ns that it reaches at most, infinite where cables are its only limit.
    """

    begin: Floats
    work: Floats
    ceiling: Floats


class Background(NamedTuple):
    """[O] communications of other jobs, whose beginnings nothing of this one delays.

    Attributes:
        kind: which of the kinds behind the run's own each loads links as.
        sending: what they send.
    """

    kind: Ints
    sending: Sending


class _Moves(NamedTuple):
    """[C] per communication, ns: until it moves bytes, and for how long it does, as recorded."""

    latency: Floats
    moving: Floats


def with_fabric(
    graph: Graph,
    found: Communications,
    best: Cables,
    before: Cables,
    after: Cables,
    background: Background | None = None,
) -> Graph:
    """The graph, with transfers as long as they take over other paths or cables.

    Args:
        best, before, after: what each kind of them loads: by the best paths that there are, when recorded,
            and then. Behind these the last may have kinds of communications of other jobs.
        background: these communications; without, there is one of each such kind, and it never ends.

    Raises:
        Unanswerable: transfers were faster than the cables of the topology are.
    """
    nodes = graph.nodes
    timeline = replay(graph)
    if not found.ops:
        return graph
    share = moving_shares(graph)[found.transfers]
    lasted = nodes.duration[found.transfers].astype(np.float64)
    moves = _moves(found, lasted, share)
    _check(found, moves, _each(best, found.kind))
    before = _each(before, found.kind)
    begin, work, ceiling = _sending(found, moves, timeline.start, before)
    kinds = found.first.size
    if background is None:
        background = _endless(after.load.indptr.size - 1 - kinds, begin, work)
    own = _with_ceilings(before, ceiling)
    after = _each(after, np.append(found.kind, kinds + background.kind))
    its = _with_ceilings(after, np.append(ceiling, background.sending.ceiling))
    expected = ends_of(begin, work, own.load, own.gbps) - begin
    # Faster than they can have been over these paths: they took others, and what is gained is not known.
    known = (moves.moving > 0) & (expected <= REFUTED * moves.moving)
    duration = nodes.duration
    for _ in range(ROUNDS):
        taken = _beside(begin, work, its, background.sending) - begin
        times = np.where(known, taken / np.where(known, expected, 1.0), 1.0)[found.of]
        changed = nodes.duration.copy()
        changed[found.transfers] = np.rint(lasted * (1 - share + share * times))
        settled = np.abs(changed - duration).max() <= SETTLED_NS
        duration = changed
        if settled:
            break
        begin = _begins(found, replay(graph.with_durations(duration)).start) + moves.latency
    return graph if np.array_equal(duration, nodes.duration) else graph.with_durations(duration)


def met_between_switches(graph: Graph, at: Placed) -> list[Meeting]:
    """Connections that meet on links between switches, by their known paths, else by a hash."""
    choose = known_paths(at.flows, at.routes, at.known).choice(hashed(at.flows.key))
    row, links = crossed(at.flows, at.routes, choose)
    inner = between_switches(at.fabric)[links]
    moved = recorded(graph, at.found)
    return meetings(at.flows, row[inner], links[inner], at.found.kind, moved.begin, moved.end)


def with_links_apart(graph: Graph, at: Placed) -> Graph:
    """The graph as if each of the connections that meet on a link between switches had one like it.

    Args:
        at: the run in its fabric; its paths are known.

    Raises:
        Unanswerable: transfers were faster than the cables of the topology are.
    """
    gbps = at.fabric.gbps
    apart = gbps.copy()
    for meeting in met_between_switches(graph, at):
        apart[meeting.link] *= len(meeting.connections)
    best, load = Cables(sprayed(at.flows, at.routes), gbps), quantile(at.now, 0.5)
    return with_fabric(graph, at.found, best, Cables(load, gbps), Cables(load, apart))


def _each(cables: Cables, kind: Ints) -> Cables:
    """What each communication loads, from what its kind does."""
    return Cables(repeated(cables.load, kind), cables.gbps)


def _endless(others: int, begin: Floats, work: Floats) -> Background:
    """One communication of each kind of other jobs, which begins before and ends after those of this one."""
    amount = NEVER_ENDS * max(float(work.max(initial=0.0)), 1.0) * work.size
    first = begin.min(initial=np.inf)
    columns = (np.full(others, each) for each in (first, amount, np.inf))
    return Background(np.arange(others), Sending(*columns))


def _beside(begin: Floats, work: Floats, cables: Cables, others: Sending) -> Floats:
    """[C] when communications end beside those of other jobs."""
    both = np.append(begin, others.begin), np.append(work, others.work)
    return ends_of(*both, *cables)[: work.size]


def sending(graph: Graph, found: Communications, cables: Cables) -> Sending:
    """What communications send, as recorded."""
    timeline = replay(graph)
    share = moving_shares(graph)[found.transfers]
    moves = _moves(found, graph.nodes.duration[found.transfers].astype(np.float64), share)
    return _sending(found, moves, timeline.start, _each(cables, found.kind))


def _sending(found: Communications, moves: _Moves, start: Ints, before: Cables) -> Sending:
    begin = _begins(found, start) + moves.latency
    ceiling = _ceilings(found, moves, begin, before)
    own = _with_ceilings(before, ceiling)
    moved = moved_by(begin, begin + moves.moving, own.load, own.gbps)
    return Sending(begin, np.maximum(moved, found.sent), ceiling)


def recorded(graph: Graph, found: Communications) -> Recorded:
    """When communications move how much."""
    timeline = replay(graph)
    end = np.zeros(len(found.ops))
    np.maximum.at(end, found.of, timeline.end[found.transfers].astype(np.float64))
    return Recorded(_begins(found, timeline.start), end, found.sent)


def _moves(found: Communications, lasted: Floats, share: Floats) -> _Moves:
    """Of the longest transfer of each; the least part of a transfer that moves bytes counts."""
    longest, part = np.zeros(len(found.ops)), np.ones(len(found.ops))
    np.maximum.at(longest, found.of, lasted)
    np.minimum.at(part, found.of, share)
    return _Moves(longest * (1 - part), longest * part)


def _begins(found: Communications, start: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """[C] when the first transfer of each begins, ns."""
    begin = np.full(len(found.ops), np.inf)
    np.minimum.at(begin, found.of, start[found.transfers].astype(np.float64))
    return begin


def _check(found: Communications, moves: _Moves, best: Cables) -> None:
    """Refuse transfers that were much faster than cables are by the best paths.

    Raises:
        Unanswerable: there are such.
    """
    speed, alone = _speeds(moves, found.sent), _alone(best)
    if (speed > CONTRADICTED * alone).any():
        worst = int(np.argmax(speed / alone))
        raise Unanswerable(
            f"{found.ops[worst]} of {len(found.members[worst])} ranks moved {speed[worst]:.3g} GB/s, and the "
            f"cables of the topology carry {alone[worst]:.3g}: is it this job's topology?"
        )


def _speeds(moves: _Moves, sent: Floats) -> Floats:
    """[C] bytes per ns that each moved when recorded, 0 where unknown."""
    known = (sent > 0) & (moves.moving > 0)
    speeds: Floats = np.where(known, sent / np.maximum(moves.moving, 1e-9), 0.0)
    return speeds


def _alone(cables: Cables) -> Floats:
    """[C] bytes per ns that the cables carry of each by itself."""
    slowest = np.append(cables.gbps[cables.load.links] / cables.load.share, np.inf)
    alone: Floats = np.minimum.reduceat(slowest, cables.load.indptr[:-1])
    return alone


def _ceilings(found: Communications, moves: _Moves, begin: Floats, before: Cables) -> Floats:
    """[C] bytes per ns that each reaches at most: what its kind reached of what its paths allowed."""
    speed = _speeds(moves, found.sent)
    allowed = moved_by(begin, begin + moves.moving, *before) / np.maximum(moves.moving, 1e-9)
    reached: dict[tuple[str, tuple[int, ...]], float] = {}
    kinds = list(zip(found.ops, found.members))
    for kind, part in zip(kinds, (speed / np.maximum(allowed, 1e-12)).tolist()):
        reached[kind] = max(part, reached.get(kind, 0.0))
    part = np.array([reached[kind] for kind in kinds])
    ceiling: Floats = np.where((speed > 0) & (part < LIMITED), part * _alone(before), np.inf)
    return ceiling


def _with_ceilings(cables: Cables, ceiling: Floats) -> Cables:
    """A link of its own for each communication that has a ceiling; links that none crosses are left out."""
    load = cables.load
    used, links = np.unique(load.links, return_inverse=True)
    own = np.flatnonzero(np.isfinite(ceiling))
    place = np.full(ceiling.size, -1)
    place[own] = used.size + np.arange(own.size)
    rows = np.concatenate([np.repeat(np.arange(ceiling.size), np.diff(load.indptr)), own])
    order = np.argsort(rows, kind="stable")
    indptr = np.searchsorted(rows[order], np.arange(ceiling.size + 1))
    all_links = np.concatenate([links, place[own]])[order]
    share = np.concatenate([load.share, np.ones(own.size)])[order]
    return Cables(
        Load(indptr.astype(np.int64), all_links.astype(np.int64), share),
        np.concatenate([cables.gbps[used], ceiling[own]]),
    )
