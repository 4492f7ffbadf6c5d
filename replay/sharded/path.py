"""What decides when a step ends, through ranks that were condensed: their nodes are found where it goes.

In: a joined graph and its replay, and what replays one of its ranks. Out: critical paths in the nodes of the
whole graph, as `dpro.replay.timeline` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.graph import NodeKind
from dpro.replay.sharded.joined import Joined
from dpro.replay.timeline import Timeline, chain_to, from_begin, path_pieces, steps_between, summed_pieces

InsideOf = Callable[[int], Timeline]  # as `dpro.replay.sharded.inside.replay_inside`, of a rank
Stretches = list[tuple[Timeline, Ints]]  # parts of a path, each on one rank, first to last


def critical_path_inside(joined: Joined, timeline: Timeline, inside: InsideOf) -> pl.DataFrame:
    """As `dpro.replay.timeline.critical_path`."""
    paths = critical_stretches(joined, timeline, inside)
    return summed_pieces([path_pieces(own, nodes, 0) for own, nodes in paths])


def critical_stretches(
    joined: Joined, timeline: Timeline, inside: InsideOf
) -> Iterator[tuple[Timeline, Ints]]:
    """What decides when windows end, as the replays of the ranks that it goes through and their nodes."""
    nodes = joined.graph.nodes
    for window in np.unique(nodes.window).tolist():
        ends = np.where(nodes.window == window, timeline.end, -1)
        yield from _path_to_last(joined, timeline, inside, ends == ends.max())


def critical_path_of_steps_inside(
    joined: Joined, timeline: Timeline, inside: InsideOf, steps: pl.DataFrame
) -> pl.DataFrame:
    """As `dpro.replay.timeline.critical_path_of_steps`.

    Args:
        steps: `window` and `step` of each.
    """
    nodes, frames = joined.graph.nodes, []
    for window, step, finish, begins in steps_between(timeline, steps).iter_rows():
        last = (nodes.window == window) & (nodes.step == step) & (timeline.end == finish)
        last &= nodes.kind != NodeKind.RENDEZVOUS
        path = _path_to_last(joined, timeline, inside, last) if last.any() else []
        pieces = [path_pieces(own, nodes_, begins) for own, nodes_ in path]
        rank = int(path[0][0].graph.nodes.rank[path[0][1][0]]) if path else -1
        frames += [*pieces, from_begin(pieces, rank, finish - begins)]
    return summed_pieces(frames)


def _path_to_last(joined: Joined, timeline: Timeline, inside: InsideOf, last: Bools) -> Stretches:
    """What decides when the last work ends of which some kept nodes are, or stand for the end."""
    kept = int(np.argmax(last))
    nodes = joined.graph.nodes
    rank = int(nodes.rank[kept])
    own = inside(rank).graph.nodes
    ends = inside(rank).end == timeline.end[kept]
    ends &= own.window == nodes.window[kept]
    if nodes.kind[kept] == NodeKind.END:
        ends &= own.step == nodes.step[kept]
    return path_inside(joined, timeline, inside, rank, int(np.argmax(ends)))


def path_inside(joined: Joined, timeline: Timeline, inside: InsideOf, rank: int, node: int) -> Stretches:
    """What decides when a node of a rank ends."""
    stretches: Stretches = []
    edges, kind = joined.graph.edges, joined.graph.nodes.kind
    met = np.flatnonzero(kind == NodeKind.RENDEZVOUS)
    met_by = {int(joined.graph.nodes.collective[each]): int(each) for each in met}
    while True:
        own = inside(rank)
        path = chain_to(own, node)
        stretches.append((own, path))
        first, nodes = int(path[0]), own.graph.nodes
        meeting = (
            met_by.get(int(nodes.collective[first]), -1) if nodes.kind[first] == NodeKind.TRANSFER else -1
        )
        if meeting < 0 or timeline.start[meeting] < own.start[first] or timeline.binding[meeting] < 0:
            return stretches[::-1]
        last_arrived = edges.source[timeline.binding[meeting]]
        rank, node = int(joined.graph.nodes.rank[last_arrived]), int(joined.node[last_arrived])
