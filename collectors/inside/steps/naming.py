"""Steps that the user names: a range called `dpro::step`, or a function whose returns end steps.

Watches the ends of `torch.profiler.record_function` ranges, and the function of option `--step
MODULE:FUNCTION`. Ends steps. A script that uses the range needs no dpro, and runs as before without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function

from ..recorder import Recorder
from ..stepping import NAMED

RANGE = "dpro::step"


class NamedFunction:
    """The function that the user named."""

    def __init__(self, recorder: Recorder, target: str) -> None:
        """Keep the name of the function, which need not exist yet."""
        self._recorder = recorder
        self._target = target
        self._module_name, _, self._path = target.partition(":")
        self._original: Any = None

    def look(self) -> None:
        """Find the function, once its module has defined it, and make each of its returns end a step."""
        if self._original is not None:
            return
        *path, name = self._path.split(".")
        owner = _find_module(self._module_name)
        for part in path:
            owner = getattr(owner, part, None)
        if not callable(getattr(owner, name, None)):
            return
        function = self._original = vars(owner).get(name) or getattr(owner, name)
        if isinstance(function, staticmethod | classmethod):
            setattr(owner, name, type(function)(self._ending_steps(function.__func__)))
            return
        named = self._ending_steps(function)
        setattr(owner, name, named)
        for module in list(sys.modules.values()):  # those that have imported it by name
            names = getattr(module, "__dict__", {})
            for alias in [key for key, value in list(names.items()) if value is function]:
                names[alias] = named

    def _ending_steps(self, function: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            recorder.guarded(recorder.on_update, NAMED)
            return result

        return named

    def on_end(self) -> None:
        """Raise if there was no such function."""
        if self._original is None and self._recorder.enabled:
            raise LookupError(f"the job had no {self._target} when it asked for data or gradients")


def install(recorder: Recorder) -> None:
    """Let the user name the steps."""
    original = record_function.__exit__

    @functools.wraps(original)
    def patched(
        self: Any, kind: Any, value: Any, traceback: Any
    ) -> None:  # torch calls it often: no *details
        original(self, kind, value, traceback)
        if self.name == RANGE:
            recorder.guarded(recorder.on_update, NAMED)

    record_function.__exit__ = patched
    if recorder.config["step"]:
        function = NamedFunction(recorder, recorder.config["step"])
        recorder.listen("work", function.look)
        recorder.listen("end", function.on_end)


def _find_module(name: str) -> Any:
    """Return a module by its name; the script also by its file's name, or as given to `python -m`."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if name in ("__main__", spec and spec.name, file and Path(file).stem):
        return main
    return sys.modules.get(name)
