"""Schedules with backward in two parts: gradients of inputs are passed on, those of weights fill idle time.

In: numbers of stages, micro-batches and chunks. Out: the order of each stage. Both are of Qi et al., Zero
Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241). With F forward, B gradients of inputs, W those of
weights, ZB-H1 leaves (p - 1)(F + B - W) idle where 1F1B leaves (p - 1)(F + B + W). In ZB-V no stage is idle
between its first and its last piece of work if all three take as long; stages begin one after the other.
"""

from __future__ import annotations

from collections import deque

from dpro.errors import UsageError
from dpro.replay.pipeline.schedules.in_turn import one_forward_one_backward
from dpro.replay.pipeline.schedules.tasks import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    PipelineTask,
    only_one_chunk,
)


def zb_h1(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """1F1B whose backward only passes gradients on; those of weights fill what was idle.

    A stage holds back as many of them as there are stages before it (section 2.2).
    """
    only_one_chunk("zb-h1", num_chunks)
    plain = one_forward_one_backward(num_stages, num_batches, 1)
    return [_with_weights(order, stage) for stage, order in enumerate(plain)]


def _with_weights(order: Order, held: int) -> Order:
    """Each backward followed by the weights' gradients of the one this many before; the rest at the end."""
    found: Order = []
    waiting: deque[int] = deque()
    for task in order:
        found.append(task)
        if task.kind == BACKWARD:
            waiting.append(task.batch)
            if len(waiting) > held:
                found.append(PipelineTask(WEIGHTS, waiting.popleft()))
    return [*found, *(PipelineTask(WEIGHTS, batch) for batch in waiting)]


def zb_v(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Two chunks on each stage, the second on the way back: the first stage has the loss (section 6).

    Of fewer micro-batches than fill the pipeline the missing ones are left out of the order.

    Raises:
        UsageError: there are other than two chunks.
    """
    if num_chunks != 2:
        raise UsageError(f"pipeline: schedule=zbv has chunks=2, not {num_chunks}")
    full = max(2 * num_stages - 1, num_batches)
    orders = [_of_stage(stage, num_stages, full) for stage in range(num_stages)]
    return [[task for task in order if task.batch < num_batches] for order in orders]


def _of_stage(stage: int, num_stages: int, num_batches: int) -> Order:
    """What a stage of ZB-V does, in order: chunk 0 is on the way up, chunk 1 on the way down."""
    order: Order = []
    done = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD, WEIGHTS) for chunk in (0, 1)}

    def do(chunk: int, *kinds: str) -> None:
        for kind in kinds:
            order.append(PipelineTask(kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    for _ in range(2 * (num_stages - stage) - 1):
        do(0, FORWARD)
    for _ in range(stage):
        do(1, FORWARD)
        do(0, FORWARD)
    for _ in range(num_stages - stage):
        do(1, FORWARD, BACKWARD, WEIGHTS)
    while done[FORWARD, 1] < num_batches:
        if done[FORWARD, 0] < num_batches:
            do(0, FORWARD)
        do(0, BACKWARD, WEIGHTS)
        do(1, FORWARD, BACKWARD, WEIGHTS)
    for _ in range(stage):
        do(0, BACKWARD)
        do(1, BACKWARD)
    for _ in range(num_stages - stage):
        do(0, BACKWARD, WEIGHTS)
    for chunk in (1, 0):
        while done[WEIGHTS, chunk] < done[BACKWARD, chunk]:
            do(chunk, WEIGHTS)
    return order
