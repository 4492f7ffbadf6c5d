"""The doctor on this very machine."""

from __future__ import annotations

import json
import sys

import pytest

from tests.jobs import complete

pytest.importorskip("torch")
DOCTOR = [sys.executable, "-m", "dpro", "doctor"]


@pytest.mark.slow
def test_machine_that_can_record_is_ready_and_loops_alone_are_left_behind(tmp_path):
    cache, tmp_path = tmp_path / "cache", tmp_path / "work"
    tmp_path.mkdir()
    done = complete([*DOCTOR, "--json", "--folder", str(tmp_path)], tmp_path, DPRO_CACHE=cache)
    document = json.loads(done.stdout)
    states = {check["name"]: check["state"] for check in document["checks"]}
    assert (states["torch"], states["recording"], states["folder"]) == ("ready", "ready", "ready")
    assert (done.returncode, document["ready"]) == (0, True)
    assert list(tmp_path.iterdir()) == []
    kept = {file.name.split("-")[0] for file in (cache / "loops").glob("*.nbi")}
    assert {"scan_kernel.scan", "engine._longest_path", "rank_graph._describe"} <= kept


@pytest.mark.slow
def test_what_keeps_the_recorder_out_is_found_and_fails(tmp_path):
    done = complete(DOCTOR, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert any(line.startswith("!!  recording") for line in lines)
    assert any(line.startswith("!!  environment") and "AUTOLOAD=0" in line for line in lines)
