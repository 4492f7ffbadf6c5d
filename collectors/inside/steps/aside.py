"""What a training loop does besides training: saving checkpoints, working without gradients, compiling code.

In: what `checkpoints` says of saving, calls of `torch.no_grad`, `torch.inference_mode` and `eval` of modules,
what the compiler says of itself. Out: per step one record of how long each has taken so far. Only the thread
that trains counts: what others save in the background holds up no step. Compilation holds it up wherever it
runs. An optimizer that updates without gradients trains. A loop that evaluates reads its batches with them
on: from `eval` of a module to the last work without gradients before the next backward it evaluates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import records
from ..patching import patch, uncompiled
from ..recorder import Recorder
from ..threads import get_ident
from ..torch_internals import compiler_callbacks
from . import checkpoints
from .checkpoints import Stopwatch


class OtherWork:
    """What one process does besides training."""

    def __init__(self, recorder: Recorder, saves: checkpoints.Checkpoints) -> None:
        self._recorder, self._saves = recorder, saves
        self.on_fork()

    def on_fork(self) -> None:
        """Start at zero in a forked child: what its parent was doing does not count."""
        self._without_gradients, self._compiling = Stopwatch(), Stopwatch()
        self._updating: int | None = None  # the optimizer that updates
        self._in_updates_ns = self._before_update_ns = 0  # without gradients, by optimizers, and before this
        self._evaluates = False
        self._eval_ns = self._eval_without_ns = 0  # when a module was set to evaluate, and the total then
        self._num_backward = self._left_without_ns = 0
        self._left_ns = self._between_ns = 0  # the last end of such work since; time of loops around it

    def on_step(self, _step: int) -> None:
        """Record the time of saving, evaluating and compiling up to the end of this step."""
        self.look()
        self._evaluates = False
        if self._recorder.records is not None:
            now_ns = time.time_ns()
            saving, compiling = (
                stopwatch.total_ns(now_ns) for stopwatch in (self._saves.held_up, self._compiling)
            )
            without_ns = self._without_ns(now_ns) + self._between_ns
            self._recorder.records.write(records.ASIDE, now_ns, saving, without_ns, compiling)

    def on_work(self) -> None:
        """The loop asks for something: where it asks for gradients, it evaluates no more."""
        self.look()
        if self._evaluates and self._recorder.num_backward != self._num_backward:
            self._evaluates = False
            if self._left_ns:
                took_ns, without_ns = self._left_ns - self._eval_ns, self._left_without_ns
                self._between_ns += max(took_ns - (without_ns - self._eval_without_ns), 0)

    def on_eval(self) -> None:
        """A module is set to evaluate."""
        if get_ident() == self._recorder.training_thread and not self._evaluates:
            self._evaluates, self._num_backward = True, self._recorder.num_backward
            self._eval_ns, self._left_ns = time.time_ns(), 0
            self._eval_without_ns = self._without_ns(self._eval_ns)

    def on_update_begins(self, optimizer: Any) -> None:
        """An optimizer begins to update; others may within it."""
        if self._updating in (None, id(optimizer)):  # the same again: its update has failed
            self._updating = id(optimizer)
            self._before_update_ns = self._without_gradients.total_ns(time.time_ns())

    def on_updated(self, optimizer: Any) -> None:
        """It has updated."""
        if self._updating == id(optimizer):
            total_ns = self._without_gradients.total_ns(time.time_ns())
            self._in_updates_ns += total_ns - self._before_update_ns
            self._updating = None

    def _without_ns(self, now_ns: int) -> int:
        """Time without gradients so far, but for that of optimizers."""
        total_ns = self._without_gradients.total_ns(now_ns)
        return (total_ns if self._updating is None else self._before_update_ns) - self._in_updates_ns

    def look(self) -> None:
        """Have the compiler say when it compiles, once the job has imported it."""
        handler = compiler_callbacks()
        if handler is not None and self._on_compile not in handler.start_callbacks:  # a reset drops them
            handler.register_start_callback(self._on_compile)
            handler.register_end_callback(self._on_compiled)

    def _on_compile(self, *_: Any) -> None:
        self._recorder.call(self._compiling.start)

    def _on_compiled(self, *_: Any) -> None:
        self._recorder.call(self._compiling.stop)

    def watch_mode(self, mode: Any) -> None:
        """Time a context in which no gradients are kept.

        Jobs may enter hundreds per step: only a thread is compared and a number counted, which cannot fail.
        The compiler knows these contexts by their class, and never reads what is here.
        """
        entering, leaving = mode.__enter__, mode.__exit__
        recorder, own_thread = self._recorder, get_ident

        @functools.wraps(entering)
        def enter(context: Any) -> Any:
            if own_thread() == recorder.training_thread:
                self._without_gradients.start()
            return entering(context)

        @functools.wraps(leaving)
        def leave(context: Any, kind: Any, value: Any, traceback: Any) -> Any:
            result = leaving(context, kind, value, traceback)
            if own_thread() == recorder.training_thread:
                self._without_gradients.stop()
                if self._evaluates and self._updating is None:
                    self._left_ns = time.time_ns()
                    self._left_without_ns = self._without_ns(self._left_ns)
            return result

        mode.__enter__, mode.__exit__ = enter, leave


def install(recorder: Recorder) -> None:
    """Record what is done besides training."""
    aside = OtherWork(recorder, checkpoints.install(recorder))
    for mode in (torch.no_grad, torch.inference_mode):
        aside.watch_mode(mode)
    patch(torch.nn.Module, "eval", before=lambda *_: recorder.call(aside.on_eval))
    for register, action in (
        (register_optimizer_step_pre_hook, aside.on_update_begins),
        (register_optimizer_step_post_hook, aside.on_updated),
    ):
        register(_hook(recorder, action))
    recorder.listen("work", aside.on_work)
    recorder.listen("step", aside.on_step)
    recorder.listen("resume", aside.on_step)
    recorder.listen("fork", aside.on_fork)


def _hook(recorder: Recorder, action: Callable[[Any], None]) -> Callable[..., None]:
    """An action of the probe as a hook of all optimizers."""

    def hook(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        uncompiled(recorder.call, action, optimizer)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined] # of a compiled update, too, we want to know
    return hook
