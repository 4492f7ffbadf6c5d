"""How well recorded jobs of a GPU replay: the graph against measured times, by kind of job.

Each job is recorded with a few windows; the figures of `dpro replay` are compared with the bars for trusted
predictions. The runs are kept, since they are the project's own and may become goldens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from gpu_stages.check import Bench, Check

WINDOWS = ["--every", 50, "--window-steps", 3]
JOBS: dict[str, list[object]] = {
    "gpt-bf16": ["gpt", "--bf16", "--fused", "--item-every", 10],
    "resnet-channels-last": ["resnet", "--bf16", "--batch", 128, "--loader", "--workers", 2],
    "embeddings": ["embeddings", "--batch", 4096],
    "compiled": ["gpt", "--bf16", "--fused", "--compile", "compile"],
    "reduce-overhead": ["gpt", "--bf16", "--layers", 4, "--batch", 2, "--compile", "reduce-overhead"],
}


def replay(bench: Bench, name: str) -> None:
    """Record a job, replay it, and compare the replay with its bars."""
    arguments: list[object] = [*JOBS[name], "--steps", bench.few(160, 14), *(["--tiny"] if bench.dry else [])]
    options: list[object] = WINDOWS if not bench.dry else ["--every", 6, "--window-steps", 3]
    variables = {"TORCH_COMPILE_DISABLE": 1} if bench.dry else {}
    run, done = bench.record(
        name, bench.job("train.py", *arguments), options, limit_s=150, variables=variables
    )
    truth = done.ensure().last_json()
    info = bench.ask("info", run)
    bench.say(
        "recorded", n=int(truth["steps"]), steps=info.get("steps"), windows=info["coverage"].get("windows"),
        truth_event_ms=truth["event_median_ms"], truth_host_ms=truth["host_median_ms"],
        typical_ms=(info.get("step_time") or {}).get("typical_ms"), gpus=info.get("gpus"),
        warnings=info.get("warnings"), skipped=info.get("skipped"), window_costs=info.get("windows"),
    )  # fmt: skip
    bench.keep(run)
    bench.attempt("step times", lambda: step_times(bench, run, truth))
    bench.attempt("replay", lambda: fit(bench, run))
    bench.attempt("window", lambda: window(bench, run))


def step_times(bench: Bench, run: Path, truth: dict[str, Any]) -> None:
    """Compare the recorder's step times with the script's own events, of the same steps."""
    from dpro.schema import STEPS
    from dpro.store import open_run

    steps = open_run(run).table(STEPS)
    outside = steps.filter(steps["step"] >= 10)  # including steps in windows, which the script times, too
    times, column = outside["duration_ns"], "duration_ns"
    if "gpu_step_ns" in steps.columns and outside["gpu_step_ns"].fill_null(-1).max() > 0:
        times, column = outside["gpu_step_ns"].drop_nulls(), "gpu_step_ns"
    times = times.filter(times > 0)
    median_ms = float(times.median() or 0) / 1e6
    error = median_ms / truth["event_median_ms"] - 1
    bench.say(
        "step times", n=times.len(), column=column, recorded_ms=median_ms, truth_ms=truth["event_median_ms"],
        error_pct=100 * error, bar="recorded within 1% of the script's events", holds=abs(error) <= 0.01,
    )  # fmt: skip


def fit(bench: Bench, run: Path) -> None:
    """Replay a run, and report each figure of its grade beside its bar."""
    said = bench.ask("replay", run, limit_s=90)
    for figure in said["trust"]["figures"]:
        known = figure["value"] is not None
        bench.say(
            figure["name"], value=figure["value"], unit=figure["unit"], poor_from=figure["poor"],
            bar=f"≤ {figure['good']:g} {figure['unit']}",
            holds=figure["value"] <= figure["good"] if known else None,
        )  # fmt: skip
    bench.say(
        "replay", n=len(said["steps"]), grade=said["trust"]["grade"], error_pct=said["error_pct"],
        start_error_us=said["span_start_error_us"], coverage=said["coverage"], evidence=said["evidence"],
        bar="predictions from it are good", holds=said["trust"]["grade"] == "good",
    )  # fmt: skip


def window(bench: Bench, run: Path) -> None:
    """Count the spans in each step of a window; a first step with fewer would show here."""
    import polars as pl

    from dpro.schema import SPANS, STEPS
    from dpro.store import open_run

    opened = open_run(run)
    steps = opened.table(STEPS).filter(pl.col("window") >= 0).sort("start_ns")
    spans = opened.table(SPANS).select("kind", "start_ns", "name").sort("start_ns")
    placed = spans.join_asof(
        steps.select("start_ns", step="step", place=pl.col("step") - pl.col("step").min().over("window")),
        on="start_ns",
    )
    kinds = placed.group_by("place", "kind").len().sort("place", "kind")
    counts: dict[str, dict[str, int]] = {}
    for row in kinds.drop_nulls("place").iter_rows(named=True):
        counts.setdefault(f"step {row['place'] + 1}", {})[row["kind"]] = row["len"]
    kernels = spans.filter(pl.col("kind") == "kernel")
    bench.say(
        "window", n=steps.height, spans=counts, kernels=kernels.height,
        bar="windows of a GPU job have kernels", holds=kernels.height > 0,
    )  # fmt: skip


CHECKS = tuple(
    Check("replay", name, "how well does a recording of this job replay?",
          functools.partial(replay, name=name), 170)
    for name in JOBS
)  # fmt: skip
