"""Operations of jobs that pipeline with Megatron-core's own schedules, interleaved or not.

Hooks its functions for a forward and a backward step, once the job itself has imported them. Records each
forward (with the loss) and backward of a micro-batch. A backward is known by the output of its forward. A
forward is recorded with its backward, so that nothing is recorded of a validation. Messages are outside.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from ..files import BACKWARD, FORWARD
from ..patching import wrap
from ..recorder import Recorder
from .operations import PipelineOperations, timed

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
STATE = "megatron.core.parallel_state"
SOURCE = "Megatron-core"
MAX_IN_FLIGHT = 1 << 14  # forwards without their backward; more belong to validations


class _Forward(NamedTuple):
    place: int
    micro_batch: int
    start_ns: int
    end_ns: int


class MegatronHooks:
    """Hooks on the schedules of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operations = PipelineOperations(recorder)
        self._set = False
        self._on_fork()
        recorder.listen("fork", self._on_fork)

    def _on_fork(self) -> None:
        self._in_flight: dict[int, _Forward] = {}
        self._places: dict[int, int] = {}  # number of each chunk of ours, by its place in the model

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported the schedules."""
        module = sys.modules.get(SCHEDULES)
        if self._set or not (hasattr(module, "forward_step") and hasattr(module, "backward_step")):
            return
        self._set = True
        wrap(module, "forward_step", timed(self._recorder, self._on_forward))
        wrap(module, "backward_step", timed(self._recorder, self._on_backward))

    def _on_forward(self, start_ns: int, end_ns: int, _args: Any, kwargs: Any, result: Any) -> None:
        state = sys.modules[STATE]
        num_stages = int(state.get_pipeline_model_parallel_world_size())
        micro_batch = kwargs.get("current_microbatch")
        if num_stages < 2 or micro_batch is None:
            return
        stage, chunk = int(state.get_pipeline_model_parallel_rank()), _chunk(state, kwargs)
        place = chunk * num_stages + stage
        if place not in self._places:
            self._places[place] = chunk
            said = getattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: None)()
            num_chunks = max(int(said or 1), 1 + max(self._places.values()))
            schedule = "1F1B" if num_chunks == 1 else "interleaved 1F1B"
            self._operations.describe(f"{SOURCE} {schedule}", stage, self._places, num_stages * num_chunks)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.clear()
        self._in_flight[_output(result[0])] = _Forward(place, int(micro_batch), start_ns, end_ns)

    def _on_backward(self, start_ns: int, end_ns: int, args: Any, kwargs: Any, _result: Any) -> None:
        output = args[1] if len(args) > 1 else kwargs["output_tensor"]
        forward = self._in_flight.pop(_output(output), None)
        if forward is not None:
            place, micro_batch, begun_ns, ended_ns = forward
            self._operations.note(FORWARD, place, micro_batch, begun_ns, ended_ns)
            self._operations.note(BACKWARD, place, micro_batch, start_ns, end_ns)


def _chunk(state: Any, kwargs: Any) -> int:
    """Return the number of the model chunk: the schedule's, or in older versions the process's state."""
    said = kwargs.get("vp_stage")
    if said is None:
        said = state.get_virtual_pipeline_model_parallel_rank()
    return int(said or 0)


def _output(output: Any) -> int:
    """Return an id of a forward's output: it lives until its backward, though it may lose its data."""
    return id(output[0] if isinstance(output, list) else output)


def install(recorder: Recorder) -> None:
    """Record the operations of Megatron-core's pipelines."""
    if not torch.distributed.is_available():
        return
    hooks = MegatronHooks(recorder)
    recorder.on_import(SCHEDULES, hooks.look)
