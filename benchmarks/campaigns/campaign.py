"""A campaign: a job that fails at moments drawn from a seed and is restarted by torchrun.

In: a design, a seed, how long. Out: the run that dpro recorded, when failures were injected, and the job's
own log. A failure is a SIGKILL, or a SIGSTOP that is detected after the design's time; there is none while a
process is missing. In a job on two hosts a failure takes the second host, with its torchrun.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaigns.design import DESIGNS, SAVE_S, STEP_S, CampaignDesign

RANKS = 2
JOB = Path(__file__).with_name("job.py")
HOSTS = Path(__file__).with_name("hosts.py")
HAPPENED = "campaign.json"
POLL_S = 0.02
# Each start gets a new store, since gloo at times finds addresses of earlier processes in torchrun's.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
END_S = 60.0  # how long a job that is asked to stop is waited for


@dataclass(frozen=True)
class Injected:
    """An injected failure.

    Attributes:
        at_s: when, seconds since 1970.
        hang: whether the process was stopped; else it was killed.
        ended_s: when its processes were killed.
    """

    at_s: float
    hang: bool
    ended_s: float


@dataclass(frozen=True)
class Campaign:
    """A job that ran, and its failures.

    Attributes:
        design: how the job saves and recovers.
        folder: with `run`, and the logs of ranks.
        begun_s: when the job was started, seconds since 1970.
        ended_s: when the last process was gone.
        failures: that met a process.
    """

    design: CampaignDesign
    folder: Path
    begun_s: float
    ended_s: float
    failures: list[Injected]

    @property
    def run(self) -> Path:
        """The run directory that dpro recorded."""
        return self.folder / "run"

    def logged(self, rank: int) -> list[dict[str, Any]]:
        """Return the lines that a rank logged, in order."""
        path = self.folder / f"log-{rank}.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            with suppress(ValueError):  # cut off by a failure
                found.append(json.loads(line))
        return found


def run_campaign(design: CampaignDesign, seed: int, folder: Path, seconds: float, mtbf_s: float) -> Campaign:
    """Run a job for some time, and inject failures.

    Args:
        design: how it saves and recovers.
        seed: of the moments and kinds of failures.
        folder: for everything that the campaign writes.
        seconds: for how long.
        mtbf_s: mean time between failures.
    """
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    begun_s = time.time()
    job, failures = _start(design, folder), []
    next_s = begun_s + draw.expovariate(1 / mtbf_s)
    while job.poll() is None and time.time() < begun_s + seconds:
        if time.time() >= next_s:
            failures += _fail(design, folder, draw)
            next_s = time.time() + draw.expovariate(1 / mtbf_s)
        time.sleep(POLL_S)
    (folder / "stop").touch()
    _wait(job)
    found = Campaign(design, folder, begun_s, time.time(), failures)
    happened = {"design": design.name, "begun_s": begun_s, "ended_s": found.ended_s}
    happened |= {"failures": list(map(asdict, failures))}
    (folder / HAPPENED).write_text(json.dumps(happened))
    return found


def kept_campaigns(folder: Path) -> list[Campaign]:
    """Return the campaigns in a folder, in order.

    Args:
        folder: the parent of the folders given to `run_campaign`.
    """
    found = []
    for path in sorted(folder.glob(f"*/{HAPPENED}"), key=lambda path: int(path.parent.name)):
        happened = json.loads(path.read_text())
        name = happened.pop("design")
        design = next(each for each in DESIGNS if each.name == name)
        failures = [Injected(**each) for each in happened.pop("failures")]
        found.append(Campaign(design, path.parent, failures=failures, **happened))
    return found


def _start(design: CampaignDesign, folder: Path) -> subprocess.Popen[bytes]:
    asked = ["--step-s", STEP_S, "--every", design.every, "--save-s", SAVE_S]
    job = [JOB, folder, *asked, *(["--in-background"] if design.in_background else [])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", 1000, "--nproc-per-node"]
    launcher = [*torchrun, RANKS] if design.hosts == 1 else [HOSTS, folder, design.repair_s, design.least]
    record = [sys.executable, "-m", "dpro", "record", "--no-windows", "-o", folder / "run"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            list(map(str, [*record, "--", sys.executable, *launcher, *job])), stdout=output, stderr=output,
            env=os.environ | ENVIRONMENT, start_new_session=True,
        )  # fmt: skip


def _fail(design: CampaignDesign, folder: Path, draw: random.Random) -> list[Injected]:
    """Let a rank fail, or the second host; do nothing while a rank is missing."""
    number, chosen = draw.choice([signal.SIGKILL, signal.SIGSTOP]), draw.randrange(RANKS)
    workers = [tuple(map(int, path.read_text().split())) for path in sorted(folder.glob("pid-*"))]
    if len(workers) < RANKS:
        return []
    pids = [pid for pid, _ in workers]
    victim, doomed = pids[chosen], pids
    if design.hosts > 1:
        host = int((folder / "host-1").read_text())
        victim = next(pid for pid, parent in workers if parent == host)
        doomed = [host, victim]
    for path in folder.glob("pid-*"):
        path.unlink()
    at_s = time.time()
    if number == signal.SIGSTOP:
        _kill([victim], signal.SIGSTOP)
        time.sleep(design.detect_s)
    _kill(doomed if number == signal.SIGSTOP or design.hosts > 1 else [victim], signal.SIGKILL)
    return [Injected(at_s, number == signal.SIGSTOP, time.time())]


def _kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(job: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a job; kill it after `END_S`."""
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
