"""The skeletons of all ranks as one graph, joined where ranks wait for each other.

In: a graph, its `Cut` and its `Skeletons`. Out: a graph that replays exactly as the whole one: kept nodes,
ends of steps and beginnings of windows have the same times to the nanosecond.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpro.arrays import Ints
from dpro.replay.condense.parts import Cut
from dpro.replay.condense.skeletons import Skeletons
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled


def joined_graph(graph: Graph, cut: Cut, skeletons: Skeletons, scenario: int = 0) -> tuple[Graph, Ints]:
    """Join the skeletons of ranks.

    Args:
        cut: where it falls apart into ranks.

    Returns:
        The joined graph, and [M] the node of the whole graph that each of its nodes is; -1 for the virtual
        end of a step.
    """
    # The numbers of the whole graph are in topological order; virtual ends are behind everything.
    key = np.where(skeletons.node >= 0, skeletons.node, graph.num_nodes + 1 + skeletons.rank)
    order = np.argsort(key, kind="stable")
    number = np.empty(order.size, np.int64)
    number[order] = np.arange(order.size)
    source, target = number[skeletons.source], number[skeletons.target]
    between, behind = graph.edges.taken(cut.between), key[order]
    between = dataclasses.replace(
        between,
        source=np.searchsorted(behind, between.source).astype(np.int64),
        target=np.searchsorted(behind, between.target).astype(np.int64),
    )
    paths = paths_beside(source, target, skeletons.lag, between, order.size)
    kept = Edges(
        source[paths], target[paths], skeletons.lag[paths, scenario],
        np.full(paths.size, EdgeKind.PATH, np.int64), np.zeros(paths.size, np.bool_),
    )  # fmt: skip
    nodes = _columns(graph, skeletons, order, scenario)
    joined = assembled(nodes, kept.and_also(between), graph.names, graph.lanes, graph.origin_ns)
    return joined.of_same_job(graph), skeletons.node[order]


def paths_beside(source: Ints, target: Ints, lag: Ints, between: Edges, size: int) -> Ints:
    """Edges of the skeletons, less those from arrival to transfer where it is as far over the rendezvous.

    Args:
        source, target, lag: of edges inside ranks; [E, K] ns.
    """
    met, meets = np.full(size, -1, np.int64), np.full(size, -2, np.int64)
    lag_before, lag_after = np.zeros(size, np.int64), np.zeros(size, np.int64)
    meets[between.source], lag_before[between.source] = between.target, between.lag
    met[between.target], lag_after[between.target] = between.source, between.lag
    over = lag_before[source] + lag_after[target]
    return np.flatnonzero((meets[source] != met[target]) | (over[:, None] < lag).any(axis=1))


def _columns(graph: Graph, skeletons: Skeletons, order: Ints, scenario: int) -> Nodes:
    """The columns of the joined nodes: those of the whole graph, and of virtual ends their step's."""
    node = skeletons.node[order]
    columns = {f.name: getattr(graph.nodes, f.name)[node] for f in dataclasses.fields(Nodes)}
    ends = slice(np.count_nonzero(node >= 0), None)
    own = {"kind": NodeKind.END, "anchored": False, "measured_start": 0, "measured_end": 0, "name": 0}
    own |= dict.fromkeys(("around", "span", "collective", "bytes", "message", "phase", "lane"), -1)
    for name, value in own.items():
        columns[name][ends] = value
    for name in ("rank", "window", "step"):
        columns[name][ends] = getattr(skeletons, name)[order[ends]]
    columns["duration"] = skeletons.duration[order, scenario]
    columns["earliest"] = skeletons.earliest[order, scenario]
    return Nodes(**columns)
