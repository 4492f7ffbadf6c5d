"""Edits a graph: nodes are removed, inserted and linked, then numbered again.

In: a graph. Out: another one, validated like any. What to change is decided by the edits.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.replay.graph import EdgeKind, Edges, Graph, Nodes, make_graph


class GraphEditor:
    """Changes to a graph that are made all at once.

    Attributes:
        graph: what is changed.
        gone: [N] nodes to take out, with all their edges.
        cut: [E] further edges to take out.
        duration: [N] ns, to be written to.
    """

    def __init__(self, graph: Graph) -> None:
        """Begin with no changes.

        Args:
            graph: what to change.
        """
        self.graph = graph
        self.gone: Bools = np.zeros(graph.num_nodes, np.bool_)
        self.cut: Bools = np.zeros(graph.edges.source.size, np.bool_)
        self.duration: Ints = graph.nodes.duration.copy()
        self._templates: list[int] = []
        self._changed: dict[str, dict[int, Any]] = defaultdict(dict)
        self._edges: list[tuple[int, int, int, int]] = []
        self._inserted: dict[int, list[int]] = defaultdict(list)

    def add(self, template: int, **changed: Any) -> int:
        """Add a node that equals another one but for some columns.

        Args:
            template: the node to copy.
            changed: columns of `Nodes` with other values; `earliest` is 0 and `anchored` False unless given.

        Returns:
            Its number, for edges of this editor.
        """
        row = len(self._templates)
        self._templates.append(template)
        for name, value in {"earliest": 0, "anchored": False, **changed}.items():
            self._changed[name][row] = value
        return self.graph.num_nodes + row

    def add_all(self, templates: Ints, **changed: Ints) -> Ints:
        """Add nodes, each as `add` does.

        Args:
            templates: [K] the nodes to copy.
            changed: [K] columns of `Nodes` with other values.

        Returns:
            [K] their numbers.
        """
        rows = range(len(self._templates), len(self._templates) + templates.size)
        self._templates += templates.tolist()
        nothing = np.zeros(templates.size, np.int64)
        for name, values in {"earliest": nothing, "anchored": nothing != 0, **changed}.items():
            self._changed[name].update(zip(rows, values.tolist()))
        return self.graph.num_nodes + np.array(rows, np.int64)

    def link(self, source: int, target: int, kind: EdgeKind, lag: int = 0) -> None:
        """Add an edge.

        Args:
            source, target: numbers of nodes, old or added.
            kind: why the target waits.
            lag: ns between the end of the source and the start of the target.
        """
        self._edges.append((source, target, lag, kind))

    def link_all(self, sources: Ints, targets: Ints, kinds: Ints | EdgeKind, lags: Ints | int = 0) -> None:
        """Add edges, each as `link` does.

        Args:
            sources, targets: [K] numbers of nodes, old or added.
            kinds: [K] why the targets wait, or one for all.
            lags: [K] ns between the ends of the sources and the starts of the targets, or one for all.
        """
        columns = (np.broadcast_to(each, sources.shape).tolist() for each in (sources, targets, lags, kinds))
        self._edges += zip(*columns)

    def insert(self, after: int, template: int = -1, **changed: Any) -> int:
        """Put a node into the program of a thread, behind a node of it and what was inserted there before.

        Args:
            after: the node of the thread.
            template: the node to copy, the same where none is given.
            changed: columns of `Nodes` with other values.

        Returns:
            Its number, for edges of this editor.
        """
        node = self.add(after if template < 0 else template, **changed)
        self._inserted[after].append(node)
        return node

    def wait(self, after: int, awaited: int) -> None:
        """Have what follows a node on its thread wait for another node.

        Args:
            after: a node of a thread.
            awaited: any node, old or added.
        """
        source, target = self._on_threads
        first, last = np.searchsorted(source, (after, after + 1))
        for follows in target[first:last].tolist():
            self.link(awaited, follows, EdgeKind.SYNC)

    @cached_property
    def _on_threads(self) -> tuple[Ints, Ints]:
        """The edges of threads by where they come from: sources and targets."""
        edges = self.graph.edges
        on_thread = np.flatnonzero(edges.kind == EdgeKind.THREAD)
        on_thread = on_thread[np.argsort(edges.source[on_thread], kind="stable")]
        return edges.source[on_thread], edges.target[on_thread]

    def finish(self) -> Graph:
        """The changed graph.

        Raises:
            GraphError: the changes contradict each other (a cycle).
        """
        self._thread_through()
        graph, edges = self.graph, self.graph.edges
        kept = np.append(~self.gone, np.ones(len(self._templates), np.bool_))
        number = np.cumsum(kept) - 1
        added = np.array(self._edges, np.int64).reshape(-1, 4).T
        stays = ~(self.cut | self.gone[edges.source] | self.gone[edges.target])
        inferred = np.append(edges.inferred[stays], np.ones(added.shape[1], np.bool_))
        joined = Edges(
            source=number[np.append(edges.source[stays], added[0])],
            target=number[np.append(edges.target[stays], added[1])],
            lag=np.append(edges.lag[stays], added[2]),
            kind=np.append(edges.kind[stays], added[3]),
            inferred=inferred,
        )
        made = make_graph(self._nodes(kept), joined, graph.names, graph.lanes, graph.origin_ns)
        return made.of_same_job(graph)

    def _thread_through(self) -> None:
        """Make what was inserted part of the program: between its node and the one that followed."""
        edges = self.graph.edges
        on_thread = np.flatnonzero(edges.kind == EdgeKind.THREAD)
        follows = np.full(self.graph.num_nodes, -1)
        follows[edges.source[on_thread]] = on_thread
        after = np.array(list(self._inserted), np.int64)
        last = np.array([nodes[-1] for nodes in self._inserted.values()], np.int64)
        edge = follows[after]
        after, last, edge = after[edge >= 0], last[edge >= 0], edge[edge >= 0]
        self.cut[edge] = True
        self.link_all(last, edges.target[edge], EdgeKind.THREAD, edges.lag[edge])
        chains = ([after, *nodes] for after, nodes in self._inserted.items())
        self._edges += [(*pair, 0, EdgeKind.THREAD) for chain in chains for pair in pairwise(chain)]

    def _nodes(self, kept: Bools) -> Nodes:
        templates = np.array(self._templates, np.int64)
        columns = {}
        for f in dataclasses.fields(Nodes):
            own = self.duration if f.name == "duration" else getattr(self.graph.nodes, f.name)
            new = own[templates]
            new[list(self._changed[f.name])] = list(self._changed[f.name].values())
            columns[f.name] = np.append(own, new)[kept]
        return Nodes(**columns)
