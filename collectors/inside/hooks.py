"""The recorder's entry: its hooks on torch, and the list of its probes.

Each patch calls the original with the same arguments and lets its exceptions pass. Patches that each step
calls do what `Recorder.guarded` and `patching.run_uncompiled` do without calling them.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import captures, kineto, peers, windows
from .calls import buckets, coverage, flight, mesh, stalls
from .files import IMPORTED
from .patching import keep_compiler_out, keep_library, patch
from .pipelines import deepspeed, megatron, pipelining
from .process import actors, exits, memory, requests, stacks, starting
from .recorder import Recorder
from .steps import aside, data, gpu_steps, host, inference, losses, model_calls, naming, phases
from .torch_internals import frame_watch


def install(launch: str) -> None:
    """Set the hooks, at the end of `import torch`."""
    recorder = Recorder(Path(launch))
    with suppress(OSError):
        (recorder.launch / IMPORTED).touch()
    of_extensions = list(_probes_of_extensions(recorder))
    first = [probe for probe in of_extensions if getattr(probe, "FIRST", False)]
    later = [probe for probe in of_extensions if probe not in first]
    for probe in first:
        recorder.call(probe.install, recorder)
    _install_optimizers(recorder)
    _install_scaler(recorder)
    if dist.is_available():
        _install_distributed(recorder)
    # Called in this order: the time of a step is recorded before our own work at its end, and a window is
    # saved before what ends with it.
    for probe in (
        starting, coverage, captures, requests, gpu_steps, data, host, aside, losses, naming, phases,
        inference, model_calls, actors, mesh, pipelining, megatron, deepspeed, *later, windows,
        stalls, flight, buckets, peers, memory, exits, stacks,
    ):  # fmt: skip
        recorder.call(probe.install, recorder)
    _install_backward(recorder)
    keep_compiler_out()
    keep_library()
    os.register_at_fork(after_in_child=lambda: recorder.run(recorder.on_fork))
    _install_exit(recorder)


def _probes_of_extensions(recorder: Recorder) -> Iterator[ModuleType]:
    """Load the probes that the launcher names, as modules of this package; log those that fail.

    A container without the file of a probe has a copy of it beside that of the recorder.
    """
    for name, place in recorder.config.get("probes", {}).items():
        try:
            if os.path.exists(place):
                spec = spec_from_file_location(f"{__package__}.{name}", place)
                assert spec is not None
                assert spec.loader is not None
                module = sys.modules[spec.name] = module_from_spec(spec)
                spec.loader.exec_module(module)
            else:
                module = import_module(f".{name}", __package__)
            yield module
        except Exception as error:
            recorder.complain(f"continues without the probe {name}", error)


def _install_exit(recorder: Recorder) -> None:
    """End the recording before the interpreter exits, also where the job clears its exit handlers."""

    def leave() -> None:
        try:
            recorder.guarded(recorder.on_exit)
        finally:  # handlers registered before torch was imported follow, and may train
            recorder.has_exited = True

    def register() -> None:
        atexit.register(kineto.stop_left)
        atexit.register(leave)  # called first

    register()
    patch(atexit, "_clear", after=lambda *_: register())


def _install_optimizers(recorder: Recorder) -> None:
    watch = frame_watch()

    def hook(optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        before = watch(None)
        try:
            if recorder.enabled and not recorder.has_exited:
                recorder.on_update(optimizer)
        except Exception as error:
            recorder.stop(recorder.on_update, error)
        finally:
            watch(before)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined] # compiled updates count, too
    register_optimizer_step_post_hook(hook)


def _install_backward(recorder: Recorder) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            if recorder.enabled and not recorder.has_exited:
                recorder.on_backward()
        except Exception as error:
            recorder.stop(recorder.on_backward, error)
        result = original(*args, **kwargs)
        if recorder.postponed or recorder.pass_begun_ns:
            recorder.guarded(recorder.after_backward)
        return result

    torch.autograd.backward = backward


def _install_scaler(recorder: Recorder) -> None:
    """Count a step that the scaler skips for infinite gradients like any other."""
    original = torch.amp.GradScaler.step

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = recorder.num_updates
        result = original(scaler, optimizer, *args, **kwargs)
        if recorder.num_updates == before:
            recorder.guarded(recorder.on_update, optimizer)
        return result

    torch.amp.GradScaler.step = step


def _install_distributed(recorder: Recorder) -> None:
    from torch.distributed import device_mesh, distributed_c10d

    others = dist, device_mesh
    for name, before, after in (
        ("init_process_group", lambda *_: None, lambda *_: recorder.guarded(recorder.on_process_group)),
        ("destroy_process_group", lambda *_: recorder.guarded(recorder.on_end), lambda *_: None),
    ):
        patch(distributed_c10d, name, before, after, also=others)
