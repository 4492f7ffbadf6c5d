"""How much links carry, and which connections meet on them.

In: flows, the links that each crosses, and when communications run. Out: per link, bytes and the time in
which anything crosses it; and meetings: connections that cross one link at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.replay.fabric.connections import connections_of, known_paths
from dpro.replay.fabric.fairness import max_min_rates
from dpro.replay.fabric.flows import Flows, Load, loaded
from dpro.replay.fabric.routes import Routes, hashed
from dpro.topology.paths import PathEntry


class Usage(NamedTuple):
    """[L] per link.

    Attributes:
        sent: bytes that cross it.
        busy: time in which a communication crosses it.
    """

    sent: Floats
    busy: Floats


@dataclass(frozen=True)
class Meeting:
    """Connections that cross a link at the same time.

    Attributes:
        link: the link.
        connections: those that do so at any time, by number.
        together: for how long two or more of them do.
    """

    link: int
    connections: tuple[int, ...]
    together: float


def usage(load: Load, begin: Floats, end: Floats, sent: Floats, num_links: int) -> Usage:
    """How much links carry.

    Args:
        begin, end: [C] when each communication runs.
        sent: [C] bytes that the busiest rank of each sends.
    """
    of = np.repeat(np.arange(begin.size), np.diff(load.indptr))
    carried = np.bincount(load.links, load.share * sent[of], num_links).astype(np.float64)
    order = np.lexsort((begin[of], load.links))
    link, since, until = load.links[order], begin[of][order], end[of][order]
    busy = np.zeros(num_links)
    firsts = np.flatnonzero(np.diff(link, prepend=-1))
    for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), link.size]):
        # What of each interval no earlier one of this link covers.
        covered = np.maximum.accumulate(until[first:last])
        before = np.concatenate([[-np.inf], covered[:-1]])
        busy[link[first]] = np.maximum(until[first:last] - np.maximum(since[first:last], before), 0).sum()
    return Usage(carried, busy)


def meetings(flows: Flows, row: Ints, links: Ints, kind: Ints, begin: Floats, end: Floats) -> list[Meeting]:
    """Connections that meet, by link: the longest first.

    Args:
        row, links: flows, and links that each crosses, as `flows.crossed` gives them.
        kind: [C] of each communication.
        begin, end: [C] when each runs.
    """
    by_kind = np.argsort(kind, kind="stable")
    since, until = begin[by_kind], end[by_kind]
    bounds = np.searchsorted(kind[by_kind], np.arange(flows.count + 1))
    connection = connections_of(flows).of[row]
    order = np.argsort(links, kind="stable")
    firsts = np.flatnonzero(np.diff(links[order], prepend=-1))
    found = []
    for rows in np.split(order, firsts[1:]) if order.size else []:
        if (connection[rows] == connection[rows[0]]).all():
            continue
        of = flows.of[row[rows]]
        counts = bounds[of + 1] - bounds[of]
        at = np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in of.tolist()])
        met, together = _together(np.repeat(connection[rows], counts), since[at], until[at])
        if met:
            found.append(Meeting(int(links[rows[0]]), tuple(sorted(met)), together))
    return sorted(found, key=lambda meeting: (-meeting.together, meeting.link))


def _together(connection: Ints, since: Floats, until: Floats) -> tuple[set[int], float]:
    """Which connections run beside another one, and for how long any two do."""
    events = sorted(
        [(time, 1, each) for time, each in zip(since.tolist(), connection.tolist())]
        + [(time, -1, each) for time, each in zip(until.tolist(), connection.tolist())],
        key=lambda event: event[:2],
    )  # at one time ends come before begins
    running: dict[int, int] = {}
    met: set[int] = set()
    together, last = 0.0, 0.0
    for time, change, each in events:
        if len(running) > 1 and time > last:
            together += time - last
            met |= running.keys()
        last = time
        running[each] = running.get(each, 0) + change
        if not running[each]:
            del running[each]
    return met, together


# What flows load by hashes that are not known: the same flows under many seeds.

SEEDS = 40


def hashed_loads(flows: Flows, routes: Routes, known: Sequence[PathEntry] = ()) -> list[Load]:
    """The load by the hash of each seed: first the one under which all communications at once are fastest.

    Args:
        known: paths that no hash decides.

    Raises:
        Unanswerable: no path leads from a port to another, or a known one is none.
    """

    paths = known_paths(flows, routes, known)
    seeds = SEEDS if paths.missing.size or not known else 1
    loads = [loaded(flows, routes, paths.choice(hashed(flows.key, seed))) for seed in range(seeds)]

    def slowness(load: Load) -> float:
        return float((1 / np.maximum(max_min_rates(load, routes.network.gbps), 1e-12)).sum())

    return sorted(loads, key=slowness)


def quantile(loads: Sequence[Load], share: float) -> Load:
    """The load at a share of the seeds.

    Args:
        loads: in order.
        share: 0 for the first, 1 for the last.
    """
    return loads[round(share * (len(loads) - 1))]
