"""Results computed once per object, even under concurrent use by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Generic, TypeVar, overload

from dpro.errors import DproError

T = TypeVar("T")
C = TypeVar("C", bound="Cached")


class Cached:
    """Base of objects that keep their results by name."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self._inputs: dict[Hashable, Hashable] = {}
        self._locks: dict[Hashable, threading.RLock] = {}
        self._lock = threading.Lock()

    def once(self, name: Hashable, compute: Callable[[], T], inputs: Hashable = None) -> T:
        """Return the kept result or failure, computing it on first use; concurrent callers wait for it.

        Args:
            inputs: inputs besides this object; when they change, the result is computed again and replaced.

        Raises:
            DproError: the computation raised it, now or earlier.
        """
        with self._lock:
            lock = self._locks.setdefault(name, threading.RLock())
        with lock:
            if name not in self.values or self._inputs.get(name) != inputs:
                value: T | DproError
                try:
                    value = compute()
                except DproError as error:
                    value = error
                self.values[name], self._inputs[name] = value, inputs
            result: T = self.values[name]
        if isinstance(result, DproError):
            raise result
        return result


class cached(Generic[C, T]):  # noqa: N801, used like `property`
    """Decorator of a property, or of a function of one object, to compute it once per object."""

    def __init__(self, work: Callable[[C], T]) -> None:
        self._work = work
        self._name: Hashable = work
        update_wrapper(self, work)

    def __set_name__(self, _owner: type, name: str) -> None:
        """Name the result after the property, so that a subclass's override shares the name."""
        self._name = name

    def __call__(self, instance: C) -> T:
        """Return the result.

        Raises:
            DproError: the computation raised it, now or earlier.
        """
        return instance.once(self._name, lambda: self._work(instance))

    @overload
    def __get__(self, instance: None, owner: type) -> cached[C, T]: ...

    @overload
    def __get__(self, instance: Cached, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the result for an instance; this object for the class."""
        return self if instance is None else self(instance)
