"""Which operators of an execution trace depend on which.

In: nodes in the order in which they began. Out: pairs of places: caller and callee, and writer and reader of
a tensor. Tensors are distinguished by the ids that the observer gave them; that two tensors share a storage
(a write through a view) is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro.ingest.execution_trace.nodes import Node, index_of

Pairs = list[tuple[int, int]]
"""(place of the source, place of the target) in the sequence of nodes."""


def parents(nodes: Sequence[Node]) -> list[int]:
    """Place of each node's parent, -1 for none."""
    places = index_of(nodes)
    found = [places.get(node.parent, -1) for node in nodes]
    return [parent if parent != place else -1 for place, parent in enumerate(found)]


def called(nodes: Sequence[Node]) -> Pairs:
    """Each node with what called it."""
    return [(parent, place) for place, parent in enumerate(parents(nodes)) if parent >= 0]


def read_from(nodes: Sequence[Node]) -> Pairs:
    """Each node with those that wrote, last before it began, the tensors it reads.

    An operator and the ones it calls name the same tensors. A hand-over is recorded once, between the
    outermost operators that both name the tensor and are not inside each other.
    """
    parent_of = parents(nodes)
    writers = _Writers(nodes)
    sources: list[dict[int, int]] = []
    pairs: dict[tuple[int, int], None] = {}
    for place, node in enumerate(nodes):
        writers.begin(place, parent_of[place])
        found = {tensor: writers.last(tensor, node.thread) for tensor in node.reads}
        sources.append({tensor: source for tensor, source in found.items() if source >= 0})
        outer = sources[parent_of[place]] if 0 <= parent_of[place] < place else {}
        for tensor, source in sources[place].items():
            if outer.get(tensor) != source:
                pairs[source, place] = None
    return list(pairs)


class _Writers:
    """The last writer of each tensor, as nodes begin one after the other.

    A node writes when it ends. On its own thread it has ended when a node begins that it did not call; on
    other threads nothing shows that it has, but a new tensor must come from a node still open.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._ended: dict[int, int] = {}  # tensor -> place
        self._open: dict[int, list[int]] = {}  # thread -> places, outermost first

    def begin(self, place: int, parent: int) -> None:
        stack = self._open.setdefault(self._nodes[place].thread, [])
        while stack and stack[-1] != parent:
            ended = stack.pop()
            self._ended.update(dict.fromkeys(self._nodes[ended].writes, ended))
        stack.append(place)

    def last(self, tensor: int, thread: int) -> int:
        """Place of the last writer as seen from a thread, -1 for none; the outermost of those that nest."""
        best = self._ended.get(tensor, -1)
        for other, stack in self._open.items():
            writing = [place for place in stack if tensor in self._nodes[place].writes]
            if other == thread or not writing:
                continue
            # All that began on a thread after a node that is still open is inside it.
            inside = best > writing[0] and self._nodes[best].thread == other
            if inside or writing[-1] > best:
                best = writing[0]
        return best
