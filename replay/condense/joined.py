"""The skeletons of all ranks as one graph, joined where ranks wait for each other.

In: a graph. Out: a `Condensed`, whose graph has the same kept nodes, step ends and beginnings of windows to
the nanosecond: what asks a timeline for steps asks one of this graph. Of a changed graph only those ranks are
condensed again in which more has changed than how long transfers last.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.condense.parts import Cut, cut_by_rank
from dpro.replay.condense.skeletons import Skeletons, skeletons_of, together
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled


@dataclass(frozen=True)
class Condensed:
    """A graph and its skeleton.

    Attributes:
        graph: the skeletons of all ranks, joined.
        node: [M] the node of the whole graph that each of its nodes is; -1 of the virtual end of a step.
        whole: the whole graph.
        cut: where it falls apart into ranks.
        skeletons: of its ranks.
        asked: [N] nodes that were asked for.
    """

    graph: Graph
    node: Ints
    whole: Graph
    cut: Cut
    skeletons: Skeletons
    asked: Bools | None = None


def condense(graph: Graph, asked: Bools | None = None) -> Condensed:
    """Condense a graph rank by rank.

    Args:
        graph: the graph.
        asked: [N] further nodes whose starts are wanted.
    """
    cut = cut_by_rank(graph)
    return _condensed(graph, cut, skeletons_of(graph, cut, asked), asked)


def recondense(condensed: Condensed, changed: Graph) -> Condensed:
    """Condense a graph of which another one that differs from it a little has been condensed.

    Args:
        condensed: the other.
        changed: the same graph with other durations, earliest times or lags; with other edges or nodes it is
            condensed as a whole.
    """
    before, cut, asked = condensed.whole, condensed.cut, condensed.asked
    if not all(map(np.array_equal, _shape(before), _shape(changed))):
        return condense(changed, asked if changed.num_nodes == before.num_nodes else None)
    anew = ranks_to_condense(condensed, changed)
    skeletons = condensed.skeletons
    if anew.any():
        again = skeletons_of(changed, cut.of(anew), asked)
        skeletons = together([skeletons.of(~np.isin(skeletons.rank, cut.ranks[anew])), again])
    node = skeletons.node
    lasts = np.where(node >= 0, changed.nodes.duration[node], 0)[:, None]
    return _condensed(changed, cut, dataclasses.replace(skeletons, duration=lasts), asked)


def ranks_to_condense(condensed: Condensed, changed: Graph) -> Bools:
    """[R] of a graph of the same shape the ranks in which more has changed than how long transfers last.

    Args:
        condensed: another one.
        changed: the graph.
    """
    before, cut = condensed.whole, condensed.cut
    touched = (changed.nodes.duration != before.nodes.duration) & ~cut.free
    touched |= changed.nodes.earliest != before.nodes.earliest
    # Lags between ranks are edges of the joined graph as they are.
    relagged = changed.edges.lag != before.edges.lag
    relagged[cut.between] = False
    touched[changed.edges.target[relagged]] = True
    return np.isin(cut.ranks, changed.nodes.rank[touched])


def _shape(graph: Graph) -> tuple[Ints, ...]:
    return graph.edges.source, graph.edges.target, graph.nodes.rank, graph.nodes.window, graph.nodes.step


def _condensed(graph: Graph, cut: Cut, skeletons: Skeletons, asked: Bools | None) -> Condensed:
    joined, node = joined_graph(graph, cut, skeletons)
    return Condensed(joined, node, graph, cut, skeletons, asked)


def joined_graph(graph: Graph, cut: Cut, skeletons: Skeletons, scenario: int = 0) -> tuple[Graph, Ints]:
    """The skeletons as one graph, and [M] the node of the whole graph that each of its nodes is, or -1.

    Args:
        graph: the whole graph.
        cut: where it falls apart into ranks.
        skeletons: of its ranks.
        scenario: of those that they hold; the graphs of all have the same edges.
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
        between: edges between ranks.
        size: how many nodes there are.
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
