"""Phases of reinforcement learning by TRL: ranges in deep windows for the phases that TRL itself times.

Watches the contexts in which TRL times rollouts, rewards, losses and weight syncs, and the training steps of
its trainers, once the job itself has imported it. Marks ranges of `record_function` by TRL's names, such as
`GRPOTrainer._calculate_rewards`. Which phase a name means is not decided here.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.profiler import record_function

from ..patching import patch, wrap
from ..recorder import Recorder

MODULE = "trl.extras.profiling"
RANGE = "_dpro_range"
TRAINING = "Trainer.training_step"


def install(recorder: Recorder) -> None:
    """Mark the phases."""

    def enter(context: Any) -> None:
        setattr(context, RANGE, record_function(str(context.name)))
        getattr(context, RANGE).__enter__()

    def leave(context: Any) -> None:
        opened = context.__dict__.pop(RANGE, None)
        if opened is not None:
            opened.__exit__(None, None, None)

    def look(module: Any) -> None:
        context: Any = getattr(module, "ProfilingContext", None)
        trainer: Any = getattr(module, "Trainer", None)
        if hasattr(context, "__enter__") and hasattr(context, "__exit__"):
            patch(context, "__enter__", before=functools.partial(recorder.call, enter))
            patch(context, "__exit__", before=functools.partial(recorder.call, leave))
        if hasattr(trainer, "training_step"):
            wrap(trainer, "training_step", _mark_range)

    recorder.on_import(MODULE, look)


def _mark_range(original: Any) -> Any:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(TRAINING):
            return original(*args, **kwargs)

    return ranged
