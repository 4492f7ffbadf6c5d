"""Gradients that are needed first go first: in pieces, by the order of the next forward pass.

In: a DDP job. Out: its graph with gradients cut into pieces, moved in order of priority, and awaited by the
layer that uses them instead of by the whole next step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.costs import untold
from dpro.replay.forwards import first_uses
from dpro.replay.gradients import MB
from dpro.replay.graph import EdgeKind, Graph
from dpro.replay.whatif.bucket import buckets, closing
from dpro.replay.whatif.edit import MOST_TIMES, Edit, key
from dpro.replay.whatif.reduction import Reduced, Reduction, next_of_rank, on_stream, reduced, with_reductions

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Priority(Edit):
    """Reductions in pieces, of which that for the first layer of the next step goes first."""

    name = "priority"
    summary = "gradients in pieces, those first that the next forward pass needs first"
    example = "priority:mb=4"
    needs = "what bucket needs, and sequence numbers of autograd, as torch.profiler and dpro record"
    assumes = (
        "each parameter is updated once its gradient is there, which takes what it does now, a piece that is "
        "on its way is not interrupted, and a piece costs a call"
    )
    source = (
        "ByteScheduler (Peng et al., SOSP 2019) and P3 (Jayarajan et al., MLSys 2019): priority by layer, no "
        "barrier between steps; gradients cut as in dPRO (Hu et al., MLSys 2022)"
    )
    mb: float = key("size of a piece, 2**20 bytes", least=1 / MOST_TIMES)
    doubt: float = 0.3

    def apply(self, graph: Graph) -> Graph:
        """Order the pieces as a link would that always takes the one needed first of those that are ready."""
        known = reduced(graph)
        uses = first_uses(graph, known.passes, on_stream(known))
        following = next_of_rank(known)
        if all(after < 0 for after in following):
            raise Unanswerable(
                "no two steps follow each other in a window: when gradients are needed is not seen"
            )
        kind = EdgeKind.EVENT if on_stream(known) else EdgeKind.SYNC
        pieces = cut(known, round(self.mb * MB))
        order = _orders(known, pieces, uses)
        wanted = []
        for which, after in enumerate(following):
            needed = [
                ()
                if after < 0
                else tuple((int(node), kind) for node in np.unique(uses[after][each.first : each.last + 1]))
                for each in pieces
            ]
            wanted.append([replace(pieces[piece], needed=needed[piece]) for piece in order[which]])
        return with_reductions(known, wanted)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """What latency is not known of."""
        return untold(graph)

    def describe(self) -> str:
        """What is changed."""
        return f"gradients in pieces of {self.mb:g} MB, those first that are needed first"

    def how(self) -> str:
        """How to do it."""
        return (
            "BytePS (BYTEPS_PARTITION_BYTES), and an optimizer that updates a parameter when its layer runs"
        )


def cut(known: Reduced, size: int) -> list[Reduction]:
    """Reductions of one size: small gradients together, large ones in pieces of even size."""
    found = []
    for each in buckets(known, closing(known.parameters.num_bytes, size, size)):
        count = max(round(each.num_bytes / max(size, 1)), 1) if each.first == each.last else 1
        found += [
            replace(each, num_bytes=max(each.num_bytes // count, 1), moving_ns=each.moving_ns / count)
        ] * count
    return found


def _orders(known: Reduced, pieces: list[Reduction], uses: list[Ints]) -> list[list[int]]:
    """For each pass its pieces in the order in which they move, alike on all ranks of a pass."""
    timeline = known.timeline
    start = known.graph.nodes.measured_start
    last = np.array([each.last for each in pieces])
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    numbers: dict[tuple[int, int], int] = defaultdict(int)
    for which, each in enumerate(known.passes):
        place = (each.rank, each.window)
        together[each.window, numbers[place]].append(which)
        numbers[place] += 1
    orders: list[list[int]] = [[]] * len(known.passes)
    takes = np.array([each.moving_ns + each.fixed_ns for each in pieces])
    for members in together.values():
        ready = np.max([timeline.end[known.passes[which].ready][last] for which in members], axis=0)
        used = start[uses[members[0]]]
        urgency = np.array([used[each.first : each.last + 1].min() for each in pieces])
        order = by_priority(ready, urgency, takes)
        for which in members:
            orders[which] = order
    return orders


def by_priority(ready: Ints, urgency: Ints, takes: NDArray[np.float64]) -> list[int]:
    """The order in which a link moves pieces if it always takes the most urgent of those that are ready.

    Args:
        ready: [C] ns from which each can be moved.
        urgency: [C] smaller is more urgent; of equals the one that is listed first.
        takes: [C] ns.
    """
    coming = sorted(range(ready.size), key=lambda piece: (int(ready[piece]), piece))
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, float(ready[coming[0]]))
        while coming and ready[coming[0]] <= now:
            piece = coming.pop(0)
            heappush(waiting, (int(urgency[piece]), piece))
        _, piece = heappop(waiting)
        order.append(piece)
        now += float(takes[piece])
    return order
