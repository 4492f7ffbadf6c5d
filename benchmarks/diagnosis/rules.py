"""Ranks that simpler rules and another tool would call slow, on the same recordings.

`relative` is the rule of NVIDIA's resiliency extension: a rank's score is its speed relative to the best
rank, and below 0.75 it is a straggler. `twice` is DLRover's: more than two times the median. Both get each
rank's own work, without waiting, where the recording has it: a kernel's (on the CPU: an operator's) typical
time, weighted by its total; without deep windows the time from a step's beginning to its last call, as a
timed section of the training loop would measure it. Holistic Trace Analysis (HTA) reads Kineto traces of
GPUs, which are written here with the kernel names that it expects; it is asked for the one likeliest rank of
each step.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import polars as pl

from dpro.schema import COLLECTIVES, SPANS, STEPS
from dpro.store import Run

MIN_SCORE = 0.75
MAX_TIMES = 2.0
COMMUNICATION = "^(nccl|gloo:|c10d::)"
HTA_PROGRAM = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
for folder in sys.argv[1:]:
    try:
        found = TraceAnalysis(trace_dir=folder).get_potential_stragglers(num_candidates=1)
        print(json.dumps([int(rank) for rank in found]), flush=True)
    except Exception as error:
        print(json.dumps(str(error)[:80]), flush=True)
"""


def own_work(run: Run) -> pl.DataFrame:
    """Return the times that the rules compare: `rank`, `name`, `typical` and `total`, in ns."""
    spans = run.table(SPANS)
    if spans.is_empty():
        return _sections(run)
    kernels = spans.filter(pl.col("kind") == "kernel")
    work = kernels if kernels.height else spans.filter(pl.col("kind") == "cpu_op")
    work = work.filter(~pl.col("name").str.contains(COMMUNICATION))
    return work.group_by("rank", "name").agg(
        typical=pl.col("duration_ns").median(), total=pl.col("duration_ns").sum()
    )


def _sections(run: Run) -> pl.DataFrame:
    steps = run.table(STEPS).sort("start_ns")
    calls = run.table(COLLECTIVES).select("rank", "enqueued_ns").sort("enqueued_ns")
    placed = calls.join_asof(
        steps.select("rank", "step", "start_ns"), left_on="enqueued_ns", right_on="start_ns", by="rank",
        check_sortedness=False,
    ).drop_nulls("step")  # fmt: skip
    section = placed.group_by("rank", "step").agg(
        took=pl.col("enqueued_ns").max() - pl.col("start_ns").first()
    )
    return section.group_by("rank", name=pl.lit("section")).agg(
        typical=pl.col("took").median(), total=pl.col("took").sum()
    )


def relative(work: pl.DataFrame) -> set[int]:
    """Return the ranks whose score is below `MIN_SCORE`."""
    best = pl.col("typical").min().over("name")
    scored = work.with_columns(best=best).group_by("rank").agg(
        score=(pl.col("best") / pl.col("typical") * pl.col("total")).sum() / pl.col("total").sum()
    )  # fmt: skip
    return set(scored.filter(pl.col("score") < MIN_SCORE)["rank"])


def twice(work: pl.DataFrame) -> set[int]:
    """Return the ranks that take more than `MAX_TIMES` the median."""
    times = work.group_by("rank").agg(pl.col("typical").sum())
    return set(times.filter(pl.col("typical") > MAX_TIMES * pl.col("typical").median())["rank"])


def write_kineto(run: Run, folder: Path) -> None:
    """Write one trace per rank, of the first deep window."""
    folder.mkdir(parents=True)
    steps = run.table(STEPS).filter(pl.col("window") == 0)
    spans = run.table(SPANS).filter(pl.col("window") == 0)
    for rank in sorted(steps["rank"].unique()):
        mine = pl.col("rank") == rank
        events = [_event(row) for row in spans.filter(mine).iter_rows(named=True)]
        for step in steps.filter(mine).iter_rows(named=True):
            name = f"ProfilerStep#{step['step']}"
            events.append(
                _row("user_annotation", name, step["start_ns"], step["duration_ns"], 1000 + rank, 1)
            )
        document = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
        with gzip.open(folder / f"rank{rank}.json.gz", "wt") as file:
            json.dump(document, file)


def _event(row: dict) -> dict:
    if row["kind"] == "kernel":
        name = row["name"].replace("ncclDevKernel", "ncclKernel")  # HTA does not know NCCL's newer names
        event = _row("kernel", name, row["start_ns"], row["duration_ns"], 0, row["stream"])
        return event | {"args": {"stream": row["stream"], "correlation": row["correlation"], "device": 0}}
    kinds = {"cpu_op": "cpu_op", "runtime": "cuda_runtime", "annotation": "user_annotation"}
    event = _row(kinds[row["kind"]], row["name"], row["start_ns"], row["duration_ns"], row["pid"], 1)
    return event | {"args": {"correlation": row["correlation"]} if row["correlation"] >= 0 else {}}


def _row(kind: str, name: str, start: int, duration: int, process: int, thread: int) -> dict:
    return {
        "ph": "X", "cat": kind, "name": name, "ts": start / 1e3, "dur": duration / 1e3, "pid": process,
        "tid": thread, "args": {},
    }  # fmt: skip


def named_by_hta(python: str, folders: list[Path]) -> list[list[int] | str]:
    """Return for each folder of traces the ranks that HTA names (over all steps), or its error."""
    done = subprocess.run([python, "-c", HTA_PROGRAM, *map(str, folders)], capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]
