"""Activation checkpointing: modules keep their inputs only, and backward computes the rest again.

In: a pattern for names of modules. Out: of those that fit, the outermost ones run their `forward` under
`torch.utils.checkpoint`. Names, parameters and hooks of modules stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...recorder import Recorder
from ..report import ChangeReport
from .outermost import change_outermost

WRAPPER = "module."  # by which DDP names the module inside


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Checkpoint modules by name."""
    pattern = arguments["module"]

    def change(model: Any) -> None:
        for name, module in list(_fitting(model, pattern)):
            if getattr(module.forward, "__wrapped__", None) is checkpoint:
                continue
            if _is_checkpointed(module):
                report.refuse(f"the script checkpoints {name} itself")
                continue
            module.forward = _checkpointed(module.forward)
            report.applied(f"{name} ({type(module).__name__})")

    change_outermost(report, recorder, change)
    report.missing = (
        f"no module that trains is called {pattern}: in the script, "
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    )


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    functools.update_wrapper(called, forward)
    called.__wrapped__ = checkpoint  # type: ignore[attr-defined] # by which it is recognised
    return called


def _fitting(model: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """The outermost modules within a model whose names fit, as `dpro record --modules` names them."""
    taken: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        if any(fnmatchcase(spelling, pattern) for spelling in (name, name.removeprefix(WRAPPER))):
            taken.append(name)
            yield name, module


def _is_checkpointed(module: Any) -> bool:
    """Whether the script has wrapped it, or something within, as PyTorch's own helpers do."""
    wrappers = ("CheckpointWrapper", "OffloadWrapper")
    return any(type(part).__name__ in wrappers for part in module.modules())
