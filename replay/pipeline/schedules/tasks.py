"""Pieces of work of a pipeline, and what each waits for.

In: for each stage the list of its pieces of work, in order. Out: all of them as arrays, and what waits for
what. A place is where a chunk is in the model: 0 computes the input, the last one the loss. Forward work
goes up the places, backward work down; how long pieces take is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.errors import UsageError

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
KINDS = (FORWARD, BACKWARD, WEIGHTS)
HALF = 0.5  # of a backward goes into the gradients of weights: as many products as for those of inputs


class PipelineTask(NamedTuple):
    """A piece of work of a stage.

    Attributes:
        kind: forward, backward (of inputs alone where the stage has `WEIGHTS` of the same chunk and batch,
            else of both), or weights.
        batch: micro-batch, from 0.
        chunk: of those that the stage holds, from 0.
        beside: whether it and the piece before it are one: both begin once both can, and what they hand on
            goes when both have ended.
    """

    kind: str
    batch: int
    chunk: int = 0
    beside: bool = False


Order = list[PipelineTask]
Place = Callable[[int, int, int], int]  # of (stage, chunk, number of stages)


@dataclass(frozen=True)
class TaskTable:
    """All pieces of work of a step, stage by stage, each in its order; and what waits for what beyond that.

    Attributes:
        stage, batch, chunk, place: [N] of each.
        kind: [N] index into `KINDS`.
        apart: [N] whether it is a backward of inputs alone.
        source, target: [E] the target waits for the source.
    """

    stage: Ints
    batch: Ints
    chunk: Ints
    place: Ints
    kind: Ints
    apart: Bools
    source: Ints
    target: Ints


def looped(stage: int, chunk: int, num_stages: int) -> int:
    """The place of a chunk where the model goes round all stages, again and again."""
    return chunk * num_stages + stage


def v_shaped(stage: int, chunk: int, num_stages: int) -> int:
    """The place of a chunk where the model goes up all stages and down again: two on each."""
    return 2 * num_stages - 1 - stage if chunk else stage


def from_both_ends(stage: int, chunk: int, num_stages: int) -> int:
    """The place of a chunk where stages hold the model twice: once from the first, once from the last.

    Args:
        chunk: 0 of the copy that begins at the first stage, 1 of the other.
    """
    return num_stages - 1 - stage if chunk else stage


def table_of(orders: Sequence[Order], place: Place) -> TaskTable:
    """The pieces of work of all stages as arrays, with what waits for what.

    A forward waits for that of its micro-batch at the place before, a backward for that at the place after:
    where a micro-batch skips places, the next that it visits. The backward at the last place that it visits
    waits for the forward there. Gradients of weights wait for nothing but their place in the order. What
    the second of two pieces that are one waits for, the first does; what waits for the first, waits for both.
    """
    work = list(chain.from_iterable(orders))
    stage = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    kind = np.array([_NUMBER[task.kind] for task in work], np.int64)
    batch = np.array([task.batch for task in work], np.int64)
    chunk = np.array([task.chunk for task in work], np.int64)
    places = np.array(
        [[place(at, each, len(orders)) for each in range(int(chunk.max()) + 1)] for at in range(len(orders))]
    )
    at = places[stage, chunk]
    alone = chain.from_iterable(map(_are_apart, orders))
    main = np.flatnonzero(kind != _NUMBER[WEIGHTS])
    upwards = np.where(kind == _NUMBER[FORWARD], at, -at)[main]
    path = main[np.lexsort([upwards, kind[main], batch[main]])]  # of each micro-batch, there and back
    same = batch[path[1:]] == batch[path[:-1]]
    beside = np.array([task.beside for task in work], np.bool_)
    source, target = path[:-1][same], path[1:][same]
    target = target - beside[target]
    source = source + np.append(beside[1:], False)[source]
    return TaskTable(stage, batch, chunk, at, kind, np.fromiter(alone, np.bool_), source, target)


_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def _are_apart(order: Order) -> list[bool]:
    apart = {(task.batch, task.chunk) for task in order if task.kind == WEIGHTS}
    return [task.kind == BACKWARD and (task.batch, task.chunk) in apart for task in order]


def most_in_flight(order: Order) -> int:
    """Chunks of micro-batches whose activations a stage holds at once, at most.

    They are needed until both gradients are computed.
    """
    held = most = 0
    for task, apart in zip(order, _are_apart(order)):
        held += 1 if task.kind == FORWARD else -int(not apart)
        most = max(most, held)
    return most


def only_one_chunk(schedule: str, num_chunks: int) -> None:
    """Refuse several chunks.

    Raises:
        UsageError: there are several.
    """
    if num_chunks != 1:
        raise UsageError(f"pipeline: schedule={schedule} has one chunk per stage; interleaved has several")
