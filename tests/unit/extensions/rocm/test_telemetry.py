"""AMD GPUs sampled through AMD's own binding, from a library that answers as AMD SMI does."""

import sys
import threading
import time

import pytest

from dpro.collectors.telemetry import nvml, sampler
from dpro.collectors.telemetry.gpus import Unavailable, libraries
from dpro.extensions.rocm import telemetry
from dpro.extensions.rocm.telemetry import AmdGpus
from tests import fake_amdsmi, fake_nvml
from tests.fake_amdsmi import BUSY, NO_PERM, NOT_SUPPORTED, FakeGpu, FakeLibrary

MI300X = {
    "current_gfxclks": [2100, 2000, 2100, 2000],
    "current_uclk": 1300,
    "current_socket_power": 645,
    "temperature_hotspot": 78,
    "temperature_mem": 62,
    "average_gfx_activity": 99,
    "average_umc_activity": 31,
    "pcie_link_width": 16,
    "pcie_link_speed": 320,
    "pcie_replay_count_acc": 2,
    "xgmi_read_data_acc": [5, 7],
    "xgmi_write_data_acc": [4, 4],
    "accumulation_counter": 1000,
    "ppt_residency_acc": 100,
    "socket_thm_residency_acc": 0,
    "hbm_thm_residency_acc": 0,
    "vr_thm_residency_acc": 0,
    "prochot_residency_acc": 0,
}
MI210 = {
    "current_gfxclk": 1700,
    "average_socket_power": 300,
    "temperature_edge": 51,
    "temperature_hotspot": 64,
    "throttle_status": 1,
}


@pytest.fixture
def opened(opening, monkeypatch, tmp_path):
    """Opens a made-up library: the GPUs, and what was complained of."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(telemetry, "DRIVER", tmp_path / "kfd")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    return lambda library: opening(AmdGpus, fake_amdsmi.installed(library, monkeypatch))


def values_of(gpus: AmdGpus, everything: bool = True) -> dict[str, float]:
    (sample,) = gpus.read(everything)
    return dict(sample.values)


def test_a_gpu_is_sampled_in_the_names_and_units_that_nvidias_have(opened):
    gpus, complaints = opened(FakeLibrary(FakeGpu(metrics=MI300X)))
    (sample,) = gpus.read(True)
    assert (sample.rank, sample.device, complaints) == (-1, "a1b2c3d4e5f60718", [])
    expected = {
        "sm_clock_mhz": 2050,
        "memory_clock_mhz": 1300,
        "power_w": 645,
        "energy_j": 65_536 * 15.259,
        "temperature_c": 78,  # there is no sensor at the edge
        "hotspot_temperature_c": 78,
        "memory_temperature_c": 62,
        "utilization_pct": 99,
        "memory_utilization_pct": 31,
        "memory_used_bytes": 20 << 30,
        "memory_total_bytes": 192 << 30,
        "pcie_lanes": 16,
        "pcie_generation": 5,
        "pcie_replays": 2,
        "xgmi_rx_bytes": 12 * 1024,
        "xgmi_tx_bytes": 8 * 1024,
        "power_limit_w": 750,
        "sm_clock_max_mhz": 2100,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "pci_address": 0xC1 << 8,
    }
    assert {name: sample.values[name] for name in expected} == pytest.approx(expected)
    assert sample.values["throttled_power_s"] == 0  # since the first reading


def test_what_a_gpu_does_not_have_is_left_out(opened):
    gpus, _ = opened(FakeLibrary(FakeGpu(metrics=MI210)))
    values = values_of(gpus)
    assert (values["sm_clock_mhz"], values["power_w"], values["temperature_c"]) == (1700, 300, 51)
    assert values["clocks_hw_slowdown"] == 1  # why is not known
    assert not {"xgmi_rx_bytes", "throttled_power_s", "utilization_pct", "pcie_lanes"} & values.keys()


def test_what_changes_rarely_is_read_only_when_everything_is(opened):
    gpus, _ = opened(FakeLibrary(FakeGpu(metrics=MI300X)))
    assert not {"ecc_corrected", "power_limit_w", "pci_address"} & values_of(gpus, everything=False).keys()


def test_shares_of_the_librarys_time_become_seconds_that_grow(opened, monkeypatch):
    gpu = FakeGpu(metrics=dict(MI300X))
    gpus, _ = opened(FakeLibrary(gpu))
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    values_of(gpus)
    now += 2.0
    gpu.metrics |= {"accumulation_counter": 3000, "ppt_residency_acc": 1600, "socket_thm_residency_acc": 200}
    values = values_of(gpus)
    assert (values["throttled_power_s"], values["throttled_thermal_s"]) == pytest.approx((1.5, 0.2))
    gpu.metrics |= {"accumulation_counter": 5, "ppt_residency_acc": 0}  # the driver was loaded again
    assert values_of(gpus)["throttled_power_s"] == pytest.approx(1.5)


def test_what_is_not_supported_is_asked_once_and_what_is_forbidden_is_said(opened):
    gpu = FakeGpu(metrics=MI300X, codes={"ecc": NOT_SUPPORTED, "energy": NO_PERM})
    gpus, complaints = opened(FakeLibrary(gpu))
    assert not {"ecc_corrected", "energy_j"} & values_of(gpus).keys()
    values_of(gpus)
    assert (gpu.calls.count("ecc"), gpu.calls.count("energy")) == (1, 1)
    assert complaints == ["GPUs: no permission to read energy"]


def test_a_gpu_that_is_busy_is_asked_again_and_one_that_stays_silent_is_lost(opened):
    gpu, other = FakeGpu(metrics=MI300X), FakeGpu("00000000000000ff", bus=2, metrics=MI300X)
    gpus, complaints = opened(FakeLibrary(gpu, other))
    gpu.codes["all"] = BUSY
    assert [set(sample.values) == {"sampling_us"} for sample in gpus.read(False)] == [True, False]
    gpu.codes.clear()
    assert all("power_w" in sample.values for sample in gpus.read(False))
    gpu.codes["all"] = BUSY
    for _ in range(AmdGpus.most_silent - 1):
        gpus.read(False)
    *_, event = gpus.read(False)
    assert (event.device, dict(event.values), event.is_event) == ("a1b2c3d4e5f60718", {"lost": 1}, True)
    assert complaints == ["GPU a1b2c3d4e5f60718 was lost: its driver no longer answers"]
    assert [sample.device for sample in gpus.read(False)] == ["00000000000000ff"]


def test_a_binding_whose_answers_have_other_names_costs_these_counters_only(opened, monkeypatch):
    gpus, complaints = opened(FakeLibrary(FakeGpu(metrics=MI300X)))
    smi = sys.modules["amdsmi"]
    monkeypatch.setattr(smi, "amdsmi_get_power_cap_info", lambda handle: {"cap": 1})
    monkeypatch.delattr(smi, "amdsmi_get_gpu_total_ecc_count")
    values = values_of(gpus)
    assert not {"power_limit_w", "ecc_corrected"} & values.keys()
    assert (values["power_w"], values["pci_address"], complaints) == (645, 0xC1 << 8, [])


def test_events_of_the_driver_are_events_of_their_gpu(opened):
    library = FakeLibrary(FakeGpu(metrics=MI300X), FakeGpu("00000000000000ff", metrics=MI300X))
    gpus, _ = opened(library)
    library.events = [(1, fake_amdsmi.VM_FAULT), (0, fake_amdsmi.GPU_PRE_RESET)]
    events = [(event.device, dict(event.values), event.is_event) for event in gpus.wait(0.01)]
    assert events == [
        ("00000000000000ff", {"event_vm_fault": 1}, True),
        ("a1b2c3d4e5f60718", {"event_gpu_reset": 1}, True),
    ]
    assert gpus.wait(0.001) == []


def test_a_driver_that_reports_no_events_just_waits(opened):
    gpus, complaints = opened(FakeLibrary(FakeGpu(metrics=MI300X, codes={"events": NOT_SUPPORTED})))
    assert (gpus.wait(0.001), complaints) == ([], [])


def test_chips_without_a_number_of_their_own_have_the_librarys_uuid(opened):
    parts = [FakeGpu(uuid="FF00-1"), FakeGpu(uuid="FF00-2"), FakeGpu("", uuid="FF00-3")]
    gpus, _ = opened(FakeLibrary(*parts, FakeGpu(16 * "f", uuid="FF00-4")))
    assert [sample.device for sample in gpus.read(False)] == [
        "a1b2c3d4e5f60718",
        "ff00-2",
        "ff00-3",
        "ff00-4",
    ]


def test_a_gpu_that_cannot_be_opened_is_named(opened):
    gpus, complaints = opened(FakeLibrary(FakeGpu(codes={"asic": 7}), FakeGpu(metrics=MI300X)))
    assert len(gpus.read(False)) == 1
    assert complaints == ["AMD GPUs that are not sampled: 0 (AMDSMI_STATUS_API_FAILED - API call failed)"]


def test_a_node_without_the_driver_never_loads_the_binding(monkeypatch, tmp_path):
    monkeypatch.setattr(telemetry, "DRIVER", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(Unavailable) as raised:
        AmdGpus(print)
    assert str(raised.value) == ""


def test_what_keeps_the_library_from_being_asked_is_one_line_and_nothing_is_printed(opened, capfd):
    with pytest.raises(Unavailable, match="the binding of AMD SMI does not match libamd_smi"):
        opened(None)
    with pytest.raises(Unavailable, match="AMD GPUs are not sampled: AMDSMI_STATUS_DRIVER_NOT_LOADED"):
        opened(FakeLibrary(FakeGpu(), init=34))
    with pytest.raises(Unavailable) as raised:
        opened(FakeLibrary())
    assert str(raised.value) == ""
    assert capfd.readouterr() == ("", "")


def test_a_node_with_the_driver_and_no_binding_gets_the_install_command(opened, monkeypatch):
    with pytest.raises(Unavailable):
        opened(FakeLibrary())
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(Unavailable, match=r"dpro-toolkit\[amd\]"):
        AmdGpus(print)


def test_gpus_of_both_makers_on_one_node_are_sampled_side_by_side(opened, monkeypatch):
    assert list(libraries()) == [nvml.NVML, telemetry.AMD_SMI]
    amds, _ = opened(FakeLibrary(FakeGpu(metrics=MI300X)))
    nvidias = fake_nvml.installed(fake_nvml.FakeNvml(fake_nvml.FakeGpu("GPU-8c5")), monkeypatch)
    seen, complaints = set(), []
    both = threading.Barrier(2)  # that both go on beside each other

    class Output:
        def append(self, samples):
            seen.update(sample.device for sample in samples)
            both.wait(10)
            raise RuntimeError("enough")

    threads = [
        threading.Thread(target=sampler.sample_gpus, args=(open_, 0.01, Output(), complaints.append))
        for open_ in (nvml.NvidiaGpus, lambda complain: amds)
    ]
    with nvidias:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert seen == {"8c5", "a1b2c3d4e5f60718"}
    assert complaints == ["telemetry continues without GPUs: RuntimeError: enough"] * 2
