"""What a training loop does besides training: saving checkpoints, working without gradients, compiling code.

In: what `checkpoints` says of saving, calls of `torch.no_grad` and `torch.inference_mode`, what the compiler
says of itself. Out: per step one record of how long each has taken so far. Only the thread that trains
counts: what others save in the background holds up no step. Compilation holds it up wherever it runs.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch

from .. import records
from ..recorder import Recorder
from ..torch_internals import compiler_callbacks
from . import checkpoints
from .stopwatch import Stopwatch


class OtherWork:
    """What one process does besides training."""

    def __init__(self, recorder: Recorder, saves: checkpoints.Checkpoints) -> None:
        """Nothing is done yet.

        Args:
            recorder: of the process.
            saves: what it saves.
        """
        self._recorder, self._saves = recorder, saves
        self.on_fork()

    def on_fork(self) -> None:
        """Start at zero in a forked child: what its parent was doing does not count."""
        self._without_gradients, self._compiling = Stopwatch(), Stopwatch()

    def on_step(self, _step: int) -> None:
        """Record the time of saving, evaluating and compiling up to the end of this step."""
        self.look()
        if self._recorder.records is not None:
            now_ns = time.time_ns()
            watches = (self._saves.held_up, self._without_gradients, self._compiling)
            self._recorder.records.write(records.ASIDE, now_ns, *(each.total_ns(now_ns) for each in watches))

    def look(self) -> None:
        """Have the compiler say when it compiles, once the job has imported it."""
        handler = compiler_callbacks()
        if handler is not None and self._on_compile not in handler.start_callbacks:  # a reset drops them
            handler.register_start_callback(self._on_compile)
            handler.register_end_callback(self._on_compiled)

    def _on_compile(self, *_: Any) -> None:
        self._recorder.call(self._compiling.start)

    def _on_compiled(self, *_: Any) -> None:
        self._recorder.call(self._compiled)

    def _compiled(self) -> None:
        self._compiling.stop()

    def watch_mode(self, mode: Any) -> None:
        """Time a context in which no gradients are kept.

        Jobs may enter hundreds per step: only a thread is compared and a number counted, which cannot fail.
        The compiler knows these contexts by their class, and never reads what is here.
        """
        entering, leaving = mode.__enter__, mode.__exit__
        recorder, own_thread = self._recorder, threading.get_ident

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
            return result

        mode.__enter__, mode.__exit__ = enter, leave


def install(recorder: Recorder) -> None:
    """Record what is done besides training."""
    aside = OtherWork(recorder, checkpoints.install(recorder))
    for mode in (torch.no_grad, torch.inference_mode):
        aside.watch_mode(mode)
    recorder.listen("work", aside.look)
    recorder.listen("step", aside.on_step)
    recorder.listen("resume", aside.on_step)
    recorder.listen("fork", aside.on_fork)
