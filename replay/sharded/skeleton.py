"""One rank with only the nodes that matter to others, made of its share by itself.

In: a share and what is pooled over all ranks. Out: its graph with lags, and a `RankSkeleton` of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.condense import Cut, Skeletons, joined_graph, skeletons_of
from dpro.replay.construction.graph_builder import count_from, on_worker
from dpro.replay.construction.lags import started_work, with_lags
from dpro.replay.construction.phases import phases_at
from dpro.replay.graph import Graph, NodeKind, Nodes
from dpro.replay.sharded.pooled import PooledOfRank
from dpro.replay.sharded.share import Share, load_share, share_file
from dpro.replay.timeline import extents_of


@dataclass(frozen=True)
class RankSkeleton:
    """A rank between what it waits for and what others wait for.

    Attributes:
        rank: which.
        graph: the nodes kept and the longest paths between them; names are only those that they have.
        node: [M] node of the share that each is; -1 of the virtual end of a step.
        instance, arrive, transfer: [K] for each collective it ran, the two nodes of it; instance -1 where an
            edit has taken the rank out of it.
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

    Raises:
        OSError: there is no such share.
    """
    share = load_share(share_file(folder, known.rank))
    return skeleton_of_share(known.rank, share, finished(share, known))


def finished(share: Share, known: PooledOfRank) -> Graph:
    """A rank's graph: its share with lags, phases, and times from the run's origin."""
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


def skeleton_of_share(rank: int, share: Share, graph: Graph) -> RankSkeleton:
    """Condense a rank's graph.

    Args:
        graph: as from `finished`, perhaps changed since.
    """
    cut = cut_of(rank, share, graph)
    return _kept(rank, share, graph, cut, skeletons_of(graph, cut))


def skeletons_of_both(
    rank: int, share: Share, graph: Graph, changed: Ints
) -> tuple[RankSkeleton, RankSkeleton]:
    """Two skeletons of a rank of one shape: as it is, and changed.

    Args:
        graph: as from `finished`, perhaps changed since.
        changed: [N] ns, how long its nodes last in the other.
    """
    cut = cut_of(rank, share, graph)
    both = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    return _kept(rank, share, graph, cut, both, 0), _kept(rank, share, graph, cut, both, 1)


def _kept(
    rank: int, share: Share, graph: Graph, cut: Cut, skeleton: Skeletons, scenario: int = 0
) -> RankSkeleton:
    """What is left of a rank in one of the scenarios of a skeleton."""
    small, node = joined_graph(graph, cut, skeleton, scenario)
    small = _with_measured_ends(small, graph)
    place = np.full(graph.num_nodes, -1, np.int64)
    place[node[node >= 0]] = np.flatnonzero(node >= 0)
    return RankSkeleton(
        rank, _with_own_names(small), node, share.instance, place[share.arrive], place[share.transfer]
    )


def cut_of(rank: int, share: Share, graph: Graph) -> Cut:
    """Where other ranks' edges would meet a rank's graph: at all its collectives, whoever else ran them."""
    size = graph.num_nodes
    joins = np.zeros(size, np.bool_)
    joins[share.arrive] = True
    joins[share.transfer] = True
    every = np.arange(size)
    free = joins & (graph.nodes.kind == NodeKind.TRANSFER)
    return Cut(np.array([rank]), np.array([0, size]), every, every[:0], joins, free)


def _with_measured_ends(small: Graph, graph: Graph) -> Graph:
    """Virtual ends of steps, measured for as long as the work that they stand for.

    What steps took as measured is then read from a skeleton as from its graph.
    """
    end = small.nodes.kind == NodeKind.END
    measured = extents_of(graph, ["window", "step"], graph.nodes.measured_start, graph.nodes.measured_end)
    ends = pl.DataFrame({"window": small.nodes.window[end], "step": small.nodes.step[end]})
    found = ends.join(measured, on=["window", "step"], how="left", maintain_order="left")
    start, stop = small.nodes.measured_start.copy(), small.nodes.measured_end.copy()
    start[end], stop[end] = found["start"], found["end"]
    nodes = dataclasses.replace(small.nodes, measured_start=start, measured_end=stop)
    return dataclasses.replace(small, nodes=nodes)


def _with_own_names(graph: Graph) -> Graph:
    """The same graph with only the names that its nodes have."""
    nodes = graph.nodes
    used, code = np.unique(np.append(nodes.name, nodes.around), return_inverse=True)
    code -= int(np.searchsorted(used, 0))  # -1 for none comes first
    name, around = np.split(code, 2)
    names = tuple(graph.names[at] for at in used[used >= 0].tolist())
    return dataclasses.replace(graph, names=names, nodes=dataclasses.replace(nodes, name=name, around=around))
