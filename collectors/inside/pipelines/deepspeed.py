"""Operations of jobs that pipeline with DeepSpeed's PipelineEngine.

In: its instructions, once the job itself has imported them. Out: each forward (with the loss) and backward of
a micro-batch. Micro-batches are counted within a schedule; a backward is of the forward that filled its
buffer. A forward is recorded with its backward, so that nothing is recorded of a validation. Messages lie
outside.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ..names import BACKWARD, FORWARD
from ..recorder import Recorder
from .operations import PipelineOperations

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
        self._in_buffers: dict[Any, tuple[int, int, int]] = {}  # micro-batch and extent of each one's forward

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported what they hang on."""
        engine = getattr(sys.modules.get(ENGINE), "PipelineEngine", None)
        if self._set or engine is None:
            return
        self._set = True
        self._wrap_schedule(engine)
        instructions = getattr(engine, "_INSTRUCTION_MAP", {})
        for name, noted in ((FORWARDS, self._on_forward), (BACKWARDS, self._on_backward)):
            original = getattr(engine, name, None)
            if original is None:
                continue
            timed = self._timed(original, noted)
            setattr(engine, name, timed)
            for instruction, function in list(instructions.items()):
                if function is original:
                    instructions[instruction] = timed

    def _wrap_schedule(self, engine: Any) -> None:
        original = getattr(engine, SCHEDULE, None)
        if original is None:
            return

        @functools.wraps(original)
        def begun(engine: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
            self._recorder.call(self._on_schedule, engine, schedule)
            return original(engine, schedule, *args, **kwargs)

        setattr(engine, SCHEDULE, begun)

    def _timed(self, original: Any, noted: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def timed(engine: Any, buffer_id: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = original(engine, buffer_id, *args, **kwargs)
            self._recorder.call(noted, engine, buffer_id, start_ns, time.time_ns())
            return result

        return timed

    def _on_schedule(self, engine: Any, schedule: Any) -> None:
        """A batch begins."""
        self._begin()
        stage, num_stages = int(engine.stage_id), int(engine.num_stages)
        is_training = not type(schedule).__name__.startswith("Inference")
        if num_stages > 1 and is_training:
            source = f"{SOURCE} {type(schedule).__name__}"
            self._operations.describe(source, stage, {stage: 0}, num_stages)

    def _on_forward(self, _engine: Any, buffer_id: Any, start_ns: int, end_ns: int) -> None:
        self._in_buffers[buffer_id] = (self._micro_batches, start_ns, end_ns)
        self._micro_batches += 1

    def _on_backward(self, engine: Any, buffer_id: Any, start_ns: int, end_ns: int) -> None:
        forward = self._in_buffers.pop(buffer_id, None)
        if forward is not None and engine.num_stages > 1:
            micro_batch, begun_ns, ended_ns = forward
            place = int(engine.stage_id)
            self._operations.note(FORWARD, place, micro_batch, begun_ns, ended_ns)
            self._operations.note(BACKWARD, place, micro_batch, start_ns, end_ns)


def install(recorder: Recorder) -> None:
    """Record the operations of DeepSpeed's pipelines."""
    if not torch.distributed.is_available():
        return
    hooks = DeepSpeedHooks(recorder)
    recorder.on_import(ENGINE, hooks.look)
