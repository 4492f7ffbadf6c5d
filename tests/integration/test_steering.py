"""A job that comes to a bad end in four ways is restarted, stopped or let alone by one policy, for real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import dpro
from tests.hang_jobs import kill_ranks
from tests.jobs import TORCHRUN, environment, imports, wait_until

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
DPRO = f"{sys.executable} -m dpro"
LONGEST_S = 120

JOB = (
    imports("os", "signal", "time", "pathlib")
    + """import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["ATTEMPT"]
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    if (attempt, rank, step) == ("first", 1, 40):
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raises":
            raise ValueError("a bad sample")
        if sys.argv[1] in ("hangs", "ended"):
            pathlib.Path("waits").touch()
            time.sleep(10_000 if sys.argv[1] == "hangs" else 3)
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
pathlib.Path(f"done-{attempt}").touch()
dist.destroy_process_group()
"""
)


def steered(folder: Path, fault: str) -> subprocess.Popen[bytes]:
    """Record a job whose second attempt would go well, with a watcher that goes by the policy."""
    (folder / "job.py").write_text(JOB)
    (folder / "hosts").write_text("here\n")
    (folder / "go").write_text('#!/bin/sh\nexec sh -c "$2"\n')
    (folder / "go").chmod(0o755)
    (folder / "policy.toml").write_text(dpro("recipe", "policy").stdout)
    ranks = [*TORCHRUN, "--standalone", "job.py", fault]
    job = " ".join(map(str, ranks))
    settings = {
        "HOSTFILE": "hosts", "NNODES": "1", "LAUNCH": "./go", "ATTEMPT": "first",
        "STOP": "kill -9 $(cat pid-0) $(cat pid-1)",
        "START": f"ATTEMPT=second {DPRO} record -o second --no-windows -- {job}",
        "DPRO_HISTORY": str(folder / "history.sqlite"),
        "DPRO_ON_FINDING": dpro("recipe", "torchrun").stdout,
    }  # fmt: skip
    return subprocess.Popen(
        [*DPRO.split(), "record", "-o", "first", "--no-windows", "--watch", "--policy", "policy.toml", "--",
         *ranks],
        cwd=folder, env=environment() | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "classes", "action", "what"),
    [
        (
            "killed",
            ("dead.rank", "ended.signal"),
            "restart",
            "ran",
        ),  # torchrun may be quicker, or the watcher
        ("raises", ("dead.rank", "ended.exception"), "stop", "ran"),
        ("hangs", ("hang.host",), "restart", "ran"),
        ("ended", ("ended.outside",), "", "skipped"),
    ],
)
def test_a_job_that_comes_to_a_bad_end_is_begun_again_only_where_that_helps(
    tmp_path, fault, classes, action, what
):
    log = tmp_path / "first" / "findings" / "hook.jsonl"
    job = steered(tmp_path, fault)
    try:
        if fault == "ended":
            wait_until((tmp_path / "waits").exists, "it does not wait", LONGEST_S)
            job.send_signal(signal.SIGTERM)
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "nothing decided", LONGEST_S)
        if action == "restart":
            wait_until((tmp_path / "done-second").exists, "not begun again", LONGEST_S)
        job.wait(LONGEST_S)
        time.sleep(1)  # a watcher that decided twice would begin the job once more
    finally:
        kill_ranks(tmp_path / "first")
        job.wait(60)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    done = [line for line in lines if line["what"] != "skipped"] or lines
    (one,) = done
    assert (one["class"] in classes, one["action"], one["what"]) == (True, action, what), one
    assert (tmp_path / "done-second").exists() == (action == "restart")
    assert not (tmp_path / "done-first").exists()
