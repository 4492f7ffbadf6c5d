"""Schedules of forwards and whole backwards: GPipe, 1F1B, and 1F1B with several chunks on each stage.

In: numbers of stages, micro-batches and chunks. Out: the order of each stage. Of p equal stages and m
micro-batches that take F and B each stage is idle for (p - 1)(F + B), with v chunks for the v-th part of it.
"""

from __future__ import annotations

from dpro.errors import UsageError
from dpro.replay.pipeline.schedules.tasks import BACKWARD, FORWARD, Order, PipelineTask, only_one_chunk


def gpipe(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019)."""
    forward, backward = _in_rounds(num_stages, num_batches, num_chunks, "gpipe")
    return [forward + backward] * num_stages


def one_forward_one_backward(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """A backward after each forward once the pipeline is full (Narayanan et al., PipeDream, SOSP 2019)."""
    only_one_chunk("1f1b", num_chunks)
    forward, backward = _in_rounds(num_stages, num_batches, 1, "1f1b")
    return [alternating(forward, backward, num_stages - stage - 1) for stage in range(num_stages)]


def interleaved(num_stages: int, num_batches: int, num_chunks: int) -> list[Order]:
    """Several chunks of the model on each stage (Narayanan et al., Megatron-LM, SC 2021, section 2.2).

    Raises:
        UsageError: there is one chunk, or the micro-batches are no multiple of the stages.
    """
    if num_chunks < 2:
        raise UsageError("pipeline: schedule=interleaved needs chunks=, 2 or more")
    forward, backward = _in_rounds(num_stages, num_batches, num_chunks, "interleaved")
    ahead = [2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages for stage in range(num_stages)]
    return [alternating(forward, backward, count) for count in ahead]


def _in_rounds(num_stages: int, num_batches: int, num_chunks: int, schedule: str) -> tuple[Order, Order]:
    """All forwards and all backwards of a stage: of each chunk as many in a row as there are stages."""
    if num_chunks > 1 and num_batches % num_stages:
        raise UsageError(
            f"pipeline: {schedule} in chunks needs a multiple of the {num_stages} stages as micro_batches, "
            f"not {num_batches}"
        )
    if num_chunks == 1:
        places = [(batch, 0) for batch in range(num_batches)]
    else:
        rounds = [range(first, first + num_stages) for first in range(0, num_batches, num_stages)]
        places = [(batch, chunk) for each in rounds for chunk in range(num_chunks) for batch in each]
    forward = [PipelineTask(FORWARD, batch, chunk) for batch, chunk in places]
    return forward, [PipelineTask(BACKWARD, batch, num_chunks - 1 - chunk) for batch, chunk in places]


def alternating(forward: Order, backward: Order, ahead: int) -> Order:
    """This many forwards first, then one forward and one backward at a time, then the backwards left.

    Args:
        forward, backward: all of a stage, in order.
        ahead: forwards before the first backward's own.
    """
    ahead = min(ahead, len(forward))
    turns = len(forward) - ahead
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward[:turns]):
        order += pair
    return order + backward[turns:]
