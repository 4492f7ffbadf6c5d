"""Tensor plans, made to real jobs over links of a known speed, beside the best size for all buckets.

python -m benchmarks.plans [--only NAME …] [--rounds 2] [--runs FOLDER] [--json]

Each job is recorded as it is. From that run `dpro whatif --make-plan` searches for a plan; then the job is
recorded with the plan, with the best uniform bucket size of the search, and with its neighbours among the
sizes that `dpro whatif` tries, in turns. Layers also sleep, and ranks run before all other programs, as in
the controlled class of `accuracy/pairs.py`. Recordings that FOLDER has already are not made again, and all
its rounds count: `--rounds 0` judges only those. Without root, only jobs without a limited link are recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from benchmarks.accuracy.bars import GAIN_HELD, check, spread_pct
from benchmarks.accuracy.pairs import Job, Pair
from benchmarks.accuracy.whatif import answer, compare, measured, place, record
from dpro.cli.analysis import analyse
from dpro.errors import DproError, Unanswerable
from dpro.extensions.tensors.answer import search_document
from dpro.extensions.tensors.edits import Tensors
from dpro.extensions.tensors.joint import make_plan
from dpro.extensions.tensors.plan_file import TensorPlan, write_plan
from dpro.replay.whatif.graph_ops.divisions import SIZES_MB
from dpro.selection import ALL
from dpro.stages import ignore

EXPOSED = 1.2  # lowest ratio of the step to that without communication, in the replay
SAME_PCT, BETTER_PCT, SHARE = 1.0, 5.0, 0.5
SEARCH_S = 10.0
USUAL_MB = 25.0
COMMON = "--bucket-mb 0 --first"  # 0: DDP's own buckets
SHAPES = {
    "gpt": ("gpt", "--width 96 --blocks 8 --block-ms 8"),
    "resnet": ("resnet", "--width 256 --blocks 5 --block-ms 12"),
    "dlrm": ("dlrm", "--width 256 --blocks 6 --block-ms 10"),
    "embeddings": ("gpt", "--width 64 --blocks 6 --block-ms 10 --outputs 4096"),
    "small layers": ("gpt", "--width 48 --blocks 16 --block-ms 4"),
    "huge last layer": ("resnet", "--width 128 --blocks 5 --block-ms 12 --outputs 4096"),
}
LINKS = {  # Mbit/s; 0 for loopback
    "gpt": (200, 500),
    "resnet": (200, 500),
    "dlrm": (100, 0),
    "embeddings": (100, 500),
    "small layers": (100, 200),
    "huge last layer": (200, 0),
}
Row = dict[str, Any]
Check = dict[str, Any]


def jobs() -> dict[str, Job]:
    """Return the jobs by name."""
    found = {}
    for shape, (model, words) in SHAPES.items():
        for link in LINKS[shape]:
            name = f"{shape}, {link} Mbit/s" if link else f"{shape}, loopback"
            found[name] = Job(f"{words} {COMMON}", link, f"model_job.py {model} ddp")
    return found


def searched(runs: Path, name: str, job: Job) -> Row:
    """Search for a plan from a job's first recording, and keep the result beside it.

    Returns:
        Why it was `refused`; or else `edits` of the plan, the plan itself last; the best `uniform` size in
        MB; the `seconds` of the search; the number of `reductions` of the plan; by how many per cent of the
        step it is ahead of the best size (`ahead_pct`).
    """
    stem = "".join(letter if letter.isalnum() else "-" for letter in name)
    kept, file = runs / f"{stem}.found.json", runs / f"{stem}.json"
    if not kept.exists():
        analysis = analyse(str(place(runs, job, 0)))
        begun = time.perf_counter()
        try:
            plan, search = make_plan(analysis, "", None, None, ALL, ignore)
            ensure_names(plan)
        except DproError as error:
            kept.write_text(json.dumps({"refused": str(error)}))
            return searched(runs, name, job)
        seconds = time.perf_counter() - begun
        write_plan(plan, file)
        made = search_document(file, plan, search)
        uniform = made.uniform.rpartition("=")[2]
        ahead = 100 * (1 - made.step_ms / made.uniform_ms) if made.step_ms and made.uniform_ms else 0.0
        found = {
            "edits": [*plan.edits, str(Tensors(file))],
            "uniform": float(uniform) if uniform else USUAL_MB,
            "seconds": seconds,
            "reductions": made.reductions,
            "ahead_pct": ahead,
        }
        kept.write_text(json.dumps(found))
    return dict(json.loads(kept.read_text()))


def ensure_names(plan: TensorPlan) -> None:
    """Refuse a plan that cannot be made to a job.

    Raises:
        Unanswerable: its gradients have no names.
    """
    if not plan.has_names:
        raise Unanswerable("its gradients have no names")


def neighbours(size: float) -> list[float]:
    """Return the two sizes that are nearest to one, by ratio, among those that `dpro whatif` tries."""
    return sorted(set(SIZES_MB) - {size}, key=lambda other: abs(math.log(other / size)))[:2]


def times_of(runs: Path, job: Job) -> list[float]:
    """Return the typical step of each recording of a job, in ms."""
    folders = (place(runs, job, number) for number in count())
    return [measured(each) for each in takewhile(lambda folder: (folder / "manifest.json").exists(), folders)]


def ways_of(job: Job, found: Row) -> tuple[Job, Job, list[Job]]:
    """Return a job with the plan, with the best uniform size, and with the sizes next to that."""
    sizes = (found["uniform"], *neighbours(found["uniform"]))
    best, *others = (job.changed(f"bucket:mb={size:g}") for size in sizes)
    return job.changed(shlex.join(found["edits"])), best, others


def record_all(runs: Path, name: str, job: Job, rounds: int) -> None:
    """Record a job in all ways, in turns."""
    record(place(runs, job, 0), job)
    found = searched(runs, name, job)
    if "refused" in found:
        return
    planned, best, others = ways_of(job, found)
    for number in range(rounds):
        for way in [job, planned, best, *others][:: (-1) ** number]:
            record(place(runs, way, number), way)


def judge(runs: Path, name: str, job: Job) -> Row | None:
    """Compare the recordings of a job; None if some way of it was not recorded."""
    if not times_of(runs, job):
        return None
    found = searched(runs, name, job)
    if "refused" in found:
        return {"job": name, **found}
    planned, best, others = ways_of(job, found)
    base = place(runs, job, 0)
    times = {way.change: times_of(runs, way) for way in (job, planned, best, *others)}
    if not all(times.values()):
        return None
    compared = compare(runs, Pair(name, job, planned, tuple(found["edits"])))
    if "refused" in compared:
        return {"job": name, "refused": compared["refused"]}
    uniform = {way.change: statistics.median(times[way.change]) for way in (best, *others)}
    fastest = min(uniform, key=lambda change: uniform[change])
    own, plan = statistics.median(times[job.change]), statistics.median(times[planned.change])
    return found | {
        "job": name,
        "own_ms": own,
        "plan_ms": plan,
        "uniform_ms": uniform,
        "fastest": fastest,
        "exposed": answer(base, []).predicted / answer(base, ["no-comm"]).predicted > EXPOSED,
        "predicted_ms": compared["predicted_ms"],
        "error_pct": compared["error_pct"],
        "gain_held": compared["gain_held"],
        "same_job_pct": [spread for each in times.values() if (spread := spread_pct(each)) is not None],
        "over_own_pct": 100 * (1 - plan / own),
        "over_fastest_pct": 100 * (1 - plan / uniform[fastest]),
    }


def checks(rows: Sequence[Row]) -> dict[str, Check]:
    """Compute the checks, and whether their bars hold."""
    planned = [row for row in rows if "refused" not in row]
    refused = {row["job"]: row["refused"] for row in rows if "refused" in row}
    spreads = [spread for row in planned for spread in row["same_job_pct"]]
    noise = max(SAME_PCT, statistics.median(spreads)) if spreads else SAME_PCT
    slower = {row["job"]: row["over_fastest_pct"] for row in planned if row["over_fastest_pct"] < -noise}
    exposed = [row for row in planned if row["exposed"]]
    better = [row["job"] for row in exposed if row["over_fastest_pct"] >= BETTER_PCT]
    held = sum(row["gain_held"] for row in planned) / max(len(rows), 1)
    missed = {row["job"]: row["error_pct"] for row in planned if row["gain_held"] < 1}
    slowest = max((row["seconds"] for row in planned), default=0.0)
    return {
        "gains": check(
            len(rows), {"held": held, "missed": missed, "refused": refused}, {"held": GAIN_HELD},
            held >= GAIN_HELD,
        ),
        "no slower than the fastest size": check(
            len(planned), {"noise_pct": noise, "slower": slower}, {"slower": 0}, bool(planned) and not slower
        ),
        "faster where exposed": check(
            len(exposed), {"share": len(better) / max(len(exposed), 1), "better": better},
            {"share": SHARE, "by_pct": BETTER_PCT}, bool(exposed) and len(better) >= SHARE * len(exposed),
        ),
        "search": check(
            len(planned), {"slowest_s": slowest}, {"slowest_s": SEARCH_S}, 0 < slowest <= SEARCH_S
        ),
    }  # fmt: skip


def table(rows: Sequence[Row], found: dict[str, Check]) -> Iterator[str]:
    """Yield the table of the documentation, and a line on each bar."""
    yield "| job | as it is ms | plan ms | predicted | held | fastest size ms | plan over it | search |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if "refused" in row:
            yield f"| {row['job']} | | | refused: {row['refused']} | | | | |"
            continue
        size = row["fastest"]
        yield (
            f"| {row['job']}{' (exposed)' * row['exposed']} | {row['own_ms']:.1f} | {row['plan_ms']:.1f} "
            f"| {row['predicted_ms']:.1f} | {row['gain_held']:.0%} | {row['uniform_ms'][size]:.1f} ({size}) "
            f"| {row['over_fastest_pct']:+.1f}% | {row['seconds']:.1f} s |"
        )
    for name, judged in found.items():
        state = "holds" if judged["holds"] else "MISSED"
        yield f"{name}: {state}; n {judged['n']}; {judged['figures']} (bar: {judged['bar']})"


def main() -> None:
    """Record, search, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="jobs whose names have one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="where recordings are kept, and taken from")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = {
        name: job
        for name, job in jobs().items()
        if not options.only or any(word in name for word in options.only)
    }
    if not chosen:
        parser.error("--only leaves none; there are " + "; ".join(jobs()))
    able = {name: job for name, job in chosen.items() if not (os.geteuid() and job.link)}
    with tempfile.TemporaryDirectory() as temporary:
        runs = (options.runs or Path(temporary)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        for name, job in able.items() if options.rounds else ():
            record_all(runs, name, job, options.rounds)
            print(f"recorded: {name}", file=sys.stderr)
        judged = (judge(runs, name, job) for name, job in able.items())
        rows = [row for row in judged if row is not None]
    found = checks(rows)
    print(json.dumps(found | {"jobs": rows}, indent=1) if options.json else "\n".join(table(rows, found)))


if __name__ == "__main__":
    main()
