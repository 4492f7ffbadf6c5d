"""A job on planned paths, one of whose cables becomes slow: what `dpro watch` and a recipe make of it.

In: a lab and a seed. Out: for each draw which part was named, how long it took, and the step before, with the
slow cable, and on the paths of the new plan. Pairs of hosts reduce in rounds, as replicas of two ranks do. A
short recording is planned once; each draw is a job of its own whose leaves follow the rules of that plan. The
recipe is what `dpro recipe nccl` prints, and installs its rules on the leaves of the lab.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from benchmarks.fabric_lab.lab import Lab
from benchmarks.fabric_lab.traffic import before_other_work
from benchmarks.recording import ENVIRONMENT, dpro, record_window
from dpro.detect.findings_log import BEGINS, read_log
from dpro.opening import ensure_finished
from dpro.schema import STEPS
from dpro.store import open_run
from dpro.topology.file import FILE, write

RANKS = Path(__file__).with_name("ranks.py")
JOB = Path(__file__).with_name("pairs_job.py")
INSTALL = Path(__file__).with_name("install_rules.sh")
LEFT = (0.15, 0.35)  # range of the share of its rate that is left of a slow cable
SKIP, WINDOW_STEPS = 4, 6
BEFORE_S, AFTER_S, GIVE_UP_S = 15.0, 12.0, 180.0
HEALTHY_S = 60.0  # for which a healthy job is watched
WON_BACK = 0.8  # least share of the lost time
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Replanned:
    """A draw.

    Attributes:
        fault: the cable that became slow; empty in a healthy draw.
        left: share of its rate that was left.
        named: parts that findings named for a new plan, in order.
        found_s: from the change of the cable to the finding; None without one.
        applied_s: from the change of the cable until the leaves had the new rules; None without any.
        changes: how many times rules were installed after the job began.
        healthy_ms, bad_ms, after_ms: median step before, with the slow cable, and on the new paths.
    """

    fault: str
    left: float
    named: tuple[str, ...]
    found_s: float | None
    applied_s: float | None
    changes: int
    healthy_ms: float
    bad_ms: float
    after_ms: float

    @property
    def won_back(self) -> float:
        """Share of the lost step time that the new plan won back; NaN without a fault."""
        lost = self.bad_ms - self.healthy_ms
        return (self.bad_ms - self.after_ms) / lost if self.fault and lost > 0 else float("nan")

    @property
    def right(self) -> bool:
        """Whether exactly the cable was named and enough won back, or nothing touched without a fault."""
        if not self.fault:
            return self.changes == 0
        return self.named == (self.fault,) and self.won_back >= WON_BACK


@dataclass(frozen=True)
class PlannedJob:
    """What all draws share.

    Attributes:
        made: the lab.
        folder: of all files.
        words: arguments of the job, without the number of steps.
    """

    made: Lab
    folder: Path
    words: Sequence[str]

    @property
    def planned(self) -> Path:
        """The short recording that is planned."""
        return self.folder / "planned"

    def launch(self, steps: int) -> list[str]:
        """Return the command that starts a rank on each host."""
        made = self.made
        places = ",".join(f"{made.host(host)}/h{host}" for host in range(made.hosts))
        port = str(random.randrange(20000, 30000))
        begin = [sys.executable, str(RANKS), places, made.address(0), port, "--", sys.executable, str(JOB)]
        return [*begin, *self.words, str(steps)]

    def environment(self, out: Path) -> dict[str, str]:
        """Return the settings of the recipe, for this lab."""
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PLANNED": str(self.planned),
            "OUT": str(out),
            "ADDRESSES": str(self.folder / "addresses"),
            "INSTALL": f"sh {shlex.quote(str(INSTALL))} {self.made.name}",
            "DPRO_HISTORY": str(out.with_suffix(".sqlite")),
        }

    def record(self) -> None:
        """Record the job for a few steps, and write what the recipe needs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        topology = self.folder / "topology.toml"
        write(self.made.topology(), topology)
        ports = [f"h{host}:nic0 {self.made.address(host)}" for host in range(self.made.hosts)]
        (self.folder / "addresses").write_text("\n".join(ports) + "\n")
        (self.folder / "recipe.sh").write_text(dpro("recipe", "nccl").stdout)
        rule = '[[rule]]\non = ["slow.link", "slow.fabric"]\ndo = "reroute"\nat_most = "3/1h"\n'
        (self.folder / "policy.toml").write_text(rule)
        if not (self.planned / "manifest.json").exists():
            launch = self.launch(SKIP + 2 * WINDOW_STEPS)
            record_window(self.planned, launch, SKIP, WINDOW_STEPS, ["--topology", str(topology)])
            ensure_finished(self.planned)


def drawn(job: PlannedJob, number: int, draw: random.Random, *, healthy: bool) -> Replanned:
    """Run the job on planned paths, slow a cable down unless the draw is healthy, and see what becomes of it.

    Args:
        number: of the draw; names its folder.
        draw: source of the cable and its rate.
    """
    made, folder = job.made, job.folder / f"draw{number}"
    folder.mkdir()
    made.heal()
    env = job.environment(folder / "out")
    subprocess.run(["sh", str(job.folder / "recipe.sh")], env=env, check=True, stdout=subprocess.DEVNULL)
    leaf, spine = draw.randrange(made.leaves), draw.randrange(made.spines)
    left = 1.0 if healthy else draw.uniform(*LEFT)
    run = folder / "run"
    with running(job, run, env):
        until(lambda: len([*run.glob(".raw/*/*/window0000.json")]) == made.hosts, "no window was recorded")
        time.sleep(BEFORE_S)
        rules = [made.rules(each) for each in range(made.leaves)]
        slow_ns = time.time_ns()
        if not healthy:
            for end in made.cable_ends(leaf, spine):
                made.limit(end, int(left * made.spine_mbit))
        give_up_s = time.monotonic() + (HEALTHY_S if healthy else GIVE_UP_S)
        while time.monotonic() < give_up_s and not _ran(run):
            time.sleep(0.2)
        time.sleep(AFTER_S)
        changed = rules != [made.rules(each) for each in range(made.leaves)]
    ran = _ran(run)
    fault = "" if healthy else f"l{leaf} - s{spine}"
    found = [each.time_ns for each in read_log(run) if each.event == BEGINS and each.component.id == fault]
    named = [line.partition("=")[0] for line in (folder / "out" / "avoid").read_text().splitlines()]
    applied_ns = ran[0]["time_ns"] if ran else time.time_ns()
    healthy_ms, bad_ms, after_ms = _steps(run, slow_ns, applied_ns)
    return Replanned(
        fault, left, tuple(named), (found[0] - slow_ns) / 1e9 if found else None,
        (applied_ns - slow_ns) / 1e9 if ran else None, len(ran) or int(changed), healthy_ms, bad_ms, after_ms,
    )  # fmt: skip


@contextmanager
def running(job: PlannedJob, run: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run the recorded job and its watcher; end both at the end.

    Args:
        run: the folder to make, beside the files of the draw.
        env: settings of the recipe.
    """
    folder, dpro_ = run.parent, [sys.executable, "-m", "dpro"]
    window = ["--skip", str(SKIP), "--every", "1000000", "--window-steps", str(WINDOW_STEPS)]
    topology = ["--topology", str(job.folder / "topology.toml")]
    record = [*dpro_, "record", "--quiet", "-o", str(run), *window, *topology, "--", *job.launch(100_000)]
    recipe = ["--policy", str(job.folder / "policy.toml"), "--on-finding", f"sh {job.folder / 'recipe.sh'}"]
    env, quiet = {**ENVIRONMENT, **env, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}, subprocess.DEVNULL
    with before_other_work():
        recording = subprocess.Popen(record, cwd=folder, env=env, stdout=quiet, stderr=quiet)
    watcher = None
    try:
        until((run / FILE).exists, "the recording did not begin")
        done = dpro("topology", run, "--paths", run.with_name("out") / "plan.json")
        if done.returncode:
            raise RuntimeError(done.stderr)
        with (folder / "watch.log").open("w") as said:
            watch = [*dpro_, "watch", str(run), *recipe]
            watcher = subprocess.Popen(watch, cwd=folder, env=env, stdout=said, stderr=said)
        yield
    finally:
        (folder / "stop").touch()  # the ranks outlive a launcher that is killed
        for process in (recording, watcher):
            with suppress(subprocess.TimeoutExpired):
                if process is not None:
                    process.wait(PATIENCE_S)
    ensure_finished(run)


def until(condition: Callable[[], object], complaint: str) -> None:
    """Wait until a condition holds.

    Raises:
        RuntimeError: it did not within `PATIENCE_S`.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(complaint)
        time.sleep(0.2)


def _ran(run: Path) -> list[dict[str, Any]]:
    """Return the commands that the hook of a run has run."""
    log = run / "findings" / "hook.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if line["what"] in ("ran", "failed")]


def _steps(run: Path, slow_ns: int, applied_ns: int) -> tuple[float, float, float]:
    """Return the median step of rank 0 before, with the slow cable, and on new paths, in ms."""
    steps = open_run(run).table(STEPS).filter((pl.col("rank") == 0) & (pl.col("window") < 0))
    begin, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    phases = (end <= slow_ns, (begin >= slow_ns) & (end <= applied_ns), begin >= applied_ns)
    found = [steps.filter(phase)["duration_ns"].median() for phase in phases]
    return tuple(float(each) / 1e6 if each is not None else float("nan") for each in found)  # type: ignore


def draws(made: Lab, folder: Path, seed: int, cases: int, words: Sequence[str]) -> Iterator[Replanned]:
    """Yield draws; every third is healthy.

    Args:
        made: the lab.
        folder: of all files.
        seed: of the cables and their rates.
        cases: how many draws have a slow cable.
        words: arguments of the job.
    """
    draw = random.Random(seed)
    job = PlannedJob(made, folder, words)
    with before_other_work():
        job.record()
    for number in range(cases + cases // 2):
        yield drawn(job, number, draw, healthy=number % 3 == 2)


def judged(rows: Sequence[Replanned]) -> dict[str, dict[str, Any]]:
    """Compute the checks of draws: those with a slow cable, and the healthy ones.

    Args:
        rows: all draws.
    """
    slow = [row for row in rows if row.fault]
    healthy = [row for row in rows if not row.fault]
    right = sum(row.right for row in slow)
    figures: dict[str, Any] = {"right": right}
    if slow:
        won = sorted(round(100 * row.won_back, 1) for row in slow if row.applied_s is not None)
        found = [row.found_s for row in slow if row.found_s is not None]
        applied = [row.applied_s for row in slow if row.applied_s is not None]
        figures |= {
            "named": sum(row.named == (row.fault,) for row in slow),
            "won_back_pct": won,
            "found_s": [round(each, 1) for each in found],
            "applied_s": [round(each, 1) for each in applied],
            "healthy_ms": round(median(row.healthy_ms for row in slow), 1),
            "bad_ms": round(median(row.bad_ms for row in slow), 1),
            "after_ms": round(median(row.after_ms for row in slow), 1),
        }
    untouched = sum(row.right for row in healthy)
    return {
        "replan": {
            "n": len(slow),
            "figures": figures,
            "bar": f"the cable is named, and {WON_BACK:.0%} of the lost time won back, in 9 of 10",
            "holds": right >= 0.9 * len(slow) if slow else None,
        },
        "replan, healthy": {
            "n": len(healthy),
            "figures": {"untouched": untouched},
            "bar": "no rule is changed",
            "holds": untouched == len(healthy) if healthy else None,
        },
    }
