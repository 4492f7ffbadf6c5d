"""Where collectives stand in the order of their ranks' work: behind what, and before what waits for them.

In: a graph. Out: for each member of a collective the last work before it and the first that waits for it, on
one thread or stream. A collective for which nothing waits at once is not here: it overlaps already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpro.arrays import Ints
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.kept import kept

IN_BETWEEN = 0.1  # of a collective's time: more work between its call and the wait, and it overlaps already
FSDP = "FSDP::"  # ranges in which parameters are gathered, and gradients reduced


class Member(NamedTuple):
    """A rank's part in a collective that its own work waits for.

    Attributes:
        rank: whose.
        arrive, transfer: nodes.
        call: the node of a thread that launches it, -1 where none is known.
        before: the last work before it: of its stream, or its call.
        after: the first work that waits for it, on the same thread or stream.
        num_bytes: payload, -1 where unknown.
        message: which kind of communication.
    """

    rank: int
    arrive: int
    transfer: int
    call: int
    before: int
    after: int
    num_bytes: int
    message: int


class Order:
    """The nodes of each thread and stream, one after the other.

    Attributes:
        nodes: [K] of all lanes, lane by lane.
        place: [N] the position of each node in them; -1 of what is on no lane.
    """

    def __init__(self, graph: Graph) -> None:
        """Of a graph."""
        lane = graph.nodes.lane
        at = np.flatnonzero(lane >= 0)
        self.nodes: Ints = at[np.argsort(lane[at], kind="stable")]
        self.place: Ints = np.full(graph.num_nodes, -1)
        self.place[self.nodes] = np.arange(self.nodes.size)
        self._lane = lane
        self._until = np.append(0, np.cumsum(graph.nodes.duration[self.nodes]))

    def between_ns(self, first: int, last: int) -> int:
        """What the nodes between two of one lane take."""
        return int(self._until[self.place[last]] - self._until[self.place[first] + 1])

    def are_in_order(self, first: int, last: int) -> bool:
        """Whether two nodes are on one lane, and the last is the first or comes after it."""
        return bool(self._lane[first] == self._lane[last] and self.place[first] <= self.place[last])

    def within(self, first: int, last: int) -> list[int]:
        """The nodes from one to another, both included."""
        return [int(each) for each in self.nodes[self.place[first] : self.place[last] + 1]]

    def from_here(self, node: int, way: int) -> Iterator[int]:
        """A node, and those before or behind it on its lane.

        Args:
            node: where to begin.
            way: -1 or 1.
        """
        place = int(self.place[node])
        while 0 <= place < self.nodes.size and self._lane[self.nodes[place]] == self._lane[node]:
            yield int(self.nodes[place])
            place += way


def awaited_collectives(graph: Graph, order: Order) -> list[list[Member]]:
    """Collectives that the work of each of their recorded ranks waits for at once, in order of time.

    Gathers and reductions of FSDP, which no chunk of tokens needs less of, are left out.
    """
    nodes, edges = graph.nodes, graph.edges
    columns = (*nodes.columns, edges.source, edges.target, edges.kind, graph.names, graph.lanes)
    records = {"Member": Member}
    found = kept(graph, "awaited-collectives", columns, lambda: _awaited_collectives(graph, order), records)
    return [list(members) for members in found]


def _awaited_collectives(graph: Graph, order: Order) -> list[list[Member]]:
    nodes, edges = graph.nodes, graph.edges
    into = _by_node(edges.target, np.isin(nodes.kind[edges.target], (NodeKind.ARRIVE,)))
    out = _by_node(edges.source, nodes.kind[edges.source] == NodeKind.TRANSFER)
    arrives: dict[int, list[int]] = defaultdict(list)
    for arrive in np.flatnonzero((nodes.kind == NodeKind.ARRIVE) & (nodes.collective >= 0)).tolist():
        arrives[int(nodes.collective[arrive])].append(arrive)
    at = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    transfers = {(int(nodes.collective[each]), int(nodes.rank[each])): int(each) for each in at}
    found = []
    for collective, own in arrives.items():
        members = []
        for arrive in own:
            transfer = transfers.get((collective, int(nodes.rank[arrive])), -1)
            member = _member(graph, order, arrive, transfer, into[arrive], out[transfer])
            if member is not None:
                members.append(member)
        if members and len(members) == len(own):
            found.append(sorted(members))
    return sorted(found, key=lambda members: min(int(nodes.measured_start[each.arrive]) for each in members))


def _by_node(ends: Ints, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> dict[int, list[int]]:
    """Of each node the edges among the chosen that it ends."""
    found: dict[int, list[int]] = defaultdict(list)
    for edge in np.flatnonzero(chosen).tolist():
        found[int(ends[edge])].append(edge)
    return found


def _member(
    graph: Graph, order: Order, arrive: int, transfer: int, into: list[int], out: list[int]
) -> Member | None:
    """A rank's part, if its work waits for it at once; None if not."""
    nodes, edges = graph.nodes, graph.edges
    if transfer < 0:
        return None
    calls = [int(edges.source[edge]) for edge in into if edges.kind[edge] == EdgeKind.LAUNCH]
    call = calls[0] if calls else -1
    if call >= 0 and nodes.around[call] >= 0 and graph.names[nodes.around[call]].startswith(FSDP):
        return None
    on_stream = graph.lanes[int(nodes.lane[transfer])][1].startswith("stream")
    kinds = GPU_KINDS if on_stream else CPU_KINDS
    waits = (EdgeKind.EVENT, EdgeKind.STREAM) if on_stream else (EdgeKind.SYNC,)
    befores = [int(edges.source[edge]) for edge in into if edges.kind[edge] in waits] if on_stream else calls
    afters = [int(edges.target[edge]) for edge in out if edges.kind[edge] in waits]
    pairs = [
        (order.between_ns(before, after), before, after)
        for before in befores
        for after in afters
        if nodes.kind[before] in kinds
        and nodes.kind[after] in kinds
        and nodes.lane[before] == nodes.lane[after]
        and order.place[before] < order.place[after]
    ]
    between, before, after = min(pairs, default=(0, -1, -1))
    if before < 0 or between > IN_BETWEEN * nodes.duration[transfer]:
        return None
    rank, num_bytes = int(nodes.rank[arrive]), int(nodes.bytes[transfer])
    return Member(rank, arrive, transfer, call, before, after, num_bytes, int(nodes.message[transfer]))
