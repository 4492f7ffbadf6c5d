"""Real pipelines in one shape, predicted from recordings of the same pipeline in another.

python -m benchmarks.accuracy.schedules [--only NAME …] [--steps 14] [--runs FOLDER] [--json]

Four ranks on gloo, each a stage of torch.distributed.pipelining whose layers sleep
(`benchmarks/recording/pipeline_job.py`), are recorded in each schedule, with other micro-batches, and with
other layers on the stages. What the edits say of each from each is compared with the steps that were
recorded; both count by their median. Jobs with a loss are compared with each other only. What FOLDER has
already is not recorded again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.recording import dpro, job
from dpro.analysis.analysis import Analysis
from dpro.opening import ensure_finished
from dpro.replay.timeline import changed_step_times, replay
from dpro.replay.whatif.predict import apply_all, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import STEPS
from dpro.store import open_run

STAGES, SKIP, MS = 4, 2, 1e6
MEDIAN_PCT, WORST_PCT, HELD = 3.0, 8.0, 0.85


@dataclass(frozen=True)
class Shape:
    """A pipeline to record.

    Attributes:
        name: of it.
        arguments: of the job.
        edit: what makes it of the others.
        loss: whether its last layer has more to do, which the others of its kind have, too.
    """

    name: str
    arguments: str
    edit: str
    loss: bool = False


LOSS = "--loss-ms 10"
SHAPES = (
    Shape("GPipe", "gpipe", "pipeline:schedule=gpipe,micro_batches=8"),
    Shape("1F1B", "1f1b", "pipeline:schedule=1f1b,micro_batches=8"),
    Shape("interleaved", "interleaved", "pipeline:schedule=interleaved,micro_batches=8,chunks=2"),
    Shape("ZB-H1", "zb-h1 --chunks 1", "pipeline:schedule=zb-h1,micro_batches=8"),
    Shape("ZB-V", "zbv", "pipeline:schedule=zbv,micro_batches=8"),
    Shape("four micro-batches", "1f1b --micro-batches 4", "pipeline:schedule=1f1b,micro_batches=4"),
    Shape("layers 2/2/2/2", f"1f1b {LOSS}", "stages:layers=2/2/2/2,now=3/2/2/1", loss=True),
    Shape("layers 3/2/2/1", f"1f1b {LOSS} --layers 3/2/2/1", "stages:layers=3/2/2/1,now=2/2/2/2", loss=True),
)


def folder_of(runs: Path, shape: Shape) -> Path:
    """Where a shape is recorded.

    Args:
        runs: where all are.
        shape: which.
    """
    return runs / shape.name.replace("/", "-")


def record(folder: Path, shape: Shape, steps: int) -> None:
    """Record a shape, unless it is there."""
    if (folder / "manifest.json").exists():
        return
    first = [] if os.geteuid() else ["--first"]
    command = job("pipeline_job.py", [*shape.arguments.split(), "--steps", steps, *first], STAGES)
    done = dpro("record", "-o", folder, "--", *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    ensure_finished(folder)


def measured_ms(folder: Path) -> float:
    """The median recorded step of the slowest rank, without the first ones."""
    steps = open_run(folder).table(STEPS).filter((pl.col("duration_ns") > 0) & (pl.col("step") > SKIP))
    each = steps.group_by("step").agg(pl.col("duration_ns").max())["duration_ns"]
    return float(np.median(each.to_numpy())) / MS


def compare(runs: Path, before: Shape, after: Shape) -> dict[str, object]:
    """One way from a shape to another: times in ms, error and half of the interval in percent."""
    view = Analysis(open_run(folder_of(runs, before))).operations
    pair: dict[str, object] = {"pair": f"{before.name} to {after.name}", "edit": after.edit}
    if view is None:
        return pair | {"refused": "the replay of its operations misses its steps by more than 5%"}
    graph = view.built.predictive
    baseline, edits = baseline_steps(graph), [parse_edit(after.edit)]
    found = predict(graph, baseline, edits, view.trust)
    changed = apply_all(graph, edits)[0][-1]
    timeline = replay(changed)
    steps = changed_step_times(baseline, changed, timeline.start, timeline.end)["duration_ns"].to_numpy()
    middle, truth = float(np.median(steps)) / MS, measured_ms(folder_of(runs, after))
    scale = middle / found.predicted_ns
    return pair | {
        "before_ms": measured_ms(folder_of(runs, before)),
        "after_ms": truth,
        "predicted_ms": middle,
        "error_pct": 100 * (middle / truth - 1),
        "held": bool(scale * found.low_ns <= truth <= scale * found.high_ns),
        "interval_pct": 50 * (found.high_ns - found.low_ns) / found.predicted_ns,
    }


def main() -> None:
    """Record, predict, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="shapes of these names")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--runs", type=Path, help="where recordings are kept, and taken from if there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if options.only is None or shape.name in options.only]
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        runs.mkdir(parents=True, exist_ok=True)
        for shape in shapes:
            record(folder_of(runs, shape), shape, options.steps)
            print(f"{shape.name}: {measured_ms(folder_of(runs, shape)):.1f} ms", file=sys.stderr)
        every = [
            compare(runs, before, after)
            for before, after in permutations(shapes, 2)
            if before.loss == after.loss
        ]
    pairs = [row for row in every if "refused" not in row]
    errors = [abs(float(str(row["error_pct"]))) for row in pairs] or [0.0]
    held = statistics.fmean(bool(row["held"]) for row in pairs) if pairs else 1.0
    figures = {"median_pct": statistics.median(errors), "worst_pct": max(errors), "held": held}
    bar = {"median_pct": MEDIAN_PCT, "worst_pct": WORST_PCT, "held": HELD}
    holds = errors and figures["median_pct"] <= MEDIAN_PCT and max(errors) <= WORST_PCT and held >= HELD
    if options.json:
        check = {"n": len(pairs), "figures": figures | {"pairs": every}, "bar": bar, "holds": bool(holds)}
        print(json.dumps({"schedules": check}, indent=1))
        return
    print("| from | to | before ms | after ms | predicted ms | error | interval | held |")
    print("|---|---|---|---|---|---|---|---|")
    for row in pairs:
        times = " | ".join(f"{row[name]:.1f}" for name in ("before_ms", "after_ms", "predicted_ms"))
        ends = f"{row['error_pct']:+.1f}% | ±{row['interval_pct']:.1f}% | {'yes' if row['held'] else 'no'}"
        print(f"| {str(row['pair']).replace(' to ', ' | ')} | {times} | {ends} |")
    print({name: round(value, 2) for name, value in figures.items()}, "bars", bar)


if __name__ == "__main__":
    main()
