"""Operations of jobs that pipeline with `torch.distributed.pipelining`, under any of its schedules.

Hooks its stages, once the job itself has imported them. Records each forward and backward of a micro-batch,
from when the stage has its input until it has its output: waiting for messages is outside. A backward of
inputs alone and one of weights alone are separate operations. The loss is part of the last chunk's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..files import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LOSS
from ..patching import wrap
from ..recorder import Recorder
from ..torch_internals import LOSS_OF_SCHEDULE, pipeline_classes
from .operations import PipelineOperations, timed

SOURCE = "torch.distributed.pipelining"
SCHEDULES = f"{SOURCE}.schedules"
FULL = 2  # place, after the stage, of the argument that says whether a backward is of weights, too


class PipelineHooks:
    """Hooks on the stages of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operations = PipelineOperations(recorder)
        self._known: dict[int, int] = {}  # number of each chunk of ours, by its place in the model
        self._schedule = ""
        self._set = False

    def look(self, *_: Any) -> None:
        """Set the hooks once the job has imported stages and schedules."""
        if self._set:
            return
        stage, schedule = pipeline_classes()
        if stage is None:
            return
        self._set = True
        self._hook(stage, "forward_one_chunk", lambda *call: self._on_chunk(FORWARD, *call))
        self._hook(stage, "backward_one_chunk", self._on_backward)
        self._hook(stage, "backward_weight_one_chunk", lambda *call: self._on_chunk(BACKWARD_WEIGHT, *call))
        self._hook(schedule, LOSS_OF_SCHEDULE, self._on_loss)

    def _hook(self, owner: Any, name: str, noted: Callable[..., None]) -> None:
        if hasattr(owner, name):
            wrap(owner, name, timed(self._recorder, noted))

    def _on_backward(self, start_ns: int, end_ns: int, args: Any, kwargs: Any, _result: Any) -> None:
        full = args[1 + FULL] if len(args) > 1 + FULL else kwargs.get("full_backward", True)
        self._on_chunk(BACKWARD if full else BACKWARD_INPUT, start_ns, end_ns, args, kwargs)

    def _on_chunk(self, kind: str, start_ns: int, end_ns: int, args: Any, kwargs: Any, *_: Any) -> None:
        """Record an operation of a stage; its second argument is the micro-batch."""
        stage = args[0]
        if not stage.has_backward:
            return  # a validation
        batch = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        place = int(stage.stage_index)
        if place not in self._known:
            self._describe(stage, place)
        self._operations.note(kind, place, int(batch), start_ns, end_ns)

    def _on_loss(self, start_ns: int, end_ns: int, args: Any, kwargs: Any, _result: Any) -> None:
        """Record the loss of a micro-batch on the stage that has it; the fifth argument says which."""
        schedule, stage, *others = args
        name = type(schedule).__name__
        if name != self._schedule:
            self._schedule = name
            self._describe(stage, int(stage.stage_index))
        if stage.is_last and stage.has_backward:
            batch = others[2] if len(others) > 2 else kwargs["mb_index"]
            self._operations.note(LOSS, int(stage.stage_index), int(batch), start_ns, end_ns)

    def _describe(self, stage: Any, place: int) -> None:
        """Number the chunks of this process with a new one, and describe them."""
        self._known[place] = 0
        self._known = {chunk_place: number for number, chunk_place in enumerate(sorted(self._known))}
        source = f"{SOURCE} {self._schedule}".strip()
        self._operations.describe(source, int(stage.group_rank), self._known, int(stage.num_stages))


def install(recorder: Recorder) -> None:
    """Record the operations of pipelines."""
    if not torch.distributed.is_available():
        return
    hooks = PipelineHooks(recorder)
    recorder.on_import(SCHEDULES, hooks.look)  # it imports the stages
