"""Editor of graphs: removes, inserts and links nodes, and numbers them again.

Takes a graph; returns another one, validated like any. The edits decide what to change.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.limits import refuse_large_graph
from dpro.replay.engine import by_target, longest_path, topological_order
from dpro.replay.graph import EdgeKind, Edges, Graph, Nodes, assembled, make_graph
from dpro.replay.intervals import union

MANY = 1 << 20  # added nodes between checks of memory


class GraphEditor:
    """Changes to a graph, made all at once.

    Attributes:
        graph: the graph to change.
        gone: [N] mask of nodes to remove, with all their edges.
        cut: [E] mask of further edges to remove.
        duration: [N] ns, to be written to.
    """

    def __init__(self, graph: Graph) -> None:
        """Begin without changes."""
        self.graph = graph
        self.gone: Bools = np.zeros(graph.num_nodes, np.bool_)
        self.cut: Bools = np.zeros(graph.edges.source.size, np.bool_)
        self.duration: Ints = graph.nodes.duration.copy()
        self._templates: list[int] = []
        self._changed: dict[str, dict[int, Any]] = defaultdict(dict)
        self._changed_at_once: list[tuple[slice, dict[str, Any]]] = []
        self._edges: list[int] = []  # source, target, lag and kind of each, in sequence
        self._edges_at_once: list[Ints] = []  # [4, K] source, target, lag and kind
        self._inserted: list[int] = []  # node of the thread and inserted node, in turn

    def add(self, template: int, **changed: Any) -> int:
        """Add a copy of a node, with some columns changed.

        Args:
            changed: columns of `Nodes` with other values; `earliest` is 0 and `anchored` False unless given.

        Returns:
            Its number, for edges of this editor.
        """
        row = len(self._templates)
        if row and not row % MANY:
            refuse_large_graph(self.graph.num_nodes + 2 * row)  # as many again may follow
        self._templates.append(template)
        for name, value in {"earliest": 0, "anchored": False, **changed}.items():
            self._changed[name][row] = value
        return self.graph.num_nodes + row

    def add_all(self, templates: Ints, **changed: Ints | int) -> Ints:
        """Add nodes, each as `add` does.

        Args:
            templates: [K] the nodes to copy.
            changed: [K] columns of `Nodes` with other values, or one value for all.

        Returns:
            [K] their numbers.
        """
        first = len(self._templates)
        self._templates += templates.tolist()
        nothing = np.zeros(templates.size, np.int64)
        rows = slice(first, len(self._templates))
        self._changed_at_once.append((rows, {"earliest": nothing, "anchored": nothing, **changed}))
        return self.graph.num_nodes + np.arange(rows.start, rows.stop)

    def link(self, source: int, target: int, kind: EdgeKind, lag: int = 0) -> None:
        """Add an edge.

        Args:
            lag: ns between the end of the source and the start of the target.
        """
        self._edges += (source, target, lag, kind)

    def link_all(self, sources: Ints, targets: Ints, kinds: Ints | EdgeKind, lags: Ints | int = 0) -> None:
        """Add edges, each as `link` does.

        Args:
            sources, targets: [K] numbers of nodes, old or added.
            kinds: [K] why the targets wait, or one for all.
            lags: [K] ns between the ends of the sources and the starts of the targets, or one for all.
        """
        edges = np.empty((4, sources.size), np.int64)
        edges[0], edges[1], edges[2], edges[3] = sources, targets, lags, kinds
        self._edges_at_once.append(edges)

    def insert(self, after: int, template: int = -1, **changed: Any) -> int:
        """Insert a node into the sequence of a thread, after a node and what was inserted there before.

        Args:
            template: the node to copy; by default `after`.
            changed: columns of `Nodes` with other values.

        Returns:
            Its number, for edges of this editor.
        """
        node = self.add(after if template < 0 else template, **changed)
        self._inserted += (after, node)
        return node

    def insert_all(self, after: Ints, **changed: Ints | int) -> Ints:
        """Insert nodes into the sequences of threads, each as `insert` does.

        Args:
            after: [K] nodes of threads, which are copied.
            changed: [K] columns of `Nodes` with other values, or one value for all.

        Returns:
            [K] their numbers.
        """
        nodes = self.add_all(after, **changed)
        self._inserted += np.stack([after, nodes], axis=1).ravel().tolist()
        return nodes

    def wait(self, after: int, awaited: int) -> None:
        """Make the successors of a node on its thread wait for another node."""
        source, target = self._on_threads
        first, last = np.searchsorted(source, (after, after + 1))
        for follows in target[first:last].tolist():
            self.link(awaited, follows, EdgeKind.SYNC)

    @cached_property
    def _on_threads(self) -> tuple[Ints, Ints]:
        """Edges of threads sorted by source: sources and targets."""
        edges = self.graph.edges
        on_thread = np.flatnonzero(edges.kind == EdgeKind.THREAD)
        on_thread = on_thread[np.argsort(edges.source[on_thread], kind="stable")]
        return edges.source[on_thread], edges.target[on_thread]

    def finish(self) -> Graph:
        """Return the changed graph.

        Raises:
            GraphError: the changes contradict each other (a cycle).
        """
        self._thread_through()
        graph, edges = self.graph, self.graph.edges
        one_by_one = np.array(self._edges, np.int64).reshape(-1, 4).T
        added = np.concatenate([one_by_one, *self._edges_at_once], axis=1)
        stays = ~(self.cut | self.gone[edges.source] | self.gone[edges.target])
        source = np.append(edges.source[stays], added[0])
        target = np.append(edges.target[stays], added[1])
        order = self._order(added)
        place = np.empty(graph.num_nodes + len(self._templates), np.int64)
        place[order] = np.arange(order.size)
        order = _mended(order, place[source], place[target])
        place[order] = np.arange(order.size)
        joined = Edges(
            source=place[source],
            target=place[target],
            lag=np.append(edges.lag[stays], added[2]),
            kind=np.append(edges.kind[stays], added[3]),
            inferred=np.append(edges.inferred[stays], np.ones(added.shape[1], np.bool_)),
        )
        # All edges go forward now, except those of a cycle, which `make_graph` describes.
        make = assembled if (joined.source < joined.target).all() else make_graph
        nodes = self._nodes(order, place[graph.num_nodes :])
        return make(nodes, joined, graph.names, graph.lanes, graph.origin_ns).with_job_of(graph)

    def _order(self, added: Ints) -> Ints:
        """Return [N'] the nodes of the new graph: old ones in their order, new ones after what they wait for.

        Sorting all nodes again would take as long as everything else here. In this order most edges go
        forward: all but those of old nodes that now wait for nodes numbered after them.

        Args:
            added: [4, K] columns of the added edges.
        """
        num_old, num_new = self.graph.num_nodes, len(self._templates)
        source, target = added[:2, added[1] >= num_old]
        behind = np.full(num_new, -1)  # the old node after which each comes
        old = source < num_old
        np.maximum.at(behind, target[old] - num_old, source[old])
        source, target = source[~old] - num_old, target[~old] - num_old
        among, _ = topological_order(num_new, source, target, np.arange(num_new))
        kept = np.flatnonzero(~self.gone)
        if among.size < num_new:  # a cycle
            return np.append(kept, num_old + np.arange(num_new))
        place = np.empty(num_new, np.int64)
        place[among] = np.arange(num_new)
        indptr, edge = by_target(place[source], place[target], num_new)
        nothing = np.zeros(num_new, np.int64)
        lags = np.zeros(edge.size, np.int64)
        behind, _, _ = longest_path(nothing, behind[among], indptr, place[source][edge], lags)
        turn = np.argsort(behind, kind="stable")
        return np.insert(kept, np.searchsorted(kept, behind[turn], "right"), num_old + among[turn])

    def _thread_through(self) -> None:
        """Link inserted nodes into their threads, between their node and its successor."""
        edges = self.graph.edges
        after, node = np.array(self._inserted, np.int64).reshape(-1, 2).T
        turn = np.argsort(after, kind="stable")
        after, node = after[turn], node[turn]
        is_first = np.diff(after, prepend=-1) != 0
        is_last = np.append(is_first[1:], True)[: after.size]
        self.link_all(np.where(is_first, after, np.roll(node, 1)), node, EdgeKind.THREAD)
        follows = np.full(self.graph.num_nodes, -1)
        follows[after] = -2
        edge = np.flatnonzero((follows[edges.source] < -1) & (edges.kind == EdgeKind.THREAD))
        follows[edges.source[edge]] = edge
        edge = follows[after[is_last]]
        last, edge = node[is_last][edge >= 0], edge[edge >= 0]
        self.cut[edge] = True
        self.link_all(last, edges.target[edge], EdgeKind.THREAD, edges.lag[edge])

    def _nodes(self, order: Ints, places: Ints) -> Nodes:
        """Return the nodes in an order.

        Args:
            order: [N'] numbers of nodes, old or added.
            places: [K] positions of the added ones in `order`.
        """
        like = order.copy()
        like[places] = self._templates
        columns: dict[str, Any] = {}
        for f in dataclasses.fields(Nodes):
            as_is = self.duration if f.name == "duration" else getattr(self.graph.nodes, f.name)
            column = columns[f.name] = as_is[like]
            for rows, changed in self._changed_at_once:
                if f.name in changed:
                    column[places[rows]] = changed[f.name]
            one_by_one = self._changed[f.name]
            column[places[list(one_by_one)]] = list(one_by_one.values())
        return Nodes(**columns)


def _mended(order: Ints, source: Ints, target: Ints) -> Ints:
    """Repair an order in which most edges go forward, so that all do; return it as it is if there is a cycle.

    Nodes between the ends of an edge that goes backwards are sorted again, overlapping stretches together.
    All others keep their positions, so that their edges still go forward.

    Args:
        order: [N] nodes.
        source, target: [E] positions in the order.
    """
    late = np.flatnonzero(source >= target)
    if not late.size:
        return order
    stretches = union(target[late], source[late] + 1)
    places = np.concatenate([np.arange(*ends_of) for ends_of in stretches.tolist()])
    stretch = np.repeat(np.arange(len(stretches)), stretches[:, 1] - stretches[:, 0])
    inside = np.zeros(order.size, np.bool_)
    inside[places] = True
    within = np.flatnonzero(inside[source] & inside[target])
    first, second = (np.searchsorted(places, end[within]) for end in (source, target))
    turn, stuck = topological_order(places.size, first, second, np.arange(places.size))
    if stuck.size:
        return order
    turn = turn[np.argsort(stretch[turn], kind="stable")]
    mended = order.copy()
    mended[places] = order[places[turn]]
    return mended
