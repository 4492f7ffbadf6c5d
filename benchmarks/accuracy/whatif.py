"""Predictions compared with jobs that were really changed.

python -m benchmarks.accuracy.whatif [--pair NAME …] [--rounds 4] [--runs FOLDER] [--json]

Each pair is a job before and after one change, both recorded by `dpro record`, in turns. What `dpro whatif`
says of the change from the run before alone, as a user would ask it, is compared with the steps recorded
after it. In the controlled class, which needs root, layers sleep a fixed time, the ranks talk over a link of
a fixed speed (`limited_link.py`) and run before all other programs, so that two shared cores are no limit; in
the noisy class they compute. Next to each error is the difference between recordings of one and the same job.
Steps count by their median, which a short disturbance does not change; where only every k-th step
communicates, by the median of the means of k steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.recording import cable, cpu_job, record_window
from dpro.errors import DproError
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.timeline import changed_step_times, durations_of, measured_step_times, replay
from dpro.replay.whatif.predict import apply_all, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run

SKIP, WINDOW_STEPS, AFTERWARDS = 8, 24, 3
MS = 1_000_000
CONTROLLED_MEDIAN, CONTROLLED_WORST, NOISY_MEDIAN, HELD = 3.0, 8.0, 8.0, 0.9
LARGE, SMALL = 8 << 20, 16 << 10  # bytes of messages that measure a link
EFFECT = 3.0  # per cent of the step below which a change counts as none

SLEEPING = "--layers 8 --width 512 --layer-ms 8 --first"
COMPUTING = "--layers 8 --width 512 --layer-ms 0 --products 40"
READING = f"{SLEEPING} --input-ms 40"


@dataclass(frozen=True)
class Job:
    """A job.

    Attributes:
        arguments: of `cpu_job.py`.
        link: rate of its link in Mbit/s; 0 for loopback.
        kind: of parallelism.
        delay_us: of its link, each way.
    """

    arguments: str
    link: int = 0
    kind: str = "ddp"
    delay_us: int = 0

    @property
    def cable(self) -> tuple[str, ...]:
        """The command that runs another one over its link."""
        return cable(self.link, self.delay_us)


@dataclass(frozen=True)
class Pair:
    """A job before and after a change.

    Attributes:
        name: the change.
        before, after: the jobs.
        edits: arguments of `dpro whatif --edit`; `{link}` is by how much the link is faster and `{added}`
            by how many us a small message takes longer, as measured with nothing else on it. None says that
            nothing should change.
        cycle: steps of the job after the change of which one communicates.
    """

    name: str
    before: Job
    after: Job
    edits: tuple[str, ...]
    cycle: int = 1

    @property
    def controlled(self) -> bool:
        """Whether nothing is computed and the link limits."""
        return bool(self.before.link)


def pairs() -> list[Pair]:
    """All pairs, controlled ones first."""
    found = []
    for rate in (200, 500):
        one, many = Job(SLEEPING, rate), Job(f"{SLEEPING} --bucket-mb 1", rate)
        found.append(Pair(f"buckets 25 to 1 MB, {rate} Mbit/s", one, many, ("bucket:mb=1",)))
        found.append(Pair(f"buckets 1 to 25 MB, {rate} Mbit/s", many, one, ("bucket:mb=25",)))
    slow, fast = Job(SLEEPING, 200), Job(SLEEPING, 500)
    late, many = Job(f"{SLEEPING} --slow-rank 1 --slow-ms 50", 500), Job(f"{SLEEPING} --bucket-mb 1", 500)
    sharded, ahead, further = (Job(f"{SLEEPING} --prefetch {layers}", 500, "fsdp") for layers in range(3))
    near, far = (Job(f"{SLEEPING} --bucket-mb 1", 200, delay_us=delay) for delay in (1, 1000))
    found += [
        Pair("1 ms of delay each way, 200 Mbit/s", near, far, ("delay:us={added}",)),
        Pair("link 200 to 500 Mbit/s", slow, fast, ("network:bandwidth={link}",)),
        Pair("link 500 to 200 Mbit/s", fast, slow, ("network:bandwidth={link}",)),
        Pair("link 200 to 1000 Mbit/s", slow, Job(SLEEPING, 1000), ("network:bandwidth={link}",)),
        Pair("fp16 hook, 200 Mbit/s", slow, Job(f"{SLEEPING} --hook fp16", 200), ("compress:to=fp16",)),
        Pair(
            "PowerSGD of rank 2, 200 Mbit/s", slow, Job(f"{SLEEPING} --hook powersgd", 200),
            ("compress:powersgd_rank=2",),
        ),
        Pair("straggler healed, 500 Mbit/s", late, fast, ("heal:rank=1",)),
        Pair(
            "parameters averaged every 4 steps, 200 Mbit/s", slow, Job(f"{SLEEPING} --local-updates 4", 200),
            ("local-updates:every=4",), cycle=4,
        ),
        Pair(
            "gradients accumulated over 2 batches, 500 Mbit/s", fast, Job(f"{SLEEPING} --accumulate 2", 500),
            ("accumulate:steps=2",),
        ),
        Pair(
            "a DataLoader worker, 500 Mbit/s", Job(READING, 500), Job(f"{READING} --workers 1", 500),
            ("workers:count=1",),
        ),
        Pair("FSDP gathers a layer ahead, 500 Mbit/s", sharded, ahead, ("prefetch:ahead=1",)),
        Pair("FSDP gathers two layers ahead, 500 Mbit/s", sharded, further, ("prefetch:ahead=2",)),
        Pair(
            "two changes: link 200 to 500 Mbit/s, buckets 25 to 1 MB", slow, many,
            ("network:bandwidth={link}", "bucket:mb=1"),
        ),
        Pair("nothing: static_graph, 500 Mbit/s", fast, Job(f"{SLEEPING} --static-graph", 500), ()),
        Pair(
            "buckets 25 to 1 MB, loopback, computing", Job(COMPUTING), Job(f"{COMPUTING} --bucket-mb 1"),
            ("bucket:mb=1",),
        ),
        Pair(
            "fp16 hook, loopback, computing", Job(COMPUTING), Job(f"{COMPUTING} --hook fp16"),
            ("compress:to=fp16",),
        ),
        Pair(
            "foreach AdamW, computing", Job(f"{COMPUTING} --optimizer adamw"),
            Job(f"{COMPUTING} --optimizer foreach"), ("optimizer:impl=foreach",),
        ),
        Pair(
            "fused AdamW, computing", Job(f"{COMPUTING} --optimizer adamw"),
            Job(f"{COMPUTING} --optimizer fused"), ("optimizer:impl=fused",),
        ),
        Pair("nothing: static_graph, computing", Job(COMPUTING), Job(f"{COMPUTING} --static-graph"), ()),
    ]  # fmt: skip
    return found


# Recording.


def place(runs: Path, job: Job, number: int) -> Path:
    """The folder of a job's recording in a round."""
    described = f"{job.kind} {job.link} {f'{job.delay_us}us ' if job.delay_us else ''}{job.arguments}"
    name = "".join(letter if letter.isalnum() else "-" for letter in described)
    return runs / f"{name}-{number}"


def record(folder: Path, job: Job) -> None:
    """Record one job with one deep window, unless it is there."""
    if (folder / "manifest.json").exists():
        return
    steps = ["--steps", str(SKIP + WINDOW_STEPS + AFTERWARDS)]
    command = cpu_job([job.kind, *job.arguments.split(), *steps], over=job.cable if job.link else ())
    record_window(folder, command, SKIP, WINDOW_STEPS)
    ensure_finished(folder)


SPEED = """
import os, time, torch, torch.distributed as dist
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
torch.set_num_threads(1)
dist.init_process_group("gloo")
value, times = torch.ones(NUMBER), []
for _ in range(12):
    begun = time.perf_counter()
    dist.all_reduce(value)
    times.append(time.perf_counter() - begun)
if dist.get_rank() == 0:
    print(sorted(times)[len(times) // 2])
"""


@cache
def seconds_of(cable: tuple[str, ...], num_bytes: int) -> float:
    """Time to reduce so many bytes over a link with nothing else on it: the median of three times."""
    command = [*cable, sys.executable, "-c", SPEED.replace("NUMBER", str(num_bytes // 4))]
    times = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        times.append(float(done.stdout.split()[-1]))
    return statistics.median(times)


def edits_of(pair: Pair) -> list[str]:
    """The edits of a pair, with what was measured of its links."""
    values: dict[str, str] = {}
    if any("{link}" in edit for edit in pair.edits):
        values["link"] = f"{seconds_of(pair.before.cable, LARGE) / seconds_of(pair.after.cable, LARGE):.3g}"
    if any("{added}" in edit for edit in pair.edits):
        longer = seconds_of(pair.after.cable, SMALL) - seconds_of(pair.before.cable, SMALL)
        values["added"] = f"{1e6 * longer:.0f}"
    return [edit.format_map(values) for edit in pair.edits]


# Predicting.


@dataclass(frozen=True)
class Answer:
    """What was predicted of a run, in ms; the gain is of as many samples as a step had before."""

    predicted: float
    low: float
    high: float
    gain_low: float
    gain_high: float
    samples: float


def typical(steps_ns: list[int], cycle: int = 1) -> float:
    """The median of the means of so many steps each, in ms."""
    cycles = [steps_ns[first : first + cycle] for first in range(0, len(steps_ns) - cycle + 1, cycle)]
    return statistics.median(statistics.fmean(each) for each in cycles) / MS


def answer(folder: Path, edits: list[str]) -> Answer:
    """What `dpro whatif` says of a run, its interval laid around the typical step."""
    run = open_run(folder)
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    graph = built.predictive
    baseline = baseline_steps(graph)
    wanted = [parse_edit(text) for text in edits]
    predicted = predict(graph, baseline, wanted, trust)
    graph = apply_all(graph, wanted)[0][-1]
    timeline = replay(graph)
    steps = (
        changed_step_times(baseline, graph, timeline.start, timeline.end) if edits else durations_of(baseline)
    )
    middle = typical(steps["duration_ns"].to_list())
    scale = middle / predicted.predicted_ns
    return Answer(
        middle,
        float(scale * predicted.low_ns),
        float(scale * predicted.high_ns),
        predicted.gain_low_ns / MS,
        predicted.gain_high_ns / MS,
        predicted.samples,
    )


def measured(folder: Path, cycle: int = 1) -> float:
    """The typical recorded step, in ms."""
    steps = measured_step_times(build_graph(open_run(folder)).graph)
    return typical(steps["duration_ns"].to_list(), cycle)


def compare(runs: Path, pair: Pair, rounds: int) -> dict[str, object]:
    """A pair's row: medians over the rounds, per cent."""
    edits = edits_of(pair)
    befores = [place(runs, pair.before, number) for number in range(rounds)]
    afters = [place(runs, pair.after, number) for number in range(rounds)]
    was = [measured(folder) for folder in befores]
    became = [measured(folder, pair.cycle) for folder in afters]
    try:
        answers = [answer(folder, edits) for folder in befores]
    except DproError as error:
        return {"pair": pair.name, "controlled": pair.controlled, "edits": edits, "refused": str(error)}
    truth = statistics.median(became)
    predicted = statistics.median(each.predicted for each in answers)
    base = statistics.median(was)
    gained = base - truth / answers[0].samples
    widths = [(each.gain_high - each.gain_low, (each.high - each.low) / each.samples) for each in answers]
    return {
        "pair": pair.name,
        "controlled": pair.controlled,
        "edits": edits,
        "before_ms": base,
        "after_ms": truth,
        "predicted_ms": predicted,
        "error_pct": 100 * (predicted / truth - 1),
        "same_job_pct": max(spread_pct(was), spread_pct(became)),
        "held": sum(bool(each.low <= truth <= each.high) for each in answers) / rounds,
        "gained_ms": gained,
        "gain_held": sum(bool(each.gain_low <= gained <= each.gain_high) for each in answers) / rounds,
        "gain_width": statistics.median(gain / step for gain, step in widths),
        "interval_pct": 100
        * statistics.median((each.high - each.low) / 2 / each.predicted for each in answers),
        "sign_right": bool((predicted - base) * (truth - base) > 0 or abs(truth / base - 1) < EFFECT / 100),
    }


def spread_pct(times: list[float]) -> float:
    """Median difference between any two rounds of the same job."""
    differences = [100 * abs(a / b - 1) for a, b in combinations(times, 2)]
    return statistics.median(differences) if differences else float("nan")


# Reporting.


def rows(results: list[dict[str, object]]) -> Iterator[str]:
    """The table of the documentation, and a line on the bars of each class."""
    yield "| change | class | before ms | after ms | predicted ms | error | same job | interval | held |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results:
        class_ = "controlled" if row["controlled"] else "noisy"
        if "refused" in row:
            yield f"| {row['pair']} | {class_} | | | refused: {row['refused']} | | | | |"
            continue
        times = " | ".join(f"{row[key]:.1f}" for key in ("before_ms", "after_ms", "predicted_ms"))
        yield (
            f"| {row['pair']} | {class_} | {times} | {row['error_pct']:+.1f}% | {row['same_job_pct']:.1f}% "
            f"| ±{row['interval_pct']:.0f}% | {row['held']:.0%} |"
        )
    for class_, check in checks(results).items():
        figures, bar = check["figures"], check["bar"]
        yield (
            f"{class_}: median error {figures['median_error_pct']:.1f}% (bar {bar['median_error_pct']:g}%), "
            f"worst {figures['worst_error_pct']:.1f}%; held by {figures['held']:.0%} of the intervals "
            f"(bar {HELD:.0%}); sign right in {figures['signs_right']} of {check['n']}; of the gain: held by "
            f"{figures['gain_held']:.0%}, {figures['gain_width']:.2f} times as wide"
        )


def checks(results: list[dict[str, object]]) -> dict[str, dict[str, Any]]:
    """The bars of each class that has pairs, and whether they hold: {n, figures, bar, holds}."""
    found = {}
    for class_, controlled in (("controlled", True), ("noisy", False)):
        mine = [row for row in results if row["controlled"] is controlled and "refused" not in row]
        if not mine:
            continue
        errors = [abs(float(str(row["error_pct"]))) for row in mine]
        figures = {
            "median_error_pct": statistics.median(errors),
            "worst_error_pct": max(errors),
            "held": statistics.fmean(float(str(row["held"])) for row in mine),
            "signs_right": sum(bool(row["sign_right"]) for row in mine),
            "gain_held": statistics.fmean(float(str(row["gain_held"])) for row in mine),
            "gain_width": statistics.median(float(str(row["gain_width"])) for row in mine),
        }
        bar = {"median_error_pct": CONTROLLED_MEDIAN if controlled else NOISY_MEDIAN, "held": HELD}
        bar |= {"worst_error_pct": CONTROLLED_WORST} if controlled else {}
        holds = figures["held"] >= HELD and all(figures[name] <= bar[name] for name in bar if name != "held")
        pairs = [row for row in results if row["controlled"] is controlled]
        found[class_] = {"n": len(mine), "figures": figures | {"pairs": pairs}, "bar": bar, "holds": holds}
    return found


def main() -> None:
    """Record, predict, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", nargs="+", default=[], metavar="WORD", help="pairs whose names have one")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--runs", type=Path, help="where recordings are kept, and taken from if they are there"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [pair for pair in pairs() if not options.pair or any(word in pair.name for word in options.pair)]
    if os.geteuid():
        chosen = [pair for pair in chosen if not pair.controlled]
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        runs.mkdir(parents=True, exist_ok=True)
        jobs = list(dict.fromkeys(job for pair in chosen for job in (pair.before, pair.after)))
        for number in range(options.rounds):
            for job in jobs if number % 2 == 0 else jobs[::-1]:
                record(place(runs, job, number), job)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        results = [compare(runs, pair, options.rounds) for pair in chosen]
    print(json.dumps(checks(results), indent=1) if options.json else "\n".join(rows(results)))


if __name__ == "__main__":
    main()
