"""How long after what it depends on work begins: one number per kind of dependency and work, for all ranks.

In: nodes and edges without lags. Out: the same with lags. Where nothing in the trace explains a start it is
tied to the trace, and the node marked as anchored.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpro.arrays import Bools, Ints
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


def pooled_lags(edges: Edges, nodes: Nodes, on_worker: Bools) -> tuple[Edges, Nodes]:
    """The graph with lags. Only work that is started has any, and most edges lead to other nodes.

    Args:
        edges: of all ranks, in the numbers of all nodes, with lags of 0.
        nodes: of all ranks, in topological order.
        on_worker: [lanes] whether each is a thread that runs CPU collectives.
    """
    started = _on_stream(nodes)
    chosen = np.flatnonzero(started[edges.target])
    to_work = Edges(**{f.name: getattr(edges, f.name)[chosen] for f in dataclasses.fields(Edges)})
    to_work, nodes = _lags_of_work(to_work, nodes, np.flatnonzero(started), on_worker)
    lag = edges.lag.copy()
    lag[chosen] = to_work.lag
    return dataclasses.replace(edges, lag=lag), nodes


def _lags_of_work(edges: Edges, nodes: Nodes, work: Ints, on_worker: Bools) -> tuple[Edges, Nodes]:
    """Lags of launches, stream order and events, each one number per kind of work for all ranks.

    A launch's latency shows where the stream was idle when the call returned (median over those); the cost of
    going on with queued work, where the launch was long past (mean over gaps short enough to be that: a
    median would add up its bias over thousands of kernels). One rank alone may not show it: a GPU that never
    idles has no launch onto an idle stream. Work whose launch is not in the trace and that nothing else
    explains keeps its distance from the work before it, and counts as anchored.
    """
    # What is left to explain: the time from the end of what an edge comes from to the start of its work.
    slack = nodes.measured_start[edges.target] - nodes.measured_end[edges.source]
    launch, stream = edges.kind == EdgeKind.LAUNCH, edges.kind == EdgeKind.STREAM
    event = edges.kind == EdgeKind.EVENT
    # [E] kind of work: kernels 0, copies 1, GPU collectives 2, collectives of communication threads 3.
    kind = nodes.kind[edges.target]
    group = np.where(kind == NodeKind.COPY, 1, np.where(kind == NodeKind.ARRIVE, 2, 0))
    group[on_worker[nodes.lane[edges.target]]] = 3
    # [E] which of the work an edge leads to; [W] when the last of the other dependencies of work had ended,
    # and when its call had returned.
    at = np.searchsorted(work, edges.target)
    others = _latest_end(edges, nodes, ~launch, at, work.size)
    called = _latest_end(edges, nodes, launch, at, work.size)
    # A call that released its work before it returned (copies that block, CUDA graphs) has a latency of its
    # own, but never more than was seen: the moment may have been taken from the work.
    returned, early = launch & ~edges.inferred, launch & edges.inferred
    # Only where all else was over when the call returned is the slack its latency.
    free = others[at] <= nodes.measured_end[edges.source]
    long_called = called[at] < nodes.measured_end[edges.source] - BACK_TO_BACK_NS
    lag = edges.lag.copy()
    for code in range(4):
        mine = group == code
        idle = returned & mine & free
        if idle.any():
            lag[returned & mine] = round(float(np.median(slack[idle])))
        idle = early & mine & (slack > 0) & free
        if idle.any():
            lag[early & mine] = np.clip(slack[early & mine], 0, round(float(np.median(slack[idle]))))
        # Work that was queued long before follows the work before it by the cost of going on alone.
        queued = stream & mine & long_called & (slack <= BACK_TO_BACK_NS)
        if queued.any():
            lag[stream & mine] = round(float(slack[queued].mean()))
    # The error of each GPU's clock shows as a latency of its rank that differs from the pooled one.
    lag += _gpu_clocks(nodes, edges, slack - lag, returned & (group < 3), free)
    # An event sets the start where work begins right behind it: there its slack is the lag of all events.
    bound = event & (slack >= 0) & (slack <= BACK_TO_BACK_NS)
    if bound.any():
        lag[event] = round(float(np.median(slack[bound])))
    # A dependency that is only inferred must not contradict what happened.
    lag[edges.inferred & event] = np.minimum(lag, slack)[edges.inferred & event]
    lag, fitted = _drained(edges, nodes, lag, slack)
    edges = dataclasses.replace(edges, lag=lag)
    nodes = dataclasses.replace(nodes, anchored=nodes.anchored | fitted)
    return _anchor_unexplained(edges, nodes, work, at, on_worker)


def _drained(edges: Edges, nodes: Nodes, lag: Ints, slack: Ints) -> tuple[Ints, Bools]:
    """Lags of work that waited for room on the device, and what could only be fitted.

    How long after its start a kernel leaves room is a property of it: its blocks run in waves, and the last
    wave does not fill the device. What starts then makes that wave slower, so the end of the kernel says
    less. Of kernels of one name that leave room after comparable times it is the median, over all ranks and
    steps; where too few were seen the measured time is taken.

    Returns:
        [E] ns the lags, and [N] work whose start was taken from the trace.
    """
    full = np.flatnonzero(edges.kind == EdgeKind.CONTENTION)
    source = edges.source[full]
    lasts = nodes.measured_end[source] - nodes.measured_start[source]
    room = lasts + slack[full]
    pooled, taken = room.copy(), np.zeros(nodes.kind.size, np.bool_)
    for mine in _comparable(nodes.name[source], room):
        if mine.size >= ENOUGH_DRAINED:
            pooled[mine] = round(float(np.median(room[mine])))
        else:
            taken[edges.target[full[mine]]] = True
    lag = lag.copy()
    lag[full] = np.minimum(pooled - lasts, 0)
    return lag, taken


def _comparable(name: Ints, time: Ints) -> list[Ints]:
    """Indices of what has one name and times that differ by less than `SAME_ROOM`, from the shortest."""
    order = np.lexsort((time, name))
    groups: list[list[int]] = []
    for at in order.tolist():
        first = groups[-1][0] if groups else -1
        if first >= 0 and name[first] == name[at] and time[at] <= SAME_ROOM * time[first]:
            groups[-1].append(at)
        else:
            groups.append([at])
    return [np.array(group) for group in groups]


def _gpu_clocks(nodes: Nodes, edges: Edges, left: Ints, launch: Bools, free: Bools) -> Ints:
    """[E] by how much launches of a rank arrive later than those of all ranks, where it has enough launches
    to show it.

    Profilers read the clock of each GPU to some 10 us only, with the same error for all its launches: on one
    rank kernels begin before the calls that launch them return, on another long after.

    Args:
        nodes, edges: the graph so far.
        left: [E] ns that the pooled latency leaves of a launch.
        launch: [E] launches onto streams, by calls that had returned.
        free: [E] whether nothing else holds up what an edge leads to.
    """
    later = np.zeros(left.size, np.int64)
    launches = np.flatnonzero(launch)
    rank, window = nodes.rank[edges.target[launches]], nodes.window[edges.target[launches]]
    order = np.lexsort((window, rank))
    changes = np.flatnonzero(np.diff(rank[order]) | np.diff(window[order])) + 1
    for mine in np.split(launches[order], changes):
        idle = mine[free[mine]]
        if idle.size >= ENOUGH_IDLE_LAUNCHES:
            later[mine] = round(float(np.median(left[idle])))
    return later


def _anchor_unexplained(
    edges: Edges, nodes: Nodes, work: Ints, at: Ints, on_worker: Bools
) -> tuple[Edges, Nodes]:
    """Tie down GPU work that starts later than anything in the trace explains.

    Work without a launch keeps its distance from the work before it, and a worker thread that found no core
    its distance from what it had waited for. Work that was ready before its GPU did anything inside the
    window may have queued behind work from before it: it keeps its time.

    Args:
        edges: that lead to work.
        nodes: all.
        work: [W] those that are work.
        at: [E] which of the work each edge leads to.
        on_worker: [lanes] whether each is a thread that runs CPU collectives.
    """
    launch, stream = edges.kind == EdgeKind.LAUNCH, edges.kind == EdgeKind.STREAM
    began, on_worker = nodes.measured_start[work], on_worker[nodes.lane[work]]
    # Work whose start nothing explains: all that it depends on was over, and long ago.
    ready = _latest_end(edges, nodes, np.ones(at.size, np.bool_), at, work.size)
    late = (began - ready > UNEXPLAINED_NS) & ~nodes.anchored[work]
    without_core = late & on_worker & (began - ready > NO_CORE_NS)
    has_launch, has_before = np.zeros(work.size, np.bool_), np.zeros(work.size, np.bool_)
    has_launch[at[launch]] = True
    has_before[at[stream]] = True
    # [rank] when the GPU of each first did anything; ranks may begin below 0 (of a rendezvous).
    rank, on_gpu = nodes.rank[work], np.isin(nodes.kind[work], GPU_KINDS)
    rank = rank - rank.min(initial=0)
    first_work = np.full(int(rank.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_work, rank[on_gpu], began[on_gpu])
    first = late & ~has_before & ~on_worker & (ready < first_work[rank])
    # Tie the rest to what it had waited for: an edge whose lag is what was measured.
    fitted = stream & (late & ~has_launch)[at]
    fitted |= without_core[at] & (nodes.measured_end[edges.source] == ready[at])
    lag = edges.lag.copy()
    lag[fitted] = began[at[fitted]] - nodes.measured_end[edges.source[fitted]]
    anchored, earliest = nodes.anchored.copy(), nodes.earliest.copy()
    anchored[work[first]] = True
    anchored[edges.target[fitted]] = True
    earliest[work[first]] = began[first]
    return dataclasses.replace(edges, lag=lag), dataclasses.replace(
        nodes, anchored=anchored, earliest=earliest
    )


def _on_stream(nodes: Nodes) -> Bools:
    """[N] GPU work and collectives' arrivals; arrivals of CPU collectives too, which behave the same."""
    return np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.COPY, NodeKind.ARRIVE))


def _latest_end(edges: Edges, nodes: Nodes, chosen: Bools, at: Ints, size: int) -> Ints:
    """[W] measured end of the latest predecessor over the chosen edges, long ago where there is none."""
    latest = np.full(size, np.iinfo(np.int64).min // 2)
    np.maximum.at(latest, at[chosen], nodes.measured_end[edges.source[chosen]])
    return latest
