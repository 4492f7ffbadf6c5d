"""Connections: the links that they cross, the load of links, meetings of connections, and their rates there.

A connection is a sequence of flows between two ports that routers send along one path. Takes flows of
communications, next hops, and the known paths; returns the choice that follows known paths; where none is
known, the probability that a flow crosses a link, or its load under many hashes; per link, bytes and busy
time; and meetings: connections that cross one link at the same time.

Communications that share links run at max-min fair rates, by progressive filling: rates follow from their
loads and the links' capacities, and ends from their beginnings and bytes. All rates grow evenly until a link
is full; communications across it stay there, the others grow on (Bertsekas and Gallager, Data Networks, 2nd
edition, section 6.5.2). A ring is as fast as its slowest flow, so a communication loads several links at
once, in proportion to its flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.fabric.flows import Flows, Load, crossed, inside, loaded, sprayed
from dpro.replay.cost.fabric.network import NO_LINK, SWITCH, Choice, Routes, between_switches, hashed
from dpro.replay.engine import compiled
from dpro.topology.kept import PathEntry

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

FULL = 1e-9  # share of a link's capacity below which nothing is left


@compiled
def _fill(
    running: Any, indptr: Any, links: Any, share: Any, capacity: Any, left: Any, growing: Any, rate: Any
) -> None:
    # `growing` [L] is zero before and after. `left` [L] is scratch, set only for touched links, since most
    # links are crossed by none.
    size = 0
    for call in running:
        size += indptr[call + 1] - indptr[call]
    touched = np.empty(size, np.int64)
    count = 0
    for call in running:
        rate[call] = -1.0
        for entry in range(indptr[call], indptr[call + 1]):
            link = links[entry]
            if growing[link] == 0.0:
                touched[count] = link
                count += 1
                left[link] = capacity[link]
            growing[link] += share[entry]
    remaining = running.size
    level = 0.0
    while remaining > 0:
        step = np.inf
        for link in touched[:count]:
            if growing[link] > FULL:
                step = min(step, left[link] / growing[link])
        if step == np.inf:  # the remaining communications cross no link
            for call in running:
                if rate[call] < 0:
                    rate[call] = np.inf
            break
        level += step
        for link in touched[:count]:
            left[link] -= step * growing[link]
        for call in running:
            if rate[call] >= 0:
                continue
            for entry in range(indptr[call], indptr[call + 1]):
                if left[links[entry]] <= capacity[links[entry]] * FULL:
                    rate[call] = level
                    remaining -= 1
                    break
            if rate[call] >= 0:  # its unused share of other links is free for the next round
                for entry in range(indptr[call], indptr[call + 1]):
                    growing[links[entry]] -= share[entry]
    for link in touched[:count]:
        growing[link] = 0.0


def max_min_rates(load: Load, capacity: Floats) -> Floats:
    """Return [C] the rate of each communication while all run: bytes of its busiest rank per unit of time.

    Args:
        capacity: [L] of each link, more than 0, bytes per unit of time.
    """
    count = load.indptr.size - 1
    rate = np.zeros(count)
    running = np.arange(count)
    scratch = np.zeros(capacity.size), np.zeros(capacity.size)
    _fill(running, load.indptr, load.links, load.share, capacity, *scratch, rate)
    return rate


@compiled
def _flow(
    order: Any, begin: Any, work: Any, indptr: Any, links: Any, share: Any, capacity: Any, end: Any
) -> None:
    left = work.copy()
    room, growing = np.zeros(capacity.size), np.zeros(capacity.size)
    rate = np.zeros(work.size)
    running = np.zeros(work.size, np.int64)
    count, coming = 0, 0
    now = 0.0
    while coming < order.size or count > 0:
        ends = np.inf
        for place in range(count):
            call = running[place]
            if rate[call] == np.inf or left[call] <= 0:
                ends = now
            else:
                ends = min(ends, now + left[call] / rate[call])
        begins = begin[order[coming]] if coming < order.size else np.inf
        upto = min(ends, begins)
        for place in range(count):
            if rate[running[place]] != np.inf:
                left[running[place]] -= rate[running[place]] * (upto - now)
        now = upto
        kept = 0
        for place in range(count):
            call = running[place]
            done = rate[call] == np.inf or left[call] <= 1e-9 * work[call]
            if ends <= begins and done:
                end[call] = now
            else:
                running[kept] = call
                kept += 1
        count = kept
        while coming < order.size and begin[order[coming]] <= now:
            running[count] = order[coming]
            count += 1
            coming += 1
        _fill(running[:count], indptr, links, share, capacity, room, growing, rate)


def ends_of(begin: Floats, work: Floats, load: Load, capacity: Floats) -> Floats:
    """Return [C] when each communication ends, at max-min fair rates.

    Args:
        begin: [C] beginning of each.
        work: [C] bytes that the busiest rank of each sends.
        capacity: [L] of each link, bytes per unit of time.
    """
    end = begin.astype(np.float64)
    order = np.argsort(begin, kind="stable")
    _flow(
        order, begin.astype(np.float64), work.astype(np.float64), load.indptr, load.links, load.share,
        capacity, end,
    )  # fmt: skip
    return end


@compiled
def _moved(
    events: Any, begins: Any, call_of: Any, indptr: Any, links: Any, share: Any, capacity: Any, moved: Any
) -> None:
    rate = np.zeros(moved.size)
    left, growing = np.zeros(capacity.size), np.zeros(capacity.size)
    running = np.zeros(moved.size, np.int64)
    count = 0
    now = 0.0
    for row in range(events.size):
        if count > 0 and events[row] > now:
            _fill(running[:count], indptr, links, share, capacity, left, growing, rate)
            for place in range(count):
                moved[running[place]] += rate[running[place]] * (events[row] - now)
        now = events[row]
        if begins[row]:
            running[count] = call_of[row]
            count += 1
        else:
            kept = 0
            for place in range(count):
                if running[place] != call_of[row]:
                    running[kept] = running[place]
                    kept += 1
            count = kept


def moved_by(begin: Floats, end: Floats, load: Load, capacity: Floats) -> Floats:
    """Return [C] bytes that the busiest rank of each communication has sent when it ends.

    Args:
        begin, end: [C] of each; each crosses a link.
        capacity: [L] of each link, bytes per unit of time.
    """
    events = np.concatenate([begin, end]).astype(np.float64)
    begins = np.repeat([True, False], begin.size)
    order = np.lexsort((begins, events))
    moved = np.zeros(begin.size)
    _moved(
        events[order], begins[order], np.tile(np.arange(begin.size), 2)[order], load.indptr, load.links,
        load.share, capacity, moved,
    )  # fmt: skip
    return moved


@dataclass(frozen=True)
class Connections:
    """Connections of flows.

    Attributes:
        of: [F] the connection of each flow.
        flows: one representative flow of each connection.
        number: [K] of each among those between its ports.
    """

    of: Ints
    flows: Flows
    number: Ints


def connections_of(flows: Flows) -> Connections:
    """Return the connections of flows, ordered by their ports."""
    ends = np.stack([flows.begin, flows.end, flows.key])
    rows, first, of = np.unique(ends, axis=1, return_index=True, return_inverse=True)
    columns = {name: getattr(flows, name)[first] for name in ("begin", "end", "share", "key")}
    count = first.size
    new = np.ones(count, np.bool_)
    new[1:] = (np.diff(rows[:2], axis=1) != 0).any(axis=0)
    row_numbers = np.arange(count)
    number = row_numbers - np.maximum.accumulate(np.where(new, row_numbers, 0)) if count else row_numbers
    return Connections(of.ravel(), Flows(of=row_numbers, count=count, **columns), number)


@dataclass(frozen=True)
class KnownPaths:
    """Paths of connections that no hash decides.

    Attributes:
        of: [F] the connection of each flow.
        steps: by connection and switch, the index of its link in the equal-cost group.
        missing: [K] connections that leave their hosts on an unknown path.
    """

    of: Ints
    steps: dict[tuple[int, int], int]
    missing: Ints

    def choice(self, otherwise: Choice) -> Choice:
        """Return the choice for `paths` that follows known paths, and `otherwise` elsewhere."""
        if not self.steps:
            return otherwise

        def choose(rows: Ints, here: Ints, number: Ints) -> Ints:
            ends = zip(self.of[rows].tolist(), here.tolist())
            places = np.array([self.steps.get(pair, -1) for pair in ends], np.int64)
            return np.where(places >= 0, places, otherwise(rows, here, number))

        return choose


def known_paths(flows: Flows, routes: Routes, entries: Sequence[PathEntry]) -> KnownPaths:
    """Return the known paths of connections.

    Raises:
        Unanswerable: a path names a link that the fabric lacks, or that is on no shortest path to its end.
    """
    connections, names = connections_of(flows), routes.network.names
    entry_of = {(entry.begin, entry.end, entry.connection): entry for entry in entries}
    steps: dict[tuple[int, int], int] = {}
    missing = []
    ends = zip(connections.flows.begin.tolist(), connections.flows.end.tolist(), connections.number.tolist())
    within = inside(connections.flows, routes.network)
    for row, (begin, end, number) in enumerate(ends):
        entry = entry_of.get((names[begin], names[end], number))
        if entry is not None:
            steps |= {(row, switch): place for switch, place in _group_indices(routes, end, entry).items()}
        elif not within[row]:
            missing.append(row)
    return KnownPaths(connections.of, steps, np.array(missing, np.int64))


def _group_indices(routes: Routes, end: int, entry: PathEntry) -> dict[int, int]:
    """Return the index of a path's link in the equal-cost group of each switch."""
    network = routes.network
    places: dict[int, int] = {}
    if routes.into[end] == NO_LINK:
        return places
    to = int(network.source[routes.into[end]])
    for name in entry.links:
        link = network.link_named(name)
        if link is None:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: the topology has no link {name!r}")
        switch = int(network.source[link])
        group = routes.choices(switch, to).tolist() if network.kind[switch] == SWITCH else []
        if link not in group:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: {name!r} is on no shortest path")
        places[switch] = group.index(link)
    return places


def path_entries(flows: Flows, routes: Routes, choose: Choice) -> list[PathEntry]:
    """Return the path of each connection that leaves its host."""
    connections, network = connections_of(flows), routes.network
    first = np.unique(connections.of, return_index=True)[1]
    row, links = crossed(
        connections.flows, routes, lambda rows, here, number: choose(first[rows], here, number)
    )
    between = between_switches(network)[links]
    names: dict[int, list[str]] = {int(connection): [] for connection in row}
    for connection, link in zip(row[between].tolist(), links[between].tolist()):
        names[connection].append(network.link_name(link))
    begin, end = connections.flows.begin, connections.flows.end
    return [
        PathEntry(network.names[begin[of]], network.names[end[of]], ways, int(connections.number[of]))
        for of, ways in names.items()
    ]


# Probability that a flow crosses a link: 1 on links shared by all its paths, else 1 / number of paths.


def crossings(flows: Flows, routes: Routes, entries: Sequence[PathEntry] = ()) -> csr_matrix:
    """Return [F, L] the probability that a flow crosses a link.

    Args:
        entries: known paths of connections; several between two ports are equally likely.

    Raises:
        Unanswerable: no path leads from a port to another, or a known path names a link that does not exist.
    """
    from scipy.sparse import csr_matrix, diags

    count = flows.begin.size
    alone = replace(flows, of=np.arange(count), share=np.ones(count), count=count)
    spread = sprayed(alone, routes)
    shape = (count, routes.network.source.size)
    sprayed_evenly = csr_matrix((spread.share, spread.links, spread.indptr), shape=shape)
    names = routes.network.names
    of_ports: dict[tuple[str, str], list[PathEntry]] = {}
    for entry in entries:
        of_ports.setdefault((entry.begin, entry.end), []).append(entry)
    ends = list(zip(flows.begin.tolist(), flows.end.tolist()))
    rows = [
        (flow, _along(entry, routes, *pair), 1.0 / len(entries))
        for flow, pair in enumerate(ends)
        for entries in [of_ports.get((names[pair[0]], names[pair[1]]), [])]
        for entry in entries
    ]
    if not rows:
        return sprayed_evenly
    row = np.concatenate([np.full(len(links), flow) for flow, links, _ in rows])
    link = np.concatenate([np.array(links, np.int64) for _, links, _ in rows])
    share = np.concatenate([np.full(len(links), share) for _, links, share in rows])
    kept = np.ones(count)
    kept[[flow for flow, *_ in rows]] = 0.0
    return csr_matrix(diags(kept) @ sprayed_evenly + csr_matrix((share, (row, link)), shape=shape))


def _along(entry: PathEntry, routes: Routes, begin: int, end: int) -> list[int]:
    """Return the links of a known path from port to port."""
    between = []
    for name in entry.links:
        link = routes.network.link_named(name)
        if link is None:
            raise Unanswerable(f"path of {entry.begin} to {entry.end}: the topology has no link {name!r}")
        between.append(link)
    return [int(routes.out[begin]), *between, int(routes.into[end])]


def hops_of(crossing: csr_matrix) -> Ints:
    """Return [F] the number of links that each flow crosses, from port to port."""
    hops: Ints = np.rint(np.asarray(crossing.sum(axis=1)).ravel()).astype(np.int64)
    return hops


# Load of links.


class Usage(NamedTuple):
    """Load of each link, [L].

    Attributes:
        sent: bytes across it.
        busy: time in which at least one communication crosses it.
    """

    sent: Floats
    busy: Floats


@dataclass(frozen=True)
class Meeting:
    """Connections that cross a link at the same time.

    Attributes:
        connections: numbers of those that do so at any time.
        together: total time in which two or more do.
    """

    link: int
    connections: tuple[int, ...]
    together: float


def usage(load: Load, begin: Floats, end: Floats, sent: Floats, num_links: int) -> Usage:
    """Return the bytes and the busy time of each link.

    Args:
        begin, end: [C] of each communication.
        sent: [C] bytes that the busiest rank of each sends.
    """
    of = np.repeat(np.arange(begin.size), np.diff(load.indptr))
    carried = np.bincount(load.links, load.share * sent[of], num_links).astype(np.float64)
    order = np.lexsort((begin[of], load.links))
    link, since, until = load.links[order], begin[of][order], end[of][order]
    busy = np.zeros(num_links)
    firsts = np.flatnonzero(np.diff(link, prepend=-1))
    for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), link.size]):
        # Count the part of each interval that no earlier one of this link covers.
        covered = np.maximum.accumulate(until[first:last])
        before = np.concatenate([[-np.inf], covered[:-1]])
        busy[link[first]] = np.maximum(until[first:last] - np.maximum(since[first:last], before), 0).sum()
    return Usage(carried, busy)


def meetings(flows: Flows, row: Ints, links: Ints, kind: Ints, begin: Floats, end: Floats) -> list[Meeting]:
    """Return the meetings of connections by link, the longest first.

    Args:
        row, links: flows, and links that each crosses, as from `flows.crossed`.
        kind: [C] of each communication.
        begin, end: [C] of each communication.
    """
    by_kind = np.argsort(kind, kind="stable")
    since, until = begin[by_kind], end[by_kind]
    bounds = np.searchsorted(kind[by_kind], np.arange(flows.count + 1))
    connection = connections_of(flows).of[row]
    order = np.argsort(links, kind="stable")
    firsts = np.flatnonzero(np.diff(links[order], prepend=-1))
    met_at = []
    for rows in np.split(order, firsts[1:]) if order.size else []:
        if (connection[rows] == connection[rows[0]]).all():
            continue
        of = flows.of[row[rows]]
        counts = bounds[of + 1] - bounds[of]
        runs = np.concatenate([np.arange(bounds[number], bounds[number + 1]) for number in of.tolist()])
        met, together = _together(np.repeat(connection[rows], counts), since[runs], until[runs])
        if met:
            met_at.append(Meeting(int(links[rows[0]]), tuple(sorted(met)), together))
    return sorted(met_at, key=lambda meeting: (-meeting.together, meeting.link))


def _together(connection: Ints, since: Floats, until: Floats) -> tuple[set[int], float]:
    """Return the connections that run beside another one, and the total time in which two or more run."""
    events = sorted(
        [(time, 1, number) for time, number in zip(since.tolist(), connection.tolist())]
        + [(time, -1, number) for time, number in zip(until.tolist(), connection.tolist())],
        key=lambda event: event[:2],
    )  # at equal times, ends come before begins
    running: dict[int, int] = {}
    met: set[int] = set()
    together, last = 0.0, 0.0
    for time, change, number in events:
        if len(running) > 1 and time > last:
            together += time - last
            met |= running.keys()
        last = time
        running[number] = running.get(number, 0) + change
        if not running[number]:
            del running[number]
    return met, together


# Loads by unknown hashes: the flows under many seeds.

SEEDS = 40


def hashed_loads(flows: Flows, routes: Routes, entries: Sequence[PathEntry] = ()) -> list[Load]:
    """Return the load by the hash of each seed, ordered by how fast all communications run, fastest first.

    Raises:
        Unanswerable: no path leads from a port to another, or a known path is invalid.
    """

    paths = known_paths(flows, routes, entries)
    seeds = SEEDS if paths.missing.size or not entries else 1
    loads = [loaded(flows, routes, paths.choice(hashed(flows.key, seed))) for seed in range(seeds)]

    def slowness(load: Load) -> float:
        return float((1 / np.maximum(max_min_rates(load, routes.network.gbps), 1e-12)).sum())

    return sorted(loads, key=slowness)


def quantile(loads: Sequence[Load], share: float) -> Load:
    """Return the load at a quantile of the seeds.

    Args:
        loads: in order.
        share: 0 for the first, 1 for the last.
    """
    return loads[round(share * (len(loads) - 1))]
