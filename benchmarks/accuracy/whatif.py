"""Predictions compared with jobs that were really changed.

python -m benchmarks.accuracy.whatif [--pair NAME …] [--every K] [--rounds 4] [--runs FOLDER] [--json]

Each pair (`pairs.py`) is a job before and after one change, both recorded by `dpro record`, in turns. From
the first recording alone, `dpro whatif` predicts the change as a user would ask for it; the prediction is
compared with the recorded steps of the changed job. Next to each error is the difference between recordings
of one job. Steps count by their median, which a short disturbance does not change; where only every k-th step
communicates, by the median of the means of k steps. Jobs that are in FOLDER already are not recorded again,
and all its rounds count: `--rounds 0` judges only those. Without root, pairs of the controlled class are not
recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path

from benchmarks.accuracy.bars import checks, signs, spread_pct, table
from benchmarks.accuracy.pairs import Job, Pair, pairs
from benchmarks.recording import job as command_of
from benchmarks.recording import record_window
from dpro.errors import DproError
from dpro.extensions.plan.layout import parse_layout
from dpro.extensions.plan.recorded_job import ranked, recorded_job
from dpro.extensions.trial.job import ensure_applied
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.timeline import changed_step_times, durations_of, measured_step_times, replay
from dpro.replay.whatif.predict import apply_all, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run

SKIP, WINDOW_STEPS, AFTERWARDS = 8, 24, 3
MS = 1_000_000
LARGE, SMALL = 8 << 20, 16 << 10  # bytes of messages that measure a link

# Recording.


def place(runs: Path, job: Job, number: int) -> Path:
    """Return the folder of a job's recording in a round."""
    what = [job.program, str(job.ranks), str(job.link), f"{job.delay_us or ''}", job.arguments, job.change]
    what += ["shapes"] * job.shapes
    name = "".join(letter if letter.isalnum() else "-" for letter in " ".join(filter(None, what)))
    return runs / f"{name}-{number}"


def record(folder: Path, job: Job) -> None:
    """Record one job with one deep window, unless it is recorded already."""
    if (folder / "manifest.json").exists():
        return
    made = job.made
    samples = math.prod(change.samples for change in made)
    steps = round((SKIP + WINDOW_STEPS + AFTERWARDS) * samples)
    program, *words = job.program.split()
    arguments = [*words, *job.arguments.split(), "--steps", str(steps)]
    command = command_of(program, arguments, job.ranks, job.cable if job.link else ())
    options = ["--modules", "--memory"] if program == "model_job.py" else []
    options += ["--shapes"] if job.shapes else []
    if made:
        options += ["--apply", json.dumps([change.document() for change in made])]
    record_window(folder, command, SKIP, WINDOW_STEPS, options)
    ensure_finished(folder)
    ensure_applied(folder, made)


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


def seconds_of(runs: Path, job: Job, num_bytes: int) -> float:
    """Measure the time to reduce this many bytes over a job's idle link: smallest of three medians, in s.

    Args:
        runs: folder where the result is kept.
        job: whose link.
        num_bytes: of the message.
    """
    kept = runs / f"link-{job.link}-{job.delay_us}-{job.ranks}-{num_bytes}.json"
    if not kept.exists():
        command = [*job.cable, sys.executable, "-c", SPEED.replace("NUMBER", str(num_bytes // 4))]
        times = []
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            times.append(float(done.stdout.split()[-1]))
        kept.write_text(json.dumps(min(times)))
    return float(json.loads(kept.read_text()))


def edits_of(runs: Path, pair: Pair) -> list[str]:
    """Return the edits of a pair, with the measured figures of its links."""
    values: dict[str, str] = {}
    if any("{link}" in edit for edit in pair.edits):
        was, becomes = (seconds_of(runs, job, LARGE) for job in (pair.before, pair.after))
        values["link"] = f"{was / becomes:.3g}"
    if any("{added}" in edit for edit in pair.edits):
        was, becomes = (seconds_of(runs, job, SMALL) for job in (pair.before, pair.after))
        values["added"] = f"{1e6 * (becomes - was):.0f}"
    return [edit.format_map(values) for edit in pair.edits]


# Predicting.


@dataclass(frozen=True)
class Answer:
    """A prediction for a run, in ms; the gain is per number of samples of a step before the change."""

    predicted: float
    low: float
    high: float
    gain_low: float
    gain_high: float
    samples: float


def typical(steps_ns: list[int], cycle: int = 1) -> float:
    """Return the median of the means of `cycle` steps each, in ms; the mean where there are fewer steps."""
    cycle = min(cycle, len(steps_ns))
    cycles = [steps_ns[first : first + cycle] for first in range(0, len(steps_ns) - cycle + 1, cycle)]
    return statistics.median(statistics.fmean(each) for each in cycles) / MS


@lru_cache(16)
def read(folder: Path) -> tuple[Built, Trust]:
    """Build the graph of a recording, and assess its replay."""
    run = open_run(folder)
    built = build_graph(run)
    return built, assess(built, replay(built.graph), run.manifest)


def answer(folder: Path, edits: list[str], cycle: int = 1) -> Answer:
    """Predict edits of a run as `dpro whatif` does, with the interval scaled to the typical step.

    Args:
        folder: of the run.
        edits: to predict.
        cycle: steps per mean.
    """
    built, trust = read(folder)
    graph = built.predictive
    baseline = baseline_steps(graph)
    wanted = [parse_edit(text) for text in edits]
    predicted = predict(graph, baseline, wanted, trust)
    graph = apply_all(graph, wanted).graphs[-1]
    timeline = replay(graph)
    steps = changed_step_times(baseline, graph, timeline.end) if edits else durations_of(baseline)
    middle = typical(steps["duration_ns"].to_list(), cycle)
    scale = middle / predicted.predicted_ns
    return Answer(
        middle,
        float(scale * predicted.low_ns),
        float(scale * predicted.high_ns),
        predicted.gain_low_ns / MS,
        predicted.gain_high_ns / MS,
        predicted.samples,
    )


def planned(folder: Path, pair: Pair) -> Answer:
    """Predict a run in the layout of a pair as `dpro plan` does, with the rest of its layout unchanged."""
    graph = read(folder)[0].predictive
    job = recorded_job(graph)
    keep = job.layout.row(0, named=True) | parse_layout(pair.layout)
    sequences = keep["dp"] * keep["micro_batch"] * keep.pop("micro_batches")
    (row,) = ranked(job, pair.after.ranks, sequences, keep).iter_rows(named=True)
    base = typical(durations_of(baseline_steps(graph))["duration_ns"].to_list())
    samples = sequences / job.global_batch
    predicted, low, high = (row[name] * base / job.step_ms for name in ("step_ms", "low_ms", "high_ms"))
    return Answer(predicted, low, high, base - high / samples, base - low / samples, samples)


def measured(folder: Path, cycle: int = 1) -> float:
    """Return the typical recorded step, in ms."""
    steps = measured_step_times(read(folder)[0].graph)
    return typical(steps["duration_ns"].to_list(), cycle)


def recorded(runs: Path, pair: Pair) -> list[tuple[Path, Path]]:
    """Return the recordings before and after of each round that has both."""
    rounds = ((place(runs, pair.before, at), place(runs, pair.after, at)) for at in count())
    return list(takewhile(lambda both: all((run / "manifest.json").exists() for run in both), rounds))


def compare(runs: Path, pair: Pair) -> dict[str, object]:
    """Return the row of a pair: medians over its recorded rounds, or why it is refused."""
    edits, both = edits_of(runs, pair), recorded(runs, pair)
    befores, afters = zip(*both)
    rounds = len(both)
    cycle = WINDOW_STEPS if pair.uneven else 1
    was = [measured(folder, cycle) for folder in befores]
    became = [measured(folder, max(cycle, pair.cycle)) for folder in afters]
    found: dict[str, object] = {
        "pair": pair.name,
        "controlled": pair.controlled,
        "edits": edits,
        "rounds": rounds,
    }
    try:
        answers = [
            planned(folder, pair) if pair.layout else answer(folder, edits, cycle) for folder in befores
        ]
    except DproError as error:
        return found | {"refused": str(error)}
    truth = statistics.median(became)
    predicted = statistics.median(each.predicted for each in answers)
    base = statistics.median(was)
    gained = base - truth / answers[0].samples
    widths = [(each.gain_high - each.gain_low, (each.high - each.low) / each.samples) for each in answers]
    same_job = max((each for each in (spread_pct(was), spread_pct(became)) if each is not None), default=None)
    return found | {
        "before_ms": base,
        "after_ms": truth,
        "predicted_ms": predicted,
        "error_pct": 100 * (predicted / truth - 1),
        "same_job_pct": same_job,
        "held": sum(bool(each.low <= truth <= each.high) for each in answers) / rounds,
        "interval_pct": 100
        * statistics.median((each.high - each.low) / 2 / each.predicted for each in answers),
        "gained_ms": gained,
        "gain_held": sum(bool(each.gain_low <= gained <= each.gain_high) for each in answers) / rounds,
        "gain_width": statistics.median(gain / step for gain, step in widths),
        **signs(base, base - gained, predicted / answers[0].samples, same_job),
    }


def main() -> None:
    """Record, predict, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", nargs="+", default=[], metavar="WORD", help="pairs whose names have one")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="of those, each K-th")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--runs", type=Path, help="where recordings are kept, and taken from if they are there"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [pair for pair in pairs() if not options.pair or any(word in pair.name for word in options.pair)]
    chosen = chosen[:: options.every]
    if not chosen:
        parser.error("--pair leaves none; there are " + "; ".join(pair.name for pair in pairs()))
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        runs.mkdir(parents=True, exist_ok=True)
        able = [pair for pair in chosen if not (os.geteuid() and pair.controlled)]
        jobs = list(dict.fromkeys(job for pair in able for job in (pair.before, pair.after)))
        for number in range(options.rounds):
            for job in jobs if number % 2 == 0 else jobs[::-1]:
                record(place(runs, job, number), job)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        results = [compare(runs, pair) for pair in chosen if recorded(runs, pair)]
    found = checks(results, whole=not options.pair and options.every == 1)
    print(json.dumps(found, indent=1) if options.json else "\n".join(table(results, found)))


if __name__ == "__main__":
    main()
