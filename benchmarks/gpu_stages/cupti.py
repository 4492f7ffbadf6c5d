"""CUPTI of this process, called by name: it has no binding for Python.

Finds the library that torch has loaded. A function that this version lacks, or that refuses, is an error with
its name.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

# Kinds of activity that Kineto enables, and that for events; CUPTI_ACTIVITY_KIND_… of cupti_activity.h.
KINDS = {"kernel": 10, "copy": 1, "runtime": 5, "driver": 4, "sync": 38, "external": 39}
CUDA_EVENT = 36
BUFFER_BYTES, NUM_BUFFERS = 1 << 20, 16
FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED

_OF_API = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_REQUESTED = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_COMPLETED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Cupti:
    """The library, and what it has to keep alive."""

    def __init__(self, path: str = "") -> None:
        """Open the library at a path, or the one that is loaded.

        Raises:
            RuntimeError: none is loaded.
        """
        self._library = ctypes.CDLL(path or loaded_path())
        self._kept: list[Any] = []
        self._is_registered = False
        self._subscriber = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            RuntimeError: this CUPTI lacks it, or it refuses.
        """
        function = getattr(self._library, name, None)
        if function is None:
            raise RuntimeError(f"this CUPTI has no {name}")
        code = function(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def subscribe(self) -> None:
        """Become the process's subscriber, with no callback enabled."""
        callback = _OF_API(lambda *_: None)
        self._kept.append(callback)
        self.call("cuptiSubscribe", ctypes.byref(self._subscriber), callback, None)

    def unsubscribe(self) -> None:
        """Stop being the subscriber."""
        self.call("cuptiUnsubscribe", self._subscriber)

    def enable(self, kind: int) -> None:
        """Enable a kind of activity, whose records are thrown away."""
        if not self._is_registered:
            self._register()
        self.call("cuptiActivityEnable", ctypes.c_int(kind))

    def disable(self, kind: int) -> None:
        """Deliver the records of a kind of activity, and disable it."""
        self.call("cuptiActivityFlushAll", ctypes.c_uint32(FORCED))
        self.call("cuptiActivityDisable", ctypes.c_int(kind))

    def set_event_timestamps(self, on: bool) -> None:
        """Turn the device's timestamps of events on, as Kineto does from CUDA 13.0 on, or off."""
        self.call("cuptiActivityEnableCudaEventDeviceTimestamps", ctypes.c_uint8(on))

    def finalize(self) -> None:
        """Detach from the process; other threads must not call CUDA meanwhile."""
        self.call("cuptiFinalize")

    def _register(self) -> None:
        """Give CUPTI buffers, each again once it has been delivered."""
        buffers = {ctypes.addressof(each): each for each in map(_make_buffer, range(NUM_BUFFERS))}
        free = list(buffers)

        def request(buffer: Any, size: Any, most_records: Any) -> None:
            buffer[0], size[0] = (free.pop(), BUFFER_BYTES) if free else (None, 0)
            most_records[0] = 0

        def complete(_context: Any, _stream: int, buffer: int, _size: int, _valid: int) -> None:
            free.append(buffer)

        callbacks = _REQUESTED(request), _COMPLETED(complete)
        self._kept += [buffers, *callbacks]
        self.call("cuptiActivityRegisterCallbacks", *callbacks)
        self._is_registered = True


def _make_buffer(_number: int) -> Any:
    """Return a buffer at a multiple of 8 bytes, as CUPTI requires."""
    return (ctypes.c_uint64 * (BUFFER_BYTES // 8))()


def loaded_path() -> str:
    """Return the path of the CUPTI that this process has loaded.

    Raises:
        RuntimeError: there is none.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if "libcupti.so" in line:
            return line.split(maxsplit=5)[5]
    raise RuntimeError("no CUPTI is loaded")
