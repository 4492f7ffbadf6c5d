"""A campaign: a job that fails at moments drawn from a seed, and is started again, as a scheduler would.

In: a design, a seed, how long. Out: the runs that dpro recorded, one for each start, when failures were
injected, and what the job itself logged. A failure is a SIGKILL, or a SIGSTOP, which is detected after the
design's time; where no process is there, none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaigns.design import DESIGNS, SAVE_S, STEP_S, CampaignDesign

RANKS = 2
JOB = Path(__file__).with_name("job.py")
HAPPENED = "campaign.json"
POLL_S = 0.05
END_S = 60.0  # a job that is asked to stop is waited for


@dataclass(frozen=True)
class Campaign:
    """What happened.

    Attributes:
        design: how the job saves and recovers.
        folder: with the runs `run-0`, `run-1`, and the logs of ranks.
        begun_s: when the first start was asked for, seconds since 1970.
        ended_s: when the last process was gone.
        failures_s: when failures met a process.
    """

    design: CampaignDesign
    folder: Path
    begun_s: float
    ended_s: float
    failures_s: list[float]

    @property
    def runs(self) -> list[Path]:
        """The runs, in order."""
        return sorted(self.folder.glob("run-*"), key=lambda path: int(path.name.partition("-")[2]))

    def logged(self, rank: int) -> list[dict[str, Any]]:
        """What a rank logged, in order."""
        path = self.folder / f"log-{rank}.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            with suppress(ValueError):  # cut off by a failure
                found.append(json.loads(line))
        return found


def run_campaign(design: CampaignDesign, seed: int, folder: Path, seconds: float, mtbf_s: float) -> Campaign:
    """Run a job for some time, whatever happens to it.

    Args:
        design: how it saves and recovers.
        seed: of when failures come and what they are.
        folder: where all of it goes.
        seconds: for how long.
        mtbf_s: mean time between failures.
    """
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    begun_s = time.time()
    next_s, failures_s, number = begun_s + draw.expovariate(1 / mtbf_s), [], 0
    while time.time() < begun_s + seconds:
        job = _start(design, folder, number)
        number += 1
        while job.poll() is None:
            if time.time() >= begun_s + seconds:
                (folder / "stop").touch()
                _wait(job)
            elif time.time() >= next_s:
                if _fail(design, folder, draw, job):
                    failures_s.append(next_s)
                next_s = time.time() + draw.expovariate(1 / mtbf_s)
            time.sleep(POLL_S)
        for path in folder.glob("pid-*"):
            path.unlink()
        if not (folder / "stop").exists():
            time.sleep(design.repair_s)
    found = Campaign(design, folder, begun_s, time.time(), failures_s)
    happened = {"design": design.name, "begun_s": begun_s, "ended_s": found.ended_s, "failures_s": failures_s}
    (folder / HAPPENED).write_text(json.dumps(happened))
    return found


def kept_campaigns(folder: Path) -> list[Campaign]:
    """The campaigns that a folder keeps, in order.

    Args:
        folder: as `run_campaign` was given it, one level up.
    """
    found = []
    for path in sorted(folder.glob(f"*/{HAPPENED}"), key=lambda path: int(path.parent.name)):
        happened = json.loads(path.read_text())
        design = next(each for each in DESIGNS if each.name == happened.pop("design"))
        found.append(Campaign(design, path.parent, **happened))
    return found


def _start(design: CampaignDesign, folder: Path, number: int) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    asked = ["--step-s", STEP_S, "--every", design.every, "--save-s", SAVE_S]
    job = [JOB, folder, *asked, *(["--in-background"] if design.in_background else [])]
    record = [sys.executable, "-m", "dpro", "record", "--every", "1000000", "-o", folder / f"run-{number}"]
    with (folder / f"output-{number}").open("wb") as output:
        return subprocess.Popen(
            list(map(str, [*record, "--", *torchrun, *job])), stdout=output, stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip


def _fail(design: CampaignDesign, folder: Path, draw: random.Random, job: subprocess.Popen[bytes]) -> bool:
    """Let a rank fail; whether there was one."""
    pids = [int(path.read_text() or -1) for path in sorted(folder.glob("pid-*"))]
    if len(pids) < RANKS:
        return False
    number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    victim = draw.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(victim, number)
        if number == signal.SIGSTOP:
            time.sleep(design.detect_s)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _wait(job)
        return True
    return False


def _wait(job: subprocess.Popen[bytes]) -> None:
    """Until a job is over; one that does not end is killed."""
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
