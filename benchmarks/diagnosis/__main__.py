"""How often `dpro diagnose` is right about jobs that are slow, or are not; simulated, and really injected.

python -m benchmarks.diagnosis [matrix] [healthy] [smallest] [latency] [injected] [--cases N]

`matrix` draws cases: class of fault x layout (DP, FSDP, TP x PP, MoE) x ranks x severity x noise x missing
telemetry x clocks, recorded with deep windows or without, writes each as a run directory and runs the
command on it. The jobs are those of `tests/reference/training_jobs.py`, which knows nothing of detectors.
`healthy` looks at long healthy jobs again and again, as the watcher does. `smallest` looks for the smallest
slowdown that is named within 20 steps, `latency` for how many steps larger ones take. `injected` records
real jobs on this machine. Hangs have a program of their own, `diagnosis_hangs.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from benchmarks.diagnosis.injected import injected, injected_table
from benchmarks.diagnosis.live import healthy, latencies, live_tables, smallest
from benchmarks.diagnosis.report import markdown, table, wilson
from benchmarks.diagnosis.rules import named_by_hta, own_work, relative, twice, write_kineto
from dpro.cli.run.diagnose import diagnose
from dpro.store import open_run
from tests.reference.training_jobs import (
    BATCHES,
    FAULTS,
    HOST_FAULTS,
    IMBALANCES,
    LAYOUTS,
    NOISES,
    Job,
    Log,
    hosts_apart,
    mesh_of,
    run_job,
)  # fmt: skip
from tests.reference.training_records import SKEWS, Recording, write_run

SEVERITIES = (1.05, 1.1, 1.2, 1.5, 2.0, 5.0)
RANKS = {"windows": ((4, 16, 64), (48, 48, 4)), "calls": ((4, 16, 64, 512), (38, 38, 20, 4))}
MISSING = (0.0, 0.1, 0.3)
STEPS = 80
MAX_TRACES = 16  # ranks of a job of which traces are written for another tool
WINDOW_EVERY, WINDOW_STEPS, FIRST_WINDOW = 12, 2, 5  # two steps in a window is what `record` does
RIGHT_CLASS = {
    "compute": ("slow.compute",),
    "host": ("slow.host",),
    "imbalance": ("imbalance.stage", "imbalance.data"),
    "network": ("slow.link", "slow.nic"),
    "regression": ("slow.regression",),
    "input": ("slow.host",),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, how it is recorded, and whether what is recorded can tell.

    Attributes:
        seen: `windows`, or `calls` alone.
        told: whether the fault shows in what is recorded, by what the recording holds.
    """

    job: Job
    recording: Recording
    seen: str
    told: bool


def draw(seed: int, fault: str) -> Case:
    """One case; what is drawn besides the fault is the same for all faults of a seed."""
    rng = random.Random(f"slow {seed}")
    seen = rng.choice(("windows", "calls"))
    size = rng.choices(*RANKS[seen])[0]
    layout, gpu = LAYOUTS[seed % len(LAYOUTS)], rng.random() < (0.6 if seen == "windows" else 0.25)
    steps = STEPS if size <= 64 else 50
    windows = tuple((first, WINDOW_STEPS) for first in range(FIRST_WINDOW, steps, WINDOW_EVERY))
    since = rng.choice((0, 0, steps // 3, steps // 2))
    apart = random.Random(f"batches {seed}")
    batches, uneven = apart.choice(("sized", *BATCHES)), apart.choice(IMBALANCES)
    job = Job(
        layout, size, steps, gpu, rng.choice(NOISES), seed, windows=windows if seen == "windows" else (),
        batches=batches,
    )  # fmt: skip
    missing, skew, victim = rng.choice(MISSING), rng.choice(SKEWS), rng.randrange(size)
    hows = {"host": rng.choice(HOST_FAULTS), "network": rng.choice(("nic", "rank")), "imbalance": uneven}
    how = hows.get(fault, "")
    severity = rng.choice(SEVERITIES)
    lost = tuple(rank for rank in range(size) if rng.random() < missing and rank != victim)[: size - 2]
    if fault:
        since = steps // 2 if fault == "regression" else since
        job = dataclasses.replace(
            job, fault=fault, severity=severity, victim=victim, since=since, how=how
        )  # fmt: skip
    timed = seen == "calls" and gpu and rng.random() < 0.5
    recording = Recording(skew, lost if missing else (), missing, seed, timed)
    return Case(job, recording, seen, told(job, recording, seen))


def told(job: Job, recording: Recording, seen: str) -> bool:
    """Whether what is recorded holds the fault at all."""
    if job.fault in ("regression", ""):
        return True
    if job.fault == "imbalance":
        return _uneven_told(job, recording, seen)
    if job.fault == "network":
        return _shows_network(job, recording, seen)
    if job.fault == "input":
        return True
    peers = _peers(job, recording)
    if seen == "windows":
        return bool(peers)
    if recording.skew == "unknown" or (job.gpu and job.fault == "compute"):
        return False  # no clock to tell by; or only the device is late
    return _comparable(job, recording, job.victim) and any(
        _comparable(job, recording, peer) for peer in peers
    )


def _uneven_told(job: Job, recording: Recording, seen: str) -> bool:
    """Whether it can be seen that work is uneven: how much there is, or whole stages that take longer."""
    here = [rank for rank in range(job.num_ranks) if rank not in recording.lost]
    if job.layout == "tp_pp":
        return seen == "windows" and np.unique(mesh_of(job.layout, job.num_ranks).pp[here]).size > 1
    if job.batches != "sized":
        return False
    if seen == "windows":
        return len(here) > 1
    clocks = recording.skew != "unknown" and not job.gpu
    return clocks and sum(_comparable(job, recording, rank) for rank in here) > 1


def _shows_network(job: Job, recording: Recording, seen: str) -> bool:
    """Whether groups alike are there to compare with, or what was before; timed, or in hosts that wait."""
    if seen == "windows" or recording.timed:
        return job.since > 0 or _like_groups(job, recording) >= 2
    hosts_tell = not job.gpu and job.layout != "tp_pp" and recording.skew != "unknown"
    return job.since > 0 and hosts_tell


def _peers(job: Job, recording: Recording) -> list[int]:
    """Recorded ranks that do the same as the victim."""
    mesh = mesh_of(job.layout, job.num_ranks)
    alike = np.flatnonzero(mesh.pp == mesh.pp[job.victim])
    return [int(rank) for rank in alike if rank != job.victim and rank not in recording.lost]


def _comparable(job: Job, recording: Recording, rank: int) -> bool:
    """Whether a rank's clock is known, and all whom it waits for but where all ranks wait for the same."""
    leader = rank // hosts_apart(job.num_ranks) * hosts_apart(job.num_ranks)
    if recording.skew == "compared" and leader and {0, leader} & {*recording.lost}:
        return False  # the one that compared the host's clock, or with whose clock
    groups = mesh_of(job.layout, job.num_ranks).groups.values()
    mine = [row for kind in groups for row in kind if rank in row and row.size < job.num_ranks]
    return not any(np.isin(row, recording.lost).any() for row in mine)


def _like_groups(job: Job, recording: Recording) -> int:
    """Groups alike, whole in the recording, of which the victim is in one; the most of any kind."""
    mesh, most = mesh_of(job.layout, job.num_ranks), 0
    for kind, groups in mesh.groups.items():
        hosts = groups // hosts_apart(job.num_ranks)
        spans = np.array([len(set(row)) for row in hosts])
        whole = ~np.isin(groups, recording.lost).any(axis=1) & (groups.shape[1] > 1)
        mine = (groups == job.victim).any(axis=1) & whole
        if not mine.any() or (job.how == "nic" and spans[mine][0] == 1) or kind == "world":
            continue
        most = max(most, int((whole & (spans == spans[mine][0])).sum()))
    return most


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """Run the job, write it down, ask the command and the rules; what came of it, for the report."""
    log = run_job(case.job)
    run = write_run(folder / "run", case.job, log, case.recording)
    begin = time.perf_counter()
    asked = CliRunner().invoke(diagnose, [str(run), "--json"])
    seconds = time.perf_counter() - begin
    if asked.exit_code:
        document = {"findings": [], "error": str(asked.exception)[:200], "answerable": False, "reasons": []}
    else:
        document = json.loads(asked.stdout)
    work = own_work(open_run(run))
    true_cost = cost_of(case.job, log)
    return {
        **dataclasses.asdict(case.job),
        "seen": case.seen,
        "told": case.decided,
        "missing": case.recording.missing,
        "lost": case.recording.lost,
        "skew": case.recording.skew,
        "findings": [
            {key: finding[key] for key in ("class", "component", "ranks", "confidence", "cost_ms_per_step")}
            for finding in document["findings"]
        ],
        "answerable": document["answerable"],
        "error": document.get("error", ""),
        "unknown": document["reasons"],
        "true_cost_ms": true_cost,
        "step_ms": _mean_step(log, case.job.since),
        "seconds": round(seconds, 3),
        "rules": {"relative": sorted(relative(work)), "twice": sorted(twice(work))},
    }


def cost_of(job: Job, log: Log) -> float | None:
    """What the fault really costs per step since it is there, ms: against the same job without it."""
    if not job.fault or job.fault == "imbalance":
        return None
    healthy = run_job(dataclasses.replace(job, fault="", severity=1.0))
    return _mean_step(log, job.since) - _mean_step(healthy, job.since)


def _mean_step(log: Log, since: int) -> float:
    steps = log.steps[since:]
    return float(steps[-1]["end"].max() - steps[0]["begin"].max()) / len(steps)


def verdict(row: dict[str, Any]) -> str:
    """`right`, `component` (the right part, another class), `silent`, or `wrong`; of the first finding."""
    counted = [each for each in row["findings"] if not accepted_besides(row, each)]
    if not counted:
        return "right" if not row["fault"] else "silent"
    if not any(at_fault(row, each) for each in counted):
        return "wrong"
    first = next(each for each in counted if at_fault(row, each))
    return "right" if first["class"] in RIGHT_CLASS[row["fault"]] else "component"


def accepted_besides(row: dict[str, Any], finding: dict[str, Any]) -> bool:
    """What is true, and not the point: a job slower than it was, or one that was made to pause."""
    became_slow = row["fault"] not in ("", "regression") and row["since"] > 0
    pauses = row["noise"] == "periodic" and finding["class"] == "pauses"
    return pauses or (became_slow and finding["class"] == "slow.regression")


def at_fault(row: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Whether a finding names the part that is at fault."""
    fault, component = row["fault"], finding["component"]
    if fault in ("regression", "input"):
        wanted = {"regression": "step time", "input": "the input pipeline"}[fault]
        return component == {"kind": "job", "id": wanted}
    if fault == "imbalance":
        return finding["class"].startswith("imbalance.")
    if fault == "network":
        classes = (*RIGHT_CLASS[fault], "slow.fabric")  # of a single group only that it is the network
        return finding["class"] in classes and row["victim"] in finding["ranks"]
    return bool(fault) and finding["ranks"] == [row["victim"]]


def matrix(cases: int, seed: int, only: list[str], traces: Path | None) -> Iterator[dict[str, Any]]:
    """Draw, judge and yield `cases` of each class.

    Args:
        cases: of each class.
        seed: of the first.
        only: the classes.
        traces: where to leave Kineto traces of jobs on GPUs, None for nowhere.
    """
    for number in range(seed, seed + cases):
        for fault in only:
            case = draw(number, fault)
            with tempfile.TemporaryDirectory() as folder:
                row = judge(case, Path(folder))
                if traces and case.seen == "windows" and case.job.gpu and case.job.num_ranks <= MAX_TRACES:
                    write_kineto(open_run(Path(folder) / "run"), traces / f"{number}-{fault}")
                    row["traces"] = f"{number}-{fault}"
            yield row | {"verdict": verdict(row)}


def shown(rows: Iterator[dict[str, Any]], total: int, what: str) -> list[dict[str, Any]]:
    """All rows, with a line of progress now and then; an interrupt leaves those that there are."""
    got = []
    with suppress(KeyboardInterrupt):
        for row in rows:
            got.append(row)
            if len(got) % max(total // 20, 1) == 0:
                print(f"{what}: {len(got)} of {total}", file=sys.stderr, flush=True)
    return got


def main() -> None:
    """Measure, write the rows as JSON and the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["matrix"])
    parser.add_argument("--cases", type=int, default=200, help="of each class of the matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="classes of the matrix, by commas")
    parser.add_argument("--steps", type=int, default=10_000, help="of each of 20 healthy jobs")
    parser.add_argument("--repeats", type=int, default=3, help="of injected, smallest and latency")
    parser.add_argument("--hta", default="", metavar="PYTHON", help="a Python that has HTA installed")
    parser.add_argument("--output", type=Path, default=Path("diagnosis.json"))
    options = parser.parse_args()
    only = (
        [name.replace("healthy", "") for name in options.only.split(",")] if options.only else ["", *FAULTS]
    )
    seeds = range(options.seed, options.seed + options.repeats)
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["DPRO_CACHE"] = f"{place}/cache"
        traces = Path(place) / "traces" if options.hta else None
        if "matrix" in options.parts:
            drawn = matrix(options.cases, options.seed, only, traces)
            rows["matrix"] = shown(drawn, options.cases * len(only), "matrix")
            _ask_hta(options.hta, rows["matrix"], traces)
    if "healthy" in options.parts:
        rows["healthy"] = shown(
            (healthy(seed, options.steps) for seed in range(options.seed, options.seed + 20)), 20, "healthy"
        )
    if "smallest" in options.parts:
        rows["smallest"] = shown(smallest(seeds), 30 * options.repeats, "smallest")
    if "latency" in options.parts:
        rows["latency"] = shown(latencies(seeds), 4 * options.repeats, "latency")
    if "injected" in options.parts:
        rows["injected"] = shown(injected(options.repeats), 18 * options.repeats, "injected")
    options.output.write_text(json.dumps(rows))
    if rows.get("matrix"):
        print(markdown(rows["matrix"]))
    print(live_tables(rows, wilson, table))
    if rows.get("injected"):
        print(injected_table(rows["injected"], wilson, table))


def _ask_hta(python: str, rows: list[dict[str, Any]], traces: Path | None) -> None:
    """Add what HTA says of those that have traces."""
    told = [row for row in rows if "traces" in row]
    if traces is not None and told:
        for row, ranks in zip(told, named_by_hta(python, [traces / row["traces"] for row in told])):
            row["rules"]["hta"] = ranks


if __name__ == "__main__":
    main()
