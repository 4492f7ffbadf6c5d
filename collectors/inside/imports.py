"""What to do once the job has imported a module; nothing is imported for it.

In: the name of a module, and an action. Out: the action is called with the module, in the thread that has
imported it, when its code has run. What no job imports costs nothing but a look at a table in each import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AwaitedModules:
    """A finder that finds what the others find, and learns when it has been loaded."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Callable[[Any], None]]] = {}
        self._asking: set[str] = set()

    def add(self, name: str, action: Callable[[Any], None]) -> None:
        """Call an action when a module has been imported, at once where it is there.

        Args:
            action: gets the module; must not raise.
        """
        if name in sys.modules:
            action(sys.modules[name])
            return
        self._actions.setdefault(name, []).append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders say, of a module that is awaited; None of any other."""
        if name not in self._actions or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if spec is None or execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # else another one that has the same loader
                for action in self._actions.pop(name, ()):
                    action(module)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec
