"""How often `dpro diagnose` is right about jobs of whole operations: data, stages and workers that vary.

python -m benchmarks.diagnosis.operations [--cases N] [--seed N] [--json]

Pipelines of the reference generator (`tests/pipelines.py`, independent of detectors): 1 to 4 stages, 2 to 4
data-parallel ranks, 4 to 12 micro-batches, 8 to 16 steps, noise of 0.5 to 3% per operation, late launches or
none. Sequence lengths have a long tail (lognormal, cut off at the longest that fits), and the time of a
micro-batch grows with the length and its square. A fault has to be named if the job without it takes at least
3% less; a smaller one may be named or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.diagnosis.report import table, wilson
from dpro.detect.pipeline_slowdown import analyse_slowdown, diagnose_operations
from dpro.replay.construction.graph_builder import build_graph
from tests.pipelines import Job, written

KINDS = ("", "data", "stage", "worker", "data+stage", "data+worker", "stage+worker")
COSTS = 0.03  # of the step: a fault of this cost has to be named
BAR = 0.95  # of precision and of recall
Fault = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class DrawnJob:
    """A job with faults; for each fault, by class and component, the job without it."""

    job: Job
    faults: dict[Fault, Job]


def lengths(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw lengths of micro-batches relative to the longest that fits: a long tail."""
    return np.minimum(random.lognormal(-1.5, random.uniform(0.5, 1.0), shape), 1.0)


def draw(seed: int, kind: str) -> DrawnJob:
    """Draw one case; everything but the faults is equal for all kinds of a seed."""
    random = np.random.default_rng([seed, 14])
    stages = int(random.integers(2 if "stage" in kind else 1, 5))
    num_dp, batches, steps = (int(random.integers(*each)) for each in ((2, 5), (4, 13), (8, 17)))
    job = Job(stages, num_dp, batches, steps, noise=float(random.uniform(0.005, 0.03)), seed=seed)
    job.late = float(random.choice((0.0, 0.1)))
    size, quadratic = lengths(random, (steps, num_dp, batches)), float(random.uniform(0.0, 1.0))
    taken = np.stack([size + share * size**2 for share in (quadratic, 1.1 * quadratic)], axis=-1)
    taken /= taken.mean(axis=(1, 2), keepdims=True)
    times = [float(random.choice((1.2, 1.5, 2.0))) for _ in range(2)]
    slow_stage = int(random.integers(stages))
    victim = (int(random.integers(stages)), int(random.integers(num_dp)))
    if kind == "stage+worker" and victim[0] == slow_stage:
        victim = ((slow_stage + 1) % stages, victim[1])
    parts = kind.split("+")
    whole = _with(job, taken, slow_stage, victim, times, parts)
    names = {
        "data": ("imbalance.data", "the micro-batches"),
        "stage": ("imbalance.stage", str(slow_stage)),
        "worker": ("slow.compute", str(victim[0] * num_dp + victim[1])),
    }
    without = {
        names[part]: _with(job, taken, slow_stage, victim, times, [each for each in parts if each != part])
        for part in parts
        if part
    }
    return DrawnJob(whole, without)


def _with(
    job: Job, taken: np.ndarray, stage: int, victim: tuple[int, int], times: list[float], parts: list[str]
) -> Job:
    def factor(at: int, dp: int) -> float:
        slower = times[0] if "stage" in parts and at == stage else 1.0
        return slower * (times[1] if "worker" in parts and (at, dp) == victim else 1.0)

    job = dataclasses.replace(
        job, forward=lambda at, dp: 10 * factor(at, dp), backward=lambda at, dp: 20 * factor(at, dp), rows=[]
    )
    if "data" in parts:
        job.times = lambda step, dp, batch: tuple(taken[step, dp, batch].tolist())
    return job


def step_ms(job: Job) -> float:
    """Return the mean step, in ms."""
    ends: dict[int, float] = {}
    for row in job.run():
        ends[row["step"]] = max(ends.get(row["step"], 0.0), row["start_ts"] + row["duration"])
    return 1e3 * sum(ends.values()) / len(ends)


def judge(seed: int, kind: str) -> dict[str, object]:
    """Draw a job, diagnose it, and compare the findings with its faults."""
    drawn = draw(seed, kind)
    whole = step_ms(drawn.job)
    costs = {fault: whole - step_ms(job) for fault, job in drawn.faults.items()}
    with tempfile.TemporaryDirectory() as folder:
        graph = build_graph(written(drawn.job.run(), Path(folder))).graph
        found = diagnose_operations(graph, analyse_slowdown(graph))
    named = {(each.class_, each.component_id): each.cost_ns / 1e6 for each in found}
    wanted = {fault for fault, cost in costs.items() if cost >= COSTS * whole}
    return {
        "kind": kind, "seed": seed, "right": len(named.keys() & costs.keys()),
        "wrong": sorted(named.keys() - costs.keys()), "wanted": len(wanted),
        "found": len(wanted & named.keys()), "missed": sorted(wanted - named.keys()),
        "cost_ratios": [named[fault] / costs[fault] for fault in sorted(wanted & named.keys())],
    }  # fmt: skip


def main() -> None:
    """Measure and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--verbose", action="store_true", help="print what went wrong")
    options = parser.parse_args()
    rows, figures = [], {}
    for kind in KINDS:
        mine = [judge(seed, kind) for seed in range(options.seed, options.seed + options.cases)]
        total = Counter(right=0, wrong=0, wanted=0, found=0)
        for row in mine:
            total.update(
                right=row["right"], wrong=len(row["wrong"]), wanted=row["wanted"], found=row["found"]
            )
            if options.verbose and (row["wrong"] or row["missed"]):
                print(row)
        ratios = sorted(ratio for row in mine for ratio in row["cost_ratios"])
        low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9)).tolist() if ratios else (0.0, 0.0, 0.0)
        rows.append(
            [kind or "none", wilson(total["right"], total["right"] + total["wrong"]),
             wilson(total["found"], total["wanted"]),
             f"{middle:.2f} ({low:.2f}-{high:.2f})" if ratios else "-"]
        )  # fmt: skip
        figures[kind or "none"] = dict(total)
    named = sum(each["right"] + each["wrong"] for each in figures.values())
    precision = sum(each["right"] for each in figures.values()) / max(named, 1)
    recall = sum(each["found"] for each in figures.values()) / max(
        sum(each["wanted"] for each in figures.values()), 1
    )
    holds = precision >= BAR and recall >= BAR
    if options.as_json:
        n = options.cases * len(KINDS)
        all_ = {"precision": precision, "recall": recall, "by_kind": figures}
        print(json.dumps({"operations": {"n": n, "figures": all_, "bar": BAR, "holds": holds}}))
    else:
        print(
            table(
                ["fault", "of what is named, right", "of what costs 3%, named", "stated over true cost"], rows
            )
        )


if __name__ == "__main__":
    main()
