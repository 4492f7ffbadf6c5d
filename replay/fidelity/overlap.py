"""Compute and communication that run side by side slow each other down: how much, and what an edit changes.

In: a replayed graph. Out: the slowdown as this trace shows it, and replays of changed graphs in which kernels
that run for another share of their time during communication take accordingly longer or shorter.

The same kernel is seen with and without concurrent communication where it stands at the same place of its
step (the k-th of its name, of as many) in other steps and on other ranks. Data-parallel ranks do the same
work there; where they do not, the interval is wide and no slowdown is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.intervals import covered, union
from dpro.replay.timeline import Timeline, replay

ALONE, OVERLAPPED = 0.05, 0.95  # shares of a kernel's time up to and from which it counts as such
ENOUGH_PLACES = 8
RESAMPLES = 1000
SETTLED_NS = 1_000  # a replay whose end moves by less has found its overlap
ROUNDS = 4
UNCHANGED = 1e-9  # shares that differ by less are the same


@dataclass(frozen=True)
class Contention:
    """By how much communication slows down the kernels that run at the same time.

    Attributes:
        slowdown: time during communication / time alone.
        low, high: 95% interval of it.
        overlapped: [N] `overlapped_share` of each node in the replay of the unchanged graph.
    """

    slowdown: float
    low: float
    high: float
    overlapped: Floats


def overlap_of(timeline: Timeline) -> Contention | None:
    """The slowdown of kernels during communication, from the measured times.

    It is that of the time of all places together, each weighted by how often it was seen in the rarer way:
    the slowdown of long kernels counts most. The interval is a percentile bootstrap over the places (Efron
    and Tibshirani, An Introduction to the Bootstrap, chapter 13).

    Args:
        timeline: the replay of the unchanged graph.

    Returns:
        None where the same kernels were too seldom seen both ways, or the interval does not exclude that
        there is no slowdown.
    """
    graph = timeline.graph
    places = _seen_both_ways(graph)
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
    share = overlapped_share(graph, timeline.start, timeline.end)
    return Contention(float(overlapped / alone), float(low), float(high), share)


def _seen_both_ways(graph: Graph) -> pl.DataFrame:
    """Places in the step whose kernel was seen alone and during communication: median ns, and how often."""
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
    alone, overlapped = pl.col("share") <= ALONE, pl.col("share") >= OVERLAPPED
    return (
        placed.group_by("name", "of", "place")
        .agg(
            alone=pl.col("ns").filter(alone).median(),
            overlapped=pl.col("ns").filter(overlapped).median(),
            seen=pl.min_horizontal(alone.sum(), overlapped.sum()),
        )
        .filter(pl.col("seen") > 0)
        .sort("name", "of", "place")
    )


def overlapped_share(graph: Graph, start: Ints, end: Ints) -> Floats:
    """The share of each kernel's time during which its rank's GPU also moved data for a collective.

    Args:
        graph: the graph.
        start, end: [N] ns of its nodes.

    Returns:
        [N]; 0 for what is no kernel.
    """
    nodes = graph.nodes
    share = np.zeros(graph.num_nodes)
    kernels = np.flatnonzero(nodes.kind == NodeKind.KERNEL)
    kernels = kernels[end[kernels] > start[kernels]]
    moving = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
    # One axis for all ranks, each after the one before it: what is of one rank meets none of another's.
    begin = int(start.min(initial=0))
    apart = nodes.rank * (int(end.max(initial=0)) - begin + 1) - begin
    busy = union(start[moving] + apart[moving], end[moving] + apart[moving])
    together = covered(busy, start[kernels] + apart[kernels], end[kernels] + apart[kernels])
    share[kernels] = together / (end[kernels] - start[kernels])
    return share


def replays_with_new_overlap(graph: Graph, before: Floats, slowdowns: Sequence[float]) -> list[Timeline]:
    """Replay a changed graph with kernels slowed down by the communication that now runs at the same time.

    A kernel of duration d with a share s of it during communication would take d / (1 + (slowdown - 1) s)
    alone. Where it ends up changes the overlap again, so the replay is repeated until its end settles.

    Args:
        graph: the changed graph; its kernels have the durations that go with the overlap before.
        before: [N] `overlapped_share` in the replay of the unchanged graph.
        slowdowns: as of `Contention`.

    Returns:
        The last replay for each slowdown; where no overlap has changed, one that is exactly that of the graph
        as it is.
    """
    timeline = replay(graph)
    now = overlapped_share(graph, timeline.start, timeline.end)
    if not (np.abs(now - before) > UNCHANGED).any():
        return [timeline]
    return [_settled(timeline, before, now, slowdown) for slowdown in slowdowns]


def _settled(timeline: Timeline, before: Floats, now: Floats, slowdown: float) -> Timeline:
    """Replays with the durations that go with the last one's overlap, until that changes the end no more."""
    graph = timeline.graph
    kernels = np.flatnonzero(graph.nodes.kind == NodeKind.KERNEL)
    alone = graph.nodes.duration[kernels] / (1 + (slowdown - 1) * before[kernels])
    for round_ in range(ROUNDS):
        if round_:
            now = overlapped_share(graph, timeline.start, timeline.end)
        changed = np.abs(now[kernels] - before[kernels]) > UNCHANGED
        if not changed.any():
            break
        slower = np.rint(alone * (1 + (slowdown - 1) * now[kernels]))
        duration = graph.nodes.duration.copy()
        duration[kernels[changed]] = slower[changed]
        again = replay(graph.with_durations(duration))
        moved = abs(int(again.end.max(initial=0)) - int(timeline.end.max(initial=0)))
        timeline = again
        if moved < SETTLED_NS:
            break
    return timeline
