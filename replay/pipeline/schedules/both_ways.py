"""DualPipe: half of the micro-batches enter the pipeline at its first stage, half at its last.

In: numbers of stages and micro-batches. Out: the order of each stage. Each stage holds the parameters of two
places in the model. The order is that of DeepSeek-V3 (arXiv 2412.19437, section 3.2.1, figure 5). With F&B a
forward and a backward that run beside each other, B a whole backward and W its gradients of weights, each
stage is idle for (p / 2 - 1)(F&B + B - 3W), and holds p + 1 micro-batches (its table 2). F&B is one piece: it
begins when both inputs have come and hands both results on at its end, also where it takes F + B. Were the
two handed on one by one, half of that would be left.
"""

from __future__ import annotations

from collections import deque

from dpro.errors import UsageError
from dpro.replay.pipeline.schedules.tasks import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Order,
    PipelineTask,
    only_one_chunk,
)


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
