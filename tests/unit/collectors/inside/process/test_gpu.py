"""What a process says of its GPU, with a CUDA that is made up."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dpro.collectors.inside.recorder import gpu_facts  # noqa: E402

UUID = "8c5bf1a2-0000-0000-0000-000000000001"
NOTHING = {"gpu_name": "", "gpu_uuid": "", "gpu_pci": ""}


@pytest.fixture
def cuda(monkeypatch):
    def made(index: int = 0, **properties) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
        known = SimpleNamespace(name="NVIDIA H100", **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_a_process_that_did_not_start_cuda_is_not_made_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", pytest.fail)
    assert gpu_facts() == NOTHING


def test_name_uuid_and_address_are_those_of_the_current_gpu(cuda):
    cuda(uuid=UUID, pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    assert gpu_facts() == {"gpu_name": "NVIDIA H100", "gpu_uuid": UUID, "gpu_pci": "0001:c1:00.0"}


def test_an_older_torch_knows_no_address(cuda):
    cuda(uuid=UUID)
    assert gpu_facts() == {"gpu_name": "NVIDIA H100", "gpu_uuid": UUID, "gpu_pci": ""}
    cuda()
    assert gpu_facts() == {"gpu_name": "NVIDIA H100", "gpu_uuid": "", "gpu_pci": ""}


def test_an_instance_is_what_the_environment_names(cuda, monkeypatch):
    cuda(uuid=UUID)
    for visible, uuid in (
        (f"MIG-{UUID[:-1]}9", f"MIG-{UUID[:-1]}9"),
        ("MIG-8c5", UUID),  # shortened: ambiguous
        (f"GPU-{UUID}", UUID),
        ("3", UUID),
        ("", UUID),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_facts()["gpu_uuid"] == uuid
