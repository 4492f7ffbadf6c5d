"""A real job with more threads than cores: one finding about the host, and no rank is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.jobs import ROOT, complete, record

JOB = str(ROOT / "tests" / "crowding.py")
BUSY = "while True: pass"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--skip", "1000"), ()])
def test_a_host_with_more_threads_than_cores_is_one_finding_and_no_rank_is_named(options, tmp_path):
    ranks = max(len(os.sched_getaffinity(0)), 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), JOB]
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(ranks)]
    try:
        record(tmp_path, torchrun, *options, OMP_NUM_THREADS=4)
    finally:
        for process in beside:
            process.kill()
            process.wait()
    done = complete([sys.executable, "-m", "dpro", "diagnose", "run", "--json"], tmp_path)
    findings = json.loads(done.stdout)["findings"]
    [host] = [each for each in findings if each["component"]["kind"] == "host"]
    assert host["class"] == "slow.host"
    assert host["ranks"] == list(range(ranks))
    assert host["severity"] > 0.1
    assert "OMP_NUM_THREADS" in host["remedy"]
    assert not [each for each in findings if each["component"]["kind"] in ("rank", "ranks")], findings
