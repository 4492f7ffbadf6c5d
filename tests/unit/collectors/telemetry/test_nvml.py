"""GPUs sampled through nvidia-ml-py, from a library that answers as NVML does."""

import builtins

import pytest

from dpro.collectors.telemetry import nvml
from dpro.collectors.telemetry.nvml import NvidiaGpus, Unavailable
from tests import fake_nvml
from tests.fake_nvml import ALL_LINKS, DOUBLE, UINT, ULONGLONG, FakeGpu, FakeNvml

H100 = {
    (186, 0): (UINT, 412_345),
    (83, 0): (ULONGLONG, 5_000_000),
    (82, 0): (UINT, 71),
    (74, 0): (ULONGLONG, 2_500_000_000),
    (138, ALL_LINKS): (ULONGLONG, 7),
    (139, ALL_LINKS): (ULONGLONG, 9),
    (3, 0): (ULONGLONG, 0),
    (4, 0): (ULONGLONG, 1),
    (142, 0): (UINT, 2),
    (144, 0): (UINT, 1),
    (94, 0): (UINT, 4),
    (190, 0): (DOUBLE, 700_000.0),
}


@pytest.fixture
def opened(opening, monkeypatch):
    """Opens a made-up library: the GPUs, and what was complained of."""
    return lambda library: opening(NvidiaGpus, fake_nvml.installed(library, monkeypatch))


def values_of(gpus: NvidiaGpus, everything: bool = True) -> dict[str, float]:
    (sample,) = gpus.read(everything)
    return dict(sample.values)


def test_a_gpu_is_sampled_in_the_units_of_the_names(opened):
    gpus, complaints = opened(FakeNvml(FakeGpu("GPU-8c5-f1", H100, reasons=0x24)))
    (sample,) = gpus.read(True)
    assert (sample.rank, sample.device, complaints) == (-1, "8c5-f1", [])
    expected = {
        "power_w": 412.345,
        "energy_j": 5000.0,
        "memory_temperature_c": 71,
        "throttled_power_s": 2.5,
        "nvlink_tx_bytes": 7 * 1024,
        "nvlink_rx_bytes": 9 * 1024,
        "ecc_corrected": 0,
        "ecc_uncorrected": 1,
        "remapped_rows_corrected": 2,
        "remapped_rows_pending": 1,
        "pcie_replays": 4,
        "power_limit_w": 700,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "temperature_c": 61,
        "utilization_pct": 97,
        "memory_used_bytes": 10 << 30,
        "pcie_lanes": 16,
        "pci_address": 0x1_1010,  # 0001:10:02.0
    }
    assert {name: sample.values[name] for name in expected} == pytest.approx(expected)
    reasons = {name for name, value in sample.values.items() if name.startswith("clocks_") and value}
    assert reasons == {"clocks_sw_power_cap", "clocks_sw_thermal_slowdown"}


def test_what_changes_rarely_is_read_only_when_everything_is(opened):
    gpus, _ = opened(FakeNvml(FakeGpu(fields=H100)))
    often = values_of(gpus, everything=False)
    assert {"power_w", "sm_clock_mhz", "nvlink_tx_bytes"} <= often.keys()
    assert not {"ecc_corrected", "remapped_rows_pending", "pcie_lanes"} & often.keys()


def test_what_a_gpu_does_not_support_is_asked_once(opened):
    gpu = FakeGpu(refusals={"temperature": fake_nvml.NOT_SUPPORTED, "fields": fake_nvml.NOT_SUPPORTED})
    gpus, complaints = opened(FakeNvml(gpu))
    first, second = values_of(gpus), values_of(gpus)
    assert first.keys() == second.keys()
    assert "temperature_c" not in first
    assert first["power_w"] == 350  # from the older call
    assert gpu.calls.count("temperature") == 1
    asked = gpu.calls.count("fields")
    values_of(gpus)
    assert gpu.calls.count("fields") == asked
    assert complaints == []


def test_links_are_summed_where_there_is_no_total(opened):
    fields = {(91, 0): (UINT, 2)} | {(202, link): (ULONGLONG, 100 + link) for link in (0, 1)}
    fields |= {(204, 1): (ULONGLONG, 5), (161, 0): (ULONGLONG, 3), (161, 1): (ULONGLONG, 4)}
    gpus, _ = opened(FakeNvml(FakeGpu(fields=fields)))
    values = values_of(gpus)
    assert (values["nvlink_tx_bytes"], values["nvlink_rx_bytes"], values["nvlink_replays"]) == (201, 5, 7)
    gpus, _ = opened(FakeNvml(FakeGpu(fields=fields | {(138, ALL_LINKS): (ULONGLONG, 1)})))
    assert values_of(gpus)["nvlink_tx_bytes"] == 1024


def test_a_driver_that_knows_throttle_reasons_by_their_older_name_is_asked_by_it(opened):
    class Older(FakeNvml):
        nvmlDeviceGetCurrentClocksEventReasons = property()  # raises AttributeError

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle, result):
            result._obj.value = 0x8
            return fake_nvml.SUCCESS

    gpus, _ = opened(Older(FakeGpu()))
    assert values_of(gpus)["clocks_hw_slowdown"] == 1


def test_a_lost_gpu_is_reported_once_and_the_others_are_sampled_on(opened):
    lost, other = FakeGpu("GPU-a", H100), FakeGpu("GPU-b", H100)
    library = FakeNvml(lost, other)
    gpus, complaints = opened(library)
    assert [sample.device for sample in gpus.read(False)] == ["a", "b"]
    lost.is_lost = True
    sampled, event = gpus.read(False)
    assert (sampled.device, event.device, dict(event.values), event.is_event) == ("b", "a", {"lost": 1}, True)
    assert complaints == ["GPU a was lost: GPU is lost"]
    assert [sample.device for sample in gpus.read(True)] == ["b"]
    assert len(complaints) == 1


def test_a_gpu_that_is_lost_within_a_batch_of_fields_is_lost(opened):
    gpu = FakeGpu("GPU-a", dict(H100))
    gpus, _ = opened(FakeNvml(gpu))
    gpu.refusals[(83, 0)] = fake_nvml.GPU_IS_LOST
    (event,) = gpus.read(False)
    assert dict(event.values) == {"lost": 1}


def test_errors_of_the_driver_are_events_of_their_gpu(opened):
    library = FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    gpus, _ = opened(library)
    library.events = [(1, 79), (0, 31), (0, 31)]
    events = gpus.wait(0.01)
    reported = [(event.device, event.values["xid"], event.is_event) for event in events]
    assert reported == [("b", 79, True), ("a", 31, True), ("a", 31, True)]


def test_errors_of_the_other_gpus_are_still_seen_when_one_is_lost(opened):
    lost, other = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    library = FakeNvml(lost, other)
    gpus, complaints = opened(library)
    lost.is_lost = True
    assert gpus.wait(0.001) == []
    library.events = [(1, 94)]
    assert [event.device for event in gpus.wait(0.001)] == ["b"]
    assert complaints == []


def test_a_node_whose_gpus_report_no_errors_just_waits(opened):
    class Silent(FakeNvml):
        def nvmlEventSetCreate(self, events):
            return fake_nvml.NOT_SUPPORTED

    gpus, complaints = opened(Silent(FakeGpu()))
    assert (gpus.wait(0.001), complaints) == ([], [])


def test_what_is_forbidden_is_said_in_one_line(opened):
    forbidden = {(186, 0): fake_nvml.NO_PERMISSION, "reasons": fake_nvml.NO_PERMISSION}
    gpus, complaints = opened(FakeNvml(FakeGpu("GPU-a", H100, dict(forbidden)), FakeGpu("GPU-b", H100)))
    for _ in range(2):
        gpus.read(True)
    assert complaints == ["GPUs: no permission to read power_w, reasons"]


def test_gpus_of_others_on_a_shared_node_are_no_trouble(opened):
    other = FakeGpu("GPU-a", refusals={"handle": fake_nvml.NO_PERMISSION})
    gpus, complaints = opened(FakeNvml(other, FakeGpu("GPU-b")))
    assert ([sample.device for sample in gpus.read(False)], complaints) == (["b"], [])


def test_a_gpu_that_cannot_be_opened_is_named(opened):
    gpus, complaints = opened(FakeNvml(FakeGpu(refusals={"uuid": 999}), FakeGpu("GPU-b")))
    assert [sample.device for sample in gpus.read(False)] == ["b"]
    assert complaints == ["GPUs that are not sampled: 0 (Unknown Error)"]


def test_instances_of_a_partitioned_gpu_are_devices_of_their_own_under_their_gpu(opened):
    parts = [FakeGpu("MIG-p1", memory_used_bytes=1), FakeGpu("MIG-p2", memory_used_bytes=2)]
    gpus, _ = opened(FakeNvml(FakeGpu("GPU-a", instances=parts)))
    used = {sample.device: sample.values["memory_used_bytes"] for sample in gpus.read(False)}
    assert used == {"a": 10 << 30, "a/p1": 1, "a/p2": 2}


def test_visible_devices_of_the_job_change_nothing(opened, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus, _ = opened(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b")))
    assert [sample.device for sample in gpus.read(False)] == ["a", "b"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (FakeNvml(init=fake_nvml.DRIVER_NOT_LOADED), "GPUs are not sampled: Driver Not Loaded"),
        (None, "GPUs are not sampled: NVML Shared Library Not Found; a container needs"),
    ],
)
def test_a_driver_that_cannot_be_asked_is_worth_a_word_only_where_there_is_one(
    library, reason, there, opened, monkeypatch
):
    monkeypatch.setattr(nvml, "driver_is_there", lambda: there)
    monkeypatch.setattr("ctypes.CDLL", _no_library)
    monkeypatch.setattr("pynvml.CDLL", _no_library)
    with pytest.raises(Unavailable) as raised:
        opened(library)
    assert str(raised.value).startswith(reason) if there else str(raised.value) == ""


def _no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_permission_refused_at_the_start_is_said(opened):
    with pytest.raises(Unavailable, match="GPUs are not sampled: Insufficient Permissions"):
        opened(FakeNvml(init=fake_nvml.NO_PERMISSION))


def test_a_node_without_gpus_is_no_trouble(opened):
    with pytest.raises(Unavailable) as raised:
        opened(FakeNvml())
    assert str(raised.value) == ""


def test_without_nvidia_ml_py_only_nodes_with_a_driver_get_the_install_command(monkeypatch):
    real_import = builtins.__import__

    def without_pynvml(name, *arguments, **more):
        if name == "pynvml":
            raise ImportError(name)
        return real_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_pynvml)
    for there, reason in ((True, nvml.NOT_INSTALLED), (False, "")):
        monkeypatch.setattr(nvml, "driver_is_there", lambda there=there: there)
        with pytest.raises(Unavailable) as raised:
            NvidiaGpus(print)
        assert str(raised.value) == reason


def test_a_real_gpu_is_sampled_in_plausible_values():
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    complaints = []
    try:
        gpus = NvidiaGpus(complaints.append)
    except Unavailable:
        pytest.skip("no GPU here")
    for sample in gpus.read(True) + gpus.read(False) + gpus.wait(0.1):
        values = sample.values
        assert len(sample.device.split("/")[0]) == len("8c5bf1a2-0000-0000-0000-000000000000")
        if "/" not in sample.device:
            assert 0 < values["temperature_c"] < 120
            assert 1 < values["power_w"] < 3000
            assert 0 < values["sm_clock_mhz"] < 10_000
            assert values["memory_used_bytes"] > 0
    assert complaints == []
