"""Implementations of optimizers.

In: `impl`: fused, foreach, or loop. Out: optimizers made with it. Those of PyTorch that have no such
version, and others, stay as they are; where that is so of all, the change is refused.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ..recorder import Recorder
from .arguments import Bound, set_arguments
from .report import ChangeReport

SETTINGS = {"fused": ("fused", True), "foreach": ("foreach", True), "loop": ("foreach", False)}
EXCLUDED = {"fused": "foreach", "foreach": "fused"}


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Change how optimizers are made."""
    name, value = SETTINGS[arguments["impl"]]
    report.missing = "the job made no optimizer"

    def also(bound: Bound) -> dict[str, Any]:
        other = EXCLUDED[name]
        return {other: False} if bound.arguments.get(other) else {}

    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and _takes(cls, name)]
    _note_others(report, name)
    set_arguments(report, classes, {name: value}, also)


def _takes(cls: type, name: str) -> bool:
    return name in inspect.signature(cls.__init__).parameters  # type: ignore[misc] # of the class itself


def _note_others(report: ChangeReport, name: str) -> None:
    """Know the name of an optimizer that cannot be changed."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(_takes(cls, name) for cls in type(self).__mro__ if cls.__module__.startswith("torch.")):
            report.missing = f"{type(self).__name__} has no {name} version"
        original(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = patched
