"""Recorded jobs on a real GPU: they end as they would, and the recording holds what it should."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dpro.schema import OUT_OF_MEMORY, SPANS, STEPS
from tests.commands import dpro
from tests.jobs import ROOT, record, script

JOBS = ROOT / "benchmarks" / "gpu_stages" / "jobs"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gpu")]


def job(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(JOBS / script), *map(str, arguments)]


def test_windows_of_a_gpu_job_hold_kernels_with_their_launches(tmp_path):
    command = job("train.py", "gpt", "--tiny", "--steps", 60)
    run, done = record(tmp_path, command, "--every", "20", "--window-steps", "3")
    assert done.returncode == 0, done.stderr
    spans = run.table(SPANS)
    kernels = spans.filter(spans["kind"] == "kernel")
    assert kernels.height > 0
    launched = kernels["correlation"].is_in(spans.filter(spans["kind"] == "runtime")["correlation"].implode())
    assert launched.mean() > 0.9


def test_steps_of_a_gpu_job_have_times_of_the_device(tmp_path):
    run, done = record(tmp_path, job("train.py", "gpt", "--tiny", "--steps", 60), "--every", "1000")
    assert done.returncode == 0, done.stderr
    steps = run.table(STEPS)
    assert "gpu_step_ns" in steps.columns
    known = steps["gpu_step_ns"].fill_null(-1) > 0
    assert known.mean() > 0.8


@pytest.mark.parametrize("warmups", [3, 5, 6, 11])
def test_a_captured_step_lives_through_windows(tmp_path, warmups):
    command = job("captured.py", "--warmups", warmups, "--steps", 200)
    _, done = record(tmp_path, command, "--skip", "2", "--every", "4")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"replays": 200, "finite": True}


@pytest.mark.parametrize("skip", ["2", "3", "4", "5"])
def test_a_profiler_of_the_users_own_sees_all_it_would(tmp_path, skip):
    _, done = record(tmp_path, job("scheduled.py"), "--skip", skip, "--every", "7")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["traces"] == 7
    assert all(seen["kernels"])


@pytest.mark.parametrize("caught", [True, False])
def test_memory_that_ran_out_is_seen_and_what_filled_it(tmp_path, caught):
    body = f"""
    model, kept = model.cuda(), torch.empty(1 << 28, device="cuda")
    optimizer = Descent(model.parameters())
    given = torch.ones(2, 4, device="cuda")
    for step in range(6):
        optimizer.zero_grad()
        model(given).sum().backward()
        optimizer.step()
        if step == 3:
            try:
                torch.empty(1 << 44, device="cuda")
            except torch.OutOfMemoryError:
                if not {caught}:
                    raise
    """
    run, done = record(tmp_path, script(tmp_path, body), "--no-windows")
    assert (done.returncode == 0) == caught, done.stderr
    (row,) = run.table(OUT_OF_MEMORY).to_dicts()
    assert row["requested_bytes"] >= 4 << 44
    assert row["total_bytes"] >= row["reserved_bytes"] >= row["allocated_bytes"] >= 1 << 30
    assert (row["kinds"][0], row["bytes"][0]) == ("other tensors", 1 << 30)
    assert sum(row["bytes"]) == pytest.approx(row["allocated_bytes"], rel=0.01)


def test_a_snapshot_of_the_allocator_adds_up_to_what_pytorch_counts(tmp_path):
    file = tmp_path / "snapshot.pickle"
    source = f"""
        import torch
        torch.cuda.memory._record_memory_history()
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        optimizer, kept = torch.optim.AdamW(model.parameters()), []
        for _ in range(6):
            out = model(torch.randn(4096, 1024, device="cuda"))
            kept.append(out.detach())
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.memory._dump_snapshot({str(file)!r})
        print(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    """
    done = subprocess.run(script(tmp_path, source), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(dpro("memory", file, "--json").stdout)["devices"]
    assert device["peak_bytes"] == int(done.stdout)
    assert "forward" in {one["origin"]["phase"] for one in device["growing"]}
