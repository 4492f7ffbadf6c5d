"""Gradient accumulation: several passes of the script's loop become one optimizer step.

Takes `steps`, the passes per optimizer step. Optimizers update, and gradients are cleared, only once in that
many passes; in the others DDP and FSDP2 reduce no gradients. The gradients of each loss are divided by the
number of passes, so that a step has their mean. Nothing changes in the first steps, in which DDP learns the
order of gradients. Whatever else the script does in each pass, such as a learning rate schedule or clipping,
it still does in each.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from _dpro_inside_the_job.patching import patch
from _dpro_inside_the_job.recorder import Recorder
from _dpro_inside_the_job.torch_internals import fsdp_states, is_fsdp_root, is_within_backward
from torch.nn.parallel import DistributedDataParallel

from . import ChangeReport, place

BEGINS_AT_STEP = 2
CODE = "with model.no_sync(): in all passes but the last, and optimizer.step() after the last"


class _Accumulation:
    """The position of the loop within an optimizer step."""

    def __init__(self, report: ChangeReport, passes: int) -> None:
        self.report, self.passes = report, passes
        self.begun = False
        self.done = 0  # finished passes of the current step
        self._modules: list[weakref.ref[Any]] = []
        self._optimizer: weakref.ref[Any] | None = None
        self._stepping = False

    def wrapped(self, module: Any) -> None:
        self._modules.append(weakref.ref(module))

    def begin(self) -> None:
        """Accumulate from the next pass on; refuse on several ranks that use neither DDP nor FSDP2."""
        sharded = any(map(is_fsdp_root, fsdp_states().values()))
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        if not (self._ddp_modules() or sharded or alone):
            self.report.refuse(f"gradients are reduced by neither DDP nor FSDP2: in the script, {CODE}")
            return
        self.begun = True
        self._set_gradient_sync(False)

    def _ddp_modules(self) -> list[Any]:
        return [module for module in (reference() for reference in self._modules) if module is not None]

    def refuse(self, why: str) -> None:
        """Report why the loop cannot accumulate, and let it train on as the script says."""
        if self.begun:
            self.begun, self.done = False, 0
            self._set_gradient_sync(True)
        self.report.refuse(why)

    def _set_gradient_sync(self, wanted: bool) -> None:
        """Set whether the gradients of the next pass are reduced."""
        for module in self._ddp_modules():
            module.require_backward_grad_sync = wanted
        for module, state in fsdp_states().items():
            if is_fsdp_root(state):
                module.set_requires_gradient_sync(wanted)

    @property
    def keeps_gradients(self) -> bool:
        return self.begun and self.done > 0

    def updating(self, optimizer: Any, has_closure: bool) -> bool:
        """Count a call of an optimizer's `step`; return whether the optimizer may update."""
        if not self.begun or self._stepping:
            return True
        try:
            return self._count_pass(optimizer, has_closure)
        except Exception as error:  # the job continues unchanged
            self.refuse(f"{type(error).__name__}: {error}")
            return True

    def _count_pass(self, optimizer: Any, has_closure: bool) -> bool:
        if has_closure:
            self.refuse(f"an optimizer is given a closure at {place()}: in the script, {CODE}")
            return True
        first = self._optimizer() if self._optimizer is not None else None
        if first is not None and first is not optimizer:
            self.refuse(f"several optimizers update ({place()}): in the script, {CODE}")
            return True
        if first is None:
            self._optimizer = weakref.ref(optimizer)
            self.report.applied(f"{type(optimizer).__name__} at {place()}")
        self.done = (self.done + 1) % self.passes
        self._set_gradient_sync(self.done == self.passes - 1)
        return self.done == 0


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Make the loop's passes accumulate their gradients."""
    report.missing = "the job runs no PyTorch optimizer"
    accumulation = _Accumulation(report, arguments["steps"])
    begun: list[int] = []

    def on_step(step: int) -> None:
        if step >= BEGINS_AT_STEP and not begun:
            begun.append(step)
            report.attempt(accumulation.begin)

    def refuse_no_sync(_module: Any) -> None:
        accumulation.refuse(f"the script accumulates gradients itself, with no_sync() at {place()}")

    def refuse_scaler(scaler: Any) -> None:
        if scaler.is_enabled():
            accumulation.refuse(
                f"a GradScaler would scale gradients again in each pass: in the script, {CODE}"
            )

    patch(DistributedDataParallel, "__init__", after=accumulation.wrapped)
    patch(DistributedDataParallel, "no_sync", before=refuse_no_sync)
    patch(torch.amp.GradScaler, "step", before=refuse_scaler)
    _patch_updates(accumulation)
    for cls in (torch.optim.Optimizer, torch.nn.Module):
        _patch_clearing(accumulation, cls)
    _patch_backward(accumulation)
    recorder.listen("step", on_step)


def _patch_updates(accumulation: _Accumulation) -> None:
    """Replace the function by which PyTorch wraps `step` of an optimizer class at its first object."""
    original = torch.optim.Optimizer.profile_hook_step

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        hooked = original(function)

        @functools.wraps(hooked)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.get("closure")
            if not accumulation.updating(optimizer, closure is not None):
                return None
            outermost, accumulation._stepping = not accumulation._stepping, True
            try:
                return hooked(optimizer, *args, **kwargs)
            finally:
                accumulation._stepping = accumulation._stepping and not outermost

        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(made)


def _patch_clearing(accumulation: _Accumulation, cls: Any) -> None:
    original = cls.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if accumulation.keeps_gradients else original(self, *args, **kwargs)

    cls.zero_grad = zero_grad


def _patch_backward(accumulation: _Accumulation) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and grad_tensors is None
        if accumulation.begun and is_loss and not is_within_backward():
            grad_tensors = torch.full_like(tensors, 1 / accumulation.passes)
        return original(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward
