"""Which modules the training loop itself calls: not those that are called within another.

In: the calls of modules during the first steps. Out: each such module, once, when those steps are over.
Nothing is left behind: a module that is compiled afterwards finds `torch.nn.Module` as it was.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...recorder import Recorder
from ..report import ChangeReport

KNOWN_AT_STEP = 2


class _Calls:
    """The calls of modules that only the training loop makes, during the first steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._found: list[tuple[Any, bool]] = []
        self._waiting: list[tuple[ChangeReport, Callable[[Any], None]]] = []
        self._within = threading.local()
        self._original = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._patched = self._watched(self._original)
        recorder.listen("step", self._on_step)

    def await_them(self, report: ChangeReport, change: Callable[[Any], None]) -> None:
        self._waiting.append((report, change))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._within, "a_call", False) or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._within.a_call = True
            try:
                if not any(module is other for other, _ in self._found) and _trains(module):
                    self._found.append((module, _is_compiled(module)))
                return original(module, *args, **kwargs)
            finally:
                self._within.a_call = False

        return called

    def _on_step(self, step: int) -> None:
        if step < KNOWN_AT_STEP or not self._waiting:
            return
        if torch.nn.Module.__call__ is self._patched:
            torch.nn.Module.__call__ = self._original
        waiting, self._waiting = self._waiting, []
        for report, change in waiting:
            for module, is_compiled in self._found:
                if is_compiled:
                    report.refuse("the script compiles its model itself: make this change there, too")
                else:
                    report.attempt(change, module)


_calls = functools.cache(_Calls)  # several changes are made to what is found once


def change_outermost(report: ChangeReport, recorder: Recorder, change: Callable[[Any], None]) -> None:
    """Have an action called with each module that the loop itself calls for training.

    Args:
        report: receives where the script compiles a module, which a change around it would change, too.
        change: the action; it may raise.
    """
    report.missing = "no step of the job called a module that trains"
    _calls(recorder).await_them(report, change)


def _trains(module: Any) -> bool:
    wanted = torch.is_grad_enabled() and module.training
    return wanted and any(parameter.requires_grad for parameter in module.parameters())


def _is_compiled(module: Any) -> bool:
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )
