"""The skeletons of all ranks as one graph, joined where ranks wait for each other.

In: a graph. Out: a `Condensed`, whose graph has the same kept nodes, step ends and beginnings of windows to
the nanosecond: what asks a timeline for steps asks one of this graph. Of a changed graph only those ranks are
condensed again in which more has changed than how long transfers last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.condense.parts import Cut, Part, cut_by_rank, part_of
from dpro.replay.condense.skeletons import skeleton_of
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled, renumbered


@dataclass(frozen=True)
class Condensed:
    """A graph and its skeleton.

    Attributes:
        graph: the skeletons of all ranks, joined.
        node: [M] the node of the whole graph that each of its nodes is; -1 of the virtual end of a step.
        whole: the whole graph.
        cut: where it falls apart into ranks.
        skeletons: of each rank.
        asked: [N] nodes that were asked for.
    """

    graph: Graph
    node: Ints
    whole: Graph
    cut: Cut
    skeletons: tuple[Part, ...]
    asked: Bools | None = None


def condense(graph: Graph, asked: Bools | None = None) -> Condensed:
    """Condense a graph rank by rank.

    Args:
        graph: the graph.
        asked: [N] further nodes whose starts are wanted.
    """
    cut = cut_by_rank(graph)
    skeletons = [skeleton_of(part_of(graph, cut, number, asked)) for number in range(cut.ranks.size)]
    return _condensed(graph, cut, skeletons, asked)


def recondense(condensed: Condensed, changed: Graph) -> Condensed:
    """Condense a graph of which another one that differs from it a little has been condensed.

    Args:
        condensed: the other.
        changed: the same graph with other durations, earliest times or lags; with other edges or nodes it is
            condensed as a whole.
    """
    before, cut = condensed.whole, condensed.cut
    if not all(map(np.array_equal, _shape(before), _shape(changed))):
        return condense(changed, condensed.asked if changed.num_nodes == before.num_nodes else None)
    touched = (changed.nodes.duration != before.nodes.duration) & ~cut.free
    touched |= changed.nodes.earliest != before.nodes.earliest
    # Lags between ranks are edges of the joined graph as they are.
    relagged = changed.edges.lag != before.edges.lag
    relagged[cut.between] = False
    touched[changed.edges.target[relagged]] = True
    anew = np.isin(cut.ranks, changed.nodes.rank[touched])
    skeletons = [
        skeleton_of(part_of(changed, cut, number, condensed.asked))
        if anew[number]
        else dataclasses.replace(skeleton, duration=_durations(changed, skeleton))
        for number, skeleton in enumerate(condensed.skeletons)
    ]
    return _condensed(changed, cut, skeletons, condensed.asked)


def _shape(graph: Graph) -> tuple[Ints, ...]:
    return graph.edges.source, graph.edges.target, graph.nodes.rank, graph.nodes.window, graph.nodes.step


def _durations(graph: Graph, skeleton: Part) -> Ints:
    """[M, 1] ns that the nodes of a skeleton last in a graph."""
    return np.where(skeleton.node >= 0, graph.nodes.duration[skeleton.node], 0)[:, None]


def _condensed(graph: Graph, cut: Cut, skeletons: Sequence[Part], asked: Bools | None) -> Condensed:
    joined, node = joined_graph(graph, cut, skeletons)
    return Condensed(joined, node, graph, cut, tuple(skeletons), asked)


def joined_graph(graph: Graph, cut: Cut, skeletons: Sequence[Part], scenario: int = 0) -> tuple[Graph, Ints]:
    """The skeletons as one graph, and [M] the node of the whole graph that each of its nodes is, or -1.

    Args:
        graph: the whole graph.
        cut: where it falls apart into ranks.
        skeletons: of each rank.
        scenario: of those that they hold; the graphs of all have the same edges.
    """
    node = np.concatenate([skeleton.node for skeleton in skeletons])
    first = np.cumsum([0, *(skeleton.node.size for skeleton in skeletons)])
    place = np.full(graph.num_nodes, -1, np.int64)
    place[node[node >= 0]] = np.flatnonzero(node >= 0)
    between = Edges(**{f.name: getattr(graph.edges, f.name)[cut.between] for f in dataclasses.fields(Edges)})
    between = dataclasses.replace(between, source=place[between.source], target=place[between.target])
    source = np.concatenate([skeleton.source + shift for skeleton, shift in zip(skeletons, first)])
    entering = np.concatenate([np.diff(skeleton.indptr) for skeleton in skeletons])
    target = np.repeat(np.arange(node.size), entering)
    lag = np.concatenate([skeleton.lag for skeleton in skeletons])
    paths = paths_beside(source, target, lag, between, node.size)
    kept = Edges(
        source[paths], target[paths], lag[paths, scenario],
        np.full(paths.size, EdgeKind.PATH, np.int64), np.zeros(paths.size, np.bool_),
    )  # fmt: skip
    edges = Edges(
        **{
            f.name: np.concatenate([getattr(kept, f.name), getattr(between, f.name)])
            for f in dataclasses.fields(Edges)
        }
    )
    # The numbers of the whole graph are in topological order; virtual ends are behind everything.
    order = np.argsort(np.where(node >= 0, node, graph.num_nodes), kind="stable")
    nodes = _columns(graph, cut, skeletons, node, scenario)
    ordered = Nodes(**{f.name: getattr(nodes, f.name)[order] for f in dataclasses.fields(Nodes)})
    joined = assembled(ordered, renumbered(edges, order), graph.names, graph.lanes, graph.origin_ns)
    return joined.of_same_job(graph), node[order]


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


def _columns(graph: Graph, cut: Cut, skeletons: Sequence[Part], node: Ints, scenario: int) -> Nodes:
    """The columns of the joined nodes: those of the whole graph, and of virtual ends their step's."""
    columns = {f.name: getattr(graph.nodes, f.name)[node] for f in dataclasses.fields(Nodes)}
    end = node < 0
    ends = np.concatenate([skeleton.ends for skeleton in skeletons]).reshape(-1, 2)
    own = {"kind": NodeKind.END, "duration": 0, "anchored": False, "measured_start": 0, "measured_end": 0}
    own |= dict.fromkeys(("around", "span", "collective", "bytes", "message", "phase", "lane"), -1)
    own["name"] = 0
    for name, value in own.items():
        columns[name][end] = value
    columns["rank"][end] = np.repeat(cut.ranks, [len(skeleton.ends) for skeleton in skeletons])
    columns["window"][end], columns["step"][end] = ends.T
    for name in ("duration", "earliest"):
        columns[name] = np.concatenate([getattr(skeleton, name)[:, scenario] for skeleton in skeletons])
    return Nodes(**columns)
