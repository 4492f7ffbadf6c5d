"""Results that are computed once for each object, however many threads ask for them at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Generic, TypeVar, overload

from dpro.errors import DproError

T = TypeVar("T")
C = TypeVar("C", bound="Cached")


class Cached:
    """Holds what was computed of it, by name."""

    def __init__(self) -> None:
        """Nothing is computed yet."""
        self.values: dict[Hashable, Any] = {}
        self._inputs: dict[Hashable, Hashable] = {}
        self._locks: dict[Hashable, threading.RLock] = {}
        self._lock = threading.Lock()

    def once(self, name: Hashable, compute: Callable[[], T], inputs: Hashable = None) -> T:
        """Compute a result, be it a failure, unless it is known; threads that ask meanwhile wait for it.

        Args:
            inputs: what it follows from besides this object; only the latest result is kept.

        Raises:
            DproError: as when it was computed.
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
    """A property, or a function of an object alone, that is computed once for each object."""

    def __init__(self, work: Callable[[C], T]) -> None:
        """Remember how it is computed."""
        self._work = work
        self._name: Hashable = work
        update_wrapper(self, work)

    def __set_name__(self, _owner: type, name: str) -> None:
        """Name the result after the property, which subclasses may compute in another way."""
        self._name = name

    def __call__(self, instance: C) -> T:
        """Return the result.

        Raises:
            DproError: as when it was computed.
        """
        return instance.once(self._name, lambda: self._work(instance))

    @overload
    def __get__(self, instance: None, owner: type) -> cached[C, T]: ...

    @overload
    def __get__(self, instance: Cached, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the result, as of a call."""
        return self if instance is None else self(instance)
