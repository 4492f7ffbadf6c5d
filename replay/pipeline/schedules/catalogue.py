"""All schedules by name: their orders, where they put the model, and what they take.

In: the name of a schedule. Out: `Schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpro.replay.pipeline.schedules.both_ways import dualpipe
from dpro.replay.pipeline.schedules.in_turn import gpipe, interleaved, one_forward_one_backward
from dpro.replay.pipeline.schedules.tasks import Order, Place, from_both_ends, looped, v_shaped
from dpro.replay.pipeline.schedules.zero_bubble import zb_h1, zb_v


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
