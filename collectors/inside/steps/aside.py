"""What a training loop does besides training: saving checkpoints, working without gradients, compiling code.

Takes the time of saving from `checkpoints`, and watches `torch.no_grad`, `torch.inference_mode`, `eval` of
modules, and the compiler's callbacks. Writes one record per step of how long each has taken so far. Only the
thread that trains counts: saves of others in the background hold up no step. Compilation holds it up wherever
it runs. An optimizer that updates without gradients trains. A loop that evaluates reads its batches with
gradients on: it evaluates from `eval` of a module to the last work without gradients before the next
backward.
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
from ..patching import patch
from ..recorder import ENOUGH, Recorder
from ..threads import get_ident
from ..torch_internals import COMPILER_CALLBACKS, compiler_callbacks
from . import checkpoints
from .checkpoints import Stopwatch


class OtherWork:
    """The work of one process besides training."""

    def __init__(self, recorder: Recorder, saves: checkpoints.Checkpoints) -> None:
        self._recorder, self._saves = recorder, saves
        self.on_fork()

    def on_fork(self) -> None:
        """Start at zero in a forked child: what its parent was doing does not count."""
        self._without_gradients, self._compiling = Stopwatch(), Stopwatch()
        self._updating: int | None = None  # the optimizer that updates
        self._in_updates_ns = self._before_update_ns = 0  # without gradients, in updates, and before this one
        self._evaluates = False
        self._eval_ns = self._eval_without_ns = 0  # when a module was set to evaluate, and the total then
        self._num_backward = self._left_without_ns = 0
        self._compiler: Any = None  # what calls back when it begins and ends
        self._left_ns = self._between_ns = 0  # last end of such work since; time of loops around it

    def on_step(self, _step: int) -> None:
        """Record the time of saving, evaluating and compiling up to the end of this step."""
        if self._compiler is not None and self._on_compile not in self._compiler.start_callbacks:
            self.look()  # a reset has dropped our callbacks
        self._evaluates = False
        writer = self._recorder.records
        if writer is not None:
            now_ns, saves, compiling = time.time_ns(), self._saves.held_up, self._compiling
            saving_ns = saves.total_ns(now_ns) if saves.depth else saves.ended_ns
            compiling_ns = compiling.total_ns(now_ns) if compiling.depth else compiling.ended_ns
            without_ns = self._between_ns
            if self._updating is None:
                without_ns += self._without_ns(now_ns)
            else:  # as in `_without_ns`: an optimizer's update ends most steps
                without_ns += self._before_update_ns - self._in_updates_ns
            writer.add(records.pack(now_ns, saving_ns, without_ns, compiling_ns, records.ASIDE))

    def on_work(self) -> object:
        """End an evaluation where the loop asks for gradients."""
        if self._evaluates and self._recorder.num_backward != self._num_backward:
            self._evaluates = False
            if self._left_ns:
                took_ns, without_ns = self._left_ns - self._eval_ns, self._left_without_ns
                self._between_ns += max(took_ns - (without_ns - self._eval_without_ns), 0)
        return None if self._evaluates else ENOUGH

    def on_eval(self) -> None:
        """Begin an evaluation: a module was set to evaluate."""
        if get_ident() == self._recorder.training_thread and not self._evaluates:
            self._evaluates, self._num_backward = True, self._recorder.num_backward
            self._recorder.listen("work", self.on_work)
            self._eval_ns, self._left_ns = time.time_ns(), 0
            self._eval_without_ns = self._without_ns(self._eval_ns)

    def update_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks of all optimizers, which take the time of updates out of that without gradients.

        Optimizers may update within an update. As in the contexts below nothing here can fail: hooks are
        called directly.

        Returns:
            What is called before updates, and what after them.
        """

        def begins(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
            if self._updating in (None, id(optimizer)):  # the same optimizer again: its update has failed
                self._updating, watch = id(optimizer), self._without_gradients
                self._before_update_ns = watch.total_ns(time.time_ns()) if watch.depth else watch.ended_ns

        def has_ended(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
            if self._updating == id(optimizer):
                self._updating, watch = None, self._without_gradients
                total_ns = watch.total_ns(time.time_ns()) if watch.depth else watch.ended_ns
                self._in_updates_ns += total_ns - self._before_update_ns

        for hook in (begins, has_ended):
            hook._torchdynamo_disable = True  # type: ignore[attr-defined] # compiled updates, too
        return begins, has_ended

    def _without_ns(self, now_ns: int) -> int:
        """Return the time without gradients so far, but for that of optimizers, in ns."""
        total_ns = self._without_gradients.total_ns(now_ns)
        return (total_ns if self._updating is None else self._before_update_ns) - self._in_updates_ns

    def look(self) -> None:
        """Register callbacks with the compiler, once the job has imported it."""
        handler = self._compiler = compiler_callbacks()
        if handler is not None and self._on_compile not in handler.start_callbacks:
            handler.register_start_callback(self._on_compile)
            handler.register_end_callback(self._on_compiled)

    def _on_compile(self, *_: Any) -> None:
        self._recorder.call(self._compiling.start)

    def _on_compiled(self, *_: Any) -> None:
        self._recorder.call(self._compiling.stop)

    def watch_mode(self, mode: Any) -> None:
        """Time a context in which no gradients are kept.

        Jobs may enter hundreds per step: this only compares a thread and counts a number, which cannot fail,
        as `Stopwatch` does, without calling it. The compiler knows these contexts by their class, and never
        reads this code.
        """
        entering, leaving = mode.__enter__, mode.__exit__
        recorder, own_thread = self._recorder, get_ident

        @functools.wraps(entering)
        def enter(context: Any) -> Any:
            if own_thread() == recorder.training_thread:
                watch = self._without_gradients
                if not watch.depth:
                    watch.begun_ns = time.time_ns()
                watch.depth += 1
            return entering(context)

        @functools.wraps(leaving)
        def leave(context: Any, kind: Any, value: Any, traceback: Any) -> Any:
            result = leaving(context, kind, value, traceback)
            if own_thread() == recorder.training_thread:
                watch = self._without_gradients
                if watch.depth == 1:
                    watch.ended_ns += time.time_ns() - watch.begun_ns
                watch.depth = max(watch.depth - 1, 0)
                if self._evaluates and self._updating is None:
                    self._left_ns = time.time_ns()
                    self._left_without_ns = self._without_ns(self._left_ns)
            return result

        mode.__enter__, mode.__exit__ = enter, leave


def install(recorder: Recorder) -> None:
    """Record the work besides training."""
    aside = OtherWork(recorder, checkpoints.install(recorder))
    for mode in (torch.no_grad, torch.inference_mode):
        aside.watch_mode(mode)
    patch(torch.nn.Module, "eval", before=lambda *_: recorder.call(aside.on_eval))
    begins, has_ended = aside.update_hooks()
    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(has_ended)
    recorder.on_import(COMPILER_CALLBACKS, lambda _: aside.look())
    recorder.listen("step", aside.on_step)
    recorder.listen("resume", aside.on_step)
    recorder.listen("fork", aside.on_fork)
