"""A host becomes slow under a job: it is named, confirmed, taken out, and the steps recover. For root.

Real namespaces with a rate on each cable, a real gloo job that is recorded, `dpro watch`, the recipe for
lists of hosts, and `dpro check`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import pytest

from benchmarks.fabric_lab.lab import Lab, lab
from tests.commands import dpro
from tests.jobs import environment, script, wait_until

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root, ip and tc"),
]
RANKS, HOSTS = 4, 5  # the last host is a spare
PORT_MBIT, SLOW_MBIT = 400, 100
HEALTHY = 12  # steps before the fault
WINDOWS = ["--skip", "30", "--every", "40", "--window-steps", "8"]  # the first is after the fault
# Hosts wait for gloo: without a deep window, a slow port is code of the host that waits for something.
CLASSES = "slow.host,slow.nic"
LONGEST_S = 110

# All pairs of ranks, in rounds of disjoint pairs. Each rank notes its process, and how long its steps are.
JOB = """
import os, socket, time
import torch.distributed as dist
host, rank = socket.gethostname(), int(os.environ["RANK"])
open(f"pid-{host}", "w").write(str(os.getpid()))
dist.init_process_group("gloo")
rounds = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
groups = {pair: dist.new_group(list(pair)) for round in rounds for pair in round}
data = torch.ones(1 << 18)  # 1 MiB
times = open(f"times-{os.environ['ATTEMPT']}-{rank}", "w", buffering=1)
while True:
    begin = time.monotonic()
    time.sleep(0.01)
    train_step()
    for round in rounds:
        for pair in round:
            if rank in pair:
                dist.all_reduce(data, group=groups[pair])
    dist.barrier()
    print(time.monotonic() - begin, file=times)
"""
LAUNCH = 'exec ip netns exec "$1" unshare --uts sh -c "hostname $1; $2"'
PYTHON = sys.executable


def started_by(folder: Path, attempt: str, windows: list[str]) -> str:
    """What starts the job on a host, for the recipe."""
    job = " ".join(script(folder, JOB))
    ranks = (
        "RANK=$HOST_RANK WORLD_SIZE=$NNODES LOCAL_RANK=0 MASTER_ADDR=$(cat address-$MASTER) MASTER_PORT=29611"
    )
    settings = f"{ranks} GLOO_SOCKET_IFNAME=eth0 TORCH_CPP_LOG_LEVEL=ERROR ATTEMPT={attempt}"
    return f"env {settings} {PYTHON} -m dpro record -o run-{attempt} {' '.join(windows)} -- {job}"


def launched(folder: Path, made: Lab) -> None:
    """Start the job on the first hosts."""
    names = [made.host(number) for number in range(HOSTS)]
    (folder / "hosts").write_text("\n".join(names) + "\n")
    for number, name in enumerate(names):
        (folder / f"address-{name}").write_text(made.address(number))
    (folder / "launch").write_text(f"#!/bin/sh\n{LAUNCH}\n")
    (folder / "launch").chmod(0o755)
    for rank, name in enumerate(names[:RANKS]):
        where = f"HOST_RANK={rank} NNODES={RANKS} MASTER={names[0]}; {started_by(folder, 'first', WINDOWS)}"
        with (folder / f"{name}.log").open("w") as log:
            subprocess.Popen(
                ["./launch", name, where], cwd=folder, env=environment(), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


def steps(folder: Path, attempt: str) -> list[float]:
    """Seconds of the steps of rank 0 so far."""
    path = folder / f"times-{attempt}-0"
    return [float(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


@contextmanager
def watched(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`dpro watch` with the recipe, whatever it starts ended afterwards."""
    check = f"{PYTHON} -m dpro check --finding - --only network --json --launcher"
    (folder / "check").write_text(
        f"#!/bin/sh\ntee finding.json | {check} 'ip netns exec {{host}}' > check.json\n"
    )
    (folder / "check").chmod(0o755)
    settings = {
        "HOSTFILE": "hosts", "NNODES": RANKS, "LAUNCH": "./launch", "CHECK": "./check",
        "STOP": "kill -9 $(cat pid-$(hostname))", "START": started_by(folder, "second", ["--no-windows"]),
        "DPRO_HISTORY": folder / "history.sqlite",
    }  # fmt: skip
    command = [
        "--on-finding",
        dpro("recipe", "torchrun").stdout,
        "--min-confidence",
        "0.6",
        "--classes",
        CLASSES,
    ]
    with (folder / "watch.log").open("w") as log:
        watcher = subprocess.Popen(
            [PYTHON, "-m", "dpro", "watch", "run-first", *command], cwd=folder, env=environment(**settings),
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield watcher
        finally:
            for path in folder.glob("pid-*"):
                with suppress(OSError):
                    os.kill(int(path.read_text()), SIGKILL)
            watcher.kill()
            watcher.wait(30)


def until(folder: Path, condition: Callable[[], bool], what: str) -> None:
    """Wait, and on failure say what all processes said."""
    try:
        wait_until(condition, what, LONGEST_S)
    except AssertionError as error:
        said = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in folder.glob("*.log"))
        raise AssertionError(f"{error}\n{said}") from None


def test_a_slow_host_is_named_confirmed_and_taken_out_and_the_steps_recover(tmp_path):
    with lab(HOSTS, 1, 1, PORT_MBIT, PORT_MBIT) as made:
        launched(tmp_path, made)
        until(tmp_path, lambda: len(steps(tmp_path, "first")) >= HEALTHY, "the job does not begin")
        with watched(tmp_path):
            bad = made.host(2)
            made.slow_port(2, SLOW_MBIT)
            healthy = statistics.median(steps(tmp_path, "first")[:HEALTHY])
            until(tmp_path, lambda: len(steps(tmp_path, "second")) >= HEALTHY, "the job does not begin again")
        slow, recovered = (
            statistics.median(steps(tmp_path, each)[-HEALTHY:]) for each in ("first", "second")
        )
        finding, check = (
            json.loads((tmp_path / name).read_text()) for name in ("finding.json", "check.json")
        )
        assert finding["class"] in CLASSES.split(",")
        assert finding["host"] == bad
        assert [host["host"] for host in check["hosts"] if host["verdict"] != "PASS"] == [bad]
        assert (check["confirmed"], check["links"]) == (True, [])
        assert (tmp_path / "hosts").read_text().split() == [made.host(number) for number in (0, 1, 3, 4)]
        (line,) = (tmp_path / "run-first" / "findings" / "hook.jsonl").read_text().splitlines()
        assert json.loads(line)["what"] == "ran"
        print(
            f"steps of {1e3 * healthy:.0f} ms, {1e3 * slow:.0f} ms when slow, {1e3 * recovered:.0f} ms after"
        )
        assert slow > 1.5 * healthy
        assert recovered < slow / 1.5
