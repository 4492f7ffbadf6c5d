"""What a training loop does besides training: saving checkpoints, working without gradients, compiling code.

In: calls of `torch.save` and the like, `torch.no_grad` and `torch.inference_mode`, what the compiler says of
itself. Out: per step one record of how long each has taken so far, and one of its own for each long save.
Only the thread that trains counts: what others save in the background holds up no step. Compilation holds it
up wherever it runs.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from .. import records
from ..recorder import Recorder
from ..torch_internals import compiler_callbacks

LONG_NS = 1_000_000
SAVES = {  # module -> functions of it that save; looked for once the job has imported it
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "_save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
}


class Stopwatch:
    """How long an activity took so far; nested calls are counted once."""

    def __init__(self) -> None:
        """Start at zero."""
        self._depth = self._total_ns = self._begun_ns = 0

    def start(self) -> None:
        """Note that the activity begins."""
        self._depth += 1
        if self._depth == 1:
            self._begun_ns = time.time_ns()

    def stop(self) -> int:
        """Note that the activity ends; one that began before the stopwatch existed is ignored.

        Returns:
            How long it took, ns, if that was the outermost; else -1.
        """
        if self._depth != 1:
            self._depth = max(self._depth - 1, 0)
            return -1
        self._depth = 0
        took_ns = time.time_ns() - self._begun_ns
        self._total_ns += took_ns
        return took_ns

    def total_ns(self, now_ns: int) -> int:
        """The total time so far, including an activity that still runs."""
        return self._total_ns + (now_ns - self._begun_ns if self._depth else 0)


class OtherWork:
    """What one process does besides training."""

    def __init__(self, recorder: Recorder) -> None:
        """Nothing is done yet."""
        self._recorder = recorder
        self._patched: set[str] = set()
        self.on_fork()

    def on_fork(self) -> None:
        """Start at zero in a forked child: what its parent was doing does not count."""
        self._saving, self._without_gradients, self._compiling = Stopwatch(), Stopwatch(), Stopwatch()

    def _ours(self) -> bool:
        return self._recorder.training_thread == threading.get_ident()

    def on_step(self, _step: int) -> None:
        """Record the time of saving, evaluating and compiling up to the end of this step."""
        self.look()
        if self._recorder.records is not None:
            now_ns = time.time_ns()
            watches = (self._saving, self._without_gradients, self._compiling)
            self._recorder.records.write(records.ASIDE, now_ns, *(each.total_ns(now_ns) for each in watches))

    def look(self) -> None:
        """Patch the functions that save of the modules that the job has imported by now."""
        for name in SAVES:
            if name not in self._patched and name in sys.modules:
                self._patch_saves(name)
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

    def _patch_saves(self, name: str) -> None:
        module = sys.modules[name]
        found = [function for function in SAVES[name] if callable(getattr(module, function, None))]
        for function in found:
            setattr(module, function, self.saving(getattr(module, function)))
        if found:  # else it is still being imported
            self._patched.add(name)

    def saving(self, original: Any) -> Any:
        """A function that saves, watched."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            ours = self._ours()
            if ours:
                self._recorder.call(self._saving.start)
            try:
                return original(*args, **kwargs)
            finally:
                if ours:
                    self._recorder.call(self.on_saved, args)

        return save

    def on_saved(self, arguments: tuple[Any, ...]) -> None:
        """Something was saved."""
        took_ns = self._saving.stop()
        if took_ns >= LONG_NS and self._recorder.records is not None:
            begun_ns = time.time_ns() - took_ns
            self._recorder.records.write(records.SAVED, begun_ns, took_ns, _size(arguments))

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
    aside = OtherWork(recorder)
    for module in (torch, torch.serialization):
        module.save = aside.saving(module.save)
    for mode in (torch.no_grad, torch.inference_mode):
        aside.watch_mode(mode)
    recorder.listen("work", aside.look)
    recorder.listen("step", aside.on_step)
    recorder.listen("resume", aside.on_step)
    recorder.listen("fork", aside.on_fork)


def _size(arguments: tuple[Any, ...]) -> int:
    """Bytes of what `torch.save(object, file)` wrote; -1 where that is not a path or was not written."""
    with suppress(Exception):
        if isinstance(arguments[1], (str, os.PathLike)):
            return os.stat(arguments[1]).st_size
    return -1
