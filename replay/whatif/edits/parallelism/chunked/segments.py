"""Segments of work and collectives that depend on each other: a matmul and its collective, or experts.

In: a graph, and the collectives that its work waits for. Out: segments, each the stages of every rank that
takes part: nodes of work, or a rank's part in a collective. What is made of them is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from dpro.arrays import Bools
from dpro.replay.graph import Graph
from dpro.replay.whatif.edits.parallelism.chunked.places import Member, Order

BESIDES = 0.1  # of a matmul's time: more other work between it and the collective, and they are not a pair
MAX_AWAY = 64  # nodes between them
ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"
ENGINE, BACKWARD = "autograd::engine", "Backward"
NEAR = 8  # nodes before a call that show which pass it belongs to
SAME_BYTES = 0.1  # of the bytes that tokens are on their way out: so much more or fewer may come back


class WorkStage(NamedTuple):
    """A stage of work.

    Attributes:
        nodes: of one thread or stream, in order.
        besides_ns: what lies between it and its collective, which a thread does again for each chunk.
    """

    nodes: tuple[int, ...]
    besides_ns: int = 0


Stage = WorkStage | Member


class Segment(NamedTuple):
    """Stages that depend on each other, of each rank that takes part: all have stages of the same sorts."""

    ranks: tuple[tuple[Stage, ...], ...]


def pairs_of(graph: Graph, order: Order, awaited: Sequence[list[Member]], work: Bools) -> list[Segment]:
    """Each collective with the work that it drains or feeds, where all its ranks have such.

    Where it could do either, an all-gather feeds and all others drain; work is in one pair only.

    Args:
        work: [N] what may be cut.
    """
    ns = graph.nodes.duration.tolist()
    taken: set[int] = set()
    found = []
    for members in awaited:
        feeds = graph.messages[members[0].message].op == ALL_GATHER
        for way in (1, -1) if feeds else (-1, 1):
            begins = [each.before if way < 0 else each.after for each in members]
            near = [_nearest(order, begin, way, work, ns) for begin in begins]
            if all(node >= 0 and node not in taken for node in near):
                taken.update(near)
                ends = [sorted(pair, key=order.place.__getitem__) for pair in zip(begins, near)]
                cut = [
                    WorkStage((node,), order.between_ns(first, last) if first != last else 0)
                    for node, (first, last) in zip(near, ends)
                ]
                found.append(Segment(tuple(zip(cut, members) if way < 0 else zip(members, cut))))
                break
    return found


def _nearest(order: Order, begin: int, way: int, work: Bools, ns: Sequence[int]) -> int:
    """The next work on a lane with little else before it; -1 where there is none."""
    besides = 0
    for away, node in enumerate(order.from_here(begin, way)):
        if work[node] and besides <= BESIDES * ns[node]:
            return node
        besides += ns[node]
        if away > MAX_AWAY:
            break
    return -1


def experts_of(graph: Graph, order: Order, awaited: Sequence[list[Member]]) -> list[Segment]:
    """Exchanges of tokens, what their experts do, and the exchanges back, with what ranks gather in between.

    An all-to-all takes tokens back if it is the next one in the group of one before it, and of its bytes.
    """
    found: list[Segment] = []
    open_: dict[tuple[str, tuple[int, ...]], int] = {}
    for at, members in enumerate(awaited):
        message = graph.messages[members[0].message]
        if message.op != ALL_TO_ALL:
            continue
        place = (message.group, tuple(each.rank for each in members))
        out = open_.pop(place, -1)
        made = None if out < 0 else _segment(graph, order, awaited[out : at + 1])
        if made is None:
            open_[place] = at
        else:
            found.append(made)
    return found


def _segment(graph: Graph, order: Order, collectives: Sequence[list[Member]]) -> Segment | None:
    """From an all-to-all to the one that takes its tokens back; None if these do not belong together."""
    out, back = collectives[0], collectives[-1]
    between = [each for each in collectives[1:-1] if {one.rank for one in each} >= {one.rank for one in out}]
    ranks = []
    for one, other in zip(out, back):
        if abs(one.num_bytes - other.num_bytes) > SAME_BYTES * max(one.num_bytes, 1):
            return None
        if not order.are_in_order(one.after, other.before) or _turns_back(graph, order, one, other):
            return None
        if graph.nodes.step[one.transfer] != graph.nodes.step[other.transfer]:
            return None
        inner = [member for each in between for member in each if member.rank == one.rank]
        ranks.append(_stages(order, [one, *_nested(order, one, other, inner), other]))
    kinds = {tuple(type(stage) for stage in stages) for stages in ranks}
    return Segment(tuple(ranks)) if len(kinds) == 1 and WorkStage in next(iter(kinds)) else None


def _turns_back(graph: Graph, order: Order, one: Member, other: Member) -> bool:
    """Whether a call belongs to a forward and one to a backward pass: gradients come back, not tokens."""
    if one.call < 0 or other.call < 0:
        return False
    if graph.nodes.lane[one.call] != graph.nodes.lane[other.call]:
        return True

    def is_backward(node: int) -> bool:
        name = graph.names[graph.nodes.name[node]]
        same_step = graph.nodes.step[node] == graph.nodes.step[one.call]
        return bool(same_step) and (name.startswith(ENGINE) or BACKWARD in name)

    before = islice(order.from_here(one.call, -1), NEAR)
    return any(map(is_backward, order.within(one.call, other.call))) and not any(map(is_backward, before))


def _nested(order: Order, one: Member, other: Member, inner: Iterable[Member]) -> list[Member]:
    """Collectives between two on the lane of the work between these."""
    first, last = order.place[one.after], order.place[other.before]
    return [each for each in inner if first <= order.place[each.before] < order.place[each.after] <= last]


def _stages(order: Order, members: Sequence[Member]) -> tuple[Stage, ...]:
    """Collectives of a rank in order, and the work between each and the next."""
    stages: list[Stage] = [members[0]]
    for one, other in pairwise(members):
        last = other.before if other.before != other.call else _in_front_of(order, other.before)
        if order.place[one.after] <= order.place[last]:
            stages.append(WorkStage(tuple(order.within(one.after, last))))
        stages.append(other)
    return tuple(stages)


def _in_front_of(order: Order, node: int) -> int:
    """The node before a call on its thread."""
    return int(order.nodes[order.place[node] - 1])
