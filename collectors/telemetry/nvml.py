"""Counters of a node's NVIDIA GPUs from the driver's library (NVML), and the errors (XIDs) that it reports.

Reads the library through nvidia-ml-py; returns samples whose device is the GPU's uuid without the prefix
`GPU-`, as PyTorch writes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
    "GPUs are not sampled: nvidia-ml-py is not installed next to dpro (pip install 'dpro-toolkit[gpu]')"
)
_ALL_LINKS = 0xFFFFFFFF
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # union member by value type


class Field(NamedTuple):
    """An NVML field: counter, id, factor to the counter's unit, and scope (a link, or all links).

    Ids above 250 are not used: they changed between drivers.
    """

    counter: str
    identifier: int
    factor: float = 1
    is_rare: bool = False
    scope: int = 0


_FIELDS = (
    Field("power_w", 186, 1e-3),  # NVML_FI_DEV_POWER_INSTANT, mW
    Field("energy_j", 83, 1e-3),  # NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, mJ
    Field("memory_temperature_c", 82),  # NVML_FI_DEV_MEMORY_TEMP
    # Throttled time: NVML_FI_DEV_PERF_POLICY_*, ns.
    Field("throttled_power_s", 74, 1e-9),
    Field("throttled_thermal_s", 75, 1e-9),
    Field("throttled_sync_boost_s", 76, 1e-9),
    Field("throttled_board_limit_s", 77, 1e-9),
    Field("throttled_reliability_s", 79, 1e-9),
    Field("nvlink_tx_bytes", 138, 1024, scope=_ALL_LINKS),  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, KiB
    Field("nvlink_rx_bytes", 139, 1024, scope=_ALL_LINKS),
    Field("pcie_tx_bytes", 197),  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES
    Field("pcie_rx_bytes", 198),
    Field("ecc_corrected", 3, is_rare=True),  # NVML_FI_DEV_ECC_SBE_VOL_TOTAL
    Field("ecc_uncorrected", 4, is_rare=True),
    Field("remapped_rows_corrected", 142, is_rare=True),  # NVML_FI_DEV_REMAPPED_COR
    Field("remapped_rows_uncorrected", 143, is_rare=True),
    Field("remapped_rows_pending", 144, is_rare=True),
    Field("remapped_rows_failure", 145, is_rare=True),
    Field("pcie_replays", 94, is_rare=True),  # NVML_FI_DEV_PCIE_REPLAY_COUNTER
    Field("pcie_correctable_errors", 173, is_rare=True),
    Field("pcie_fatal_errors", 180, is_rare=True),
    Field("power_limit_w", 190, 1e-3, is_rare=True),  # NVML_FI_DEV_POWER_CURRENT_LIMIT
    Field("nvlink_crc_errors", 45, is_rare=True),  # NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
    Field("nvlink_replays", 52, is_rare=True),
    Field("nvlink_recoveries", 59, is_rare=True),
)
# Newer generations count per link only; the sum over links replaces a total that a GPU does not support.
_LINK_FIELDS = (
    Field("nvlink_tx_bytes", 202),  # NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES
    Field("nvlink_rx_bytes", 204),
    Field("nvlink_replays", 161, is_rare=True),  # NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY
    Field("nvlink_recoveries", 162, is_rare=True),
    Field("nvlink_crc_errors", 163, is_rare=True),
    Field("nvlink_rx_errors", 208, is_rare=True),  # NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS
    Field("nvlink_link_recoveries", 215, is_rare=True),
    Field("nvlink_symbol_errors", 221, is_rare=True),
)
_LINK_COUNT = Field("nvlink_links", 91, is_rare=True)  # NVML_FI_DEV_NVLINK_LINK_COUNT

# Bits of NVML's clocks event reasons.
_REASONS = {
    0x001: "clocks_gpu_idle",
    0x002: "clocks_application_setting",
    0x004: "clocks_sw_power_cap",
    0x008: "clocks_hw_slowdown",
    0x010: "clocks_sync_boost",
    0x020: "clocks_sw_thermal_slowdown",
    0x040: "clocks_hw_thermal_slowdown",
    0x080: "clocks_hw_power_brake",
    0x100: "clocks_display_setting",
}


def _clocks(nvml: Any, gpu: Any) -> Values:
    return {
        "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    }


def _reasons(nvml: Any, gpu: Any) -> Values:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except nvml.NVMLError_FunctionNotFound:  # the name before driver 535
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return {name: float(bool(reasons & bit)) for bit, name in _REASONS.items()}


def _utilization(nvml: Any, gpu: Any) -> Values:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return {"utilization_pct": rates.gpu, "memory_utilization_pct": rates.memory}


def _temperature(nvml: Any, gpu: Any) -> Values:
    return {"temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)}


def _memory(nvml: Any, gpu: Any) -> Values:
    return {"memory_used_bytes": nvml.nvmlDeviceGetMemoryInfo(gpu).used}


def _power(nvml: Any, gpu: Any) -> Values:
    return {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3}


def _limits(nvml: Any, gpu: Any) -> Values:
    return {
        "sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_total_bytes": nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    }


def _pcie_link(nvml: Any, gpu: Any) -> Values:
    return {
        "pcie_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_lanes": nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    }


def _address_of(nvml: Any, gpu: Any) -> Values:
    pci = nvml.nvmlDeviceGetPciInfo(gpu)
    return {"pci_address": pci.domain << 16 | pci.bus << 8 | pci.device << 3}


class NvidiaGpus(SampledGpus):
    """NVIDIA GPUs of this node."""

    def __init__(self, complain: Complain) -> None:
        """Open the library and find the GPUs.

        Raises:
            Unavailable: there is no GPU, or none can be read.
        """
        self._nvml = nvml = _open_library()
        super().__init__(complain, nvml, (nvml.NVMLError,))
        self._gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
        self._refusals = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        }
        self._gpus = list(self._find())
        if not self._gpus:
            raise Unavailable("")
        self._events = self._register_events()

    def _fate(self, error: Any) -> Fate:
        return self._fate_of(error.value)

    def _fate_of(self, code: int) -> Fate:
        if code in self._gone:
            return Fate.LOST
        if code == self._nvml.NVML_ERROR_NO_PERMISSION:
            return Fate.FORBIDDEN
        return Fate.REFUSED if code in self._refusals else Fate.LATER

    def _events_within(self, timeout_s: float) -> list[tuple[str, Values]] | None:
        """Return an event `xid` for each error that the driver reports, with the error's number."""
        if self._events is None:
            return None
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, max(int(timeout_s * 1e3), 1))
        except self._nvml.NVMLError_Timeout:
            return []
        except self._nvml.NVMLError as error:
            # A lost GPU invalidates the event set: register a new one for the others.
            self._events = self._register_events() if error.value in self._gone else None
            if self._events is None and self._gpus:
                self._complain(f"GPUs: errors that the driver reports (XIDs) are no longer recorded: {error}")
            return None
        address = _address(event.device)
        device = next((gpu.device for gpu in self._gpus if _address(gpu.handle) == address), "")
        return [(device, {"xid": event.eventData})]

    # Finding GPUs and their supported fields.

    def _find(self) -> Iterator[SampledGpu]:
        """Yield all GPUs that can be read; without permission for other users' GPUs, report none of those."""
        nvml = self._nvml
        unreachable = []
        reached = False
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpu = self._opened(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                unreachable.append((error.value, f"{index} ({error})"))
                continue
            yield gpu
            yield from self._instances(gpu)
            reached = True
        broken = [what for code, what in unreachable if not reached or code != nvml.NVML_ERROR_NO_PERMISSION]
        if broken:
            self._complain(f"GPUs that are not sampled: {', '.join(broken)}")

    def _opened(self, handle: Any) -> SampledGpu:
        device = _without_prefix(self._nvml.nvmlDeviceGetUUID(handle))
        calls: list[Call] = [_clocks, _reasons, _temperature, _utilization, _memory]
        gpu = SampledGpu(handle, device, calls, [_limits, _pcie_link, _address_of])
        gpu.fields = self._supported(gpu, [*_FIELDS, _LINK_COUNT])
        counters = {field.counter for field in gpu.fields}
        links = int(self._values(gpu, [_LINK_COUNT])[_LINK_COUNT.counter]) if _LINK_COUNT in gpu.fields else 0
        missing = [field for field in _LINK_FIELDS if field.counter not in counters]
        gpu.fields += self._supported(
            gpu, [field._replace(scope=link) for field in missing for link in range(links)]
        )
        if "power_w" not in counters:
            gpu.calls.append(_power)
        return gpu

    def _instances(self, gpu: SampledGpu) -> Iterator[SampledGpu]:
        """Yield the instances of a partitioned GPU, for which NVML reports only memory."""
        nvml = self._nvml
        with suppress(nvml.NVMLError):  # not partitioned, or without support for it
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
                with suppress(nvml.NVMLError_NotFound):
                    handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
                    device = f"{gpu.device}/{_without_prefix(nvml.nvmlDeviceGetUUID(handle))}"
                    yield SampledGpu(handle, device, [_memory], [])

    def _supported(self, gpu: SampledGpu, fields: list[Field]) -> list[Field]:
        """Return the fields that a GPU has values for."""
        if not fields:
            return []
        refused: list[Field] = []
        try:
            self._values(gpu, fields, refused)
        except self._nvml.NVMLError as error:
            if error.value in self._gone:
                raise
            return []  # the GPU supports no fields at all
        return [field for field in fields if field not in refused]

    def _register_events(self) -> Any:
        """Return an event set for errors of all GPUs; None if no GPU reports any."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        registered = False
        for gpu in self._gpus:
            with suppress(nvml.NVMLError):
                if nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & nvml.nvmlEventTypeXidCriticalError:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
                    registered = True
        return events if registered else None

    # Reading.

    def _batch(self, gpu: SampledGpu, everything: bool) -> Values:
        refused: list[Field] = []
        wanted = [field for field in gpu.fields if everything or not field.is_rare]
        values = self._values(gpu, wanted, refused) if wanted else {}
        gpu.fields = [field for field in gpu.fields if field not in refused]
        return values

    def _values(self, gpu: SampledGpu, fields: list[Field], refused: list[Field] | None = None) -> Values:
        """Return values by counter, those of one counter summed; refused fields are added to `refused`.

        Raises:
            NVMLError: the GPU is lost, or supports no fields at all.
        """
        values: Values = {}
        asked = [(field.identifier, field.scope) for field in fields]
        for field, value in zip(fields, self._nvml.nvmlDeviceGetFieldValues(gpu.handle, asked)):
            if value.nvmlReturn in self._gone:
                raise self._nvml.NVMLError(value.nvmlReturn)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS:
                amount = float(getattr(value.value, _MEMBERS[value.valueType])) * field.factor
                values[field.counter] = values.get(field.counter, 0) + amount
            elif (fate := self._fate_of(value.nvmlReturn)) is not Fate.LATER and refused is not None:
                self._note(field.counter, fate)
                refused.append(field)
        return values


def _open_library() -> Any:
    """Return the initialised library.

    Raises:
        Unavailable: it cannot be used.
    """
    there = driver_is_there()
    try:
        import pynvml
    except ImportError:
        raise Unavailable(NOT_INSTALLED if there else "") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        without_gpu = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in without_gpu and not there:
            raise Unavailable("") from error
        hint = ""
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            hint = "; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        raise Unavailable(f"GPUs are not sampled: {error}{hint}") from error
    return pynvml


def driver_is_there(devices: Iterable[str] = ("/proc/driver/nvidia/version", "/dev/nvidiactl")) -> bool:
    """Return whether a file that NVIDIA's driver creates exists."""
    return any(Path(path).exists() for path in devices)


def _without_prefix(uuid: str | bytes) -> str:
    """Return a uuid as PyTorch writes it: `8c5…` for `GPU-8c5…`."""
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    return text.removeprefix("GPU-").removeprefix("MIG-")


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


NVML = GpuLibrary("NVML", Path("/proc/driver/nvidia"), NvidiaGpus)
