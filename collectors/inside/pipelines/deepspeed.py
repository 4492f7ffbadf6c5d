"""Operations of jobs that pipeline with DeepSpeed's PipelineEngine.

Hooks its instructions, once the job itself has imported them. Records each forward (with the loss) and
backward of a micro-batch. Micro-batches are counted within a schedule; a backward belongs to the forward that
filled its buffer. A forward is recorded with its backward, so that nothing is recorded of a validation.
Messages are outside.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..files import BACKWARD, FORWARD
from ..patching import preceded_by, wrap
from ..recorder import Recorder
from .operations import PipelineOperations, timed

ENGINE = "deepspeed.runtime.pipe.engine"
SOURCE = "DeepSpeed"
SCHEDULE, FORWARDS, BACKWARDS = "_exec_schedule", "_exec_forward_pass", "_exec_backward_pass"


class DeepSpeedHooks:
    """Hooks on the engines of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operations = PipelineOperations(recorder)
        self._set = False
        self._begin()

    def _begin(self) -> None:
        self._micro_batches = 0
        self._in_buffers: dict[Any, tuple[int, int, int]] = {}  # micro-batch, start and end of its forward

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported the engine."""
        engine = getattr(sys.modules.get(ENGINE), "PipelineEngine", None)
        if self._set or engine is None:
            return
        self._set = True
        if hasattr(engine, SCHEDULE):
            wrap(engine, SCHEDULE, preceded_by(self._recorder.call, self._on_schedule))
        instructions = getattr(engine, "_INSTRUCTION_MAP", {})
        for name, noted in ((FORWARDS, self._on_forward), (BACKWARDS, self._on_backward)):
            original = getattr(engine, name, None)
            if original is None:
                continue
            wrap(engine, name, timed(self._recorder, noted))
            for instruction, function in list(instructions.items()):
                if function is original:
                    instructions[instruction] = getattr(engine, name)

    def _on_schedule(self, engine: Any, schedule: Any, *_: Any) -> None:
        """Count the micro-batches of a new schedule, and describe the stage if it trains."""
        self._begin()
        stage, num_stages = int(engine.stage_id), int(engine.num_stages)
        is_training = not type(schedule).__name__.startswith("Inference")
        if num_stages > 1 and is_training:
            source = f"{SOURCE} {type(schedule).__name__}"
            self._operations.describe(source, stage, {stage: 0}, num_stages)

    def _on_forward(self, start_ns: int, end_ns: int, args: Any, kwargs: Any, _result: Any) -> None:
        self._in_buffers[_buffer(args, kwargs)] = (self._micro_batches, start_ns, end_ns)
        self._micro_batches += 1

    def _on_backward(self, start_ns: int, end_ns: int, args: Any, kwargs: Any, _result: Any) -> None:
        engine, forward = args[0], self._in_buffers.pop(_buffer(args, kwargs), None)
        if forward is not None and engine.num_stages > 1:
            micro_batch, begun_ns, ended_ns = forward
            place = int(engine.stage_id)
            self._operations.note(FORWARD, place, micro_batch, begun_ns, ended_ns)
            self._operations.note(BACKWARD, place, micro_batch, start_ns, end_ns)


def _buffer(args: Any, kwargs: Any) -> Any:
    """Return the buffer that an instruction works on: its first argument after the engine."""
    return args[1] if len(args) > 1 else kwargs["buffer_id"]


def install(recorder: Recorder) -> None:
    """Record the operations of DeepSpeed's pipelines."""
    if not torch.distributed.is_available():
        return
    hooks = DeepSpeedHooks(recorder)
    recorder.on_import(ENGINE, hooks.look)
