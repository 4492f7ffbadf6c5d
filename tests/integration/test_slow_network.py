"""Real jobs on a network of namespaces, of which one port is slow. Needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.network.traffic import host_of, transfers_of
from dpro.detect.network.transfers import delay_matrix
from tests.jobs import PATIENCE_S, RECORD, free_port, opened, script, start, wait_until

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

RANKS = 4
FAST, SLOW = 400, 100  # Mbit/s

# All pairs of ranks, in rounds of disjoint pairs, so that no pair waits for another.
JOB = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
rounds = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]
groups = {pair: dist.new_group(list(pair)) for round in rounds for pair in round}
data = torch.ones(1 << 18)  # 1 MiB
for step in range(14):
    time.sleep(0.01)
    train_step()
    for round in rounds:
        for pair in round:
            if rank in pair:
                dist.all_reduce(data, group=groups[pair])
    dist.barrier()
dist.destroy_process_group()
"""

# Two ranks, no deep window; in the middle all wait until the network was changed.
CHANGING = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
data = torch.ones(1 << 17)  # 0.5 MiB
for step in range(70):
    time.sleep(0.005)
    train_step()
    for _ in range(2):
        dist.all_reduce(data)
    if step == 35:
        open(f"halfway{rank}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
dist.destroy_process_group()
"""


def run(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True)


def set_rate(space: str, rank: int, rate: int) -> None:
    """Limit a rank's port of the switch to a rate in Mbit/s, both ways."""
    shape = ("root", "tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "100ms")
    run("tc", "-n", space, "qdisc", "replace", "dev", "net", *shape)
    run("tc", "-n", space.rpartition("-")[0], "qdisc", "replace", "dev", f"p{rank}", *shape)


@contextmanager
def switch(rates: list[int]) -> Iterator[list[str]]:
    """Make a namespace per rank on one switch, with ports limited to these rates in Mbit/s, both ways."""
    name = f"dp{os.getpid()}"
    spaces = [f"{name}-{rank}" for rank in range(len(rates))]
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "hub", "type", "bridge")
        run("ip", "-n", name, "link", "set", "hub", "up")
        for rank, (space, rate) in enumerate(zip(spaces, rates)):
            run("ip", "netns", "add", space)
            run(
                "ip",
                "-n",
                space,
                "link",
                "add",
                "net",
                "type",
                "veth",
                "peer",
                "name",
                f"p{rank}",
                "netns",
                name,
            )
            run("ip", "-n", name, "link", "set", f"p{rank}", "master", "hub", "up")
            run("ip", "-n", space, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "net")
            run("ip", "-n", space, "link", "set", "net", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            set_rate(space, rank, rate)
        yield spaces
    finally:
        for space in [name, *spaces]:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("namespaces of the network need root, ip and tc")
    try:
        with switch([FAST]):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network of namespaces here: {error.stderr.decode().strip()}")


def started(folder: Path, spaces: list[str], job: str, *options: str) -> list[subprocess.Popen[bytes]]:
    """The job, being recorded, each rank in a namespace of its own."""
    command = [*RECORD, "-o", "run", *options, "--", *script(folder, job)]
    place = {
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": len(spaces),
        "GLOO_SOCKET_IFNAME": "net",
    }
    return [
        start(["ip", "netns", "exec", space, *command], folder, RANK=rank, LOCAL_RANK=0, **place)
        for rank, space in enumerate(spaces)
    ]


def ended(jobs: list[subprocess.Popen[bytes]]) -> None:
    for job in jobs:
        _, stderr = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, stderr


def recorded(folder: Path, rates: list[int]) -> Analysis:
    """The job, recorded on ports of these rates."""
    from dpro.cli.analysis import analyse

    with switch(rates) as spaces:
        ended(started(folder, spaces, JOB, "--every", "9", "--window-steps", "4", "--skip", "4"))
    opened(folder / "run")
    return analyse(str(folder / "run"))


def changed(folder: Path, rate: int) -> list[Finding]:
    """Return the findings of a job during which the rate of rank 1's port changes."""
    with switch([FAST, FAST]) as spaces:
        jobs = started(folder, spaces, CHANGING, "--skip", "1000")
        wait_until(
            lambda: len(list(folder.glob("halfway*"))) == 2 or any(job.poll() is not None for job in jobs),
            "the job never came halfway",
            timeout_s=240,
        )
        set_rate(spaces[1], 1, rate)
        (folder / "go").touch()
        ended(jobs)
    verdict = Analysis(opened(folder / "run")).verdict_by_calls
    assert verdict is not None
    return of_the_network(verdict[0])


def of_the_network(found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.class_ in ("slow.nic", "slow.link", "slow.fabric")]


def test_slow_port_of_one_rank_is_named_in_a_real_job(tmp_path):
    analysis = recorded(tmp_path, [FAST, FAST, SLOW, FAST])
    found = [finding for finding in analysis.verdict_by_replay[0] if "slow.nic" in finding.class_]
    assert [(finding.component_kind, finding.component_id) for finding in found] == [("rank", "2")]
    # Its pairs, a row and a column of the matrix of delays, are four times as slow by the rates of the ports.
    matrix = delay_matrix(transfers_of(analysis.built.graph), host_of(analysis.built.graph))
    slow = (pl.col("source") == 2) | (pl.col("target") == 2)
    assert sorted(matrix.select("source", "target").rows()) == list(combinations(range(RANKS), 2))
    assert matrix.filter(slow)["ratio"].min() > 2.5
    assert matrix.filter(~slow)["ratio"].max() < 1.5


def test_network_of_equal_ports_is_left_alone(tmp_path):
    assert of_the_network(recorded(tmp_path, [FAST] * RANKS).verdict_by_replay[0]) == []


def test_network_that_became_slow_is_found_without_deep_windows(tmp_path):
    (finding,) = changed(tmp_path, SLOW // 2)
    assert finding.component_id.startswith("the network between ranks 0-1, ")
    since = int(finding.evidence[0].split()[2])
    assert 34 <= since <= 38
    assert finding.cost_ns > 10e6  # 1 MiB each way, at 400 and at 50 Mbit/s


def test_network_that_stays_as_it_was_raises_nothing_without_deep_windows(tmp_path):
    assert changed(tmp_path, FAST) == []
