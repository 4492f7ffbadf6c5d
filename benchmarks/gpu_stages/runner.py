"""Runs checks one after the other, each in its own process, and collects their results.

In: checks, and the document of earlier calls. Out: one document, written after each check. A check that fails
or is ended at its limit does not keep the others from running. Finished checks are left out.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_stages.check import PATIENCE, ROOT, TAIL, Bench, Check, job_environment, write_json
from gpu_stages.processes import end_carriers, marked, new_mark, run_to_limit

FORMAT = 1
WHOLE, FAILED, CUT = "whole", "failed", "cut short"
MIN_S = 5.0  # with less time left, no check is begun
SIDECAR_S = 5.0  # for which processes that a check leaves behind may go on

Document = dict[str, Any]


def run_checks(
    checks: Iterable[Check],
    document: Document,
    output: Path,
    work: Path,
    limit_s: float,
    dry: bool,
    report: Callable[[str], None],
) -> None:
    """Run checks, and add their results to a document.

    Args:
        checks: in the order in which they are run.
        document: results so far; checks that are whole in it are not run again.
        output: the folder of the document and of recorded runs.
        work: a folder for temporary files.
        limit_s: for all of them together.
        dry: whether this is a rehearsal.
        report: called with a line on each check.
    """
    deadline = time.monotonic() + limit_s
    for check in checks:
        known = document["stages"].setdefault(check.stage, {})
        if known.get(check.name, {}).get("status") == WHOLE:
            continue
        left_s = deadline - time.monotonic()
        if left_s < MIN_S:
            report(f"{check.full_name}: no time left")
            continue
        limit_s = min(check.limit_s * (PATIENCE if dry else 1), left_s - 2)
        found = run_check(check, output, work, limit_s, dry)
        known[check.name] = found
        write_json(output / "gpu.json", document)
        report(
            f"{check.full_name}: {found['status']} in {found['wall_s']:.0f} s, {len(found['lines'])} lines"
        )


def run_check(check: Check, output: Path, work: Path, limit_s: float, dry: bool) -> Document:
    """Run one check to its end or its limit; return its status, time and lines, and any error."""
    work = work / check.stage / check.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    results, mark, begun = work / f"{check.stage}-{check.name}.json", new_mark(), time.monotonic()
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--check", check.full_name]
    command += ["--results", results, "--limit-s", str(limit_s), "-o", output]
    command += ["--dry-run"] if dry else []
    with (work / "log.txt").open("wb") as log:
        code: int | None = None
        try:
            code = run_to_limit(command, limit_s, marked(job_environment(), mark), work, log, log)
        finally:
            killed = end_carriers(mark, SIDECAR_S if code == 0 else 0.0)
    found = _read(results)
    status = CUT if code is None else WHOLE if code == 0 and "error" not in found else FAILED
    wall_s = round(time.monotonic() - begun, 1)
    result = {"status": status, "wall_s": wall_s, "asks": check.asks, "lines": found.get("lines", {})}
    if killed:
        result["left_behind"] = killed
    if status != WHOLE:
        text = (work / "log.txt").read_text(encoding="utf-8", errors="replace")
        result["error"] = (found.get("error") or f"exit code {code}: {text}")[-TAIL:]
    shutil.rmtree(work, ignore_errors=True)
    return result


def run_here(check: Check, results: Path, output: Path, limit_s: float, dry: bool) -> int:
    """Run a check in this process; return its exit code."""
    folder = results.parent / "files"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(results, folder, output, dry, time.monotonic() + limit_s)
    try:
        check.run(bench)
    except Exception:
        write_json(results, {"lines": bench.lines, "error": traceback.format_exc()[-TAIL:]})
        bench.keep_rest()
        write_json(results, {"lines": bench.lines, "error": traceback.format_exc()[-TAIL:]})
        return 1
    bench.keep_rest()
    write_json(results, {"lines": bench.lines})
    return 0


def open_document(paths: Iterable[Path]) -> Document:
    """Merge earlier documents; a later one wins, except over a whole check.

    Raises:
        SystemExit: a file is not a document of this program.
    """
    document: Document = {"format": FORMAT, "machine": {}, "dry_run": None, "stages": {}}
    for path in paths:
        try:
            each = json.loads(path.read_text(encoding="utf-8"))
            if each["format"] != FORMAT:
                raise ValueError(f"its format is {each['format']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not what gpu.py has written: {error}") from error
        if document["stages"] and document["dry_run"] != each["dry_run"]:
            raise SystemExit(f"{path}: a rehearsal and measurements are not put together")
        document["machine"] |= each["machine"]
        document["dry_run"] = each["dry_run"]
        for stage, checks in each["stages"].items():
            _merge(document["stages"].setdefault(stage, {}), checks)
    return document


def _merge(known: Document, checks: Mapping[str, Document]) -> None:
    """Merge checks; a whole one is not replaced by one that is not."""
    for name, found in checks.items():
        if known.get(name, {}).get("status") != WHOLE or found["status"] == WHOLE:
            known[name] = found


def machine() -> Document:
    """Return facts of this machine that can be known without torch."""
    facts: Document = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        facts["gpus"] = done.stdout.split("\n")[:-1] if not done.returncode else []
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        facts["commit"] = done.stdout.strip()
    return facts


def _read(path: Path) -> Document:
    with suppress(OSError, ValueError):
        found: Document = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}
