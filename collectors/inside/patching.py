"""Our own code around functions of other modules, kept away from the compiler.

Takes a function, and what to call before and after it. The function gets the same arguments, and its
exceptions pass.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

import torch

from .torch_internals import code_skipper, frame_watch


def patch(
    owner: Any,
    name: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
    also: Iterable[Any] = (),
) -> None:
    """Have `before` and `after` called around a function, with its first argument if it has one.

    Args:
        before: must not raise.
        after: must not raise; not called where the function raised.
        also: other modules that have the function under the same name. It stays one function: `pickle` looks
            a function up in its module, and refuses another one.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler reads this: nothing of ours belongs in its graph
            return original(*args, **kwargs)
        before(*args[:1])
        result = original(*args, **kwargs)
        after(*args[:1])
        return result

    for module in (owner, *also):
        if getattr(module, name, None) is original:
            setattr(module, name, patched)


def wrap(owner: Any, name: str, around: Callable[[Any], Any], also: Iterable[Any] = ()) -> None:
    """Replace a function by what `around` makes of it.

    Args:
        also: other modules that have the function, as in `patch`.
    """
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(around(original))
    for module in (owner, *also):
        if getattr(module, name, None) is original:
            setattr(module, name, wrapped)


def preceded_by(call: Callable[..., None], action: Callable[..., None]) -> Callable[[Any], Any]:
    """Return an `around` for `wrap` that calls an action with a function's arguments before the function.

    Args:
        call: runs the action, as `Recorder.call`.
        action: gets the positional arguments, then those by keyword, as they come.
    """

    def around(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call(action, *args, *kwargs.values())
            return original(*args, **kwargs)

        return wrapped

    return around


def followed_by(call: Callable[..., None], action: Callable[..., None]) -> Callable[[Any], Any]:
    """Return an `around` for `wrap` that calls an action with a function's result and arguments after it."""

    def around(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            call(action, result, *args, *kwargs.values())
            return result

        return wrapped

    return around


def run_uncompiled(action: Callable[..., None], *arguments: Any) -> None:
    """Run an action, and everything that it calls, uncompiled.

    TorchDynamo compiles what compiled code calls, such as an optimizer's hook, and complains on the job's
    stderr of what it does not understand.
    """
    watch = frame_watch()
    before = watch(None)
    try:
        action(*arguments)
    finally:
        watch(before)


# Modules of the standard library that this package uses. Jobs replace their functions: tests freeze or count
# clocks (`time.time_ns`), other programs put their own `open` or `json.dumps` there.
LIBRARY = ("ctypes", "json", "math", "os", "pickle", "platform", "posixpath", "re", "resource", "select",
           "signal", "socket", "struct", "threading", "time", "weakref")  # fmt: skip


def keep_library() -> None:
    """Make the modules of this package keep the standard library as it is now."""
    kept: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            names = vars(module)
            in_library = [key for key, value in names.items() if getattr(value, "__name__", "") in LIBRARY]
            names |= {
                key: _copy_module(names[key], kept)
                for key in in_library
                if isinstance(names[key], ModuleType)
            }
            names.setdefault("open", io.open)


def _copy_module(module: ModuleType, kept: dict[str, ModuleType]) -> ModuleType:
    """Return a copy of a module as it is now, of `os` with a copy of its `path`."""
    copy = kept.get(module.__name__)
    if copy is None:
        copy = kept[module.__name__] = ModuleType(module.__name__)
        vars(copy).update(vars(module))
        if module.__name__ == "os":
            vars(copy)["path"] = _copy_module(vars(module)["path"], kept)
    return copy


def keep_compiler_out() -> None:
    """Exclude from compilation the functions of this package that run before `run_uncompiled`."""
    skip = code_skipper()
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            for code in _codes(vars(module), name):
                skip(code)


def _codes(names: dict[str, Any], module: str) -> Iterator[CodeType]:
    """Yield the code of all functions that a module defines, those within others included."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(dict(vars(value)), module)
        code = getattr(getattr(value, "fget", value), "__code__", None)
        if getattr(value, "__module__", module) == module and isinstance(code, CodeType):
            yield from _nested(code)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
