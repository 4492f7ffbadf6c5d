"""The skeletons of all ranks as one graph, which replays as that of the whole run would.

In: the skeleton of every rank. Out: a `JoinedGraph`. Nodes come in an order of their own; every start and
every step is that of the whole graph, to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.condense import paths_beside
from dpro.replay.construction.graph_builder import in_order, write_columns
from dpro.replay.construction.rank_graph import Lanes, Place, RankGraph
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled
from dpro.replay.sharded.matched import MatchedRun
from dpro.replay.sharded.rank import BareRank, Pooled, RankSkeleton
from dpro.replay.timeline import PathTo, Stretch, Timeline, chain_to, replay
from dpro.store import Run


@dataclass(frozen=True)
class JoinedGraph:
    """The condensed graph of a run.

    Attributes:
        graph: its skeletons, joined.
        node: [M] node of its rank that each node is; -1 of rendezvous and of virtual ends of steps.
    """

    graph: Graph
    node: Ints


def join_skeletons(
    skeletons: Sequence[RankSkeleton], matched: MatchedRun, pooled: Pooled, run: Run | None = None
) -> JoinedGraph:
    """Join the skeletons of all ranks where the ranks meet.

    A collective that others hold, too, keeps no edge from its arrival to its transfer: the rendezvous is
    between them. An edit that takes it out starts from `with_own_order`.

    Args:
        skeletons: of all ranks, in any order.
    """
    skeletons = sorted(skeletons, key=lambda skeleton: skeleton.rank)
    names = sorted({name for skeleton in skeletons for name in skeleton.graph.names})
    code = {name: number for number, name in enumerate(names)}
    labels = (*names, "(no span)", "(rendezvous)")
    origin = pooled.origin_ns
    as_parts = [_as_part(skeleton, code, origin) for skeleton in skeletons]
    parts = in_order(as_parts, matched.moved, labels)
    for times in (parts.nodes.measured_start, parts.nodes.measured_end):
        times -= origin
    edges = _less_paths_beside(parts.edges, parts.nodes.duration.size)
    graph = assembled(parts.nodes, edges, labels, parts.lanes, origin)
    node = np.full(graph.num_nodes, -1, np.int64)
    of_ranks = np.concatenate([skeleton.node for skeleton in skeletons])
    node[parts.number[: of_ranks.size]] = of_ranks
    graph = dataclasses.replace(graph, messages=matched.messages, places=matched.places, run=run)
    return JoinedGraph(graph, node)


def _less_paths_beside(edges: Edges, size: int) -> Edges:
    meets = edges.kind == EdgeKind.RENDEZVOUS
    inside, between = np.flatnonzero(~meets), edges.taken(np.flatnonzero(meets))
    lag = edges.lag[inside, None]
    meets[inside[paths_beside(edges.source[inside], edges.target[inside], lag, between, size)]] = True
    return edges.taken(np.flatnonzero(meets))


def with_own_order(graph: Graph) -> Graph:
    """The same with an edge from each arrival to its transfer: without rendezvous no other orders them."""
    nodes, edges = graph.nodes, graph.edges
    arrive, transfer = (_members(nodes, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    number, zeros = len(arrive), np.zeros(len(arrive), np.int64)
    order = Edges(arrive, transfer, zeros, np.full(number, EdgeKind.PATH), np.zeros(number, np.bool_))
    all_edges = edges.and_also(order)
    return assembled(nodes, all_edges, graph.names, graph.lanes, graph.origin_ns).of_same_job(graph)


def without_ranks(joined: JoinedGraph, ranks: Collection[int]) -> list[RankSkeleton]:
    """A joined graph without some ranks, as one skeleton of all others; none where there are no others."""
    graph = with_own_order(joined.graph)  # of a collective that only those ranks leave, too
    nodes, edges = graph.nodes, graph.edges
    kept = ~np.isin(nodes.rank, list(ranks)) & (nodes.kind != NodeKind.RENDEZVOUS)
    rest_nodes = np.flatnonzero(kept)
    if rest_nodes.size == 0:
        return []
    place = np.cumsum(kept) - 1
    inside = edges.taken(np.flatnonzero(kept[edges.source] & kept[edges.target]))
    inside = dataclasses.replace(inside, source=place[inside.source], target=place[inside.target])
    columns = nodes.taken(rest_nodes)
    rest = assembled(columns, inside, graph.names, graph.lanes, graph.origin_ns)
    arrive, transfer = (_members(columns, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    return [RankSkeleton(-1, rest, joined.node[rest_nodes], columns.collective[transfer], arrive, transfer)]


def _members(nodes: Nodes, kind: NodeKind) -> Ints:
    """Nodes of one kind by collective and rank."""
    members = np.flatnonzero(nodes.kind == kind)
    return members[np.lexsort((nodes.rank[members], nodes.collective[members]))]


def _as_part(skeleton: RankSkeleton, code: dict[str, int], origin: int) -> RankGraph:
    """A skeleton as a part of a graph, its times as recorded: those of rendezvous are, too."""
    graph, members = skeleton.graph, skeleton.instance >= 0
    begins = graph.nodes.measured_start + origin

    def nodes(into: Place) -> Lanes:
        kept = graph.nodes
        codes = np.array([*(code[name] for name in graph.names), -1], np.int64)
        as_recorded = dataclasses.replace(
            kept, name=codes[kept.name], around=codes[kept.around],
            lane=np.where(kept.lane < 0, -1, kept.lane + into.lane),
            measured_start=begins, measured_end=kept.measured_end + origin,
        )  # fmt: skip
        write_columns(as_recorded, into.nodes, into.number)
        return list(graph.lanes)

    columns = (skeleton.instance, skeleton.arrive, skeleton.transfer)
    instance, arrive, transfer = (column[members] for column in columns)
    return RankGraph(begins, nodes, graph.edges, instance, arrive, transfer, background=0)


# One rank as it runs in the joined graph: its own nodes, replayed by themselves.


class RendezvousTimes(NamedTuple):
    """Rendezvous.

    Attributes:
        collective: [K] of which collectives, ascending.
        start: [K] ns, when they happen.
    """

    collective: Ints
    start: Ints


def rendezvous_of(timeline: Timeline) -> RendezvousTimes:
    """The rendezvous of a joined graph."""
    met = np.flatnonzero(timeline.graph.nodes.kind == NodeKind.RENDEZVOUS)
    collective = timeline.graph.nodes.collective[met]
    order = np.argsort(collective, kind="stable")
    return RendezvousTimes(collective[order], timeline.start[met][order])


def of_collectives(rendezvous: RendezvousTimes, instance: Ints) -> RendezvousTimes:
    """The rendezvous of some collectives.

    Args:
        rendezvous: as from `rendezvous_of`.
        instance: [K] the collectives; those that one rank ran alone have none.
    """
    place = np.searchsorted(rendezvous.collective, np.sort(instance))
    place = place[place < rendezvous.collective.size]
    wanted = place[np.isin(rendezvous.collective[place], instance)]
    return RendezvousTimes(rendezvous.collective[wanted], rendezvous.start[wanted])


def replay_inside(bare: BareRank, graph: Graph, rendezvous: RendezvousTimes) -> Timeline:
    """Replay a rank by itself.

    Args:
        graph: its graph, as from `dpro.replay.sharded.rank.with_pooled_lags`.
        rendezvous: rendezvous of all its collectives at least.

    Returns:
        Of its graph, in which transfers do not begin before their rendezvous.
    """
    met = np.flatnonzero(np.isin(bare.instance, rendezvous.collective))
    begins = rendezvous.start[np.searchsorted(rendezvous.collective, bare.instance[met])]
    earliest, transfers = graph.nodes.earliest.copy(), bare.transfer[met]
    earliest[transfers] = np.maximum(earliest[transfers], begins)
    return replay(dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, earliest=earliest)))


# What decides when a step ends, through ranks that were condensed: their nodes are found where it goes.

InsideOf = Callable[[int], Timeline]  # of a rank its replay by itself, as of `replay_inside`


def inside_of(timeline: Timeline, built: Callable[[int], tuple[BareRank, Graph]]) -> InsideOf:
    """What replays ranks by themselves, each once.

    Args:
        timeline: of the joined graph.
        built: returns a rank without lags, and its graph.
    """
    rendezvous = rendezvous_of(timeline)
    return cache(lambda rank: replay_inside(*built(rank), rendezvous))


def path_through(joined: JoinedGraph, timeline: Timeline, inside: InsideOf) -> PathTo:
    """How to find what decides when nodes of a joined graph end, through the ranks that it goes through."""
    return partial(_path_to_last, joined, timeline, inside)


def _path_to_last(joined: JoinedGraph, timeline: Timeline, inside: InsideOf, last: Bools) -> list[Stretch]:
    """What decides when the last work ends of which some kept nodes are, or stand for the end."""
    kept = int(np.argmax(last))
    nodes = joined.graph.nodes
    rank = int(nodes.rank[kept])
    inner = inside(rank).graph.nodes
    ends = inside(rank).end == timeline.end[kept]
    ends &= inner.window == nodes.window[kept]
    if nodes.kind[kept] == NodeKind.END:
        ends &= inner.step == nodes.step[kept]
    return path_inside(joined, timeline, inside, rank, int(np.argmax(ends)))


def path_inside(
    joined: JoinedGraph, timeline: Timeline, inside: InsideOf, rank: int, node: int
) -> list[Stretch]:
    """What decides when a node of a rank ends."""
    stretches: list[Stretch] = []
    edges, kind = joined.graph.edges, joined.graph.nodes.kind
    met = np.flatnonzero(kind == NodeKind.RENDEZVOUS)
    met_by = {int(joined.graph.nodes.collective[meeting_node]): int(meeting_node) for meeting_node in met}
    while True:
        inner = inside(rank)
        path = chain_to(inner, node)
        stretches.append((inner, path))
        first, nodes = int(path[0]), inner.graph.nodes
        meeting = (
            met_by.get(int(nodes.collective[first]), -1) if nodes.kind[first] == NodeKind.TRANSFER else -1
        )
        if meeting < 0 or timeline.start[meeting] < inner.start[first] or timeline.binding[meeting] < 0:
            return stretches[::-1]
        last_arrived = edges.source[timeline.binding[meeting]]
        rank, node = int(joined.graph.nodes.rank[last_arrived]), int(joined.node[last_arrived])
