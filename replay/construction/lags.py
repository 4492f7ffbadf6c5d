"""Lags: the time from a dependency to the start of its work, by kind of dependency and work, for all ranks.

Takes nodes and edges without lags; returns them with lags. A start that nothing in the trace explains is tied
to the trace, and its node marked as anchored. Ranks exchange little for this: `facts_of` summarises one or
several ranks, and `pooled` computes the lags of all ranks from these summaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.engine import compiled
from dpro.replay.graph import GPU_KINDS, EdgeKind, Edges, NodeKind, Nodes

# Gaps between queued pieces of work longer than this are waits, not the cost of continuing.
BACK_TO_BACK_NS = 20_000
# Launches onto an idle stream from which a rank has its own median; a GPU that hardly idles shows none.
ENOUGH_IDLE_LAUNCHES = 20
# Kernels of one name that leave room on the device after times within about this ratio do so for one reason;
# with this many of them, the median is used.
SAME_ROOM = 1.05
ENOUGH_DRAINED = 3
# Work that starts more than this after its last known dependency is anchored.
UNEXPLAINED_NS = 50_000
# No launch takes longer than this to reach an idle device.
LONGEST_LATENCY_NS = 1_000_000
# A worker thread begins a CPU collective within this time of the call, unless it finds no core.
NO_CORE_NS = 1_000_000
# Kinds of work: kernels, copies, GPU collectives, collectives of communication threads.
KINDS = 4
ON_WORKER = 3
LONG_AGO = np.iinfo(np.int64).min // 2
STARTED = np.isin(np.arange(len(NodeKind)), (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE))


@dataclass(frozen=True)
class Counts:
    """Times and their frequencies, from which the median over all ranks is computed.

    Attributes:
        time: [V] ns, ascending.
        count: [V].
    """

    time: Ints
    count: Ints

    def median(self) -> int | None:
        """Return the median, rounded; None without any times."""
        before = np.cumsum(self.count)
        if not before.size:
            return None
        low, high = (self.time[np.searchsorted(before, (before[-1] - 1 + more) // 2, side="right")]
                     for more in (0, 1))  # fmt: skip
        return round((float(low) + float(high)) / 2)


@dataclass(frozen=True)
class LagFacts:
    """Observations of some ranks about lags.

    Attributes:
        launch, early: [KINDS] latency of launches that returned before, and after, their work began.
        queued: [KINDS, 2] sum of short gaps between queued pieces of work, in ns, and their number.
        event: latency of events that set the start of work.
        rooms: by name of kernel, the time from its start until it left room on the device.
    """

    launch: tuple[Counts, ...]
    early: tuple[Counts, ...]
    queued: Ints
    event: Counts
    rooms: Mapping[str, Counts]


@dataclass(frozen=True)
class Lags:
    """The lags common to all ranks; None where no rank shows one.

    Attributes:
        launch, stream: [KINDS] ns after a launch, and after the previous work.
        early: [KINDS] upper bound of the ns after a launch that returns later.
        event: ns after an event.
        rooms: by name of kernel, groups of comparable times: [G] the least of each, ns, ascending, and [G]
            their median, -1 where they are too few.
    """

    launch: tuple[int | None, ...]
    stream: tuple[int | None, ...]
    early: tuple[int | None, ...]
    event: int | None
    rooms: Mapping[str, tuple[Ints, Ints]]


@dataclass(frozen=True)
class Started:
    """Work that has dependencies with lags, and the edges that lead to it.

    Attributes:
        edges, nodes: all edges and nodes.
        work: [W] nodes that are work.
        chosen: [C] edges that lead to work.
        source: [C] source node of each.
        kind: [C] `EdgeKind`.
        inferred: [C].
        leads_to: [C] index in `work` of the target of each edge.
        slack: [C] ns to explain: from the end of the source to the start of its work.
        group: [C] kind of work.
        free: [C] whether nothing else held up the work when the source ended.
        others, called: [W] ns at which the last dependency of each had ended: non-launches, launches.
        on_worker: [W] whether it runs on a thread for CPU collectives.
        behind: [W] whether it may have queued behind work from before the window: it was ready before its GPU
            did anything inside the window, and began late.
    """

    edges: Edges
    nodes: Nodes
    work: Ints
    chosen: Ints
    source: Ints
    kind: Ints
    inferred: Bools
    leads_to: Ints
    slack: Ints
    group: Ints
    free: Bools
    others: Ints
    called: Ints
    on_worker: Bools
    behind: Bools

    @property
    def launches(self) -> tuple[Bools, Bools]:
        """[C] masks of launches that returned before their work could begin, and of others.

        A call that released its work before it returned (copies that block, CUDA graphs) has its own latency,
        capped by the observed one: the moment of release may have been derived from the work.
        """
        launch = self.kind == EdgeKind.LAUNCH
        return launch & ~self.inferred, launch & self.inferred


def pooled_lags(edges: Edges, nodes: Nodes, on_worker: Bools, names: Sequence[str]) -> tuple[Edges, Nodes]:
    """Return the graph of all ranks with lags, which only edges to started work have.

    Args:
        edges: numbered like the nodes, with lags of 0.
        nodes: in topological order.
        on_worker: [lanes] whether each is a thread that runs CPU collectives.
        names: names of the graph.
    """
    started = started_work(edges, nodes, on_worker)
    return with_lags(started, pooled([facts_of(started, names)]), names)


def started_work(edges: Edges, nodes: Nodes, on_worker: Bools) -> Started:
    """Find the work that has lags.

    Args:
        on_worker: [lanes] whether each is a thread that runs CPU collectives.
    """
    is_work: Bools = STARTED[nodes.kind]
    chosen = np.flatnonzero(is_work[edges.target])
    source, target, kind = edges.source[chosen], edges.target[chosen], edges.kind[chosen]
    work = np.flatnonzero(is_work)
    place = np.empty(is_work.size, np.int64)
    place[work] = np.arange(work.size)
    leads_to, ended = place[target], nodes.measured_end[source]
    of_work = nodes.kind[work]
    group = np.where(of_work == NodeKind.COPY, 1, np.where(of_work == NodeKind.ARRIVE, 2, 0))
    worker = on_worker[nodes.lane[work]]
    group[worker] = ON_WORKER
    # The slack of a launch is its latency only where all other dependencies had ended before.
    others, called = np.full(work.size, LONG_AGO), np.full(work.size, LONG_AGO)
    _latest(ended, kind == EdgeKind.LAUNCH, leads_to, others, called)
    # When the GPU of each rank first did anything in the window; -1 is the rank of rendezvous.
    rank, window = nodes.rank[work], nodes.window[work]
    of_window = (rank - rank.min(initial=0)) * (window.max(initial=0) + 1) + window
    on_gpu = np.isin(of_work, GPU_KINDS)
    first = np.full(int(of_window.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, of_window[on_gpu], nodes.measured_start[work[on_gpu]])
    ready = np.maximum(others, called)
    late = nodes.measured_start[work] - ready > UNEXPLAINED_NS
    behind = late & ~worker & (ready < first[of_window])
    behind[leads_to[kind == EdgeKind.STREAM]] = False
    # A call that returns after its work began still worked on it, as for a copy of pageable memory.
    behind[leads_to[(kind == EdgeKind.LAUNCH) & edges.inferred[chosen]]] = False
    slack = nodes.measured_start[target] - ended
    free = (others[leads_to] <= ended) & ~(behind[leads_to] & (slack > LONGEST_LATENCY_NS))
    return Started(
        edges, nodes, work, chosen, source, kind, edges.inferred[chosen], leads_to,
        slack=slack, group=group[leads_to], free=free,
        others=others, called=called, on_worker=worker, behind=behind,
    )  # fmt: skip


def facts_of(started: Started, names: Sequence[str]) -> LagFacts:
    """Return the observations from which lags are computed.

    A launch's latency shows where the stream was idle when the call returned (median over those). The cost of
    continuing with queued work shows where the launch was long before (mean over short gaps: the bias of a
    median would add up over thousands of kernels). One rank alone may not show a lag: a GPU that never idles
    has no launch onto an idle stream.
    """
    slack, kind, work = started.slack, started.kind, started.leads_to
    ended = started.nodes.measured_end[started.source]
    returned, early = started.launches
    # Only the cost of continuing separates work that was queued long before from the previous work.
    queued = (kind == EdgeKind.STREAM) & (slack <= BACK_TO_BACK_NS)
    queued &= started.called[work] < ended - BACK_TO_BACK_NS
    gaps = [slack[queued & (started.group == code)] for code in range(KINDS)]
    # An event sets the start of work that begins right behind it: its slack is then the lag of an event.
    bound = (kind == EdgeKind.EVENT) & (slack >= 0) & (slack <= BACK_TO_BACK_NS)
    full = np.flatnonzero(kind == EdgeKind.CONTENTION)
    name = started.nodes.name[started.source[full]]
    room = slack[full] + _source_durations(started, full)
    return LagFacts(
        launch=_by_kind(started, returned & started.free),
        early=_by_kind(started, early & (slack > 0) & started.free),
        queued=np.array([(gap.sum(), gap.size) for gap in gaps], np.int64),
        event=_counts(slack[bound]),
        rooms={names[code]: _counts(room[name == code]) for code in np.unique(name).tolist()},
    )


def pooled(facts: Iterable[LagFacts]) -> Lags:
    """Compute the lags common to all ranks.

    Args:
        facts: of each rank, or merged for several.
    """
    all_of = merged(facts)
    return Lags(
        launch=tuple(counts.median() for counts in all_of.launch),
        stream=tuple(
            round(float(total) / count) if count else None for total, count in all_of.queued.tolist()
        ),
        early=tuple(counts.median() for counts in all_of.early),
        event=all_of.event.median(),
        rooms={name: _comparable(counts) for name, counts in all_of.rooms.items()},
    )


def merged(facts: Iterable[LagFacts]) -> LagFacts:
    """Merge the observations of several parts of the ranks.

    Args:
        facts: of each part; at least one.
    """
    parts = list(facts)
    if len(parts) == 1:
        return parts[0]
    names = sorted({name for part in parts for name in part.rooms})
    return LagFacts(
        launch=tuple(map(_sum, zip(*(part.launch for part in parts)))),
        early=tuple(map(_sum, zip(*(part.early for part in parts)))),
        queued=np.sum([part.queued for part in parts], axis=0),
        event=_sum([part.event for part in parts]),
        rooms={name: _sum([part.rooms[name] for part in parts if name in part.rooms]) for name in names},
    )


def with_lags(started: Started, lags: Lags, names: Sequence[str]) -> tuple[Edges, Nodes]:
    """Return all edges with their lags, and all nodes, with those anchored whose start comes from the trace.

    Work that no launch and nothing else explains keeps its distance from the previous work, and is anchored.
    """
    slack, kind, group = started.slack, started.kind, started.group
    returned, early = started.launches
    lag = np.zeros(slack.size, np.int64)
    stream, event = kind == EdgeKind.STREAM, kind == EdgeKind.EVENT
    for code in range(KINDS):
        of_group = group == code
        latency, at_most, going_on = lags.launch[code], lags.early[code], lags.stream[code]
        if latency is not None:
            lag[returned & of_group] = latency
        if at_most is not None:
            lag[early & of_group] = np.clip(slack[early & of_group], 0, at_most)
        if going_on is not None:
            lag[stream & of_group] = going_on
    # The error of each GPU's clock shows as a latency of its rank that differs from the pooled one.
    lag += _gpu_clocks(started, slack - lag, returned & (group < ON_WORKER))
    if lags.event is not None:
        lag[event] = lags.event
    # A dependency that is only inferred must not contradict what happened.
    guessed = started.inferred & event
    lag[guessed] = np.minimum(lag, slack)[guessed]
    nodes = started.nodes
    anchored, earliest = nodes.anchored.copy(), nodes.earliest.copy()
    anchored[_drained(started, lags, names, lag)] = True
    keeps = _anchor_unexplained(started, lag, anchored)
    earliest[keeps] = nodes.measured_start[keeps]
    of_all = started.edges.lag.copy()
    of_all[started.chosen] = lag
    return (
        dataclasses.replace(started.edges, lag=of_all),
        dataclasses.replace(nodes, anchored=anchored, earliest=earliest),
    )


def _drained(started: Started, lags: Lags, names: Sequence[str], lag: Ints) -> Ints:
    """Set lags of work that waited for room on the device; return the work whose lag could only be fitted.

    The time from its start until it leaves room is a property of a kernel: its blocks run in waves, and the
    last wave does not fill the device. Work that starts then slows down that wave, so the end of the kernel
    is less precise. The lag uses the median of comparable times of kernels of one name, over all ranks and
    steps, or the measured time where too few were seen.
    """
    full = np.flatnonzero(started.kind == EdgeKind.CONTENTION)
    lasts = _source_durations(started, full)
    room = lasts + started.slack[full]
    usual, name = room.copy(), started.nodes.name[started.source[full]]
    taken = np.zeros(full.size, np.bool_)
    for code in np.unique(name).tolist():
        of_name = np.flatnonzero(name == code)
        first, median = lags.rooms[names[code]]
        drained = median[np.searchsorted(first, room[of_name], side="right") - 1]
        taken[of_name] = drained < 0
        usual[of_name] = np.where(drained < 0, room[of_name], drained)
    lag[full] = np.minimum(usual - lasts, 0)
    return started.work[started.leads_to[full[taken]]]


def _gpu_clocks(started: Started, left: Ints, launch: Bools) -> Ints:
    """Return [C] by how much a rank's launches arrive later than those of all; 0 with too few launches.

    Profilers read the clock of each GPU only to some 10 us, with an equal error for all its launches: on one
    rank kernels begin before the calls that launch them return, on another long after.

    Args:
        left: [C] ns that the pooled latency leaves of a launch.
        launch: [C] launches onto streams, by calls that had returned.
    """
    later = np.zeros(left.size, np.int64)
    launches, nodes = np.flatnonzero(launch), started.nodes
    onto = started.work[started.leads_to[launches]]
    rank, window = nodes.rank[onto], nodes.window[onto]
    order = np.lexsort((window, rank))
    changes = np.flatnonzero(np.diff(rank[order]) | np.diff(window[order])) + 1
    for of_clock in np.split(launches[order], changes):
        idle = of_clock[started.free[of_clock]]
        if idle.size >= ENOUGH_IDLE_LAUNCHES:
            later[of_clock] = round(float(np.median(left[idle])))
    return later


def _anchor_unexplained(started: Started, lag: Ints, anchored: Bools) -> Ints:
    """Anchor GPU work that starts later than anything in the trace explains; set some lags.

    Work without a launch keeps its distance from the previous work, and a worker thread that found no core
    its distance from its last dependency. Work that was ready before its GPU did anything inside the window
    may have queued behind earlier work: it keeps its time.

    Args:
        lag: [C] ns, some of which are set.
        anchored: [N] mask of starts taken from the trace; more are marked.

    Returns:
        Nodes that keep their time.
    """
    nodes, work, leads_to, on_worker = started.nodes, started.work, started.leads_to, started.on_worker
    launch, stream = started.kind == EdgeKind.LAUNCH, started.kind == EdgeKind.STREAM
    began, ended = nodes.measured_start[work], nodes.measured_end[started.source]
    # Work whose start nothing explains: its last dependency had ended long before.
    ready = np.maximum(started.others, started.called)
    late = (began - ready > UNEXPLAINED_NS) & ~anchored[work]
    without_core = late & on_worker & (began - ready > NO_CORE_NS)
    has_launch = np.zeros(work.size, np.bool_)
    has_launch[leads_to[launch]] = True
    # Tie the rest to its last dependency by an edge with the measured lag.
    fitted = stream & (late & ~has_launch)[leads_to]
    fitted |= without_core[leads_to] & (ended == ready[leads_to])
    lag[fitted] = began[leads_to[fitted]] - ended[fitted]
    keeps: Ints = work[started.behind & ~anchored[work]]
    anchored[keeps] = True
    anchored[work[leads_to[fitted]]] = True
    return keeps


def _source_durations(started: Started, which: Ints) -> Ints:
    """Return [K] the duration of the source of each edge, in ns."""
    source, nodes = started.source[which], started.nodes
    lasted: Ints = nodes.measured_end[source] - nodes.measured_start[source]
    return lasted


def _by_kind(started: Started, which: Bools) -> tuple[Counts, ...]:
    """Count the slacks of some edges by kind of work."""
    slack, group = started.slack[which], started.group[which]
    return tuple(_counts(slack[group == code]) for code in range(KINDS))


def _counts(times: Ints) -> Counts:
    time, count = np.unique(times, return_counts=True)
    return Counts(time, count)


def _sum(parts: Sequence[Counts]) -> Counts:
    time, place = np.unique(np.concatenate([part.time for part in parts]), return_inverse=True)
    count = np.zeros(time.size, np.int64)
    np.add.at(count, place, np.concatenate([part.count for part in parts]))
    return Counts(time, count)


def _comparable(counts: Counts) -> tuple[Ints, Ints]:
    """Group times that differ by less than `SAME_ROOM`: the least of each group, and its median or -1."""
    first = [0][: counts.time.size]
    for number, time in enumerate(counts.time.tolist()):
        if time > SAME_ROOM * counts.time[first[-1]]:
            first.append(number)
    groups = [
        Counts(counts.time[low:high], counts.count[low:high])
        for low, high in zip(first, [*first[1:], counts.time.size])
    ]
    medians = [group.median() if group.count.sum() >= ENOUGH_DRAINED else -1 for group in groups]
    least: Ints = counts.time[first]
    return least, np.array(medians, np.int64)


@compiled
def _latest(ended: Any, launch: Any, place: Any, others: Any, called: Any) -> None:
    # Find when the last dependency of each piece of work had ended: of launches, and of others.
    for edge in range(place.size):
        if launch[edge]:
            called[place[edge]] = max(called[place[edge]], ended[edge])
        else:
            others[place[edge]] = max(others[place[edge]], ended[edge])
