"""Ranks of a graph to copy: any number, of any length, all in the graph's collectives.

In: the graph of a few ranks. Out: each of its ranks by itself, and copies of these.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpro.replay.condense import Cut, cut_by_rank
from dpro.replay.graph import Edges, Graph, NodeKind, Nodes, assembled

NOISE = 0.05


@dataclasses.dataclass(frozen=True)
class Original:
    """A rank to copy.

    Attributes:
        graph: its share of the graph, by itself.
        cut: of it: where others would meet it.
        members: [N] number of the collective that a node arrives at or transfers, else -1.
        arrives: [N] whether it is the arrival.
    """

    graph: Graph
    cut: Cut
    members: np.ndarray
    arrives: np.ndarray


def originals(graph: Graph, nodes_per_rank: int) -> tuple[list[Original], int]:
    """Return all ranks, repeated up to about this number of nodes, and the number of shared collectives."""
    cut = cut_by_rank(graph)
    _, number = np.unique(graph.nodes.collective, return_inverse=True)
    shared = int(number.max()) + 1
    ranks = np.flatnonzero(cut.ranks >= 0).tolist()
    times = max(round(nodes_per_rank / np.diff(cut.indptr)[ranks].max()), 1)
    found = []
    for at in ranks:
        own = _members(cut, at)
        alone = _repeated(_alone(graph, cut, at), times)
        joins, free = np.tile(cut.joins[own], times), np.tile(cut.free[own], times)
        members = np.where(cut.joins[own], number[own], -1)
        every = np.arange(alone.num_nodes)
        as_cut = Cut(cut.ranks[at : at + 1], np.array([0, every.size]), every, every[:0], joins, free)
        arrives = np.tile(graph.nodes.kind[own] == NodeKind.ARRIVE, times)
        found.append(Original(alone, as_cut, _in_turn(members, times, shared), arrives))
    return found, shared * times


def _members(cut: Cut, number: int) -> np.ndarray:
    """Return the nodes of one rank, by its index, ascending."""
    return cut.order[cut.indptr[number] : cut.indptr[number + 1]]


def _alone(graph: Graph, cut: Cut, number: int) -> Graph:
    """Make a graph of a rank's nodes and the edges among them."""
    nodes, edges, own = graph.nodes, graph.edges, _members(cut, number)
    of_rank = nodes.rank == cut.ranks[number]
    inside = edges.taken(np.flatnonzero(of_rank[edges.source] & of_rank[edges.target]))
    source, target = (np.searchsorted(own, end) for end in (inside.source, inside.target))
    inside = dataclasses.replace(inside, source=source, target=target)
    return assembled(nodes.taken(own), inside, graph.names, graph.lanes, graph.origin_ns).with_job_of(graph)


def _in_turn(members: np.ndarray, times: int, shared: int) -> np.ndarray:
    turn = np.repeat(np.arange(times), members.size) * shared
    tiled = np.tile(members, times)
    return np.where(tiled >= 0, tiled + turn, -1)


def _repeated(graph: Graph, times: int) -> Graph:
    """Repeat a rank's graph in several windows, one after the other."""
    size, edges = graph.num_nodes, graph.edges
    lasts = int(graph.nodes.earliest.max() + graph.nodes.duration.sum())
    turn, shift = np.repeat(np.arange(times), size), np.repeat(np.arange(times) * size, edges.source.size)
    nodes = Nodes(**{f.name: np.tile(getattr(graph.nodes, f.name), times) for f in dataclasses.fields(Nodes)})
    window = nodes.window + (int(graph.nodes.window.max()) + 1) * turn
    nodes = dataclasses.replace(nodes, earliest=nodes.earliest + lasts * turn, window=window)
    tiled = Edges(**{f.name: np.tile(getattr(edges, f.name), times) for f in dataclasses.fields(Edges)})
    tiled = dataclasses.replace(tiled, source=tiled.source + shift, target=tiled.target + shift)
    begins = [graph.indptr[:-1] + edges.source.size * at for at in range(times)]
    indptr = np.concatenate([*begins, [tiled.source.size]])
    return dataclasses.replace(graph, nodes=nodes, edges=tiled, indptr=indptr, facts={})


def copied(original: Graph, rank: int) -> Graph:
    """Copy a rank's graph with another start time, and with each duration a little shorter or longer."""
    draw, nodes = np.random.default_rng(rank), original.nodes
    noise = draw.random(original.num_nodes, np.float32) * np.float32(2 * NOISE) + np.float32(1 - NOISE)
    duration = (nodes.duration * noise).astype(np.int64)
    earliest = nodes.earliest + int(draw.integers(0, 1_000_000))
    return dataclasses.replace(
        original, nodes=dataclasses.replace(nodes, duration=duration, earliest=earliest)
    )
