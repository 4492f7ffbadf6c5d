"""Properties that are computed once, however many threads ask for them at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from dpro.errors import DproError

T = TypeVar("T")


class Cached:
    """Holds the values of its `cached` properties, by name."""

    def __init__(self) -> None:
        """Nothing is computed yet."""
        self.values: dict[str, Any] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()

    def lock_of(self, name: str) -> threading.RLock:
        """Return the lock that is held while a property is computed."""
        with self._lock:
            return self._locks.setdefault(name, threading.RLock())


class cached(Generic[T]):  # noqa: N801, used like `property`
    """A property that is computed once, be it to a failure; threads that ask meanwhile wait for it."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        """Remember how it is computed."""
        self._work, self.__doc__ = work, work.__doc__
        self._name = f"{work.__module__}.{work.__qualname__}"

    def __call__(self, instance: Cached) -> T:
        """Return the value of a function of an object alone, which is no property."""
        return self.__get__(instance, type(instance))

    def __set_name__(self, _owner: type, name: str) -> None:
        """Remember its name, which Python passes."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached[T]: ...

    @overload
    def __get__(self, instance: Cached, owner: type) -> T: ...

    def __get__(self, instance: Cached | None, owner: type) -> Any:
        """Return the value.

        Raises:
            DproError: as when it was computed.
        """
        if instance is None:
            return self
        with instance.lock_of(self._name):
            if self._name not in instance.values:
                try:
                    instance.values[self._name] = self._work(instance)
                except DproError as error:
                    instance.values[self._name] = error
        value = instance.values[self._name]
        if isinstance(value, DproError):
            raise value
        return value
