"""One rank with only the nodes that matter to others, made of its share by itself.

In: a share and what is pooled over all ranks. Out: its graph with lags, and a `RankSkeleton` of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.condense.joined import joined_graph
from dpro.replay.condense.parts import Cut, part_of
from dpro.replay.condense.skeletons import skeleton_of
from dpro.replay.construction.graph_builder import count_from, on_worker
from dpro.replay.construction.lags import started_work, with_lags
from dpro.replay.construction.phases import phases_at
from dpro.replay.graph import Graph, NodeKind, Nodes
from dpro.replay.sharded.pooled import PooledOfRank
from dpro.replay.sharded.share import Share, load_share, share_file


@dataclass(frozen=True)
class RankSkeleton:
    """A rank between what it waits for and what others wait for.

    Attributes:
        rank: which.
        graph: the nodes kept and the longest paths between them; names are only those that they have.
        node: [M] node of the share that each is; -1 of the virtual end of a step.
        instance, arrive, transfer: [K] for each collective it shares with others, the two nodes of it.
    """

    rank: int
    graph: Graph
    node: Ints
    instance: Ints
    arrive: Ints
    transfer: Ints


def condense_share(folder: Path, known: PooledOfRank) -> RankSkeleton:
    """Condense the share that `build_share` has kept.

    Args:
        folder: where it is.
        known: what is pooled.

    Raises:
        OSError: there is no such share.
    """
    share = load_share(share_file(folder, known.rank))
    return skeleton_of_share(share, finished(share, known), known)


def finished(share: Share, known: PooledOfRank) -> Graph:
    """A rank's graph: its share with lags, phases, and times from the run's origin.

    Args:
        share: of the rank.
        known: what is pooled.
    """
    graph = share.graph
    columns = {f.name: getattr(graph.nodes, f.name).copy() for f in dataclasses.fields(Nodes)}
    for calls in share.calls:
        mine = graph.nodes.window == calls.window
        time, step = graph.nodes.phase[mine], graph.nodes.step[mine]
        columns["phase"][mine] = phases_at(calls, time, step, known.positions)
    nodes = Nodes(**columns)
    count_from(nodes, known.origin_ns)
    edges, nodes = with_lags(
        started_work(graph.edges, nodes, on_worker(graph.lanes)), known.lags, graph.names
    )
    return dataclasses.replace(graph, nodes=nodes, edges=edges, origin_ns=known.origin_ns)


def skeleton_of_share(
    share: Share, graph: Graph, known: PooledOfRank, asked: Bools | None = None
) -> RankSkeleton:
    """Condense a rank's graph.

    Args:
        share: of the rank.
        graph: as from `finished`, perhaps changed since.
        known: what is pooled.
        asked: [N] further nodes whose starts are wanted.
    """
    cut, meets = cut_of(share, graph, known), np.isin(share.instance, known.shared)
    skeleton = skeleton_of(part_of(graph, cut, 0, asked))
    small, node = joined_graph(graph, cut, [skeleton])
    place = np.full(graph.num_nodes, -1, np.int64)
    place[node[node >= 0]] = np.flatnonzero(node >= 0)
    return RankSkeleton(
        known.rank,
        _with_own_names(small),
        node,
        share.instance[meets],
        place[share.arrive[meets]],
        place[share.transfer[meets]],
    )


def cut_of(share: Share, graph: Graph, known: PooledOfRank) -> Cut:
    """Where other ranks' edges would meet a rank's graph.

    Args:
        share: of the rank.
        graph: its graph.
        known: what is pooled.
    """
    size, meets = graph.num_nodes, np.isin(share.instance, known.shared)
    joins = np.zeros(size, np.bool_)
    joins[share.arrive[meets]] = True
    joins[share.transfer[meets]] = True
    every = np.arange(size)
    free = joins & (graph.nodes.kind == NodeKind.TRANSFER)
    return Cut(np.array([known.rank]), np.array([0, size]), every, every, every[:0], joins, free)


def _with_own_names(graph: Graph) -> Graph:
    """The same graph with only the names that its nodes have."""
    nodes = graph.nodes
    used, code = np.unique(np.append(nodes.name, nodes.around), return_inverse=True)
    code -= int(np.searchsorted(used, 0))  # -1 for none comes first
    name, around = np.split(code, 2)
    names = tuple(graph.names[at] for at in used[used >= 0].tolist())
    return dataclasses.replace(graph, names=names, nodes=dataclasses.replace(nodes, name=name, around=around))
