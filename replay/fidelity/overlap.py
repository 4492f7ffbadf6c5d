"""Contention of compute and communication that run concurrently: its extent, and how an edit changes it.

Takes a graph; returns the slowdown shown by this trace, and replays of changed graphs in which kernels take
longer or shorter according to the share of their time that overlaps communication.

A kernel is seen with and without concurrent communication where it is at the same place of its step (the k-th
of its name, of equally many) in other steps and on other ranks. Data-parallel ranks do the same work there;
where they do not, the interval is wide and no slowdown is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.documents import DocumentPart
from dpro.replay.graph import Graph, NodeKind, computed_once
from dpro.replay.intervals import covered, union
from dpro.replay.timeline import Timeline, replay, replayed

ALONE, OVERLAPPED = 0.05, 0.95  # share of its time up to which, or from which, a kernel counts as such
ENOUGH_PLACES = 8
RESAMPLES = 1000
SETTLED_NS = 1_000  # a replay whose end moves by less has found its overlap
ROUNDS = 4
UNCHANGED = 1e-9  # difference of shares up to which they count as equal


class Contention(DocumentPart, frozen=True):
    """The slowdown of kernels while communication runs.

    Attributes:
        factor: their time with communication over their time without.
        low, high: 95% interval of the factor.
    """

    factor: float
    low: float
    high: float


def overlap_of(graph: Graph) -> Contention | None:
    """Estimate the slowdown of kernels during communication from the measured times of a graph."""
    return contention_of(kernels_beside(graph))


def contention_of(kernels: pl.DataFrame) -> Contention | None:
    """Estimate the slowdown of kernels during communication.

    It is the ratio of total times over all places, each weighted by the number of times it was seen in the
    rarer way, so that the slowdown of long kernels counts most. The interval is a percentile bootstrap over
    the places (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13).

    Args:
        kernels: rows of `kernels_beside`.

    Returns:
        None where too few kernels were seen both ways, or the interval does not exclude 1.
    """
    beside = pl.col("beside")
    places = (
        kernels.group_by("name", "of", "place")
        .agg(
            alone=pl.col("ns").filter(~beside).median(),
            overlapped=pl.col("ns").filter(beside).median(),
            seen=pl.min_horizontal((~beside).sum(), beside.sum()),
        )
        .filter(pl.col("seen") > 0)
        .sort("name", "of", "place")
    )
    if places.height < ENOUGH_PLACES:
        return None
    columns = (pl.col(name) * pl.col("seen") for name in ("alone", "overlapped"))
    weighted = places.select(columns).to_numpy()
    picks = np.random.default_rng(0).integers(0, places.height, (RESAMPLES, places.height))
    sums = weighted[picks].sum(axis=1)
    low, high = np.percentile(sums[:, 1] / sums[:, 0], (2.5, 97.5))
    if low <= 1:
        return None
    alone, overlapped = weighted.sum(axis=0)
    return Contention(float(overlapped / alone), float(low), float(high))


def kernels_beside(graph: Graph) -> pl.DataFrame:
    """Return kernels that ran alone or during communication, with duration and place in the step.

    Returns:
        `name`, `place` (index among those of its name in the step of its rank), `of` (their number), `ns`,
        and `beside`: whether communication ran all the time.
    """
    nodes = graph.nodes
    share = overlapped_share(graph, nodes.measured_start, nodes.measured_end)
    kernels = np.flatnonzero((nodes.kind == NodeKind.KERNEL) & (nodes.step >= 0))
    length = nodes.measured_end[kernels] - nodes.measured_start[kernels]
    frame = pl.DataFrame(
        {
            "rank": nodes.rank[kernels],
            "window": nodes.window[kernels],
            "step": nodes.step[kernels],
            "name": nodes.name[kernels],
            "start": nodes.measured_start[kernels],
            "ns": length,
            "share": share[kernels],
        }
    )
    in_step = ["rank", "window", "step", "name"]
    placed = frame.sort(*in_step, "start").with_columns(
        place=pl.int_range(pl.len()).over(in_step), of=pl.len().over(in_step)
    )
    beside = pl.col("share") >= OVERLAPPED
    either = placed.filter(beside | (pl.col("share") <= ALONE))
    name = pl.Series("name", graph.names, dtype=pl.String).gather(either["name"])
    return either.select(name, "place", "of", "ns", beside=beside)


@computed_once
def overlapped_before(graph: Graph) -> Floats:
    """Return [N] `overlapped_share` of each node in the replay of an unchanged graph."""
    timeline = replayed(graph)
    return overlapped_share(graph, timeline.start, timeline.end)


def overlapped_share(graph: Graph, start: Ints, end: Ints) -> Floats:
    """Return the share of each kernel's time during which its rank's GPU also moved data for a collective.

    Args:
        start, end: [N] ns of its nodes.

    Returns:
        [N]; 0 for nodes that are not kernels.
    """
    kernels, moving = _kernels_and_transfers(graph)
    share = np.zeros(graph.num_nodes)
    share[kernels] = _shares(graph, kernels, moving, start, end)
    return share


@computed_once
def _kernels_and_transfers(graph: Graph) -> tuple[Ints, Ints]:
    kind = graph.nodes.kind
    return np.flatnonzero(kind == NodeKind.KERNEL), np.flatnonzero(kind == NodeKind.TRANSFER)


def _shares(graph: Graph, kernels: Ints, moving: Ints, start: Ints, end: Ints) -> Floats:
    """Return [K] `overlapped_share` of the given kernels.

    Args:
        kernels: [K] all kernels.
        moving: [M] the transfers.
        start, end: [N] ns of its nodes.
    """
    # Put all ranks on one time axis, one after the other, so that work of different ranks never overlaps.
    begins, ends, moves, moved = start[kernels], end[kernels], start[moving], end[moving]
    first = min(int(begins.min(initial=0)), int(moves.min(initial=0)))
    length = max(int(ends.max(initial=0)), int(moved.max(initial=0))) - first + 1
    apart = graph.nodes.rank[moving] * length
    busy = union(moves + apart, moved + apart)
    apart = graph.nodes.rank[kernels] * length
    shares: Floats = covered(busy, begins + apart, ends + apart) / np.maximum(ends - begins, 1)
    return shares


def replays_with_new_overlap(graph: Graph, before: Floats, slowdowns: Sequence[float]) -> Iterator[Timeline]:
    """Replay a changed graph with kernels slowed down by the communication that now runs at the same time.

    A kernel of duration d with a share s of it during communication would take d / (1 + (slowdown - 1) s)
    alone. Its new position changes the overlap again, so the replay is repeated until its end settles.

    Args:
        before: [N] `overlapped_share` in the replay of the unchanged graph.
        slowdowns: slowdown factors, of `Contention`.

    Yields:
        The last replay for each slowdown, made lazily, so that one is in memory at a time. Where no overlap
        has changed, only one: the replay of the graph as it is.
    """
    kernels, moving = _kernels_and_transfers(graph)
    timeline, recorded = replay(graph), before[kernels]
    first = _shares(graph, kernels, moving, timeline.start, timeline.end)
    if not differs(recorded, first).any():
        yield timeline
        return
    ends = int(timeline.end.max(initial=0))
    del timeline
    for slowdown in slowdowns:
        yield _slowed_replay(graph, ends, recorded, first, slowdown)


def _slowed_replay(graph: Graph, ends: int, before: Floats, first: Floats, slowdown: float) -> Timeline:
    """Replay a graph with kernels slowed down consistently with the communication that they then overlap.

    Args:
        ends: end of its unslowed replay, in ns.
        before: [K] `overlapped_share` of its kernels in the replay of the unchanged graph.
        first: [K] `overlapped_share` in its unslowed replay.
        slowdown: a factor of `Contention`.
    """
    kernels, moving = _kernels_and_transfers(graph)
    given, duration = graph.nodes.duration[kernels], graph.nodes.duration.copy()
    slow_graph = graph.with_durations(duration)  # shared by all rounds, which change `duration`

    def slow(last: Timeline | None) -> Graph | None:
        now = first if last is None else _shares(graph, kernels, moving, last.start, last.end)
        if not differs(before, now).any():
            return None
        duration[kernels] = slowed(given, before, now, slowdown)
        return slow_graph

    return settled(ends, slow)


def differs(before: Floats, now: Floats) -> Bools:
    """Return which shares differ."""
    return np.abs(now - before) > UNCHANGED


def slowed(duration: Ints, before: Floats, now: Floats, slowdown: float) -> Floats:
    """Return the durations of kernels whose overlap with communication has changed, in ns.

    Args:
        duration: [K] ns, with the shares `before`.
        before, now: [K] shares of `overlapped_share`.
        slowdown: a factor of `Contention`.
    """
    alone = duration / (1 + (slowdown - 1) * before)
    return np.where(differs(before, now), np.rint(alone * (1 + (slowdown - 1) * now)), duration)


def settled(ends: int, slow: Callable[[Timeline | None], Graph | None]) -> Timeline:
    """Replay repeatedly with durations that fit the previous replay's overlap, until the end settles.

    Args:
        ends: end of the unslowed replay, in ns.
        slow: returns the graph with kernels slowed according to the overlap in the last replay, which is None
            before the first; returns None where the overlap is as recorded, never before the first.
    """
    timeline = None
    for _ in range(ROUNDS):
        graph = slow(timeline)
        if graph is None:
            break
        timeline = None  # free its memory for the next one
        timeline = replay(graph)
        ended, ends = ends, int(timeline.end.max(initial=0))
        if abs(ends - ended) < SETTLED_NS:
            break
    assert timeline is not None
    return timeline
