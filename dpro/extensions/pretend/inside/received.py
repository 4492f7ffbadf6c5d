"""Numbers from other ranks, which a pretended rank does not have: a script must not decide by them.

Watches small tensors that calls have filled, and how the script uses them. The script may compute with such
numbers, format and log them. Comparing one, or taking it as a count, a truth or a list, ends the process,
which names the call that brought it.

A torch function mode, which is on only while such a tensor lives, follows what is computed from it. Of the
uses of a Python number in C code only the questions of `math` are seen (`math.isnan`), none of numpy's.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _dpro_inside_the_job.torch_internals import has_compiled
from torch.overrides import TorchFunctionMode

SMALL = 64  # elements; larger tensors are data, not something to decide by
_MARK = "_dpro_received"  # an attribute of tensors: the call that brought them
_BEACON = "_dpro_beacon"  # another attribute, which lives as long as the tensor
_READS = ("__bool__", "__int__", "__index__", "__float__", "tolist", "numpy", "__array__")
_COMPARISONS = (
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__", "__int__"),
    *("__floor__", "__ceil__", "__trunc__", "is_integer"),
)
_QUESTIONS = ("isnan", "isinf", "isfinite", "isclose")  # of `math`
_ARITHMETIC = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__neg__", "__abs__", "__round__"),
)


class ReceivedNumber(float):
    """A float from other ranks; arithmetic on it returns such floats."""

    call: str
    refuse: Callable[[str, str], None]


def _number(value: float, call: str, refuse: Callable[[str, str], None]) -> ReceivedNumber:
    number = ReceivedNumber(value)
    number.call, number.refuse = call, refuse
    return number


def _make_arithmetic(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compute(self: ReceivedNumber, *others: Any) -> Any:
        value = original(self, *others)
        return _number(value, self.call, self.refuse) if type(value) is float else value

    return compute


def _make_refusing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def decide(self: ReceivedNumber, *others: Any) -> Any:
        self.refuse(self.call, WHY)
        return original(self, *others)

    return decide


def _make_question(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return a question of `math` that refuses such numbers."""

    @functools.wraps(original)
    def ask(*numbers: Any, **tolerances: Any) -> bool:
        for number in numbers:
            if isinstance(number, ReceivedNumber):
                number.refuse(number.call, WHY)
        return original(*numbers, **tolerances)

    return ask


WHY = "the script makes a decision from values of other ranks, which do not exist"
for _name in _ARITHMETIC:
    setattr(ReceivedNumber, _name, _make_arithmetic(_name))
for _name in _COMPARISONS:
    setattr(ReceivedNumber, _name, _make_refusing(_name))
setattr(ReceivedNumber, "__hash__", float.__hash__)  # noqa: B010 - else it would have none


class Received:
    """The numbers of other ranks that one process has."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        """Start without such numbers, and watch the ways to read them.

        Args:
            refuse: ends the process; takes a call, and why it has no answer.
        """
        self._refuse = refuse
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mode: _Following | None = None
        self._showing = False
        for name in ("item", *_READS):
            self._watch(name)
        for name in ("__repr__", "__format__"):
            self._show(name)
        for name in _QUESTIONS:
            setattr(math, name, _make_question(getattr(math, name)))

    def mark(self, tensors: Any, call: str) -> None:
        """Mark tensors as filled by a call.

        Args:
            tensors: any; large ones are data, and not marked.
        """
        for tensor in tensors:
            if tensor.numel() <= SMALL and not tensor.is_meta:
                setattr(tensor, _MARK, call)
                self._alive.add(_Beacon.of(tensor))

    def call_of(self, tensor: Any) -> str:
        """Return the call that brought a tensor, or the tensor that it is a view of; empty for none."""
        base = getattr(tensor, "_base", None)
        call = getattr(tensor, _MARK, "") or (getattr(base, _MARK, "") if base is not None else "")
        return str(call)

    def follow(self) -> None:
        """Follow what is computed from such tensors, from the script's own call on."""
        compiled = (
            "torch._dynamo.utils" in sys.modules and has_compiled()
        )  # graphs depend on what modes are on
        if self._mode is None and self._alive and not compiled:
            self._mode = _Following(self)
            self._mode.__enter__()

    def on_step(self, _step: int) -> None:
        """Stop following once no such tensor is left."""
        if self._mode is not None and not self._alive:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)

    def _watch(self, name: str) -> None:
        original = getattr(torch.Tensor, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            call = "" if self._showing else self.call_of(tensor)
            value = original(tensor, *args, **kwargs)
            if not call:
                return value
            if name == "item" and isinstance(value, float):
                return _number(value, call, self._refuse)
            self._refuse(call, WHY)
            return value

        setattr(torch.Tensor, name, read)

    def _show(self, name: str) -> None:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def show(*args: Any, **kwargs: Any) -> Any:
            before, self._showing = self._showing, True
            try:
                return original(*args, **kwargs)
            finally:
                self._showing = before

        setattr(torch.Tensor, name, show)


def unmark(tensors: Any) -> None:
    """Stop treating tensors as received from other ranks."""
    for tensor in tensors:
        for name in (_MARK, _BEACON):
            vars(tensor).pop(name, None)


class _Beacon:
    """Stands in a set for a tensor, with its lifetime: comparing tensors would return tensors."""

    @staticmethod
    def of(tensor: Any) -> _Beacon:
        beacon: _Beacon = vars(tensor).setdefault(_BEACON, _Beacon())
        return beacon


class _Following(TorchFunctionMode):  # type: ignore[misc] # of torch, untyped
    """The mode that marks what is computed from marked tensors."""

    def __init__(self, received: Received) -> None:
        super().__init__()
        self._received = received

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = next((brought for tensor in _tensors(args) if (brought := self._received.call_of(tensor))), "")
        if call and not self._received._showing:
            self._received.mark(_tensors(result), call)
        return result


def _tensors(values: Any) -> Iterator[Any]:
    """Yield the tensors of a result or of arguments, and of lists and tuples in them."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
