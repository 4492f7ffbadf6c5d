"""Jobs that never step: each call of the outermost model is a step.

In: a model put into evaluation mode, or a process group; then, once a second, where the threads are. Out:
steps. A hook on every module would slow every job, so the outermost model is looked for on the stacks, only
while the job has computed no gradients; the first that is met twice, however far apart, is the only one
watched from then on. Ranks find it at different calls: the same step has different numbers on them.

A training job may have said nothing yet when its model is found: its first step is long, and it may ask the
engine itself for gradients, as Megatron's pipelines do. So calls that build a graph are taken for training at
first, and the first update of an optimizer ends the watch.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from typing import Any

import torch
from torch.nn import Module

from ..recorder import Recorder
from ..torch_internals import COMPILED_CALL, call_of, module_calls, sequence_number
from .looking import LookingThread
from .model_calls import outermost_call
from .stepping import MODEL_CALL

PATIENCE_S = 5.0  # without gradients or updates: a training job has had its first step by then, or is in none
GRAPHS_S = 120.0  # for this long, calls that build a graph are not counted: the first update may come yet
LOOK_S = 0.05  # a call of 10 ms, once a second, is met every five seconds


class ModelCalls:
    """The model calls of one process."""

    def __init__(self, recorder: Recorder) -> None:
        """Start without looking for models."""
        self._recorder, self._thread = recorder, LookingThread(recorder, "dpro-calls")
        self.on_fork()

    def on_fork(self) -> None:
        """This is a forked child: the thread that looks stayed behind."""
        self._thread.on_fork()
        self._watched: Any = None
        self._compiled: Any = None  # what `torch.nn.Module.compile` had put there

    def on_eval(self) -> None:
        """A model is evaluated; it may be all that this job does."""
        self._recorder.guarded(self._recorder.on_work)
        self.search()

    def search(self) -> None:
        """Begin to look for the model that is called, unless the process trains."""
        if not (self._thread.is_started or self._trains() or self._recorder.is_helper):
            self._thread.start(self._search_until_found)

    def on_exit(self) -> None:
        """Called before the interpreter exits: end our thread first."""
        self._thread.end()

    def _trains(self) -> bool:
        return bool(self._recorder.training_thread or self._recorder.num_updates)

    def _search_until_found(self) -> None:
        met: dict[int, weakref.ref[Any]] = {}
        if self._thread.sleep(PATIENCE_S):
            return
        while not self._thread.sleep(LOOK_S) and not self._trains():
            found = outermost_module()
            if found is not None and id(found) in met and met[id(found)]() is found:
                self._watch(found)
                return
            if found is not None:
                met[id(found)] = weakref.ref(found)
            del found  # the job's own: it goes when the job lets it go

    def _watch(self, module: Any) -> None:
        recorder = self._recorder
        self._compiled = getattr(module, COMPILED_CALL)
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
        """The outermost model has returned."""
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
    _watch_modes(recorder, calls)
    recorder.listen("open", calls.search)
    recorder.listen("exit", calls.on_exit)
    recorder.listen("fork", calls.on_fork)


def _watch_modes(recorder: Recorder, calls: ModelCalls) -> None:
    """Have `train(False)` noticed: `eval` calls it, also that of a class which has its own."""
    original = Module.train
    within = threading.local()  # it is called anew for each module within the model

    @functools.wraps(original)
    def train(module: Any, mode: Any = True, *args: Any, **kwargs: Any) -> Any:
        if mode or getattr(within, "inner", False) or torch.compiler.is_compiling():
            return original(module, mode, *args, **kwargs)
        within.inner = True
        try:
            result = original(module, mode, *args, **kwargs)
        finally:
            within.inner = False
        recorder.call(calls.on_eval)
        return result

    Module.train = train


def outermost_module() -> Any:
    """The model that some thread is in, the outermost of those within each other; None if there is none."""
    calls = module_calls()
    for frame in sys._current_frames().values():
        found = outermost_call(frame, calls)
        if found is not None:
            return found.f_locals.get("self")
    return None
