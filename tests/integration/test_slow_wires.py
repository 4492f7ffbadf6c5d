"""Real jobs on a fabric of namespaces: a port that is slow, and one that loses packets. Needs root, tc."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fabric_lab.lab import Lab, lab, run, taken
from dpro.analysis.analysis import Analysis
from dpro.detect.findings import NETWORK, Finding
from dpro.topology.file import FILE, write
from dpro.topology.kept import PATHS as PATHS
from dpro.topology.kept import PathEntry, write_paths
from tests.jobs import PATIENCE_S, RECORD, free_port, opened, script, start, wait_until

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc"),
]

HOSTS = 6  # on three leaves, with two spines
ROUNDS = "[[(0, 5), (1, 4), (2, 3)], [(1, 5), (0, 2), (3, 4)], [(2, 5), (1, 3), (0, 4)], " \
    "[(3, 5), (2, 4), (0, 1)], [(4, 5), (0, 3), (1, 2)]]"  # fmt: skip

# All pairs of ranks, in rounds of disjoint pairs; after some steps they wait until their paths are known.
JOB = f"""
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
rounds = {ROUNDS}
groups = {{pair: dist.new_group(list(pair)) for round in rounds for pair in round}}
data = torch.ones(1 << 18)  # 1 MiB
for step in range(16):
    train_step()
    for round in rounds:
        for pair in round:
            if rank in pair:
                dist.all_reduce(data, group=groups[pair])
    dist.barrier()
    if step == 2:
        open(f"ready{{rank}}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
time.sleep(1.5)  # for a last sample of the connections
dist.destroy_process_group()
"""


def paths_of(made: Lab) -> list[PathEntry]:
    """The paths that the kernel sends the busiest connection of each pair of hosts over."""
    found = []
    for host in range(made.hosts):
        listed = run(["ip", "netns", "exec", made.host(host), "ss", "-tinH", "state", "established"])
        lines = listed.splitlines()
        busiest: dict[int, tuple[int, int, int]] = {}
        for line, facts in zip(lines[::2], lines[1::2]):
            local, remote = (end.rpartition(":") for end in line.split()[2:4])
            sent = [
                int(word[len("bytes_acked:") :]) for word in facts.split() if word.startswith("bytes_acked:")
            ]
            for other in range(made.hosts):
                if remote[0].strip("[]").endswith(made.address(other)) and sent and other != host:
                    each = (sent[0], int(local[2]), int(remote[2]))
                    busiest[other] = max(busiest.get(other, each), each)
        for other, (_, port, to_port) in busiest.items():
            spine = taken(made, host, other, port, to_port)
            if spine:
                links = [f"l{made.leaf_of(host)} > {spine}", f"{spine} > l{made.leaf_of(other)}"]
                found.append(PathEntry(f"h{host}:nic0", f"h{other}:nic0", links))
    return found


def findings(folder: Path, fault: Callable[[Lab], None]) -> list[Finding]:
    """What is found of the network in a job that was recorded with a fault of the fabric."""
    with lab(HOSTS, 3, 2, 200, 200) as made:
        fault(made)
        command = [*RECORD, "-o", "run", "--every", "9", "--window-steps", "4", "--skip", "5",
                   "--telemetry-period", "0.5", "--", *script(folder, JOB)]  # fmt: skip
        place = {
            "MASTER_ADDR": made.address(0),
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": HOSTS,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        jobs = [
            start(
                ["ip", "netns", "exec", made.host(rank), "unshare", "--uts", "sh", "-c",
                 f'hostname h{rank}; exec "$@"', "sh", *map(str, command)],
                folder, RANK=rank, LOCAL_RANK=0, **place,
            )
            for rank in range(HOSTS)
        ]  # fmt: skip
        wait_until(
            lambda: len([*folder.glob("ready*")]) == HOSTS or any(job.poll() is not None for job in jobs),
            "the job never got ready", timeout_s=240,
        )  # fmt: skip
        paths = paths_of(made)
        (folder / "go").touch()
        for job in jobs:
            _, stderr = job.communicate(timeout=PATIENCE_S)
            assert job.returncode == 0, stderr
        opened(folder / "run")
        write(made.topology(), folder / "run" / FILE)
        write_paths(paths, folder / "run" / PATHS)
    analysis = Analysis(opened(folder / "run"))
    return [finding for finding in analysis.verdict_by_replay[0] if finding.class_ in NETWORK]


def slow_port(made: Lab) -> None:
    for end in made.port_ends(3):
        made.limit(end, 50)


def lossy_port(made: Lab) -> None:
    made.lose(made.port_ends(3)[0], 0.02)


def test_a_slow_port_is_named_by_its_name_in_the_topology(tmp_path: Path) -> None:
    found, *others = findings(tmp_path, slow_port)
    assert (found.class_, found.component_kind, found.component_id) == ("slow.nic", "port", "h3:nic0")
    # Pairs whose hashed paths meet are slow as well, and nothing waits for them.
    assert all(each.component_kind == "link" and each.severity < 0.05 for each in others)


def test_what_loses_packets_is_named_by_the_retransmissions_of_its_connections(tmp_path: Path) -> None:
    (found,) = [each for each in findings(tmp_path, lossy_port) if each.cause]
    assert (found.cause, found.component_id) == ("packet loss", "l1 > h3:nic0")
