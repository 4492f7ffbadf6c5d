"""The names of modules as ranges of Kineto: which layer an operator belongs to.

In: forward calls of modules, while a window is open. Out: ranges named `nn.Module: layers.3.linear1`, by
where the module is within the outermost one that was called. Costs nothing while no window is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

PREFIX = "nn.Module: "


class _Calls(threading.local):
    """The calls that are open on a thread, outermost first, and the names within the outermost."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, record_function]] = []
        self.names: dict[int, str] = {}


def name_modules() -> Callable[[], None]:
    """Begin to name the modules; returns how to stop."""
    calls = _Calls()

    def before(module: Any, _arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not calls.open:
            calls.names = {id(each): name for name, each in module.named_modules()}
        name = calls.names.get(id(module)) or type(module).__name__
        mark = record_function(PREFIX + name)
        mark.__enter__()
        calls.open.append((module, mark))

    def after(module: Any, _arguments: Any, _result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while calls.open:  # those that an exception left open end here, too
            opened, mark = calls.open.pop()
            mark.__exit__(None, None, None)
            if opened is module:
                return

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop
