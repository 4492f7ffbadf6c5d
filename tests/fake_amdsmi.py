"""A library that answers AMD's binding as `libamd_smi.so` does, with GPUs made up by a test.

It is what `ctypes.CDLL` gives while the real binding is imported: that calls it with its own structures, and
turns its codes into its own exceptions. A function that is not here is one that the GPU does not support.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

SUCCESS, NOT_SUPPORTED, NO_PERM, BUSY, NO_DATA = 0, 2, 10, 30, 40
VM_FAULT, THERMAL_THROTTLE, GPU_PRE_RESET = 1, 2, 3
SOCKET, FIRST = 0x500, 0x1000


def pointed(reference: Any, kind: Any = None) -> Any:
    """What a reference or pointer that the binding passes is to."""
    if hasattr(reference, "_obj"):
        return reference._obj
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents if kind else reference.contents


@dataclass
class FakeGpu:
    """One GPU: fields of its table of metrics; those that are not given it does not have."""

    serial: str = "a1b2c3d4e5f60718"
    uuid: str = "ff00744c-0000-1000-80c5-a1b2c3d4e5f6"
    bus: int = 0xC1
    metrics: dict[str, Any] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)  # in place of answers
    energy: int = 65_536_000_000
    used_bytes: int = 20 << 30
    corrected: int = 3
    uncorrected: int = 0
    calls: list[str] = field(default_factory=list)


class FakeLibrary:
    """The library. `events` are `(index of the GPU, kind)` that wait to be read."""

    def __init__(self, *gpus: FakeGpu, init: int = SUCCESS) -> None:
        self.gpus = list(gpus)
        self.events: list[tuple[int, int]] = []
        self._init = init

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("amdsmi_"):
            raise AttributeError(name)
        answer = getattr(type(self), f"do_{name.removeprefix('amdsmi_')}", None)

        def function(*arguments: Any) -> int:
            return NOT_SUPPORTED if answer is None else int(answer(self, *arguments))

        self.__dict__[name] = function  # the binding sets its types, once
        return function

    def _gpu(self, handle: Any, what: str) -> tuple[FakeGpu, int]:
        gpu = self.gpus[(handle.value - FIRST)]
        gpu.calls.append(what)
        return gpu, gpu.codes.get("all", gpu.codes.get(what, SUCCESS))

    def do_init(self, flags: Any) -> int:
        return self._init

    def do_get_socket_handles(self, count: Any, handles: Any) -> int:
        pointed(count).value = 1
        if handles:
            handles[0] = SOCKET
        return SUCCESS

    def do_get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        pointed(count).value = len(self.gpus)
        for index in range(len(self.gpus) if handles else 0):
            handles[index] = FIRST + index
        return SUCCESS

    def do_get_gpu_asic_info(self, handle: Any, info: Any) -> int:
        gpu, code = self._gpu(handle, "asic")
        pointed(info).asic_serial = gpu.serial.encode()
        return code

    def do_get_gpu_device_uuid(self, handle: Any, length: Any, text: Any) -> int:
        gpu, code = self._gpu(handle, "uuid")
        text.value = gpu.uuid.encode()
        return code

    def do_get_gpu_device_bdf(self, handle: Any, bdf: Any) -> int:
        gpu, code = self._gpu(handle, "bdf")
        pointed(bdf).struct_amdsmi_bdf_t.bus_number = gpu.bus
        return code

    def do_get_gpu_metrics_info(self, handle: Any, table: Any) -> int:
        gpu, code = self._gpu(handle, "metrics")
        out = pointed(table)
        ctypes.memset(ctypes.addressof(out), 0xFF, ctypes.sizeof(out))  # "not there", in every width
        for name, value in gpu.metrics.items():
            if isinstance(value, list):
                getattr(out, name)[: len(value)] = value
            else:
                setattr(out, name, value)
        return code

    def do_get_gpu_memory_usage(self, handle: Any, kind: Any, used: Any) -> int:
        gpu, code = self._gpu(handle, "memory")
        pointed(used).value = gpu.used_bytes
        return code

    def do_get_gpu_memory_total(self, handle: Any, kind: Any, total: Any) -> int:
        pointed(total).value = 192 << 30
        return self._gpu(handle, "total")[1]

    def do_get_energy_count(self, handle: Any, count: Any, resolution: Any, stamp: Any) -> int:
        gpu, code = self._gpu(handle, "energy")
        pointed(count).value, pointed(resolution).value = gpu.energy, 15.259
        return code

    def do_get_clock_info(self, handle: Any, kind: Any, info: Any) -> int:
        pointed(info).clk, pointed(info).max_clk = 1500, 2100
        return self._gpu(handle, "clock")[1]

    def do_get_power_cap_info(self, handle: Any, sensor: Any, info: Any) -> int:
        pointed(info).power_cap = 750_000_000
        return self._gpu(handle, "cap")[1]

    def do_get_gpu_total_ecc_count(self, handle: Any, count: Any) -> int:
        gpu, code = self._gpu(handle, "ecc")
        out = pointed(count)
        out.correctable_count, out.uncorrectable_count = gpu.corrected, gpu.uncorrected
        return code

    def do_init_gpu_event_notification(self, handle: Any) -> int:
        return self._gpu(handle, "events")[1]

    def do_set_gpu_event_notification_mask(self, handle: Any, mask: Any) -> int:
        assert mask.value == 1 << VM_FAULT - 1 | 1 << THERMAL_THROTTLE - 1 | 1 << GPU_PRE_RESET - 1
        return SUCCESS

    def do_get_gpu_event_notification(self, timeout_ms: Any, count: Any, out: Any) -> int:
        if not self.events:
            return NO_DATA
        for place, (index, kind) in enumerate(self.events):
            out[place].processor_handle, out[place].event = FIRST + index, kind
        pointed(count).value = len(self.events)
        self.events.clear()
        return SUCCESS


@contextmanager
def installed(library: FakeLibrary | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have AMD's binding load a library, or find none."""
    if importlib.util.find_spec("amdsmi") is None:
        pytest.skip("needs amdsmi")
    real = ctypes.CDLL

    def load(name: Any, *arguments: Any, **more: Any) -> Any:
        if "libamd_smi" not in str(name):
            return real(name, *arguments, **more)
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]
