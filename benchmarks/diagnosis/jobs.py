"""How often diagnoses of real jobs with known faults are right.

python -m benchmarks.diagnosis.jobs [--only NAME …] [--load N] [--list] [--keep FOLDER] [--json]

Jobs are those of `tests/faults/table.py`, on gloo: each is recorded by `dpro record`, ended where it hangs,
diagnosed, and graded: the first finding names rank and class, its cost, and what is at fault; no other rank
is named with a confidence above 0.7; a healthy job has no findings. `--load` runs this many busy processes
beside the jobs; while all cores are used, a finding that the host is crowded is accepted. `--list` prints
each job with its findings. `--json` prints one object: check → {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpro.errors import DproError
from dpro.opening import ensure_finished
from tests.faults.table import JOBS, FaultJob
from tests.hang_jobs import kill_ranks, wait_until_ended_or_saved
from tests.jobs import RECORD, ROOT, environment

WITHIN = 0.15  # of the true cost
SURE = 0.7  # confidence from which a wrong rank counts
WAIT_S = 180  # for a recorder that has to end
CROWDED = "more threads than cores"  # true of the host while a load runs beside the job


@dataclass(frozen=True)
class Grade:
    """Grades of a job's diagnosis.

    Attributes:
        right: whether the first finding has a right class and exactly the ranks.
        cost: whether its cost is within `WITHIN`; None where the true cost is not known or `right` is false.
        place: whether it names what is at fault; None where that is not known or `right` is false.
        wrong_rank: whether another rank is named with a confidence above `SURE`.
        alarm: whether a healthy job has findings.
        said: the findings in short.
    """

    name: str
    healthy: bool
    right: bool
    cost: bool | None
    place: bool | None
    wrong_rank: bool
    alarm: bool
    said: list[str]


def graded(job: FaultJob, document: Mapping[str, Any], cost_ms: float | None, loaded: bool = False) -> Grade:
    """Grade the diagnosis of a job.

    Args:
        job: with the truth.
        document: as of `dpro diagnose --json`.
        cost_ms: what the fault cost per step; None where that is not known.
        loaded: whether processes beside it used all cores, so that findings about the host are accepted.
    """
    findings = document["findings"]
    if loaded and "core" not in job.place:
        findings = [finding for finding in findings if finding["component"]["kind"] != "host"]
    first = findings[0] if findings else None
    right = first is not None and first["class"] in job.classes and _named_first(findings) == job.ranks
    costs = cost_ms if right else None
    place = job.place if right else ""
    lines = "\n".join([str(first.get("cause", "")), *first["evidence"]]) if first else ""
    wrong = [
        finding
        for finding in findings
        if finding["confidence"] > SURE and not {*_named(finding)} <= {*job.ranks}
    ]
    return Grade(
        job.name,
        job.healthy,
        right,
        None if costs is None else abs(first["cost_ms_per_step"] / costs - 1) <= WITHIN,
        re.search(place, lines, re.IGNORECASE) is not None if place else None,
        bool(wrong),
        job.healthy and bool(findings),
        [_in_short(finding) for finding in findings] or ["nothing"],
    )


def _named_first(findings: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the ranks of the first finding; of what ended the job, of all findings that are as sure."""
    first = findings[0]
    ended = first["class"].startswith(("hang.", "dead."))
    same = [
        each
        for each in findings
        if (each["class"], each["confidence"]) == (first["class"], first["confidence"])
    ]
    return tuple(sorted({rank for each in (same if ended else [first]) for rank in _named(each)}))


def _named(finding: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks that a finding blames; empty where it is about the job or its host."""
    return (
        tuple(sorted(finding["ranks"])) if finding["component"]["kind"] in ("rank", "ranks", "stage") else ()
    )


def _in_short(finding: Mapping[str, Any]) -> str:
    cost = finding["cost_ms_per_step"]
    costs = "" if cost is None else f" {cost:.0f} ms"
    part = finding["component"]
    cause = f" ({finding['cause']})" if finding.get("cause") else ""
    return f"{finding['class']} {part['kind']} {part['id']}{cause}{costs} {finding['confidence']:.2f}"


def recorded(job: FaultJob, run: Path) -> None:
    """Record a job, and end it where it hangs.

    Args:
        job: which.
        run: run directory to make.

    Raises:
        RuntimeError: it could not be recorded.
    """
    folder = run.parent
    given = [] if job.script != "tests/faults/train.py" else ["--folder", str(folder)]
    script = [str(ROOT / job.script), *job.arguments, *given]
    command = [sys.executable, str(ROOT / "tests" / "ranks.py"), str(job.num_ranks), *script]
    recorder = [*RECORD, "-o", str(run), *job.record, "--", *command]
    with (folder / "output").open("wb") as output:
        recording = subprocess.Popen(
            recorder, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until_ended_or_saved(recording, run, folder / "went-wrong")
        finally:
            kill_ranks(run)
            recording.wait(WAIT_S)
    if run.is_dir():
        ensure_finished(run)
    if not (run / "manifest.json").is_file():
        raise RuntimeError((folder / "output").read_text(errors="replace")[-400:])


def diagnosed(run: Path) -> dict[str, Any]:
    """Return the document of `dpro diagnose` for a run.

    Raises:
        RuntimeError: the command failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "dpro", "diagnose", str(run), "--no-history", "--json"],
        env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return dict(json.loads(done.stdout))


def graded_job(job: FaultJob, loaded: bool, keep: Path | None = None) -> Grade:
    """Record, diagnose and grade one job."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        try:
            recorded(job, run)
            document = diagnosed(run)
        except (RuntimeError, AssertionError, DproError, subprocess.TimeoutExpired) as error:
            said = f"not diagnosed: {' '.join(str(error).split())[-200:]}"
            return Grade(job.name, job.healthy, False, None, None, False, job.healthy, [said])
        finally:
            if keep is not None and run.is_dir():
                shutil.rmtree(keep / job.name, ignore_errors=True)
                shutil.copytree(run, keep / job.name, symlinks=True)
        cost_ms = true_cost(job, Path(folder))
    return graded(job, document, cost_ms, loaded)


def true_cost(job: FaultJob, folder: Path) -> float | None:
    """Return the cost of a fault per step, in ms, scaled by its measured duration on a busy machine."""
    took = [float(path.read_text()) for path in folder.glob("took-*")]
    if job.cost_ms is None or not took or not job.measured:
        return job.cost_ms
    return job.cost_ms * sum(took) / len(took) / job.ms


@contextmanager
def load(number: int) -> Iterator[None]:
    """Run this many busy processes beside the block."""
    words = [sys.executable, "-S", "-c", "while True: pass"]
    beside = [subprocess.Popen(words) for _ in range(number)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def checks_of(grades: Sequence[Grade], loaded: bool) -> dict[str, dict[str, Any]]:
    """Compute each check: figures, bar, and whether it holds."""
    faulty = [grade for grade in grades if not grade.healthy]
    healthy = [grade for grade in grades if grade.healthy]
    costs = [grade.cost for grade in faulty if grade.cost is not None]
    places = [grade.place for grade in faulty if grade.place is not None]
    least = 90.0 if loaded else 95.0
    alarms = sum(grade.alarm for grade in healthy)
    return {
        "rank and class": _share([grade.right for grade in faulty], least),
        "cost": _share(costs, 85.0),
        "place": _share(places, 90.0),
        "wrong rank": _share([grade.wrong_rank for grade in grades], 2.0, most=True),
        "false alarms": {
            "n": len(healthy), "figures": {"alarms": alarms}, "bar": f"<= {int(loaded)}",
            "holds": alarms <= int(loaded),
        },
    }  # fmt: skip


def _share(held: Sequence[bool], bar: float, most: bool = False) -> dict[str, Any]:
    share = round(100 * sum(held) / len(held), 1) if held else None
    holds = None if share is None else share <= bar if most else share >= bar
    figures = {"share_pct": share}
    return {"n": len(held), "figures": figures, "bar": f"{'<=' if most else '>='} {bar:g}%", "holds": holds}


def main() -> None:
    """Run the jobs, one at a time, and print how often their diagnoses are right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs whose name contains one of these")
    parser.add_argument("--load", type=int, default=0, help="processes beside the jobs that compute")
    parser.add_argument("--list", action="store_true", help="print each job with what was said")
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [
        job for job in JOBS.values() if not options.only or any(part in job.name for part in options.only)
    ]
    grades = []
    with load(options.load):
        for job in chosen:
            if job.root and os.geteuid():
                continue
            loaded = options.load > 0 or os.getloadavg()[0] > (os.cpu_count() or 1)
            grades.append(grade := graded_job(job, loaded, options.keep))
            if options.list:
                print(json.dumps(asdict(grade)), file=sys.stderr, flush=True)
    checks = checks_of(grades, options.load > 0)
    if options.json:
        print(json.dumps(checks))
        return
    for check, row in checks.items():
        figures = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
        print(f"{check:16} {row['n']:3}  {figures} (bar {row['bar']})")


if __name__ == "__main__":
    main()
