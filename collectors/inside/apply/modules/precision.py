"""Autocast around the model's forward pass.

In: a dtype, and the names of `layers` if it is for these only. Out: they, or the modules that the training
loop calls, run under autocast; what they return in that precision is turned into float32, since what the
script does with it, a loss mostly, is outside. Gradients of fp16 are not scaled: a step takes as long as with
a GradScaler, but small gradients are lost.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...recorder import Recorder
from ...torch_internals import COMPILED_CALL
from ..report import ChangeReport
from .outermost import change_outermost

WRAPPER = "module."  # by which DDP names the module inside
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Run what the training loop calls under autocast."""
    dtype = DTYPES[arguments["dtype"]]

    def change(model: Any) -> None:
        layers = frozenset(arguments.get("layers", ()))
        parts = [part for name, part in model.named_modules() if name.removeprefix(WRAPPER) in layers]
        for module in parts if layers else [model]:
            lower(module)

    def lower(module: Any) -> None:
        around = _Autocast(report, next(module.parameters()).device.type, dtype)
        compiled = getattr(module, COMPILED_CALL, None)
        if compiled is not None:
            setattr(module, COMPILED_CALL, around.calling(compiled))
        else:
            module.register_forward_pre_hook(around.enter, prepend=True)
            module.register_forward_hook(around.leave, always_call=True)
        report.applied(type(module).__name__)

    change_outermost(report, recorder, change)


class _Autocast:
    """Autocast that hooks enter and leave: unlike a replaced `forward`, they suit copies, too."""

    def __init__(self, report: ChangeReport, device: str, dtype: torch.dtype) -> None:
        self._report = report
        self._device, self._dtype = device, dtype
        self._entered: list[Any] = []

    def __deepcopy__(self, _memo: Any) -> _Autocast:
        return _Autocast(self._report, self._device, self._dtype)

    def enter(self, _module: Any = None, _inputs: Any = None) -> None:
        is_there = torch.is_autocast_enabled(self._device)
        if is_there:
            self._report.refuse("the script runs its model under autocast itself")
        context = nullcontext() if is_there else torch.autocast(self._device, self._dtype)
        context.__enter__()
        self._entered.append(context)

    def leave(self, _module: Any, _inputs: Any, output: Any) -> Any:
        self._entered.pop().__exit__(None, None, None)
        return tree_map(self._as_float32, output)

    def _as_float32(self, value: Any) -> Any:
        is_low = isinstance(value, torch.Tensor) and value.dtype == self._dtype
        return value.float() if is_low else value

    def calling(self, function: Any) -> Any:
        """The same around a call."""

        def called(*args: Any, **kwargs: Any) -> Any:
            output = None
            self.enter()
            try:
                output = function(*args, **kwargs)
            finally:
                output = self.leave(None, None, output)
            return output

        return called
