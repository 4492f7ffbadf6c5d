"""Jobs that never step: each call of the outermost model is a step.

Begins with a model put into evaluation mode, or a process group; then the main thread looks, twenty times a
second, which model it is in. Ends steps. A hook on every module would slow every job, so the outermost model
is looked for on the stack, only while the job has computed no gradients; the first that is met twice, however
far apart, is the only one watched from then on. Where the main thread calls no model, another thread may:
then the model is the one that was put into evaluation mode last. Ranks find it at different calls: the same
step has different numbers on them.

A training job may have shown no sign of it yet when its model is found: its first step is long, and it may
ask the engine itself for gradients, as Megatron's pipelines do. So calls that build a graph count as training
at first, and the first update of an optimizer ends the watch.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from ..main_thread import MainThreadCall
from ..recorder import Recorder
from ..stepping import MODEL_CALL
from ..threads import Local
from ..torch_internals import COMPILED_CALL, call_of, module_calls, sequence_number
from ..unseen import compiled_call
from .model_calls import LookingThread, outermost_call

PATIENCE_S = 5.0  # without gradients or updates: a training job has had its first step by then, or is in none
GRAPHS_S = 120.0  # for this long, calls that build a graph are not counted: the first update may come yet
LOOK_S = 0.05  # a call of 10 ms, once a second, is met every five seconds
ELSEWHERE_LOOKS = 400  # looks without a model in the main thread, after which another thread must call it


class ModelCalls:
    """The model calls of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._thread = recorder, LookingThread(recorder)
        self.on_fork()

    def on_fork(self) -> None:
        """Start in a forked child without the thread that looks."""
        self._thread.on_fork()
        self._watched: Any = None
        self._compiled: Any = None  # what `torch.nn.Module.compile` had put there
        self._met: list[weakref.ref[Any]] = []
        self._evaluated: weakref.ref[Any] | None = None

    def on_eval(self, module: Any) -> None:
        """Look for models that are called: evaluating this one may be all that the job does."""
        self._evaluated = weakref.ref(module)
        self._recorder.guarded(self._recorder.on_work)
        self.search()

    def search(self) -> None:
        """Begin to look for the model that is called, unless the process trains."""
        if not (self._thread.is_started or self._trains() or self._recorder.is_helper):
            self._thread.start(self._search_until_found)

    def on_exit(self) -> None:
        """End our thread before the interpreter exits."""
        self._thread.end()

    def _trains(self) -> bool:
        return bool(self._recorder.training_thread or self._recorder.num_updates)

    def _search_until_found(self) -> None:
        if self._thread.sleep(PATIENCE_S):
            return
        look = MainThreadCall(partial(self._recorder.call, self._look))
        looks = 0
        while not self._thread.sleep(LOOK_S) and not self._trains() and self._watched is None:
            look.ask()
            looks += 1
            if looks >= ELSEWHERE_LOOKS and not self._met and self._evaluated is not None:
                self._watch(self._evaluated())

    def _look(self) -> None:
        """Watch the model that the main thread calls, if it was met before; called there."""
        module = outermost_module()
        if module is None or self._watched is not None or self._trains():
            return
        if any(model() is module for model in self._met):
            self._watch(module)
        else:
            self._met.append(weakref.ref(module))

    def _watch(self, module: Any) -> None:
        recorder = self._recorder
        self._compiled = compiled_call(module)
        original = call_of(module)
        self._since_s = time.monotonic()

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = sequence_number()
            result = original(*args, **kwargs)
            recorder.call(self.on_call, sequence_number() != before)
            return result

        object.__setattr__(module, COMPILED_CALL, watched)
        self._watched = module

    def on_call(self, builds_graph: bool) -> None:
        """End a step as the outermost model returns, or the watch where the process trains."""
        if self._watched is None:
            return
        if self._recorder.training_thread:  # it trains, after all
            object.__setattr__(self._watched, COMPILED_CALL, self._compiled)
            self._watched = None
            return
        if builds_graph and time.monotonic() - self._since_s < GRAPHS_S:
            return
        self._recorder.guarded(self._recorder.on_update, MODEL_CALL)


def install(recorder: Recorder) -> None:
    """Record the model calls of a job that does not train."""
    calls = ModelCalls(recorder)
    # `train(False)` is noticed, since `eval` calls it, also that of a class that has its own.
    original = Module.train
    within = Local()  # `train` is called again for each module within the model

    @functools.wraps(original)
    def train(module: Any, mode: Any = True, *args: Any, **kwargs: Any) -> Any:
        if mode or getattr(within, "inner", False) or torch.compiler.is_compiling():
            return original(module, mode, *args, **kwargs)
        within.inner = True
        try:
            result = original(module, mode, *args, **kwargs)
        finally:
            within.inner = False
        recorder.call(calls.on_eval, module)
        return result

    Module.train = train
    recorder.listen("open", calls.search)
    recorder.listen("exit", calls.on_exit)
    recorder.listen("fork", calls.on_fork)


def outermost_module() -> Any:
    """Return the outermost model that the calling thread is in; None for none."""
    call = outermost_call(sys._getframe(), module_calls())
    return None if call is None else call.f_locals.get("self")
