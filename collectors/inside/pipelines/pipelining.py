"""Operations of jobs that pipeline with `torch.distributed.pipelining`, under any of its schedules.

In: its stages, once the job itself has imported them. Out: each forward and backward of a micro-batch, from
when the stage has its input until it has its output: waiting for messages lies outside. A backward of inputs
alone and one of weights alone are operations of their own. The loss is part of the last chunk's forward.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..names import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LOSS
from ..recorder import Recorder
from ..torch_internals import LOSS_OF_SCHEDULE, pipeline_classes
from .operations import PipelineOperations

SOURCE = "torch.distributed.pipelining"
SCHEDULES = f"{SOURCE}.schedules"
FULL = 2  # which argument of a backward says whether it is of weights, too, after the stage


class PipelineHooks:
    """Hooks on the stages of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operations = PipelineOperations(recorder)
        self._known: dict[int, int] = {}  # number of each chunk of ours, by its place in the model
        self._schedule = ""
        self._set = False

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported what they hang on."""
        if self._set:
            return
        stage, schedule = pipeline_classes()
        if stage is None:
            return
        self._set = True
        self._wrap(stage, "forward_one_chunk", lambda *_: FORWARD)
        self._wrap(stage, "backward_one_chunk", _kind_of_backward)
        self._wrap(stage, "backward_weight_one_chunk", lambda *_: BACKWARD_WEIGHT)
        self._wrap_loss(schedule)

    def _wrap(self, owner: Any, name: str, kind_of: Callable[..., str]) -> None:
        """Have each call of a stage's method recorded; its second argument is the micro-batch."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            start_ns = time.time_ns()
            result = original(*args, **kwargs)
            self._recorder.call(self._on_chunk, kind_of, start_ns, time.time_ns(), args, kwargs)
            return result

        setattr(owner, name, timed)

    def _wrap_loss(self, owner: Any) -> None:
        original = getattr(owner, LOSS_OF_SCHEDULE, None)
        if original is None:
            return

        @functools.wraps(original)
        def timed(schedule: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            result = original(schedule, stage, *args, **kwargs)
            self._recorder.call(self._on_loss, schedule, stage, start_ns, time.time_ns(), args, kwargs)
            return result

        setattr(owner, LOSS_OF_SCHEDULE, timed)

    def _on_chunk(
        self, kind_of: Callable[..., str], start_ns: int, end_ns: int, args: Any, kwargs: Any
    ) -> None:
        stage = args[0]
        if not stage.has_backward:
            return  # a validation
        batch = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        place = int(stage.stage_index)
        if place not in self._known:
            self._describe(stage, place)
        self._operations.note(kind_of(args, kwargs), place, int(batch), start_ns, end_ns)

    def _on_loss(self, schedule: Any, stage: Any, start_ns: int, end_ns: int, args: Any, kwargs: Any) -> None:
        """The loss of a micro-batch was computed, on the stage that has it; the third argument is which."""
        name = type(schedule).__name__
        if name != self._schedule:
            self._schedule = name
            self._describe(stage, int(stage.stage_index))
        if stage.is_last and stage.has_backward:
            batch = args[2] if len(args) > 2 else kwargs["mb_index"]
            self._operations.note(LOSS, int(stage.stage_index), int(batch), start_ns, end_ns)

    def _describe(self, stage: Any, place: int) -> None:
        """A chunk of ours was met."""
        self._known[place] = 0
        self._known = {chunk_place: number for number, chunk_place in enumerate(sorted(self._known))}
        source = f"{SOURCE} {self._schedule}".strip()
        self._operations.describe(source, int(stage.group_rank), self._known, int(stage.num_stages))


def _kind_of_backward(args: Any, kwargs: Any) -> str:
    """Whether it is also of weights: by an argument whose place and name all versions share."""
    full = args[1 + FULL] if len(args) > 1 + FULL else kwargs.get("full_backward", True)
    return BACKWARD if full else BACKWARD_INPUT


def install(recorder: Recorder) -> None:
    """Record the operations of pipelines."""
    if not torch.distributed.is_available():
        return
    hooks = PipelineHooks(recorder)
    recorder.on_import(SCHEDULES, hooks.look)  # which has imported the stages
