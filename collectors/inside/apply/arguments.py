"""Have objects made with other arguments than the script gives.

In: a class, and the arguments that it shall get. Out: the class makes its objects with them; so do derived
classes, and libraries that make objects of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .report import ChangeReport, place

Bound = inspect.BoundArguments
Settings = dict[str, Any]


def set_arguments(
    report: ChangeReport,
    classes: list[Any],
    settings: Settings,
    also: Callable[[Bound], Settings] = lambda _: {},
) -> None:
    """Have classes make their objects with settings.

    Args:
        report: receives where that was, and what the script had asked for.
        classes: their `__init__` is replaced; one may call that of another.
        settings: arguments by name; where there are none, `also` gives all that change.
        also: from the script's arguments, returns what has to change with the settings; it raises
            `ValueError` where the settings do not fit.
    """
    making: set[int] = set()
    for cls in classes:
        _patch(report, cls, settings, also, making)


def _patch(
    report: ChangeReport, cls: Any, settings: Settings, also: Callable[[Bound], Settings], making: set[int]
) -> None:
    original: Callable[..., None] = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        if id(self) in making:
            return original(self, *args, **kwargs)
        making.add(id(self))
        try:
            bound = _bound(signature, self, args, kwargs)
            before = _changed(report, bound, settings, also) if bound is not None else None
            if bound is None or before is None:
                return original(self, *args, **kwargs)
            original(*bound.args, **bound.kwargs)
            report.applied(f"{type(self).__name__} at {place()}", before)
        finally:
            making.discard(id(self))

    cls.__init__ = patched


def _bound(signature: inspect.Signature, self: Any, args: Any, kwargs: Any) -> Bound | None:
    try:
        return signature.bind(self, *args, **kwargs)
    except TypeError:
        return None  # the original complains of it


def _changed(
    report: ChangeReport, bound: Bound, settings: Settings, also: Callable[[Bound], Settings]
) -> str | None:
    """Put settings among the arguments of a call.

    Returns:
        What they replace, such as `bucket_cap_mb=1`; None where nothing was changed.
    """
    try:
        wanted = settings | also(bound)
    except ValueError as error:
        report.refuse(f"{place()}: {error}")
        return None
    given = {name: bound.arguments[name] for name in wanted if name in bound.arguments}
    if settings and all(name in given and given[name] == value for name, value in settings.items()):
        report.missing = f"the script sets {_listed(given)} itself ({place()}): nothing to change"
        return None
    after = {**bound.arguments, **wanted}
    order = [*bound.signature.parameters]  # arguments by position are taken from it in this order
    bound.arguments = {name: after[name] for name in sorted(after, key=order.index)}
    return _listed({name: value for name, value in given.items() if value != wanted[name]})


def _listed(given: Settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())
