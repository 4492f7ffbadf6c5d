"""Which models the job trains, and what their calls are given, seen without touching them.

The main thread, if it trains, looks between two bytecodes which model it is in, twenty times a second until a
dozen calls of a model were met. Writes `model.json`: the models that were met (how many elements their
weights have), and the shapes of the tensors that each call was given. Hooks on modules would make compiled
models compile again; nothing is set here, and no element of a tensor is read.

Only calls of models in training mode count, the outermost of those within each other, and none that a
backward makes to recompute activations.
"""

from __future__ import annotations

import json
import math
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from ..files import TENSOR_AXES
from ..main_thread import MainThreadCall
from ..recorder import ENOUGH, Recorder
from ..threads import Bell, Thread, main_thread_ident
from ..torch_internals import fsdp_states, module_calls
from ..unseen import (
    attributes,
    children_of,
    dtype_of,
    is_a,
    is_training,
    mesh_of,
    modules_of,
    parameters_of,
    shape_of,
    wants_gradient,
)
from .data import tensors_in

KNOWN_AT_STEP = 2  # the first step compiles and allocates
LOOK_S, JOIN_S = 0.05, 5.0
MAX_LOOKS = 400
MAX_CALLS = 12
MAX_TENSORS = 16  # of one call
INTERNALS_OF_BACKWARD = torch.autograd.__file__
_WRAPPED = ("module", "_orig_mod")  # attributes of DDP and of compiled modules


class TrainedModels:
    """The models that one process trains."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._thread = recorder, LookingThread(recorder)
        self.on_fork()

    def on_fork(self) -> None:
        """Start in a forked child without the thread that looks."""
        self._thread.on_fork()
        self._models: list[weakref.ref[Any]] = []
        self._calls: dict[tuple[int, int], dict[str, Any]] = {}  # by model and backward calls before it
        self._saved = False

    def on_step(self, step: int) -> object:
        """Begin to look once steps take their usual course."""
        if step < KNOWN_AT_STEP or self._recorder.training_thread != main_thread_ident():
            return None
        self._thread.start(self._search)
        return ENOUGH

    def on_end(self) -> None:
        """Save what was met, if the job ends before that was enough."""
        self._thread.end(JOIN_S)
        self.save()

    def _search(self) -> None:
        codes = module_calls()
        look = MainThreadCall(partial(self._recorder.call, self._look, codes))
        for _ in range(MAX_LOOKS if codes else 0):
            if self._thread.sleep(LOOK_S) or len(self._calls) >= MAX_CALLS:
                break
            look.ask()
        if not self._thread.sleep():
            self.save()

    def _look(self, codes: tuple[Any, ...]) -> None:
        """Record the call that the main thread is in; called there."""
        call = outermost_call(sys._getframe(), codes)
        if call is not None:
            self._meet(call.f_locals)

    def _meet(self, names: Any) -> None:
        """Record a call, given the names of its frame."""
        module = names.get("self")
        if not is_a(module, Module) or not is_training(module):
            return
        number = next(
            (index for index, reference in enumerate(self._models) if reference() is module),
            len(self._models),
        )
        key = number, self._recorder.num_backward
        if key in self._calls:
            return
        tensors = tensors_in((names.get("args"), names.get("kwargs")))[:MAX_TENSORS]
        if number == len(self._models):
            self._models.append(weakref.ref(module))
        self._calls[key] = {
            "model": number,
            "time_ns": time.time_ns(),
            "shapes": [shape_of(tensor) for tensor in tensors],
            "dtypes": [dtype_of(tensor) for tensor in tensors],
        }

    def save(self) -> None:
        """Save the models and their calls, once."""
        if self._saved or not self._calls or self._recorder.folder is None:
            return
        self._saved = True
        models = [
            describe(model) if (model := reference()) is not None else None for reference in self._models
        ]
        saved = {"models": models, "calls": list(self._calls.values())}
        self._recorder.write_file("model.json", json.dumps(saved).encode())


def install(recorder: Recorder) -> None:
    """Record which models are trained, and what they are given."""
    models = TrainedModels(recorder)
    recorder.listen("step", models.on_step)
    recorder.listen("end", models.on_end)
    recorder.listen("fork", models.on_fork)


def outermost_call(frame: FrameType | None, codes: tuple[Any, ...]) -> FrameType | None:
    """Return the outermost call of a module that a frame is in, outside a backward; None for none."""
    outermost: FrameType | None = None
    while frame is not None:
        if frame.f_code in codes:
            outermost = frame
        elif frame.f_code.co_filename == INTERNALS_OF_BACKWARD:
            outermost = None
        frame = frame.f_back
    return outermost


def describe(model: Any) -> dict[str, Any]:
    """Count the elements of a model's weights, as one rank computes with them.

    Returns:
        `name`; `parameters`, all elements, -1 where they are not known; `matrices`, those of weights with two
        dimensions except embeddings (once for each module that uses them), and `trained_matrices`, those of
        them that get gradients; `tensors`, those of weights with more dimensions; `experts`, whether the path
        of a module says so.
    """
    kinds = {path: type(module).__name__ for path, module in modules_of(model)}
    every: dict[int, int] = {}
    matrices = trained = tensors = 0
    is_sharded = bool(fsdp_states())
    for path, parameter in parameters_of(model, every=True):
        of_deepspeed = attributes(parameter).get("ds_shape")  # before it was sharded
        shape = shape_of(parameter) if of_deepspeed is None else of_deepspeed
        elements = math.prod(shape) // _tensor_parallel(parameter, is_sharded)
        every[id(parameter)] = elements
        owner, _, name = path.rpartition(".")
        if "weight" not in name or "embedding" in kinds.get(owner, "").lower():
            continue
        if len(shape) == 2:
            matrices += elements
            trained += elements * wants_gradient(parameter)
        elif len(shape) > 2:
            tensors += elements
    is_known = "FullyShardedDataParallel" not in kinds.values()  # its parameters are flat, and sharded
    return {
        "name": type(_unwrapped(model)).__name__,
        "parameters": sum(every.values()) if is_known else -1,
        "matrices": matrices,
        "trained_matrices": trained,
        "tensors": tensors,
        "experts": any("expert" in path.lower() for path in kinds),
    }


def _tensor_parallel(parameter: Any, is_sharded: bool) -> int:
    """Return how many ranks each compute with a part of a parameter.

    Args:
        is_sharded: whether FSDP2 shards the model: an axis without a name is then FSDP2's.
    """
    mesh, placements = mesh_of(parameter)
    if mesh is None:
        return 1
    names = mesh.mesh_dim_names or ("" if is_sharded else TENSOR_AXES[0],) * mesh.ndim
    shards = [
        mesh.size(axis)
        for axis, (name, placement) in enumerate(zip(names, placements))
        if placement.is_shard() and name.lower() in TENSOR_AXES
    ]
    return math.prod(shards)


def _unwrapped(model: Any) -> Any:
    """Return the model within DDP, and within the compiler's wrapper of a module."""
    while True:
        children = children_of(model)
        if len(children) != 1 or children[0][0] not in _WRAPPED:
            return model
        [(_, model)] = children


# A thread of ours that looks, again and again, where the threads of the job are.


class LookingThread:
    """A thread that looks: started once in a process, ended once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.on_fork()

    def on_fork(self) -> None:
        """Start without the thread in a forked child."""
        self._thread: Thread | None = None
        self._end, self._has_to_end = Bell(), False

    def start(self, look: Callable[[], None]) -> None:
        """Run a function in the thread, unless it was started already."""
        if self._thread is None:
            self._thread = Thread(self._recorder.call, look)

    @property
    def is_started(self) -> bool:
        """Whether the thread runs, or has run."""
        return self._thread is not None

    def sleep(self, seconds: float = 0.0) -> bool:
        """Wait until the next look is due; return whether the thread has to end."""
        self._end.wait(seconds)
        return self._has_to_end

    def end(self, patience_s: float = -1) -> None:
        """Have the thread end, and wait at most this long; the thread may call this itself."""
        self._has_to_end = True
        self._end.ring()
        if self._thread is not None and not self._thread.is_current():
            self._thread.join(patience_s)
