"""Faults put into real jobs of pipelines with data parallelism: what `dpro diagnose` makes of the recordings.

A job that hangs is watched until its recorder has saved what its ranks wait for, and then killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import ROOT, TORCHRUN, environment

pytest.importorskip("torch")

JOB = ROOT / "tests" / "hanging.py"
LONGEST_S = 150


def launcher(num_ranks: int) -> list[str]:
    return [*TORCHRUN[:-1], str(num_ranks), "--standalone", str(JOB)]


def diagnosed(
    folder: Path, fault: str, *options: str, num_ranks: int = 4, spawn: bool = False
) -> dict[str, Any]:
    """Record a job with a fault, end it when it hangs, and diagnose the recording."""
    run, mark = folder / "run", folder / "went-wrong"
    job = [sys.executable, str(JOB), "--spawn", str(num_ranks)] if spawn else launcher(num_ranks)
    command = [sys.executable, "-m", "dpro", "record", "-o", str(run), "--", *job, fault, str(mark), *options]
    port = {"MASTER_PORT": str(20000 + os.getpid() % 20000)} if spawn else {}
    recording = subprocess.Popen(
        command, env=environment(**port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until_ended_or_saved(recording, run, mark)
    finally:
        end(run)
        recording.wait(30)
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "diagnose", str(run), "--json"],
        env=environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def wait_until_ended_or_saved(recording: subprocess.Popen[bytes], run: Path, mark: Path) -> None:
    """Until the job is over, or two of its ranks have saved what they wait for, well after the fault."""
    deadline = time.monotonic() + LONGEST_S
    while recording.poll() is None and time.monotonic() < deadline:
        saved = [path.stat().st_mtime for path in run.glob(".raw/*/*/stall.json")]
        if mark.exists() and sum(each > mark.stat().st_mtime + 10 for each in saved) >= 2:
            return
        time.sleep(0.2)
    assert recording.poll() is not None, "the job neither ended nor hung"


def end(run: Path) -> None:
    """Kill the ranks, and nothing else: their launcher then ends by itself."""
    for path in run.glob(".raw/*/*/facts.json"):
        try:
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
        except (OSError, ValueError):
            continue


def the_finding(document: dict[str, Any]) -> dict[str, Any]:
    assert not document["healthy"]
    (finding,) = document["findings"]
    return dict(finding)


def told(finding: dict[str, Any]) -> str:
    return "\n".join(finding["evidence"])


def test_a_rank_whose_host_sleeps_is_named_through_pipeline_and_data_parallelism(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep"))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert finding["component"] == {"kind": "rank", "id": "2"}
    assert finding["confidence"] > 0.9
    assert "hanging.py" in told(finding)  # where it sleeps
    assert "ranks 0-1, 3" in told(finding)  # who waits because of it


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "gil"])
def test_a_process_that_is_stopped_or_keeps_the_gil_cannot_save_calls_and_is_named(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [2])
    assert "no thread of rank 2 has run since" in told(finding)


@pytest.mark.slow
@pytest.mark.parametrize("spawn", [False, True])
def test_a_rank_that_is_killed_is_dead(tmp_path, spawn):
    finding = the_finding(diagnosed(tmp_path, "die", spawn=spawn))
    assert (finding["class"], finding["ranks"]) == ("dead.rank", [2])
    assert "SIGKILL" in told(finding)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["skip", "order", "size", "dtype"])
def test_a_rank_that_calls_otherwise_than_its_peers_is_named_and_no_hardware_blamed(tmp_path, fault):
    finding = the_finding(diagnosed(tmp_path, fault))
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2])


@pytest.mark.slow
def test_two_ranks_that_receive_from_each_other_are_named_together(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "deadlock"))
    assert (finding["class"], finding["ranks"]) == ("hang.mismatch", [2, 3])


@pytest.mark.slow
def test_one_of_eight_ranks_is_named(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep", "--rank", "5", num_ranks=8))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [5])


@pytest.mark.slow
def test_a_rank_of_a_data_parallel_job_without_stages_is_named(tmp_path):
    finding = the_finding(diagnosed(tmp_path, "sleep", "--flat", "--rank", "1"))
    assert (finding["class"], finding["ranks"]) == ("hang.host", [1])


@pytest.mark.slow
def test_a_job_that_ends_well_hangs_nowhere(tmp_path):
    document = diagnosed(tmp_path, "nothing", "--flat")
    assert [each for each in document["findings"] if not each["class"].startswith("slow")] == []
