"""The skeletons of all ranks as one graph, which replays as that of the whole run would.

In: the skeleton of every rank. Out: a `Joined`. Nodes come in an order of their own; every start and every
step is that of the whole graph, to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Ints
from dpro.replay.condense.joined import paths_beside
from dpro.replay.construction.graph_builder import in_order, write_columns
from dpro.replay.construction.rank_graph import Lanes, Place, RankGraph
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled
from dpro.replay.sharded.agreed import Agreed
from dpro.replay.sharded.pooled import Pooled
from dpro.replay.sharded.skeleton import RankSkeleton
from dpro.store import Run


@dataclass(frozen=True)
class Joined:
    """The condensed graph of a run.

    Attributes:
        graph: its skeletons, joined.
        node: [M] node of its rank's share that each node is; -1 of rendezvous and of virtual ends of steps.
    """

    graph: Graph
    node: Ints


def join_skeletons(
    skeletons: Sequence[RankSkeleton], agreed: Agreed, pooled: Pooled, run: Run | None = None
) -> Joined:
    """Join the skeletons of all ranks where the ranks meet.

    A collective that others hold, too, keeps no edge from its arrival to its transfer: the rendezvous is
    between them. An edit that takes it out starts from `with_own_order`.

    Args:
        skeletons: of all ranks, in any order.
    """
    skeletons = sorted(skeletons, key=lambda each: each.rank)
    names = sorted({name for each in skeletons for name in each.graph.names})
    code = {name: at for at, name in enumerate(names)}
    labels = (*names, "(no span)", "(rendezvous)")
    found = in_order([_as_part(each, code, pooled.origin_ns) for each in skeletons], agreed.moved, labels)
    origin = pooled.origin_ns
    for times in (found.nodes.measured_start, found.nodes.measured_end):
        times -= origin
    edges = _less_paths_beside(found.edges, found.nodes.duration.size)
    graph = assembled(found.nodes, edges, labels, found.lanes, origin)
    node = np.full(graph.num_nodes, -1, np.int64)
    own = np.concatenate([each.node for each in skeletons])
    node[found.number[: own.size]] = own
    graph = dataclasses.replace(graph, messages=agreed.messages, places=agreed.places, run=run)
    return Joined(graph, node)


def _less_paths_beside(edges: Edges, size: int) -> Edges:
    meets = edges.kind == EdgeKind.RENDEZVOUS
    own = np.flatnonzero(~meets)
    kept = paths_beside(
        edges.source[own], edges.target[own], edges.lag[own, None], edges.taken(np.flatnonzero(meets)), size
    )
    meets[own[kept]] = True
    return edges.taken(np.flatnonzero(meets))


def with_own_order(graph: Graph) -> Graph:
    """The same with an edge from each arrival to its transfer: without rendezvous no other orders them."""
    nodes, edges = graph.nodes, graph.edges
    arrive, transfer = (_members(nodes, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    number, zeros = len(arrive), np.zeros(len(arrive), np.int64)
    own = Edges(arrive, transfer, zeros, np.full(number, EdgeKind.PATH), np.zeros(number, np.bool_))
    both = edges.and_also(own)
    return assembled(nodes, both, graph.names, graph.lanes, graph.origin_ns).of_same_job(graph)


def without_ranks(joined: Joined, ranks: Collection[int]) -> list[RankSkeleton]:
    """A joined graph without some ranks, as one skeleton of all others; none where there are no others."""
    graph = with_own_order(joined.graph)  # of a collective that only those ranks leave, too
    nodes, edges = graph.nodes, graph.edges
    kept = ~np.isin(nodes.rank, list(ranks)) & (nodes.kind != NodeKind.RENDEZVOUS)
    at = np.flatnonzero(kept)
    if at.size == 0:
        return []
    place = np.cumsum(kept) - 1
    inside = edges.taken(np.flatnonzero(kept[edges.source] & kept[edges.target]))
    inside = dataclasses.replace(inside, source=place[inside.source], target=place[inside.target])
    columns = nodes.taken(at)
    rest = assembled(columns, inside, graph.names, graph.lanes, graph.origin_ns)
    arrive, transfer = (_members(columns, kind) for kind in (NodeKind.ARRIVE, NodeKind.TRANSFER))
    return [RankSkeleton(-1, rest, joined.node[at], columns.collective[transfer], arrive, transfer)]


def _members(nodes: Nodes, kind: NodeKind) -> Ints:
    """Nodes of one kind by collective and rank."""
    at = np.flatnonzero(nodes.kind == kind)
    return at[np.lexsort((nodes.rank[at], nodes.collective[at]))]


def _as_part(skeleton: RankSkeleton, code: dict[str, int], origin: int) -> RankGraph:
    """A skeleton as a part of a graph, its times as recorded: those of rendezvous are, too."""
    graph, members = skeleton.graph, skeleton.instance >= 0
    begins = graph.nodes.measured_start + origin

    def nodes(into: Place) -> Lanes:
        own = graph.nodes
        codes = np.array([*(code[name] for name in graph.names), -1], np.int64)
        columns = dataclasses.replace(
            own, name=codes[own.name], around=codes[own.around],
            lane=np.where(own.lane < 0, -1, own.lane + into.lane),
            measured_start=begins, measured_end=own.measured_end + origin,
        )  # fmt: skip
        write_columns(columns, into.nodes, into.number)
        return list(graph.lanes)

    met = [each[members] for each in (skeleton.instance, skeleton.arrive, skeleton.transfer)]
    return RankGraph(begins, nodes, graph.edges, met[0], met[1], met[2], background=0)
