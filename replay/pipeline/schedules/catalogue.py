"""All schedules by name: their orders, where they put the model, and what they take.

In: the name of a schedule. Out: `Schedule`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpro.errors import UsageError
from dpro.replay.pipeline.schedules.in_turn import gpipe, interleaved, one_forward_one_backward
from dpro.replay.pipeline.schedules.tasks import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    PipelineTask,
    Place,
    from_both_ends,
    looped,
    only_one_chunk,
    v_shaped,
)

# Schedules with backward in two parts: gradients of inputs are passed on, those of weights fill idle time.


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
    orders = [_zero_bubble_stage(stage, num_stages, full) for stage in range(num_stages)]
    return [[task for task in order if task.batch < num_batches] for order in orders]


def _zero_bubble_stage(stage: int, num_stages: int, num_batches: int) -> Order:
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


# DualPipe: half of the micro-batches enter the pipeline at its first stage, half at its last.


def dualpipe(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Forwards of one direction beside backwards of the other.

    Chunk 0 of a stage is of the copy of the model that begins at the first stage, chunk 1 of the other;
    micro-batches of the second half are of the latter.

    Args:
        num_batches: micro-batches per step; even, and two for each stage at least.

    Raises:
        UsageError: these numbers do not make such a schedule.
    """
    only_one_chunk("dualpipe", num_chunks)
    if num_stages % 2 or num_batches % 2 or num_batches < 2 * num_stages:
        raise UsageError(
            f"pipeline: dualpipe needs an even number of stages, and an even number of micro_batches, two "
            f"for each stage at least; here are {num_stages} and {num_batches}"
        )
    return [_of_stage(stage, num_stages, num_batches // 2) for stage in range(num_stages)]


class _Stage:
    """A stage while its order is made; its near direction begins at its half of the pipeline."""

    def __init__(self, near: int, each: int) -> None:
        self.order: Order = []
        self._near, self._each = near, each
        self._done = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD) for chunk in (0, 1)}
        self._held_back: deque[tuple[int, int]] = deque()

    def _next(self, kind: str, chunk: int, beside: bool = False) -> PipelineTask:
        number = self._done[kind, chunk]
        self._done[kind, chunk] += 1
        return PipelineTask(kind, chunk * self._each + number, chunk, beside)

    def forward(self, far: int) -> None:
        self.order.append(self._next(FORWARD, self._near ^ far))

    def backward(self, far: int, only_inputs: bool = False) -> None:
        task = self._next(BACKWARD, self._near ^ far)
        self.order.append(task)
        if only_inputs:
            self._held_back.append((task.batch, task.chunk))

    def both(self, far: int) -> None:
        """A forward of one direction beside a backward of the other."""
        self.forward(far)
        self.order.append(self._next(BACKWARD, self._near ^ far ^ 1, beside=True))

    def weights(self) -> None:
        self.order.append(PipelineTask(WEIGHTS, *self._held_back.popleft()))


def _of_stage(stage: int, num_stages: int, each: int) -> Order:
    """The eight phases of a stage; `each` micro-batches come from either end."""
    from_end = min(stage, num_stages - 1 - stage)
    inner = num_stages // 2 - from_end - 1
    made = _Stage(int(stage >= num_stages // 2), each)
    for _ in range(2 * inner):
        made.forward(0)
    for _ in range(from_end + 1):
        made.forward(0)
        made.forward(1)
    for _ in range(inner):
        made.backward(1, only_inputs=True)
        made.weights()
        made.forward(1)
    for turn in range(each - num_stages + from_end + 1):
        if turn or inner:
            made.both(0)
        else:  # the middle stages hand the very first of each on one by one
            made.forward(0)
            made.backward(1)
        made.both(1)
    for _ in range(inner):
        made.backward(1)
        made.both(1)
    for turn in range(2 * (from_end + 1)):  # the second half of these holds gradients of weights back
        made.backward(1 - turn % 2, only_inputs=turn > from_end)
    for _ in range(inner):
        made.weights()
        made.backward(0, only_inputs=True)
    for _ in range(from_end + 1):
        made.weights()
    return made.order


@dataclass(frozen=True)
class Schedule:
    """A published schedule.

    Attributes:
        orders: of all stages, from numbers of stages, micro-batches and chunks.
        place: of each chunk of each stage in the model.
        chunks: how many each stage has if nothing is said.
        copies: how many times the parameters of the model are held.
        splits: whether gradients of weights are computed apart from those of inputs.
        code: what runs it.
    """

    orders: Callable[[int, int, int], list[Order]]
    code: str
    place: Place = looped
    chunks: int = 1
    copies: int = 1
    splits: bool = False


_TORCH = "torch.distributed.pipelining."
SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(one_forward_one_backward, f"{_TORCH}Schedule1F1B(stage, n_microbatches={{}})"),
    "gpipe": Schedule(gpipe, f"{_TORCH}ScheduleGPipe(stage, n_microbatches={{}})"),
    "interleaved": Schedule(
        interleaved,
        f"{_TORCH}ScheduleInterleaved1F1B(stages, n_microbatches={{}})",
        chunks=2,
    ),
    "zb-h1": Schedule(
        zb_h1, f"{_TORCH}ScheduleInterleavedZeroBubble(stages, n_microbatches={{}})", splits=True
    ),
    "zbv": Schedule(
        zb_v,
        f"{_TORCH}ScheduleZBVZeroBubble(stages, n_microbatches={{}})",
        place=v_shaped,
        chunks=2,
        splits=True,
    ),
    "dualpipe": Schedule(
        dualpipe,
        "github.com/deepseek-ai/DualPipe with {} micro-batches (ScheduleDualPipeV of torch: half the stages)",
        place=from_both_ends,
        copies=2,
        splits=True,
    ),
}
