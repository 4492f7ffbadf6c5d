"""Real jobs on gloo in which a rank sleeps or computes longer, recorded and judged by the commands.

The job is `cpu_job.py`: its layers sleep, so that more ranks than cores take the time they should. The job's
options set how much longer the slow rank sleeps; the duration of matrix products depends on the machine. Each
repeat runs the jobs in another order, so that other load on the machine affects all equally; the table shows
this load and the real length of steps.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recording import cpu_job, dpro
from dpro.schema import STEPS as STEP_TABLE
from dpro.store import open_run

STEPS, LAYERS, LAYER_MS = 44, 4, 10
STEP_MS = 2 * LAYERS * LAYER_MS
PRODUCT_MS = 0.2
JOBS = (("ddp", 2), ("ddp", 4), ("fsdp", 2))
SLOW = (("", 1.0), ("sleep", 1.2), ("sleep", 1.5), ("sleep", 2.0), ("compute", 1.5), ("compute", 2.0))


def injected(repeats: int) -> Iterator[dict[str, Any]]:
    """Record and judge each kind of job, healthy and with each fault."""
    jobs = [(*job, *slow) for job in JOBS for slow in SLOW]
    for repeat in range(repeats):
        random.Random(repeat).shuffle(jobs)
        for kind, num_ranks, how, times in jobs:
            victim = (repeat + 1) % num_ranks if how else -1
            load = os.getloadavg()[0]
            found = _judged(kind, num_ranks, how, times, victim)
            job = {"kind": kind, "ranks": num_ranks, "how": how, "times": times, "victim": victim}
            yield job | {"load": load} | found


def _judged(kind: str, num_ranks: int, how: str, times: float, victim: int) -> dict[str, Any]:
    extra = (times - 1) * STEP_MS
    fault = ["--slow-ms", extra] if how == "sleep" else ["--slow-products", round(extra / PRODUCT_MS / 2)]
    slow = ["--slow-rank", victim, *fault] if how else []
    job = [kind, "--steps", STEPS, "--layers", LAYERS, "--layer-ms", LAYER_MS, *slow]
    command = cpu_job(job, num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = dpro("record", "-o", run, "--every", 8, "--", *command)
        if done.returncode:
            return {"error": done.stderr[-300:], "findings": [], "step_ms": None}
        asked = dpro("diagnose", run, "--json")
        if asked.returncode:
            return {"error": asked.stderr[-300:], "findings": [], "step_ms": None}
        steps = open_run(run).table(STEP_TABLE)["duration_ns"].to_list()
        found = json.loads(asked.stdout)["findings"]
        return {"error": "", "findings": found, "step_ms": statistics.median(steps) / 1e6}


def injected_table(rows: list[dict[str, Any]], wilson: Any, table: Any) -> str:
    """Make the table of jobs named right, another rank named, and silent, by fault."""
    body = []
    for key in dict.fromkeys((row["how"], row["times"]) for row in rows):
        mine = [row for row in rows if (row["how"], row["times"]) == key]
        named = [_ranks(row) for row in mine]
        right = sum(ranks == {row["victim"]} for ranks, row in zip(named, mine))
        other = sum(bool(ranks - {row["victim"]}) for ranks, row in zip(named, mine))
        silent = sum(not ranks for ranks in named)
        wanted = {"sleep": "slow.host", "compute": "slow.compute"}.get(key[0], "")
        class_ = sum(any(each["class"] == wanted for each in row["findings"]) for row in mine)
        what = f"{key[0]} x{key[1]}" if key[0] else "healthy"
        steps = statistics.median(row["step_ms"] or 0.0 for row in mine)
        of_fault = [wilson(right, len(mine)), class_] if key[0] else ["-", "-"]
        body.append([what, len(mine), f"{steps:.0f}", *of_fault, other, silent])
    head = ["injected", "jobs", "step, ms", "exactly the rank", "its class", "another rank", "silent"]
    loads = sorted(row["load"] for row in rows)
    note = f"Load of {os.cpu_count()} cores before each job: {loads[0]:.1f} to {loads[-1]:.1f}"
    return table(head, body) + f"\n{note}, median {statistics.median(loads):.1f}\n"


def _ranks(row: dict[str, Any]) -> set[int]:
    of_ranks = [each for each in row["findings"] if each["component"]["kind"] in ("rank", "ranks")]
    return {rank for each in of_ranks for rank in each["ranks"]}
