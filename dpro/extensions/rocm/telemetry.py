"""Counters of a node's AMD GPUs from AMD's management library (amdsmi), and events that its driver reports.

Reads the library through its Python binding; returns samples whose device is the GPU's id, 16 hexadecimal
digits as in `rocm-smi --showuniqueid`, which PyTorch has as the bytes of a uuid. Counters have NVML's names
where they mean the same.

The binding matches the structures of one version of the library, so the installed ROCm's own binding takes
precedence. It prints, and fails in unexpected ways, where there is no library, so it is imported only where
the driver is loaded.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from dpro.collectors.telemetry.gpus import (
    Call,
    Complain,
    Fate,
    GpuLibrary,
    SampledGpu,
    SampledGpus,
    Unavailable,
    Values,
)

NOT_INSTALLED = (
    "AMD GPUs are not sampled: AMD SMI's Python package is missing (/opt/rocm/share/amd_smi of ROCm, or "
    "pip install 'dpro-toolkit[amd]')"
)
DRIVER = Path("/dev/kfd")
_KIB = 1024
_GENERATIONS = {25: 1, 50: 2, 80: 3, 160: 4, 320: 5, 640: 6}  # PCIe generation by lane speed, 0.1 GT/s
# Errors of a binding of another version, whose answers have other names or are missing.
_OTHER_VERSIONS = (LookupError, AttributeError, TypeError, ValueError)
_MAX_EVENTS = 16  # events per read
# Counters of throttled time, by the library's name; its values are shares of its accumulation counter.
_RESIDENCIES = {
    "ppt_residency_acc": "throttled_power_s",
    "socket_thm_residency_acc": "throttled_thermal_s",
    "hbm_thm_residency_acc": "throttled_memory_thermal_s",
    "vr_thm_residency_acc": "throttled_regulator_thermal_s",
    "prochot_residency_acc": "throttled_hardware_s",
}
_EVENTS = {
    "VMFAULT": "event_vm_fault",
    "GPU_PRE_RESET": "event_gpu_reset",
    "THERMAL_THROTTLE": "event_thermal_throttle",
}


def _memory(smi: Any, gpu: Any) -> Values:
    return {"memory_used_bytes": smi.amdsmi_get_gpu_memory_usage(gpu, smi.AmdSmiMemoryType.VRAM)}


def _energy(smi: Any, gpu: Any) -> Values:
    answer = smi.amdsmi_get_energy_count(gpu)
    count = answer["power"] if "power" in answer else answer["energy_accumulator"]  # its name before 6.3
    return {"energy_j": count * answer["counter_resolution"] / 1e6}


def _limits(smi: Any, gpu: Any) -> Values:
    return {"memory_total_bytes": smi.amdsmi_get_gpu_memory_total(gpu, smi.AmdSmiMemoryType.VRAM)}


def _clock_limit(smi: Any, gpu: Any) -> Values:
    return _numbers(
        {"sm_clock_max_mhz": smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.GFX).get("max_clk")}
    )


def _power_limit(smi: Any, gpu: Any) -> Values:
    return {"power_limit_w": smi.amdsmi_get_power_cap_info(gpu)["power_cap"] / 1e6}


def _ecc(smi: Any, gpu: Any) -> Values:
    answer = smi.amdsmi_get_gpu_total_ecc_count(gpu)
    names = {"ecc_corrected": "correctable_count", "ecc_uncorrected": "uncorrectable_count"}
    return _numbers({name: answer.get(theirs) for name, theirs in names.items()})


def _address_of(smi: Any, gpu: Any) -> Values:
    domain, bus, rest = smi.amdsmi_get_gpu_device_bdf(gpu).split(":")
    device, function = rest.split(".")
    return {
        "pci_address": int(domain, 16) << 16 | int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16)
    }


class _Metrics:
    """Reader of the driver's metrics table of one GPU, which has most counters in a single call.

    Attributes:
        __name__: name under which refusals are reported.
    """

    __name__ = "metrics"

    def __init__(self) -> None:
        self._last: tuple[float, float, dict[str, float]] | None = None
        self._held_s = dict.fromkeys(_RESIDENCIES, 0.0)

    def __call__(self, smi: Any, gpu: Any) -> Values:
        """Return the counters of the table, without those that the GPU lacks."""
        answer = smi.amdsmi_get_gpu_metrics_info(gpu)
        power = answer.get("current_socket_power")
        edge = answer.get("temperature_edge")
        speed = answer.get("pcie_link_speed")
        values = {
            "sm_clock_mhz": _mean(answer.get("current_gfxclks"), answer.get("current_gfxclk")),
            "memory_clock_mhz": answer.get("current_uclk"),
            "power_w": power if _is_number(power) else answer.get("average_socket_power"),
            "temperature_c": edge if _is_number(edge) else answer.get("temperature_hotspot"),
            "hotspot_temperature_c": answer.get("temperature_hotspot"),
            "memory_temperature_c": answer.get("temperature_mem"),
            "utilization_pct": answer.get("average_gfx_activity"),
            "memory_utilization_pct": answer.get("average_umc_activity"),
            "pcie_lanes": answer.get("pcie_link_width"),
            "pcie_generation": _GENERATIONS.get(speed) if isinstance(speed, int) else None,
            "pcie_replays": answer.get("pcie_replay_count_acc"),
            "xgmi_rx_bytes": _sum(answer.get("xgmi_read_data_acc"), _KIB),
            "xgmi_tx_bytes": _sum(answer.get("xgmi_write_data_acc"), _KIB),
        }
        return _numbers(values) | self._throttled(answer)

    def _throttled(self, answer: dict[str, Any]) -> Values:
        """Return throttled time since the first reading, s; else whether clocks are throttled."""
        count = answer.get("accumulation_counter")
        if not _is_number(count):
            held = answer.get("throttle_status")
            return {"clocks_hw_slowdown": float(held)} if isinstance(held, bool) else {}
        now, residencies = time.monotonic(), _numbers({name: answer.get(name) for name in _RESIDENCIES})
        if self._last is not None and count > self._last[1]:
            then, before, earlier = self._last
            for name, value in residencies.items():
                share = (value - earlier.get(name, value)) / (count - before)
                self._held_s[name] += min(max(share, 0.0), 1.0) * (now - then)
        self._last = now, count, residencies
        return {_RESIDENCIES[name]: self._held_s[name] for name in residencies}


class AmdGpus(SampledGpus):
    """AMD GPUs of this node."""

    most_silent = 30  # no error code means a lost GPU, and a reset takes many seconds

    def __init__(self, complain: Complain) -> None:
        """Open the library and find the GPUs.

        Raises:
            Unavailable: there is no GPU, or none can be read.
        """
        smi = _open_library()
        super().__init__(complain, smi, (smi.AmdSmiException, *_OTHER_VERSIONS))
        self._gpus = list(self._find())
        if not self._gpus:
            raise Unavailable("")
        self._readers = list(self._listen())

    def _fate(self, error: Any) -> Fate:
        if isinstance(error, _OTHER_VERSIONS):
            return Fate.REFUSED
        codes = self._library.amdsmi_wrapper
        code = getattr(error, "err_code", None)
        if code == codes.AMDSMI_STATUS_NO_PERM:
            return Fate.FORBIDDEN
        refusals = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "INVAL", "FAIL_LOAD_SYMBOL")
        refused = code in {getattr(codes, f"AMDSMI_STATUS_{name}") for name in refusals}
        return Fate.REFUSED if refused else Fate.LATER

    def _events_within(self, timeout_s: float) -> list[tuple[str, Values]] | None:
        """Return the events of all GPUs, each with value 1."""
        if not self._readers:
            return None
        try:
            answer = self._readers[0].read(max(int(timeout_s * 1e3), 1), _MAX_EVENTS)
        except self._errors:
            return []  # a timeout, which has several error codes
        return [
            (self._device_of(event["processor_handle"]), {_EVENTS[event["event"]]: 1.0})
            for event in answer
            if event["event"] in _EVENTS
        ]

    def _find(self) -> Iterator[SampledGpu]:
        smi, met = self._library, set()
        for number, handle in enumerate(smi.amdsmi_get_processor_handles()):
            try:
                device = self._id_of(handle)
                if device in met:  # partitions of one GPU share its id
                    device = smi.amdsmi_get_gpu_device_uuid(handle).lower()
            except self._errors as error:
                self._complain(f"AMD GPUs that are not sampled: {number} ({_in_words(error)})")
                continue
            met.add(device)
            calls: list[Call] = [_Metrics(), _memory, _energy]
            yield SampledGpu(handle, device, calls, [_limits, _clock_limit, _power_limit, _ecc, _address_of])

    def _id_of(self, handle: Any) -> str:
        """Return the serial number of the chip; the library's uuid where the serial number is unknown."""
        serial = str(self._library.amdsmi_get_gpu_asic_info(handle).get("asic_serial", "")).lower()
        digits = serial.removeprefix("0x")
        if len(digits) == 16 and digits.strip("0") and digits.strip("f"):  # all 0 or f means unknown
            return digits
        return str(self._library.amdsmi_get_gpu_device_uuid(handle)).lower()

    def _listen(self) -> Iterator[Any]:
        """Yield a reader per GPU that reports events; any one reader returns the events of all."""
        smi = self._library
        kinds = [getattr(smi.AmdSmiEvtNotificationType, name) for name in _EVENTS]
        for gpu in self._gpus:
            with suppress(*self._errors):
                yield smi.AmdSmiEventReader(gpu.handle, kinds)

    def _device_of(self, handle: Any) -> str:
        number = getattr(handle, "value", handle)  # bindings before 7 return a plain number
        return next((gpu.device for gpu in self._gpus if gpu.handle.value == number), "")


def _open_library() -> Any:
    """Return the initialised binding.

    Raises:
        Unavailable: there is no driver, or the library cannot be used.
    """
    if not DRIVER.exists():
        raise Unavailable("")
    rocm = str(Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "share" / "amd_smi")
    sys.path.insert(0, rocm)
    try:
        with redirect_stdout(io.StringIO()):
            import amdsmi
    except ImportError:
        raise Unavailable(NOT_INSTALLED) from None
    except Exception as error:  # KeyError without a library, AttributeError with one of another version
        raise Unavailable(
            f"AMD GPUs are not sampled: the binding of AMD SMI does not match libamd_smi.so ({error})"
        ) from error
    finally:
        sys.path.remove(rocm)
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        raise Unavailable(f"AMD GPUs are not sampled: {_in_words(error)}") from error
    return amdsmi


def _in_words(error: Any) -> str:
    return str(getattr(error, "err_info", "") or error)


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a GPU has a value; the binding returns "N/A" where it has not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: dict[str, Any]) -> Values:
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _mean(several: Any, one: Any) -> Any:
    """Return the mean over the partitions of a GPU; the GPU's own value where they have none."""
    numbers = [value for value in several or () if _is_number(value)] if isinstance(several, list) else []
    return fmean(numbers) if numbers else one


def _sum(several: Any, factor: int) -> float | None:
    numbers = [value for value in several if _is_number(value)] if isinstance(several, list) else []
    return sum(numbers) * factor if numbers else None


AMD_SMI = GpuLibrary("AMD SMI", DRIVER, AmdGpus)
