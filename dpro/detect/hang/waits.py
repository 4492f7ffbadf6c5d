"""The wait-for graph of ranks and operations, and where its chains end.

Takes unfinished operations; returns `Root`s. A rank waits for the operations that it has not finished; an
operation waits for the ranks that have not called it, or, if all have, for the operations that a member must
finish first. The root causes are the strongly connected components without an edge out: a single node is at
fault, several are a deadlock (Holt, "Some deadlock properties of computer systems", 1972).

Components are found here rather than by scipy: the search for hangs runs with the base installation, which
lacks scipy, and beside a running job.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dpro.detect.hang.operations import Operation

HOST, DEVICE, COMM, CYCLE, UNKNOWN = "host", "device", "comm", "cycle", "unknown"

MAX_STARTS = 200  # nodes of a component from which the shortest cycle is searched

RANK, OPERATION = "rank", "operation"
Node = tuple[str, int]
"""(`RANK`, rank), or (`OPERATION`, index in the list of operations)."""


@dataclass(frozen=True)
class Root:
    """The end of chains of waiting.

    Attributes:
        kind: a rank that did not call and waits for nothing (`HOST`); ranks that called and did not finish
            (`DEVICE`); an operation that no rank finishes (`COMM`); a deadlock of ranks (`CYCLE`); or ranks
            about which too little is known (`UNKNOWN`).
        ranks: those ranks.
        operations: operations that cannot finish because of it, most waiting ranks first.
    """

    kind: str
    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]

    @property
    def since_ns(self) -> int:
        """When the first of its operations began to wait, in ns; -1 unknown."""
        began_ns = (operation.since_ns for operation in self.operations)
        return min((time_ns for time_ns in began_ns if time_ns >= 0), default=-1)


@dataclass(frozen=True)
class WaitGraph:
    """The wait-for graph.

    Attributes:
        hard: what each node certainly waits for.
        soft: what it waits for if a send blocks the calls after it, which it seldom does.
        doubtful: operations that no rank is known to have missed, with the ranks that may have.
        held: operations that all ranks have called, with the ranks that are behind the others.
    """

    operations: Sequence[Operation]
    hard: dict[Node, list[Node]] = field(default_factory=lambda: defaultdict(list))
    soft: dict[Node, list[Node]] = field(default_factory=lambda: defaultdict(list))
    doubtful: dict[Node, frozenset[int]] = field(default_factory=dict)
    held: dict[Node, frozenset[int]] = field(default_factory=dict)

    def connect(self, node: Node, end: Node, *, soft: bool = False) -> None:
        """Add an edge, unless it exists."""
        ends = (self.soft if soft else self.hard)[node]
        if end not in ends:
            ends.append(end)

    def successors(self, node: Node) -> list[Node]:
        """Return the nodes that a node waits for."""
        return [*self.hard.get(node, ()), *self.soft.get(node, ())]

    @property
    def nodes(self) -> list[Node]:
        """All nodes, each once, in a stable order."""
        starts = [(OPERATION, number) for number in range(len(self.operations))]
        sources = dict.fromkeys([*starts, *self.hard, *self.soft])
        targets = (node for edges in (self.hard, self.soft) for ends in edges.values() for node in ends)
        return list(sources | dict.fromkeys(targets))


def build_waits(operations: Sequence[Operation]) -> WaitGraph:
    """Build the wait-for graph of unfinished operations."""
    waits = WaitGraph(operations)
    # The unfinished operations of each rank, as (order of its call, index in the list), oldest first.
    queues: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, operation in enumerate(operations):
        for rank, call in operation.unfinished.items():
            insort(queues[rank], (call.order, number))
    for number, operation in enumerate(operations):
        node = (OPERATION, number)
        for rank, call in operation.unfinished.items():
            waits.connect((RANK, rank), node, soft=call.op == "send")
        for rank in sorted(operation.absent):
            waits.connect(node, (RANK, rank))
        if operation.absent:
            continue
        if operation.unknown:
            waits.doubtful[node] = operation.unknown
        ahead = {rank: _queued_ahead(operation, rank, queues[rank]) for rank in sorted(operation.unfinished)}
        held = frozenset(rank for rank in _members_behind(operation) if not ahead[rank])
        if held and not operation.unknown:
            waits.held[node] = held
            continue
        for rank, others in ahead.items():
            for other in others:
                waits.connect(node, (OPERATION, other), soft=operations[other].unfinished[rank].op == "send")
    return waits


def _queued_ahead(operation: Operation, rank: int, queue: Iterable[tuple[int, int]]) -> list[int]:
    """Return the operations that a rank must finish first; none if the operation already runs there.

    Args:
        operation: one that the rank has called.
        queue: (order of its call, number) of the rank's unfinished operations.
    """
    call = operation.unfinished[rank]
    return [] if call.state == "started" else [number for order, number in queue if order < call.order]


def _members_behind(operation: Operation) -> set[int]:
    """Return members that called but are behind others, which finished the operation or run it.

    If some have finished, all others are behind; else, if some run it, those that have not started are.
    """
    if operation.finished:
        return set(operation.unfinished)
    waiting = {rank for rank, call in operation.unfinished.items() if call.state != "started"}
    return waiting if len(waiting) < len(operation.unfinished) else set()


def find_roots(waits: WaitGraph) -> list[Root]:
    """Return the roots of all chains of waiting, in a stable order."""
    roots = [
        root
        for component in sinks(waits.nodes, waits.successors)
        if len(component) > 1 or component[0] not in waits.doubtful
        for root in _roots_of(component, waits)
    ]
    return roots or _unknown_root(waits)


def _roots_of(component: Sequence[Node], waits: WaitGraph) -> Iterator[Root]:
    """Yield the root of a component without an edge out; several where only soft edges connect them.

    A send waits for its receiver, which may wait for the sender in another operation. That cycle is a
    deadlock only if no other cause is left without the soft edges.
    """
    if len(component) == 1:
        yield _root_of_node(component[0], waits)
        return
    inside = set(component)
    rest = sinks(component, lambda node: [end for end in waits.hard.get(node, ()) if end in inside])
    cycles = [part for part in rest if len(part) > 1]
    ends = [part[0] for part in rest if len(part) == 1]
    causes = [node for node in ends if not _is_sender(node, waits)] or ends[: len(ends) == 1]
    if cycles or not causes:
        yield from (_root_of_deadlock(cycle, waits) for cycle in cycles or [list(component)])
    else:
        yield from (_root_of_node(node, waits) for node in causes)


def _is_sender(node: Node, waits: WaitGraph) -> bool:
    """Return whether a node is a rank that waits in a send, or is such a send."""
    kind, number = node
    if kind == RANK:
        return bool(waits.soft.get(node))
    operation = waits.operations[number]
    return operation.op == "send"


def _root_of_node(node: Node, waits: WaitGraph) -> Root:
    """Return a single node as a root.

    Majority rule: where at most half of an operation's members are behind the others, their devices are at
    fault; where more are, the operation itself.
    """
    kind, number = node
    if kind == RANK:
        waiting = [operation for operation in waits.operations if number in operation.absent]
        waiting.sort(key=lambda operation: (-len(operation.unfinished), operation.since_ns))
        return Root(HOST, (number,), tuple(waiting))
    operation = waits.operations[number]
    held = waits.held.get(node)
    if held and 2 * len(held) <= len(operation.members):
        return Root(DEVICE, tuple(sorted(held)), (operation,))
    return Root(COMM, operation.members, (operation,))


def _root_of_deadlock(component: Sequence[Node], waits: WaitGraph) -> Root:
    """Return the shortest cycle of a component as a deadlock, for which its other nodes wait."""
    cycle = min((_cycle_from(node, component, waits) for node in component[:MAX_STARTS]), key=len)
    operations = [waits.operations[number] for kind, number in cycle if kind == OPERATION]
    ranks = {number for kind, number in cycle if kind == RANK}
    for (kind, number), (next_kind, next_number) in pairwise([*cycle, cycle[0]]):
        if kind == next_kind == OPERATION:  # ranks in both link them: one is queued behind the other there
            later, earlier = waits.operations[number], waits.operations[next_number]
            ranks |= set(later.unfinished) & set(earlier.unfinished)
    return Root(CYCLE, tuple(sorted(ranks)), tuple(operations))


def _cycle_from(start: Node, component: Sequence[Node], waits: WaitGraph) -> list[Node]:
    """Return the shortest cycle through a node of a component, by breadth-first search."""
    inside = set(component)
    came: dict[Node, Node] = {}
    todo = [start]
    for node in todo:
        for end in waits.successors(node):
            if end == start:
                way = [node]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if end in inside and end not in came:
                came[end] = node
                todo.append(end)
    return list(component)


def _unknown_root(waits: WaitGraph) -> list[Root]:
    """Return at most one root: ranks about which too little is known; without other causes, one is at fault.

    Ranks that would each explain all waiting are preferred to those that explain only a part.
    """
    ends = [component[0] for component in sinks(waits.nodes, waits.successors)]
    suspects = {node: waits.doubtful[node] for node in ends if node in waits.doubtful}
    if not suspects:
        return []
    ranks = frozenset.intersection(*suspects.values()) or frozenset().union(*suspects.values())
    return [Root(UNKNOWN, tuple(sorted(ranks)), tuple(waits.operations[number] for _, number in suspects))]


def lead_to(waits: WaitGraph, roots: Sequence[Root]) -> dict[Node, int]:
    """Return all nodes that wait for one of the roots, directly or not, with their distance in edges.

    Args:
        roots: some of the graph's roots; their own nodes have distance 0.

    Returns:
        Node -> distance, nearest first.
    """
    backward: dict[Node, list[Node]] = defaultdict(list)
    for node in waits.nodes:
        for end in waits.successors(node):
            backward[end].append(node)
    places = {id(operation): number for number, operation in enumerate(waits.operations)}
    todo: list[Node] = []
    for root in roots:
        if root.kind in (HOST, CYCLE):
            todo += [(RANK, rank) for rank in root.ranks]
        if root.kind != HOST:  # operations that wait for a host have an edge to its rank
            todo += [(OPERATION, places[id(operation)]) for operation in root.operations]
    distance = dict.fromkeys(todo, 0)
    for end in todo:
        for node in backward[end]:
            if node not in distance:
                distance[node] = distance[end] + 1
                todo.append(node)
    return distance


def victims_of(root: Root, waits: WaitGraph) -> list[int]:
    """Return the ranks that a root blocks, without the root's own."""
    reached = {number for kind, number in lead_to(waits, [root]) if kind == RANK}
    return sorted(reached - set(root.ranks))


def chain_from(rank: int, root: Root, waits: WaitGraph) -> list[tuple[int, Operation]]:
    """Return the shortest chain of waiting from a rank to a root; empty if there is none.

    Returns:
        Pairs of a rank and the operation it waits in; the operation of the last pair waits for the root.
    """
    ends = {id(operation) for operation in root.operations}
    came: dict[Node, Node] = {}
    todo: list[Node] = [(RANK, rank)]
    for node in todo:
        if node[0] == OPERATION and id(waits.operations[node[1]]) in ends:
            chain: list[tuple[int, Operation]] = []
            while node in came:
                before = came[node]
                if node[0] == OPERATION and before[0] == RANK:
                    chain.append((before[1], waits.operations[node[1]]))
                elif node[0] == OPERATION:  # queued behind another operation, on a rank in both
                    earlier, later = waits.operations[node[1]], waits.operations[before[1]]
                    shared = sorted(set(earlier.unfinished) & set(later.unfinished))
                    chain.append((shared[0] if shared else -1, earlier))
                node = before
            return chain[::-1]
        for end in waits.successors(node):
            if end not in came and end != todo[0]:
                came[end] = node
                todo.append(end)
    return []


def sinks(nodes: Sequence[Node], successors: Callable[[Node], Sequence[Node]]) -> list[list[Node]]:
    """Return the strongly connected components without an edge out, each in the order of the nodes.

    Source: Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    number: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    component: dict[Node, int] = {}
    stack: list[Node] = []
    components = 0
    for start in nodes:
        todo = [] if start in number else [(start, iter(successors(start)))]
        if todo:
            number[start] = lowest[start] = len(number)
            stack.append(start)
        while todo:
            node, ends = todo[-1]
            for end in ends:
                if end not in number:
                    number[end] = lowest[end] = len(number)
                    stack.append(end)
                    todo.append((end, iter(successors(end))))
                    break
                if end not in component:
                    lowest[node] = min(lowest[node], number[end])
            else:
                todo.pop()
                if todo:
                    lowest[todo[-1][0]] = min(lowest[todo[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    while node not in component:
                        component[stack.pop()] = components
                    components += 1
    left = {
        component[node] for node in number for end in successors(node) if component[end] != component[node]
    }
    sinks_of: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        if component[node] not in left:
            sinks_of[component[node]].append(node)
    return list(sinks_of.values())
