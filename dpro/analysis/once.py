"""Properties that are worked out once, whoever asks and however many at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from dpro.errors import DproError

T = TypeVar("T")


class Knowing:
    """Holds what has been worked out so far, under the names of its `once` properties."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.known: dict[str, Any] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()

    def lock_of(self, name: str) -> threading.RLock:
        """Held while that is worked out."""
        with self._lock:
            return self._locks.setdefault(name, threading.RLock())


class once(Generic[T]):  # noqa: N801, used like `property`
    """A property that is worked out once; so is its failure. Those who ask meanwhile wait for it."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        """Remember how it is worked out."""
        self._work, self.__doc__ = work, work.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        """Told by Python under which name it is a property."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, instance: Knowing, owner: type) -> T: ...

    def __get__(self, instance: Knowing | None, owner: type) -> Any:
        """The value.

        Raises:
            DproError: as when it was worked out.
        """
        if instance is None:
            return self
        with instance.lock_of(self._name):
            if self._name not in instance.known:
                try:
                    instance.known[self._name] = self._work(instance)
                except DproError as error:
                    instance.known[self._name] = error
        value = instance.known[self._name]
        if isinstance(value, DproError):
            raise value
        return value
