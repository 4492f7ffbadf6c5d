"""In which order the stages of a pipeline do the forward and backward work of each micro-batch.

In: numbers of stages, micro-batches and chunks. Out: for each stage its list of `PipelineTask`s. How long
they take, and what waits for what, is in `dpro.replay.whatif.edits.parallelism.pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dpro.errors import UsageError


class PipelineTask(NamedTuple):
    """A piece of work of a stage: `kind` is forward, backward, or weights; chunks are the stage's own."""

    kind: str
    batch: int
    chunk: int = 0


FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
Order = list[PipelineTask]


def gpipe(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    Args:
        num_stages: of the pipeline.
        num_batches: micro-batches per step.
        num_chunks: of the model on each stage.
    """
    _only_one("gpipe", num_chunks)
    order = [PipelineTask(FORWARD, batch) for batch in range(num_batches)]
    order += [PipelineTask(BACKWARD, batch) for batch in range(num_batches)]
    return [order] * num_stages


def one_forward_one_backward(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """A backward after each forward once the pipeline is full (Narayanan et al., PipeDream, SOSP 2019).

    Args:
        num_stages: of the pipeline.
        num_batches: micro-batches per step.
        num_chunks: of the model on each stage.
    """
    _only_one("1f1b", num_chunks)
    forward = [PipelineTask(FORWARD, batch) for batch in range(num_batches)]
    backward = [PipelineTask(BACKWARD, batch) for batch in range(num_batches)]
    return [_alternating(forward, backward, num_stages - stage - 1) for stage in range(num_stages)]


def interleaved(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Several chunks of the model on each stage (Narayanan et al., Megatron-LM, SC 2021, section 2.2).

    Args:
        num_stages: of the pipeline.
        num_batches: micro-batches per step.
        num_chunks: of the model on each stage.
    """
    if num_chunks < 2:
        raise UsageError("pipeline: schedule=interleaved needs chunks=, 2 or more")
    if num_batches % num_stages:
        raise UsageError(
            f"pipeline: interleaved needs a multiple of the {num_stages} stages as micro_batches"
        )
    total, turn = num_batches * num_chunks, num_stages * num_chunks

    def task(kind: str, k: int) -> PipelineTask:
        chunk = (k % turn) // num_stages
        batch = k // turn * num_stages + k % num_stages
        return PipelineTask(kind, batch, chunk if kind == FORWARD else num_chunks - 1 - chunk)

    forward, backward = ([task(kind, k) for k in range(total)] for kind in (FORWARD, BACKWARD))
    ahead = [2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages for stage in range(num_stages)]
    return [_alternating(forward, backward, count) for count in ahead]


def zero_bubble(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """1F1B whose backward only passes gradients on; those of weights fill what was idle.

    A stage holds back as many of them as there are stages before it (ZB-H1 of Qi et al., Zero Bubble Pipeline
    Parallelism, ICLR 2024).

    Args:
        num_stages: of the pipeline.
        num_batches: micro-batches per step.
        num_chunks: of the model on each stage.
    """
    plain = one_forward_one_backward(num_stages, num_batches, num_chunks)
    return [_with_weights(order, stage) for stage, order in enumerate(plain)]


def _with_weights(order: Order, held: int) -> Order:
    """Each backward followed by the weights' gradients of the one this many before; the rest at the end."""
    found: Order = []
    for task in order:
        found.append(task)
        if task.kind == BACKWARD and task.batch >= held:
            found.append(PipelineTask(WEIGHTS, task.batch - held))
    done = sum(task.kind == WEIGHTS for task in found)
    batches = sum(task.kind == BACKWARD for task in order)
    return [*found, *(PipelineTask(WEIGHTS, batch) for batch in range(done, batches))]


def _alternating(forward: Order, backward: Order, ahead: int) -> Order:
    """This many forwards first, then one forward and one backward at a time, then the backwards left."""
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for index, task in enumerate(forward[ahead:]):
        order += [task, backward[index]]
    return order + backward[len(forward) - ahead :]


def _only_one(schedule: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise UsageError(f"pipeline: schedule={schedule} has one chunk per stage; interleaved has several")


SCHEDULES: dict[str, Callable[[int, int, int], list[Order]]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
