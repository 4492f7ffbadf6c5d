"""Real pipelines in one shape, predicted from recordings of the same pipeline in another.

python -m benchmarks.accuracy.schedules [--only NAME …] [--steps 14] [--runs FOLDER] [--json]

Four ranks on gloo, each a stage of torch.distributed.pipelining whose layers sleep
(`benchmarks/recording/pipeline_job.py`), are recorded in each schedule, with other micro-batches, and with
other layers on the stages. Orders that the library does not have are run from a list
(`benchmarks/recording/orders_job.py`); the run that edits of branches start from is traced by torch.profiler,
since only the trace has its operations. Each shape is predicted from each other shape of its kind and
compared with its recorded steps, by medians. Shapes that are in FOLDER already are not recorded again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.accuracy.orders import Foreign, pieces_named
from benchmarks.recording import ENVIRONMENT, dpro, job
from dpro.analysis.analysis import Analysis
from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.pipeline import Fill, planned
from dpro.opening import ensure_finished, open_path
from dpro.replay.timeline import changed_step_times, replay
from dpro.replay.whatif.predict import apply_all, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import STEPS

STAGES, BATCHES, SKIP, MS = 4, 8, 2, 1e6
MEDIAN_PCT, WORST_PCT, HELD = 3.0, 8.0, 0.85


@dataclass(frozen=True)
class Shape:
    """A pipeline to record.

    Attributes:
        name: in tables and folders.
        arguments: of the job, or of `pieces_named`.
        edit: turns other shapes into this one; empty for a shape that is only a starting point.
        kind: only jobs of one kind are compared.
        listed: whether it runs from a list of pieces; such a job's operations are known only if `traced`.
        traced: whether torch.profiler traces it.
    """

    name: str
    arguments: str
    edit: str
    kind: str = "even"
    listed: bool = False
    traced: bool = False


LOSS = "--loss-ms 10"
FILL = Fill(ms=20.0, switch_ms=1.0, risk=0.1)
SHAPES = (
    Shape("GPipe", "gpipe", "pipeline:schedule=gpipe,micro_batches=8"),
    Shape("1F1B", "1f1b", "pipeline:schedule=1f1b,micro_batches=8"),
    Shape("interleaved", "interleaved", "pipeline:schedule=interleaved,micro_batches=8,chunks=2"),
    Shape("ZB-H1", "zb-h1 --chunks 1", "pipeline:schedule=zb-h1,micro_batches=8"),
    Shape("ZB-V", "zbv", "pipeline:schedule=zbv,micro_batches=8"),
    Shape("four micro-batches", "1f1b --micro-batches 4", "pipeline:schedule=1f1b,micro_batches=4"),
    Shape("layers 2/2/2/2", f"1f1b {LOSS}", "stages:layers=2/2/2/2,now=3/2/2/1", "loss"),
    Shape("layers 3/2/2/1", f"1f1b {LOSS} --layers 3/2/2/1", "stages:layers=3/2/2/1,now=2/2/2/2", "loss"),
    Shape("skip", "skip", "skip:share=0.25", listed=True),
    Shape("DualPipe", "dualpipe", "pipeline:schedule=dualpipe,micro_batches=8", listed=True),
    Shape("1F1B filled", "fill", "fill:ms=20,switch_ms=1,risk=0.1", listed=True),
    Shape("branches in turn", "in-turn", "", "branches", listed=True, traced=True),
    Shape("branches side by side", "branches", "stages:branches=1/2", "branches", listed=True),
)
FILLED = "1F1B"  # the shape for which foreign work is planned


def folder_of(runs: Path, shape: Shape) -> Path:
    """Return the folder of a shape's recording.

    Args:
        runs: folder of all recordings.
        shape: which.
    """
    return runs / shape.name.replace("/", "-")


def record(runs: Path, shape: Shape, steps: int) -> None:
    """Record a shape, unless its folder exists.

    Args:
        runs: folder of all recordings.
        shape: which.
        steps: of the job.
    """
    folder = folder_of(runs, shape)
    if folder.exists():
        return
    options = ["--steps", steps, *([] if os.geteuid() else ["--first"])]
    if shape.listed:
        listed = folder.with_suffix(".pieces")
        foreign = foreign_of(runs) if shape.arguments == "fill" else None
        listed.write_text(json.dumps(pieces_named(shape.arguments, STAGES, BATCHES, foreign)))
        trace = ["--trace", folder] if shape.traced else []
        command = job("orders_job.py", [listed, *trace, *options], STAGES)
    else:
        command = job("pipeline_job.py", [*shape.arguments.split(), *options], STAGES)
    if shape.traced:
        folder.mkdir()
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    else:
        done = dpro("record", "-o", folder, "--", *command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    if not shape.traced:
        ensure_finished(folder)


def foreign_of(runs: Path) -> Foreign:
    """Return where the edit puts foreign work: ms of each piece, by rank and number of pieces before it."""
    found = next(shape for shape in SHAPES if shape.name == FILLED)
    view = Analysis(open_path(folder_of(runs, found))).operations
    if view is None:
        raise SystemExit(f"{FILLED}: no operations to plan for")
    plan = planned(view.built.predictive, FILL).filter(pl.col("pieces") > 0)
    every = plan.group_by("rank", "number").agg(pl.col("ns").median()).iter_rows()
    return {(rank, number): ns / MS for rank, number, ns in every}


def measured_ms(folder: Path) -> float:
    """Return the median over recorded steps, without the first, of the slowest rank's time, in ms."""
    steps = open_path(folder).table(STEPS).filter((pl.col("duration_ns") > 0) & (pl.col("step") > SKIP))
    each = steps.group_by("step").agg(pl.col("duration_ns").max())["duration_ns"]
    return float(np.median(each.to_numpy())) / MS


def are_a_pair(before: Shape, after: Shape) -> bool:
    """Return whether an edit turns one shape into the other and the first one's operations are known.

    Args:
        before, after: two shapes.
    """
    known = (before.traced or not before.listed) and after.edit != ""
    planned_for = after.arguments != "fill" or before.name == FILLED
    same_batches = after.arguments != "skip" or "--micro-batches" not in before.arguments
    return known and planned_for and same_batches and before.kind == after.kind


def compare(runs: Path, before: Shape, after: Shape) -> dict[str, object]:
    """Predict one shape from another: times in ms, error and half the interval in percent, or a refusal."""
    view = Analysis(open_path(folder_of(runs, before))).operations
    pair: dict[str, object] = {"pair": f"{before.name} to {after.name}", "edit": after.edit}
    if view is None:
        return pair | {"refused": "the replay of its operations misses its steps by more than 5%"}
    graph = view.built.predictive
    baseline, edits = baseline_steps(graph), [parse_edit(after.edit)]
    try:
        found = predict(graph, baseline, edits, view.trust)
    except Unanswerable as refused:
        return pair | {"refused": str(refused)}
    changed = apply_all(graph, edits).graphs[-1]
    timeline = replay(changed)
    steps = changed_step_times(baseline, changed, timeline.end)["duration_ns"].to_numpy()
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
    if not shapes:
        parser.error("--only leaves no shape; there are " + ", ".join(shape.name for shape in SHAPES))
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        runs.mkdir(parents=True, exist_ok=True)
        for shape in shapes:
            record(runs, shape, options.steps)
            print(f"{shape.name}: {measured_ms(folder_of(runs, shape)):.1f} ms", file=sys.stderr)
        every = [
            compare(runs, before, after)
            for before, after in permutations(shapes, 2)
            if are_a_pair(before, after)
        ]
    pairs = [row for row in every if "refused" not in row]
    errors = [abs(float(str(row["error_pct"]))) for row in pairs] or [0.0]
    held = statistics.fmean(bool(row["held"]) for row in pairs) if pairs else 1.0
    figures = {"median_pct": statistics.median(errors), "worst_pct": max(errors), "held": held}
    bar = {"median_pct": MEDIAN_PCT, "worst_pct": WORST_PCT, "held": HELD}
    holds = pairs and figures["median_pct"] <= MEDIAN_PCT and max(errors) <= WORST_PCT and held >= HELD
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
