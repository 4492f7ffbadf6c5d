"""Cost of recording a job: whole jobs with and without `dpro record`, in turns.

python -m benchmarks.speed.overhead [--rounds 8] [--steps 600] [--device cpu] [--json]

Each round runs a two-rank job once in every way, in a new order: alone, alone again (the noise of the
method), always-on only, with the default windows, and alone with torch.profiler switched on by hand for the
same steps. The job times its own steps, so that the figures do not depend on dpro. A ratio is that of a
round's mean step to the mean of the round's two plain jobs; another one is of median steps, which neither a
short disturbance of the machine nor a window changes. The tables give the median of the rounds and their
spread. Whole jobs on a shared machine differ by more than the cost that is measured, so what recording adds
to a step and to a collective call is also measured where it is prominent: on steps of a tenth of a
millisecond, and on the calling thread's own CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks.by_hand import profiled_by_hand
from benchmarks.recorder_cost import timed_actions

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
RECORD = [sys.executable, "-m", "dpro", "record"]
NEVER = str(10**9)
ALWAYS_ON = ["--every", NEVER, "--skip", NEVER]
WARM_UP = 20
TRIES = 3


# The job, run as `overhead.py --job NAME`.


def busy_job(steps: int, device: str, profiled: bool) -> dict[str, float]:
    """Train many small layers with data parallelism: some ten milliseconds a step, bound by launches."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = [layer for _ in range(60) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    data = torch.ones(16, 64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()

    return timed(step, steps, profiled_by_hand() if profiled else None)


def tiny_job(steps: int, device: str, profiled: bool) -> dict[str, float]:
    """Train next to nothing, so that costs of a step are prominent, and growing memory shows."""
    import torch

    model = torch.nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.ones(2, 4, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    return timed(step, steps, None)


def calls_job(steps: int, device: str, profiled: bool) -> dict[str, float]:
    """Make collective calls alone, with a step after every hundred."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1, device=device)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)

    def step() -> None:
        for _ in range(100):
            dist.all_reduce(value)
        optimizer.step()

    return timed(step, steps, None)


def probes_job(steps: int, device: str, profiled: bool) -> dict[str, float]:
    """Run the recorded job of tiny steps; return us of a step that each part of the recorder takes.

    It is the median call of each action, times its calls per step: other work on the machine does not show.
    """
    us_per_step = timed_actions()
    tiny_job(steps, device, profiled)
    return us_per_step(steps + WARM_UP)


JOBS: dict[str, Callable[[int, str, bool], dict[str, float]]] = {
    "busy": busy_job,
    "tiny": tiny_job,
    "calls": calls_job,
    "probes": probes_job,
}


def timed(step: Callable[[], None], steps: int, end_step: Callable[[], None] | None) -> dict[str, float]:
    """Time steps after a warm-up: wall and thread time of each; memory after a tenth and at the end."""
    memory, ends = [], array("d", [0.0]) * (steps + 1)
    for _ in range(WARM_UP):
        step()
        if end_step:
            end_step()
    ends[0], thread = time.perf_counter(), time.thread_time()
    for index in range(steps):
        step()
        if end_step:
            end_step()
        ends[index + 1] = time.perf_counter()
        if index in (steps // 10, steps - 1):
            memory.append(resident_mb())
    thread = time.thread_time() - thread
    return {
        "mean_s": (ends[-1] - ends[0]) / steps,
        "median_s": statistics.median(after - before for before, after in pairwise(ends)),
        "thread_s": thread / steps,
        "early_mb": memory[0],
        "late_mb": memory[-1],
    }


def resident_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def run_job(name: str, steps: int, device: str, profiled: bool) -> None:
    """Run a job in this process; rank 0 prints its measurements."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device != "cpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    measured = JOBS[name](steps, device, profiled)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))
    if dist.is_initialized():
        dist.barrier()  # else gloo at times aborts a rank whose peer is gone first
        dist.destroy_process_group()


# The benchmark.


def measure(
    job: str, ranks: int, steps: int, device: str, record: list[str] | None, profiled: bool = False
) -> dict[str, float]:
    """Run a job, and return its own measurements; with a record command also `disk_bytes` of the run."""
    command = [*TORCHRUN, str(ranks)] if ranks > 1 else [sys.executable]
    command += [__file__, "--job", job, "--steps", str(steps), "--device", device]
    command += ["--profiled"] if profiled else []
    folder = Path(tempfile.mkdtemp())
    if record is not None:
        command = [*RECORD, "-o", str(folder / "run"), *record, "--", *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(TRIES):  # gloo aborts about one in thirty plain jobs at its end
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not done.returncode:
            break
        print(f"tried again: {' '.join(command)} ended with {done.returncode}", file=sys.stderr)
        shutil.rmtree(folder / "run", ignore_errors=True)
    else:
        sys.exit(done.stderr)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if record is not None:
        info = [sys.executable, "-m", "dpro", "info", "--json", str(folder / "run")]  # waits for the tables
        subprocess.run(info, env=environment, capture_output=True, check=True)
        run = folder / "run"
        measured["disk_bytes"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return measured


WAYS: dict[str, tuple[list[str] | None, bool]] = {
    "plain": (None, False),
    "plain again": (None, False),
    "always on": (ALWAYS_ON, False),
    "default windows": ([], False),
    "torch.profiler by hand": (None, True),
}


def whole_jobs(rounds: int, steps: int, device: str) -> dict[str, dict[str, float]]:
    """Return the ratio of each way's steps to those of the plain jobs of its round: median and spread."""
    ratios: dict[str, list[float]] = {}
    ranks = 2 if device == "cpu" else 1
    for done in range(rounds):
        order = random.Random(done).sample(list(WAYS), len(WAYS))
        measured = {way: measure("busy", ranks, steps, device, *WAYS[way]) for way in order}
        for key in ("mean_s", "median_s"):
            plain, again = measured["plain"][key], measured["plain again"][key]
            for way in list(WAYS)[1:]:
                whole = plain if way == "plain again" else (plain + again) / 2
                name = f"{way}, {key.removesuffix('_s')} step"
                ratios.setdefault(name, []).append(measured[way][key] / whole)
        print(f"round {done + 1} of {rounds}: {1e3 * plain:.2f} ms a step", file=sys.stderr)
    return {name: spread(each) for name, each in sorted(ratios.items())}


def added(job: str, ranks: int, rounds: int, steps: int, device: str, key: str) -> dict[str, float]:
    """Measure what always-on recording adds to a step of a job, in us: median and spread of the rounds."""
    differences = []
    for _ in range(rounds):
        plain = measure(job, ranks, steps, device, None)[key]
        differences.append(1e6 * (measure(job, ranks, steps, device, ALWAYS_ON)[key] - plain))
    return spread(differences)


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, smallest and largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def memory_and_disk(steps: int, device: str) -> dict[str, float]:
    """Measure the memory that recording adds to a rank, its growth, and disk bytes per step."""
    plain = measure("tiny", 1, steps, device, None)
    recorded = measure("tiny", 1, steps, device, ALWAYS_ON)
    return {
        "steps": steps,
        "added_mb": recorded["late_mb"] - plain["late_mb"],
        "growth_mb": recorded["late_mb"] - recorded["early_mb"],
        "plain_growth_mb": plain["late_mb"] - plain["early_mb"],
        "disk_bytes_per_rank_step": recorded["disk_bytes"] / steps,
    }


def rows(results: dict[str, object]) -> Iterator[str]:
    """Yield the results as lines for people."""
    for name, values in results.items():
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in values.items())  # type: ignore[attr-defined]
        yield f"{name:40} {numbers}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--short", type=int, default=20_000, help="of the job of tiny steps")
    parser.add_argument("--long", type=int, default=100_000, help="steps of the job that shows growth")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job, options.steps, options.device, options.profiled)
        return
    device, few = options.device, max(3, options.rounds // 2)
    results: dict[str, object] = dict(whole_jobs(options.rounds, options.steps, device))
    results["added to a step (us)"] = added("tiny", 1, few, options.short, device, "mean_s")
    per_hundred = added("calls", 2 if device == "cpu" else 1, few, 100, device, "thread_s")
    results["added to a collective call (us)"] = {key: value / 100 for key, value in per_hundred.items()}
    parts = measure("probes", 1, options.short, device, ALWAYS_ON)
    results["parts of a step (us; recorder: all of it)"] = parts
    results["memory and disk"] = memory_and_disk(options.long, device)
    print(json.dumps(results, indent=1) if options.json else "\n".join(rows(results)))


if __name__ == "__main__":
    main()
