"""Look at objects of the job, and call torch, without running code of the job's or being seen by it.

Takes an object of the job's. Returns what it holds, as C keeps it: its own attributes, the sizes of a tensor,
the message of an exception. Classes of the job's may define how they answer (properties, `__getattr__`,
`__str__`, `__class__`, `__torch_function__`), and modes of torch see each call of a tensor. All of these may
print, count, raise or end the process: none is asked, and what only they know stays unknown.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedRandom, BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from types import FunctionType, MethodType, TracebackType, WrapperDescriptorType
from typing import Any, TypeVar

import torch
from torch.nn import Module

from .torch_internals import COMPILED_CALL, hiding

_PLAIN = (str, int, float, bool, bytes, type(None))
_LONGEST = 1 << 14  # characters of an exception's argument: a message has one line
_OWNERS = 8  # optimizers within each other, at most
Answer = TypeVar("Answer")


# Objects and classes.

_dict_of = ctypes.pythonapi.PyObject_GenericGetDict
_dict_of.restype = ctypes.py_object
_lines_of = type.__dict__["__mro__"].__get__
_names_of = type.__dict__["__dict__"].__get__
_qualified = type.__dict__["__qualname__"].__get__


def attributes(value: object) -> dict[str, Any]:
    """Return an object's own attributes, as it keeps them; empty where it keeps none."""
    try:
        held: dict[str, Any] = _dict_of(ctypes.py_object(value), None)
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Return whether an object's class is one of `kinds`, or derived; `isinstance` asks the object, too."""
    return issubclass(type(value), kinds)


def class_name(kind: type) -> str:
    """Return the name of a class, with that of the class around it."""
    return str(_qualified(kind))


def find_in_class(kind: type, name: str) -> tuple[Any, Any]:
    """Return what a class has under a name, and the class that defines it; None twice for nothing."""
    for owner in _lines_of(kind):
        names = _names_of(owner)
        if name in names:
            return names[name], owner
    return None, None


def parts_of(container: object) -> list[Any]:
    """Return the members of a list or tuple, or the values of a dict; empty for anything else."""
    if is_a(container, dict):
        return list(dict.values(container))  # type: ignore[arg-type]
    if is_a(container, list):
        return list(list.__iter__(container))  # type: ignore[arg-type]
    return list(tuple.__iter__(container)) if is_a(container, tuple) else []  # type: ignore[arg-type]


def path_of(value: object) -> str:
    """Return the path in a text, a path of `pathlib` or an open file; empty for anything else."""
    if is_a(value, str):
        return str.__str__(value)
    if is_a(value, bytes):
        return os.fsdecode(bytes(value))  # type: ignore[call-overload]
    if is_a(value, pathlib.PurePath) and find_in_class(type(value), "__str__")[1] is pathlib.PurePath:
        return pathlib.PurePath.__str__(value)
    if type(value) is TextIOWrapper:
        value = value.buffer
    if type(value) in (BufferedWriter, BufferedReader, BufferedRandom):
        value = value.raw  # type: ignore[attr-defined]
    name = attributes(value).get("name")  # of a file of C, or one of `tempfile`
    return path_of(name) if type(value) is FileIO or is_a(name, str) else ""


# Exceptions.

_arguments_of = BaseException.__dict__["args"].__get__
_traceback_of = BaseException.__dict__["__traceback__"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__


def message_of(error: BaseException) -> str:
    """Return the message of an exception as its class in C words it; else what it was raised with.

    This is `error.args`, if plain: the text of an exception whose class words it in Python (`__str__`) would
    run code of the job's, or of a library.
    """
    arguments = tuple(_plain(argument) for argument in _arguments_of(error))
    if any(argument is _UNKNOWN for argument in arguments):
        return arguments[0] if type(arguments[0]) is str else ""
    words, owner = find_in_class(type(error), "__str__")
    in_c = type(words) is WrapperDescriptorType and issubclass(owner, BaseException)
    if in_c and issubclass(owner, (OSError, KeyError)) and not _is_changed(error):
        return str(words(error))
    if len(arguments) == 1:
        return str(arguments[0])
    return str(arguments) if arguments else ""


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return where an exception was raised."""
    place: TracebackType | None = _traceback_of(error)
    return place


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it came from."""
    met: set[int] = set()
    left = [error]
    while left:
        here = left.pop()
        if here is not None and id(here) not in met:
            met.add(id(here))
            yield here
            left += [_cause_of(here), _context_of(here)]


_UNKNOWN = object()


def _plain(argument: object) -> Any:
    if is_a(argument, str):
        return str.__str__(argument)[:_LONGEST] if type(argument) is not str else argument
    return argument if type(argument) in _PLAIN else _UNKNOWN


def _is_changed(error: BaseException) -> bool:
    """Return whether a system error's words are made of objects that are not plain."""
    if not is_a(error, OSError):
        return False
    names = ("strerror", "filename", "filename2", "errno")
    values = (OSError.__dict__[name].__get__(error) for name in names)
    return any(type(value) not in _PLAIN for value in values)


# Functions of the job's, such as handlers of signals.


def code_of(function: object) -> Any:
    """Return the code that a function or a method in Python runs; None for any other object."""
    for _ in range(_OWNERS):
        if is_a(function, functools.partial):
            function = functools.partial.__dict__["func"].__get__(function)
        elif type(function) is MethodType:
            function = function.__func__
    if type(function) is not FunctionType:
        function = find_in_class(type(function), "__call__")[0]
    return function.__code__ if type(function) is FunctionType else None


# Calls of torch that no mode of the job's and no class of a tensor sees. They are made in C, one after the
# other: between bytecodes of ours a signal handler might run, and lack the job's modes.

_call_in_c = functools.partial.__call__
_elements, _element_bytes = torch.Tensor.numel, torch.Tensor.element_size
_sizes, _device, _dtype, _wants, _gradient, _is_leaf = (
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "device", "dtype", "requires_grad", "grad", "is_leaf")
)


def unseen(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call a function made in C, hidden from the job's modes.

    Raises:
        Exception: whatever the function raises.
    """
    hides = hiding()
    calls = [functools.partial(hide.__enter__) for hide in hides]
    calls.append(functools.partial(function, *arguments))
    calls += [functools.partial(hide.__exit__, None, None, None) for hide in reversed(hides)]
    try:
        return list(map(_call_in_c, calls))[len(hides)]  # type: ignore[no-any-return]
    except Exception:
        for hide in reversed(hides):
            hide.__exit__(None, None, None)
        raise


def is_answered_in_c(tensor: object) -> bool:
    """Return whether C, or a class of torch's, says how large a tensor is and where."""
    if not is_a(tensor, torch.Tensor):
        return False
    _, owner = find_in_class(type(tensor), "__torch_dispatch__")
    return str(_names_of(owner).get("__module__", "")).partition(".")[0] == "torch"


def elements_of(tensor: Any) -> int:
    """Return how many elements a tensor has; 0 where only code of the job's knows."""
    return int(unseen(_elements, tensor)) if is_answered_in_c(tensor) else 0


def shape_of(tensor: Any) -> list[int]:
    """Return the sizes of a tensor; empty where only code of the job's knows."""
    return list(unseen(_sizes, tensor)) if is_answered_in_c(tensor) else []


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor's elements; 0 where only code of the job's knows."""
    return elements_of(tensor) * unseen(_element_bytes, tensor) if is_answered_in_c(tensor) else 0


def device_of(tensor: Any) -> torch.device | None:
    """Return the device of a tensor; None where only code of the job's knows."""
    return unseen(_device, tensor) if is_answered_in_c(tensor) else None


def dtype_of(tensor: Any) -> str:
    """Return the type of a tensor's elements, as `bfloat16`; empty where only code of the job's knows."""
    is_known = is_answered_in_c(tensor)
    return str(unseen(_dtype, tensor)).removeprefix("torch.") if is_known else ""


def wants_gradient(tensor: Any) -> bool:
    """Return whether a tensor gets gradients; False where only code of the job's knows."""
    return is_answered_in_c(tensor) and bool(unseen(_wants, tensor))


def gradient_of(tensor: Any) -> Any:
    """Return the gradient of a tensor; None where it has none, or only code of the job's knows."""
    return unseen(_gradient, tensor) if is_answered_in_c(tensor) and unseen(_is_leaf, tensor) else None


def mesh_of(tensor: Any) -> tuple[Any, Any]:
    """Return the mesh and the placements of a DTensor; None twice for other tensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not is_a(tensor, kind):
        return None, None
    spec = attributes(tensor).get("_spec")
    return getattr(spec, "mesh", None), getattr(spec, "placements", None)


# Models and optimizers.


def children_of(module: object) -> list[tuple[str, Any]]:
    """Return the modules within a module, by name."""
    inner = attributes(module).get("_modules")
    children = list(dict.items(inner)) if is_a(inner, dict) else _torchscript_items(module, "named_children")  # type: ignore[arg-type]
    return [(str(name), child) for name, child in children if is_a(child, Module)]


def modules_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module and all within it, each once, by path, as `Module.named_modules` names them."""
    met: set[int] = set()
    left: list[tuple[str, Any]] = [("", module)]
    while left:
        path, here = left.pop()
        if id(here) not in met:
            met.add(id(here))
            yield path, here
            inner = [(f"{path}.{name}" if path else name, child) for name, child in children_of(here)]
            left += reversed(inner)


def parameters_of(module: Any, every: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a module and of all within it, by path, as `Module.named_parameters` does.

    Args:
        every: whether a parameter of several modules comes once for each.
    """
    met: set[int] = set()
    for path, here in modules_of(module):
        parameters = attributes(here).get("_parameters")
        if is_a(parameters, dict):
            named = list(dict.items(parameters))  # type: ignore[arg-type]
        else:
            named = _torchscript_items(here, "_parameters")
        for name, parameter in named:
            if parameter is not None and (every or id(parameter) not in met):
                met.add(id(parameter))
                yield (f"{path}.{name}" if path else str(name)), parameter


def is_training(module: Any) -> bool:
    """Return whether a module is in training mode."""
    return bool(attributes(module).get("training", True))


def compiled_call(module: Any) -> Any:
    """Return what a module was compiled to; None where it was not."""
    return attributes(module).get(COMPILED_CALL)


def _torchscript_items(module: object, what: str) -> list[tuple[str, Any]]:
    """Return what a module in TorchScript says of itself; empty for others, whose class is the job's."""
    if not type(module).__module__.startswith("torch.jit"):
        return []
    said: Any = getattr(module, what)
    return list(said() if callable(said) else said.items())


def parameters_updated(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer or the one within it updates; empty where not shown."""
    for _ in range(_OWNERS):
        held = attributes(optimizer)
        listed = [held["param_groups"]] if "param_groups" in held else list(held.values())
        for groups in listed:
            updated = [
                _parameters_in(group) for group in parts_of(groups) if is_a(group, dict) and "params" in group
            ]
            if updated and is_a(groups, list):
                return [parameter for group in updated for parameter in group]
        if "optimizer" not in held:
            return []
        optimizer = held["optimizer"]
    return []


def _parameters_in(group: dict[str, Any]) -> list[Any]:
    held = dict.get(group, "params")
    return [held] if is_a(held, torch.Tensor) else parts_of(held)


def hide_frames(error: BaseException, folder: str) -> None:
    """Remove calls of functions in a folder from an exception's tracebacks, which are about to be shown."""
    for here in chain_of(error):
        place = traceback_of(here)
        while place is not None:
            following = place.tb_next
            while following is not None and following.tb_frame.f_code.co_filename.startswith(folder):
                following = following.tb_next
            with suppress(ValueError):  # a loop
                place.tb_next = following
            place = following
