"""`dpro diagnose` on drawn cases, and whether its findings are right.

In: cases of `cases`. Out: a row per case: the job, the findings, the true cost, the ranks that simpler rules
name, and the verdict.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks.diagnosis.cases import Case, draw
from benchmarks.diagnosis.rules import own_work, relative, twice, write_kineto
from dpro.cli.diagnose import diagnose
from dpro.store import open_run
from tests.reference.training_jobs import Job, Log, run_job
from tests.reference.training_records import write_run

MAX_TRACES = 16  # ranks of the largest job whose traces are written for another tool
RIGHT_CLASS = {
    "compute": ("slow.compute",),
    "host": ("slow.host",),
    "imbalance": ("imbalance.stage", "imbalance.data"),
    "network": ("slow.link", "slow.nic"),
    "regression": ("slow.regression",),
    "input": ("slow.host",),
}


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """Run the job, write its run, ask the command and the rules; return the row for the report."""
    log = run_job(case.job)
    run = write_run(folder / "run", case.job, log, case.recording)
    begin = time.perf_counter()
    asked = CliRunner().invoke(diagnose, [str(run), "--json"])
    seconds = time.perf_counter() - begin
    if asked.exit_code:
        document = {"findings": [], "error": str(asked.exception)[:200], "answerable": False, "reasons": []}
    else:
        document = json.loads(asked.stdout)
    work = own_work(open_run(run))
    true_cost = cost_of(case.job, log)
    return {
        **dataclasses.asdict(case.job),
        "seen": case.seen,
        "shows": case.shows,
        "missing": case.recording.missing,
        "lost": case.recording.lost,
        "skew": case.recording.skew,
        "findings": [
            {key: finding[key] for key in ("class", "component", "ranks", "confidence", "cost_ms_per_step")}
            for finding in document["findings"]
        ],
        "answerable": document["answerable"],
        "error": document.get("error", ""),
        "unknown": document["reasons"],
        "true_cost_ms": true_cost,
        "step_ms": _mean_step(log, case.job.since),
        "seconds": round(seconds, 3),
        "rules": {"relative": sorted(relative(work)), "twice": sorted(twice(work))},
    }


def cost_of(job: Job, log: Log) -> float | None:
    """Return a fault's true cost per step since it began, in ms: the difference to the job without it."""
    if not job.fault or job.fault == "imbalance":
        return None
    healthy = run_job(dataclasses.replace(job, fault="", severity=1.0))
    return _mean_step(log, job.since) - _mean_step(healthy, job.since)


def _mean_step(log: Log, since: int) -> float:
    steps = log.steps[since:]
    return float(steps[-1]["end"].max() - steps[0]["begin"].max()) / len(steps)


def verdict(row: dict[str, Any]) -> str:
    """Judge the first finding: `right`, `component` (the right part, another class), `silent`, or `wrong`."""
    counted = [each for each in row["findings"] if not accepted_besides(row, each)]
    if not counted:
        return "right" if not row["fault"] else "silent"
    if not any(at_fault(row, each) for each in counted):
        return "wrong"
    first = next(each for each in counted if at_fault(row, each))
    return "right" if first["class"] in RIGHT_CLASS[row["fault"]] else "component"


def accepted_besides(row: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Return whether a finding is true but not the fault: the job became slower, or was made to pause."""
    became_slow = row["fault"] not in ("", "regression") and row["since"] > 0
    pauses = row["noise"] == "periodic" and finding["class"] == "pauses"
    return pauses or (became_slow and finding["class"] == "slow.regression")


def at_fault(row: dict[str, Any], finding: dict[str, Any]) -> bool:
    """Return whether a finding names the part that is at fault."""
    fault, component = row["fault"], finding["component"]
    if fault in ("regression", "input"):
        wanted = {"regression": "step time", "input": "the input pipeline"}[fault]
        return component == {"kind": "job", "id": wanted}
    if fault == "imbalance":
        return finding["class"].startswith("imbalance.")
    if fault == "network":
        classes = (*RIGHT_CLASS[fault], "slow.fabric")  # of a single group only the network
        return finding["class"] in classes and row["victim"] in finding["ranks"]
    return bool(fault) and finding["ranks"] == [row["victim"]]


def matrix(cases: int, seed: int, only: list[str], traces: Path | None) -> Iterator[dict[str, Any]]:
    """Draw, judge and yield `cases` of each class.

    Args:
        cases: of each class.
        seed: of the first.
        only: the classes.
        traces: folder for Kineto traces of jobs on GPUs; None for no traces.
    """
    for number in range(seed, seed + cases):
        for fault in only:
            case = draw(number, fault)
            with tempfile.TemporaryDirectory() as folder:
                row = judge(case, Path(folder))
                if traces and case.seen == "windows" and case.job.gpu and case.job.num_ranks <= MAX_TRACES:
                    write_kineto(open_run(Path(folder) / "run"), traces / f"{number}-{fault}")
                    row["traces"] = f"{number}-{fault}"
            yield row | {"verdict": verdict(row)}
