"""A real job over the hosts of a lab: one gloo rank on each, its ring's connections, and its steps.

In: a lab, and what a step does. Out: the connections that its all-reduces use, found while it waits, and
seconds per step. Gloo's ring sends from rank i + 1 to rank i, over the one connection of each pair.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fabric_lab.lab import Lab, run
from benchmarks.fabric_lab.traffic import Flow

RANK = Path(__file__).with_name("rank.py")
TIMEOUT_S = 120


@dataclass(frozen=True)
class StepWork:
    """The work of each rank in a step.

    Attributes:
        compute_ms: that it sleeps.
        num_bytes: of each all-reduce.
        reductions: all-reduces, one after the other.
    """

    compute_ms: int
    num_bytes: int
    reductions: int


@dataclass(frozen=True)
class RunningJob:
    """A job that waits for the signal to begin.

    Attributes:
        ring: the flows of its all-reduces.
        processes: its ranks.
    """

    ring: tuple[Flow, ...]
    processes: tuple[subprocess.Popen[str], ...]

    def seconds(self) -> float:
        """Run the steps; return the median over steps of the slowest rank's time, in s."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        steps = []
        for process in self.processes:
            out, _ = process.communicate(timeout=TIMEOUT_S)
            steps.append(json.loads(out.strip().splitlines()[-1]))
        return statistics.median(map(max, zip(*steps)))


@contextmanager
def job(made: Lab, work: StepWork, steps: int) -> Iterator[RunningJob]:
    """Start a rank on each host; they wait until `seconds` is called.

    Args:
        made: the lab.
        work: what a step does.
        steps: how many are measured, after a first one that is not.
    """
    port = random.randrange(20000, 30000)
    arguments = [str(each) for each in (work.compute_ms, work.num_bytes, work.reductions, steps)]
    processes = []
    try:
        for host in range(made.hosts):
            env = {
                **os.environ,
                "RANK": str(host),
                "WORLD_SIZE": str(made.hosts),
                "MASTER_ADDR": made.address(0),
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides that hosts have no names
            }
            command = ["ip", "netns", "exec", made.host(host), sys.executable, str(RANK), *arguments]
            processes.append(
                subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdout is not None
            while "ready" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError("a rank ended before it was ready")
        yield RunningJob(_ring(made, port), tuple(processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ring(made: Lab, store: int) -> tuple[Flow, ...]:
    """Find the connections by which each rank sends to the one before it."""
    flows = []
    for sender in range(made.hosts):
        receiver = (sender - 1) % made.hosts
        listed = run(["ip", "netns", "exec", made.host(sender), "ss", "-tnH", "state", "established"])
        ports = [
            tuple(int(end.rpartition(":")[2]) for end in line.split()[2:4])
            for line in listed.splitlines()
            if line.split()[3].rpartition(":")[0] == made.address(receiver)
        ]
        pairs = [pair for pair in ports if store not in pair]
        if len(pairs) != 1:
            raise RuntimeError(f"{len(pairs)} connections from host {sender} to {receiver}, not one")
        flows.append(Flow(sender, receiver, *pairs[0]))
    return tuple(flows)
