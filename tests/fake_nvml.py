"""A library that answers nvidia-ml-py as NVML does, with GPUs made up by a test.

It takes the place of `pynvml.nvmlLib`: the real binding calls it, with its own structures, and turns its
codes into its own exceptions. A function that a test's driver does not have is absent, as in an old library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 0, 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST = 9, 10, 15
DOUBLE, UINT, ULONG, ULONGLONG = 0, 1, 2, 3
ALL_LINKS = 0xFFFFFFFF
XID_EVENT = 8


def address(argument: Any) -> int:
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def point(reference: Any, value: int) -> int:
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_void_p))[0] = value
    return SUCCESS


@dataclass
class FakeGpu:
    """One GPU: field values as `(type, value)` by `(id, scope)`, and codes in place of answers."""

    uuid: str = "GPU-0000"
    fields: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    refusals: dict[str | tuple[int, int], int] = field(default_factory=dict)
    reasons: int = 0
    sm_clock_mhz: int = 1980
    memory_used_bytes: int = 10 << 30
    instances: list[FakeGpu] = field(default_factory=list)
    is_lost: bool = False
    calls: list[str] = field(default_factory=list)


class FakeNvml:
    """The library. `events` are `(index of the GPU, XID)` that wait to be read."""

    def __init__(self, *gpus: FakeGpu, init: int = SUCCESS) -> None:
        self.gpus = list(gpus)
        self.events: list[tuple[int, int]] = []
        self.registered: list[FakeGpu] = []
        self._init = init
        self._handles = [*gpus, *(instance for gpu in gpus for instance in gpu.instances)]

    def _handle(self, gpu: FakeGpu) -> int:
        return 0x1000 + self._handles.index(gpu)

    def _asked(self, handle: Any, function: str) -> tuple[FakeGpu, int]:
        gpu = self._handles[address(handle) - 0x1000]
        gpu.calls.append(function)
        return gpu, GPU_IS_LOST if gpu.is_lost else gpu.refusals.get(function, SUCCESS)

    def nvmlInitWithFlags(self, flags: int) -> int:
        return self._init

    def nvmlErrorString(self, code: int) -> bytes:
        return b"an error"

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        gpu = self.gpus[index.value]
        return gpu.refusals.get("handle") or point(handle, self._handle(gpu))

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        gpu, code = self._asked(handle, "uuid")
        text.value = gpu.uuid.encode()
        return code

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return SUCCESS if self._asked(handle, "mig")[0].instances else NOT_SUPPORTED

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, instance: Any) -> int:
        instances = self._asked(handle, "mig")[0].instances
        if index.value >= len(instances):
            return NOT_FOUND
        return point(instance, self._handle(instances[index.value]))

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:
        gpu, code = self._asked(handle, "fields")
        for value in values._obj:
            key = (value.fieldId, value.scopeId)
            kind, amount = gpu.fields.get(key, (UINT, 0))
            value.nvmlReturn = gpu.refusals.get(key, SUCCESS if key in gpu.fields else NOT_SUPPORTED)
            value.valueType = kind
            setattr(value.value, ("dVal", "uiVal", "ulVal", "ullVal")[kind], amount)
        return code

    def _number(self, handle: Any, function: str, result: Any, value: int) -> int:
        result._obj.value = value
        return self._asked(handle, function)[1]

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, result: Any) -> int:
        mhz = self._asked(handle, "clock")[0].sm_clock_mhz if address_of_enum(kind) == 1 else 2619
        return self._number(handle, "clock", result, mhz)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, result: Any) -> int:
        return self._number(handle, "max clock", result, 1980)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, result: Any) -> int:
        return self._number(handle, "reasons", result, self._asked(handle, "reasons")[0].reasons)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, result: Any) -> int:
        return self._number(handle, "temperature", result, 61)

    def nvmlDeviceGetPowerUsage(self, handle: Any, result: Any) -> int:
        return self._number(handle, "power", result, 350_000)

    def nvmlDeviceGetUtilizationRates(self, handle: Any, result: Any) -> int:
        result._obj.gpu, result._obj.memory = 97, 40
        return self._asked(handle, "utilization")[1]

    def nvmlDeviceGetMemoryInfo(self, handle: Any, result: Any) -> int:
        gpu, code = self._asked(handle, "memory")
        result._obj.used, result._obj.total = gpu.memory_used_bytes, 80 << 30
        return code

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, result: Any) -> int:
        return self._number(handle, "pcie link", result, 5)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, result: Any) -> int:
        return self._number(handle, "pcie link", result, 16)

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, result: Any) -> int:
        gpu, code = self._asked(handle, "pci")
        result._obj.domain, result._obj.bus, result._obj.device = 1, 0x10 + self._handles.index(gpu), 2
        return code

    def nvmlEventSetCreate(self, events: Any) -> int:
        return point(events, 0x9000)

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any, result: Any) -> int:
        return self._number(handle, "event types", result, XID_EVENT)

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: Any, events: Any) -> int:
        gpu, code = self._asked(handle, "register")
        if code == SUCCESS:
            self.registered.append(gpu)
        return code

    def nvmlEventSetWait_v2(self, events: Any, event: Any, timeout_ms: Any) -> int:
        if any(gpu.is_lost for gpu in self.registered):
            self.registered.clear()
            return GPU_IS_LOST
        if not self.events:
            return TIMEOUT
        index, xid = self.events.pop(0)
        handle = ctypes.c_void_p(self._handle(self.gpus[index]))
        event._obj.device = ctypes.cast(handle, type(event._obj.device))
        event._obj.eventType, event._obj.eventData = XID_EVENT, xid
        return SUCCESS


def address_of_enum(value: Any) -> int:
    return int(getattr(value, "value", value))


@contextmanager
def installed(library: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have nvidia-ml-py call a library."""
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    pynvml._nvmlGetFunctionPointer_cache.clear()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    yield
    pynvml._nvmlGetFunctionPointer_cache.clear()
