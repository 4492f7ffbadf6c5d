"""What `dpro doctor` makes of a machine."""

from __future__ import annotations

import sys

import pytest

from dpro.collectors.telemetry.node import PortCounters
from dpro.extensions.doctor import readiness
from dpro.extensions.doctor.readiness import LIMITED, MISSING, READY
from dpro.extensions.rocm import telemetry as amd


def test_python_without_torch_is_reported_with_what_to_do(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    check, facts = readiness.torch_of(str(python))
    assert (check.state, facts) == (MISSING, {})
    assert "--python" in check.advice
    absent, _ = readiness.torch_of(str(tmp_path / "none"))
    assert "No such file" in absent.what


def test_torch_that_takes_long_to_import_is_not_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(readiness, "ASK_TORCH_S", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    check, facts = readiness.torch_of(str(python))
    assert (check.state, facts) == (LIMITED, {})
    assert "did not import torch within 0.2 s" in check.what


def answering(tmp_path, version: str, distributed: str = "true") -> str:
    """A Python that says what torch it has."""
    facts = f'{{"torch": "{version}", "cuda": "12.8", "hip": "", "nccl": "2.27.5", "gpus": 8,'
    facts += f' "distributed": {distributed}, "python": "3.12.1"}}'
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 'warning: something'\necho '{facts}'\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("version", "distributed", "state"),
    [
        ("2.13.0+cu128", "true", READY),
        ("2.4.1", "true", MISSING),
        ("2.10.0a0+git", "true", READY),
        ("2.9.0", "false", LIMITED),
    ],
)
def test_torch_has_to_be_one_that_lets_the_recorder_in(tmp_path, version, distributed, state):
    check, facts = readiness.torch_of(answering(tmp_path, version, distributed))
    assert check.state == state
    assert facts["gpus"] == 8
    assert f"torch {version} (CUDA 12.8), Python 3.12.1, NCCL 2.27.5" in check.what


def test_variables_that_keep_the_recorder_out_are_named():
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_FR_BUFFER_SIZE": "0", "HOME": "/root"}
    states = [(check.state, check.what.partition("=")[0]) for check in readiness.environment(variables)]
    assert states == [(MISSING, "TORCH_DEVICE_BACKEND_AUTOLOAD"), (LIMITED, "TORCH_FR_BUFFER_SIZE")]
    assert [check.state for check in readiness.environment({"TORCH_FR_BUFFER_SIZE": "20000"})] == [READY]


def test_driver_without_a_gpu_for_torch_is_a_fault_and_no_driver_is_none(tmp_path):
    assert [check.state for check in readiness.gpus({"gpus": 0}, tmp_path)] == [READY]
    driver = tmp_path / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "params").write_text("Foo: 2\nRmProfilingAdminOnly: 1\n")
    gpu, cupti, _ = readiness.gpus({"gpus": 0}, tmp_path)
    assert (gpu.state, cupti.state) == (LIMITED, READY)
    assert "administrators" in cupti.what


def test_ports_are_named(tmp_path):
    assert readiness.network(list).state == LIMITED
    assert "mlx5_0/1" in readiness.network(lambda: [PortCounters("mlx5_0/1", tmp_path)]).what


@pytest.mark.parametrize(("answer", "state"), [(-1, LIMITED), (5, LIMITED), (0, READY)])
def test_clock_is_judged_by_the_answer_of_the_kernel(answer, state):
    check = readiness.judged_clock(answer, 1500)
    assert check.state == state
    assert state == LIMITED or "within 1.5 ms" in check.what


def test_kernel_is_asked_how_well_the_clock_is_kept():
    assert readiness.clock().name == "clock"


def test_folder_is_tried_and_left_as_it_was(tmp_path):
    mounts = tmp_path / "mounts"
    elsewhere = f"{tmp_path}-and-a-longer-path-elsewhere"
    lines = ("/dev/vda / ext4 rw 0 0", f"server:/x {tmp_path} nfs4 rw 0 0", f"none {elsewhere} tmpfs rw 0 0")
    mounts.write_text("\n".join(lines))
    runs = tmp_path / "runs"
    runs.mkdir()
    check = readiness.folder(runs, mounts)
    assert check.state == READY
    assert "(nfs4)" in check.what
    assert list(runs.iterdir()) == []
    assert readiness.folder(tmp_path / "none", mounts).state == MISSING


def test_packages_that_lack_are_named_with_what_brings_them(monkeypatch):
    monkeypatch.setitem(readiness.EXTRAS, "no-such-package", ("flying", "wings"))
    lacking = list(readiness.extras())[-1]
    assert lacking.state == LIMITED
    assert lacking.advice == "pip install 'dpro-toolkit[wings]'"


def test_restricted_ptrace_is_no_hindrance(tmp_path):
    scope = tmp_path / "sys" / "kernel" / "yama" / "ptrace_scope"
    scope.parent.mkdir(parents=True)
    scope.write_text("1\n")
    assert readiness.stacks(tmp_path).state == READY


def test_a_node_with_amds_driver_reports_whether_its_library_answers(tmp_path, monkeypatch):
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(amd, "DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(amd, "AMD_SMI", amd.AMD_SMI._replace(driver=tmp_path / "kfd"))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    *_, check = readiness.gpus({"gpus": 8}, tmp_path)
    assert (check.state, check.what) == (LIMITED, amd.NOT_INSTALLED)
    monkeypatch.setattr(amd, "AMD_SMI", amd.AMD_SMI._replace(open=lambda complain: None))
    *_, check = readiness.gpus({"gpus": 8}, tmp_path)
    assert (check.state, check.what) == (READY, "AMD SMI answers")


@pytest.mark.parametrize(
    ("facts", "variables", "said"),
    [
        ({"gpus": 8, "cuda": "13.0"}, {}, 1),
        ({"gpus": 8, "cuda": "13.0"}, {"TEARDOWN_CUPTI": "1"}, 0),
        ({"gpus": 8, "cuda": "", "hip": "7.0"}, {}, 0),
        ({"gpus": 0, "cuda": "13.0"}, {}, 0),
    ],
)
def test_windows_that_leave_cupti_attached_are_said_to(facts, variables, said):
    checks = list(readiness.attached(facts, variables))
    assert [check.state for check in checks] == [LIMITED] * said
