"""How long after what it depends on work begins: one number per kind of dependency and work, for all ranks.

In: nodes and edges without lags. Out: the same with lags. Where nothing in the trace explains a start it is
tied to the trace, and the node marked as anchored. What ranks have to exchange for it is small: `facts_of`
one rank or several, of which `pooled` makes the numbers that hold for all.
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

# Gaps between queued pieces of work longer than this are waits for something, not the cost of going on.
BACK_TO_BACK_NS = 20_000
# Of this many launches onto an idle stream the median is the rank's own; a GPU that hardly idles shows none.
ENOUGH_IDLE_LAUNCHES = 20
# Kernels of one name that leave room on the device after times that differ by less than about this do so for
# the same reason; of this many the median is that time.
SAME_ROOM = 1.05
ENOUGH_DRAINED = 3
# Work that nothing in the trace explains the start of, and that starts later by more than this, is anchored.
UNEXPLAINED_NS = 50_000
# Within this time of its call a worker thread begins with a CPU collective, unless it finds no core.
NO_CORE_NS = 1_000_000
# Kinds of work: kernels, copies, GPU collectives, collectives of communication threads.
KINDS = 4
ON_WORKER = 3
LONG_AGO = np.iinfo(np.int64).min // 2
STARTED = np.isin(np.arange(len(NodeKind)), (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE))


@dataclass(frozen=True)
class Counts:
    """Times, and how often each was seen: what is needed for the median over all ranks.

    Attributes:
        time: [V] ns, ascending.
        count: [V].
    """

    time: Ints
    count: Ints

    def median(self) -> int | None:
        """The median, rounded; None where nothing was seen."""
        before = np.cumsum(self.count)
        if not before.size:
            return None
        low, high = (self.time[np.searchsorted(before, (before[-1] - 1 + more) // 2, side="right")]
                     for more in (0, 1))  # fmt: skip
        return round((float(low) + float(high)) / 2)


@dataclass(frozen=True)
class LagFacts:
    """What some ranks show of lags.

    Attributes:
        launch, early: [KINDS] how long after launches that returned before, and after, it work began.
        queued: [KINDS, 2] sum of short gaps between queued pieces of work, ns, and how many there are.
        event: how long after an event that sets its start work began.
        rooms: by name of kernel, how long after its start it left room on the device.
    """

    launch: tuple[Counts, ...]
    early: tuple[Counts, ...]
    queued: Ints
    event: Counts
    rooms: Mapping[str, Counts]


@dataclass(frozen=True)
class Lags:
    """The same lags for all ranks; None where no rank shows one.

    Attributes:
        launch, stream: [KINDS] ns after a launch, and after the work before.
        early: [KINDS] ns after a launch that returns later, at most.
        event: ns after an event.
        rooms: by name of kernel, of times that are comparable: [G] the least, ns, ascending; [G] their
            median, -1 where they are too few.
    """

    launch: tuple[int | None, ...]
    stream: tuple[int | None, ...]
    early: tuple[int | None, ...]
    event: int | None
    rooms: Mapping[str, tuple[Ints, Ints]]


@dataclass(frozen=True)
class Started:
    """Work that is started, and what leads to it.

    Attributes:
        edges, nodes: all.
        work: [W] nodes that are work.
        chosen: [C] edges that lead to work.
        source: [C] where from.
        kind: [C] `EdgeKind`.
        inferred: [C].
        leads_to: [C] which of the work each edge leads to.
        slack: [C] ns to explain: from the end of what it comes from to the start of its work.
        group: [C] kind of work.
        free: [C] whether nothing else held up the work when what it comes from ended.
        others, called: [W] ns when the last of what each waits for had ended, launches apart, and of those.
        on_worker: [W] whether it runs on a thread for CPU collectives.
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

    @property
    def launches(self) -> tuple[Bools, Bools]:
        """[C] launches that returned before their work could begin, and others.

        A call that released its work before it returned (copies that block, CUDA graphs) has a latency of
        its own, but never more than was seen: the moment may have been taken from the work.
        """
        launch = self.kind == EdgeKind.LAUNCH
        return launch & ~self.inferred, launch & self.inferred


def pooled_lags(edges: Edges, nodes: Nodes, on_worker: Bools, names: Sequence[str]) -> tuple[Edges, Nodes]:
    """The graph of all ranks with lags. Only work that is started has any, and most edges lead elsewhere.

    Args:
        edges: in the numbers of the nodes, with lags of 0.
        nodes: in topological order.
        on_worker: [lanes] whether each is a thread that runs CPU collectives.
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
    # Only where all else was over when the call returned is the slack its latency.
    others, called = np.full(work.size, LONG_AGO), np.full(work.size, LONG_AGO)
    _latest(ended, kind == EdgeKind.LAUNCH, leads_to, others, called)
    return Started(
        edges, nodes, work, chosen, source, kind, edges.inferred[chosen], leads_to,
        slack=nodes.measured_start[target] - ended, group=group[leads_to], free=others[leads_to] <= ended,
        others=others, called=called, on_worker=worker,
    )  # fmt: skip


def facts_of(started: Started, names: Sequence[str]) -> LagFacts:
    """What the lags of all ranks are made of.

    A launch's latency shows where the stream was idle when the call returned (median over those); the cost of
    going on with queued work, where the launch was long past (mean over gaps short enough to be that: a
    median would add up its bias over thousands of kernels). One rank alone may not show it: a GPU that never
    idles has no launch onto an idle stream.
    """
    slack, kind, work = started.slack, started.kind, started.leads_to
    ended = started.nodes.measured_end[started.source]
    returned, early = started.launches
    # Work that was queued long before follows the work before it by the cost of going on alone.
    queued = (kind == EdgeKind.STREAM) & (slack <= BACK_TO_BACK_NS)
    queued &= started.called[work] < ended - BACK_TO_BACK_NS
    gaps = [slack[queued & (started.group == code)] for code in range(KINDS)]
    # An event sets the start where work begins right behind it: there its slack is the lag of all events.
    bound = (kind == EdgeKind.EVENT) & (slack >= 0) & (slack <= BACK_TO_BACK_NS)
    full = np.flatnonzero(kind == EdgeKind.CONTENTION)
    name = started.nodes.name[started.source[full]]
    room = slack[full] + _lasted(started, full)
    return LagFacts(
        launch=_by_kind(started, returned & started.free),
        early=_by_kind(started, early & (slack > 0) & started.free),
        queued=np.array([(gap.sum(), gap.size) for gap in gaps], np.int64),
        event=_counts(slack[bound]),
        rooms={names[code]: _counts(room[name == code]) for code in np.unique(name).tolist()},
    )


def pooled(facts: Iterable[LagFacts]) -> Lags:
    """The lags of all ranks.

    Args:
        facts: of each, or of several together, as from `merged`.
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
    """What several parts of the ranks show together.

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
    """All edges with their lags, and all nodes, those marked whose start was taken from the trace.

    Work whose launch is not in the trace and that nothing else explains keeps its distance from the work
    before it, and counts as anchored.
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
    """Set lags of work that waited for room on the device; the work whose lag could only be fitted.

    How long after its start a kernel leaves room is a property of it: its blocks run in waves, and the last
    wave does not fill the device. What starts then makes that wave slower, so the end of the kernel says
    less. Of kernels of one name that leave room after comparable times it is the median, over all ranks and
    steps; where too few were seen the measured time is taken.
    """
    full = np.flatnonzero(started.kind == EdgeKind.CONTENTION)
    lasts = _lasted(started, full)
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
    """[C] by how much launches of a rank arrive later than those of all ranks, where it has enough launches
    to show it.

    Profilers read the clock of each GPU to some 10 us only, with the same error for all its launches: on one
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
    """Tie down GPU work that starts later than anything in the trace explains; some lags are set.

    Work without a launch keeps its distance from the work before it, and a worker thread that found no core
    its distance from what it had waited for. Work that was ready before its GPU did anything inside the
    window may have queued behind work from before it: it keeps its time.

    Args:
        lag: [C] ns, of which some are set.
        anchored: [N] whose start was taken from the trace; more are marked.

    Returns:
        Nodes that keep their time.
    """
    nodes, work, leads_to, on_worker = started.nodes, started.work, started.leads_to, started.on_worker
    launch, stream = started.kind == EdgeKind.LAUNCH, started.kind == EdgeKind.STREAM
    began, ended = nodes.measured_start[work], nodes.measured_end[started.source]
    # Work whose start nothing explains: all that it depends on was over, and long ago.
    ready = np.maximum(started.others, started.called)
    late = (began - ready > UNEXPLAINED_NS) & ~anchored[work]
    without_core = late & on_worker & (began - ready > NO_CORE_NS)
    has_launch, has_before = np.zeros(work.size, np.bool_), np.zeros(work.size, np.bool_)
    has_launch[leads_to[launch]] = True
    has_before[leads_to[stream]] = True
    # When the GPU of each rank first did anything in a window.
    rank, window = nodes.rank[work], nodes.window[work]  # ranks may begin below 0 (of a rendezvous)
    of_window = (rank - rank.min(initial=0)) * (window.max(initial=0) + 1) + window
    on_gpu = np.isin(nodes.kind[work], GPU_KINDS)
    first_work = np.full(int(of_window.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_work, of_window[on_gpu], began[on_gpu])
    first = late & ~has_before & ~on_worker & (ready < first_work[of_window])
    # A call that returns later still worked on it: on pageable memory a copy waits for its call alone.
    first[leads_to[launch & started.inferred]] = False
    # Tie the rest to what it had waited for: an edge whose lag is what was measured.
    fitted = stream & (late & ~has_launch)[leads_to]
    fitted |= without_core[leads_to] & (ended == ready[leads_to])
    lag[fitted] = began[leads_to[fitted]] - ended[fitted]
    keeps: Ints = work[first]
    anchored[keeps] = True
    anchored[work[leads_to[fitted]]] = True
    return keeps


def _lasted(started: Started, which: Ints) -> Ints:
    """[K] ns that what some edges come from lasted."""
    source, nodes = started.source[which], started.nodes
    lasted: Ints = nodes.measured_end[source] - nodes.measured_start[source]
    return lasted


def _by_kind(started: Started, which: Bools) -> tuple[Counts, ...]:
    """Of some edges to each kind of work how often which slack is."""
    slack, group = started.slack[which], started.group[which]
    return tuple(_counts(slack[group == code]) for code in range(KINDS))


def _counts(times: Ints) -> Counts:
    time, count = np.unique(times, return_counts=True)
    return Counts(time, count)


def _sum(parts: Sequence[Counts]) -> Counts:
    """How often each time was seen in any of the parts."""
    time, place = np.unique(np.concatenate([part.time for part in parts]), return_inverse=True)
    count = np.zeros(time.size, np.int64)
    np.add.at(count, place, np.concatenate([part.count for part in parts]))
    return Counts(time, count)


def _comparable(counts: Counts) -> tuple[Ints, Ints]:
    """Times that differ by less than `SAME_ROOM`: the least of each group, and their median or -1."""
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
    # When the last of what work depends on had ended: of launches, and of all else.
    for edge in range(place.size):
        if launch[edge]:
            called[place[edge]] = max(called[place[edge]], ended[edge])
        else:
            others[place[edge]] = max(others[place[edge]], ended[edge])
