"""How often simulated hangs are named right, compared with PyTorch's own analyser; and how fast.

python -m benchmarks.diagnosis.hangs [--cases N] [--seed N] [--ranks N] [--ring N] [--json]

Cases are drawn as in the tests: DP, FSDP, TP x PP, MoE; 4, 16 or 64 ranks; nine kinds of faults; dumps of any
version, whole or active entries only, some clipped, some taken too early; in half of the cases one is lost.
PyTorch's analyser names ranks but no class: it is right if it names exactly the ranks at fault, near if they
are among those it names. Then the command itself is timed on a folder of dumps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.diagnosis.report import wilson
from tests.reference import hang_cases, hanging_dumps, hanging_jobs
from tests.reference.hang_cases import Case, diagnose, make_case, verdict
from tests.reference.hanging_model import FAULTS, LAYOUTS


def draw(seed: int, kind: str | None, folder: Path) -> tuple[Case, int]:
    """Draw one case; everything but the kind of fault is equal for all kinds of a seed."""
    rng = random.Random(f"benchmark {seed}")
    layout, size = rng.choice(LAYOUTS), rng.choice((4, 16, 64))
    if kind == "deadlock" and size == 4:
        size = 16
    return make_case(seed, layout, size, kind, folder, gloo=False, lose=rng.random() < 0.5), size


def named_by_torch(folder: Path) -> set[int] | None:
    """Return ranks that PyTorch's analyser names at each group's first failed collective; None on errors."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    logging.disable(logging.CRITICAL)
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with quiet, contextlib.redirect_stderr(io.StringIO()):
            arguments = JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"])
            database = build_db(*_details(read_dir(arguments), arguments))
    except BaseException:  # the analyser calls `exit` at times
        return None
    named: set[int] = set()
    seen: set[str] = set()
    for collective in database.collectives:
        if collective.pass_check or collective.group_id in seen:
            continue
        seen.add(collective.group_id)
        named |= set(collective.missing_ranks or ()) | set(collective.mismatch_collectives or ())
    return named


def _details(read: tuple[object, str], arguments: object) -> tuple[object, object, str]:
    details, version = read
    return details, arguments, version


def accuracy(cases: int, first: int) -> dict[str, Counter[str]]:
    """Draw cases of each kind, print how they were judged, and return the counts by kind.

    Args:
        cases: of each kind.
        first: seed of the first.
    """
    choose = hanging_dumps.choose_dumping
    hang_cases.choose_dumping = lambda rng, job: dataclasses.replace(choose(rng, job), as_json=False)
    print("| fault | right rank and class | open | wrong | PyTorch: right ranks | near | raised |")
    print("|---|---|---|---|---|---|---|")
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for kind in (*FAULTS, None):
        found: Counter[str] = Counter()
        for seed in range(first, first + cases):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    case, size = draw(seed, kind, Path(folder))
                except IndexError:  # no call of this job suits this fault
                    continue
                if kind and case.fault is None:
                    continue
                judged, torch = verdict(case, diagnose(Path(folder), size)), named_by_torch(Path(folder))
            state = "decided" if case.decided else "open"
            found[state] += 1
            found[f"{state} {judged}"] += 1
            guilty = set(case.fault.ranks if case.fault else ())
            found["torch right"] += case.decided and torch == guilty
            found["torch near"] += case.decided and torch is not None and torch > guilty
            found["torch raised"] += case.decided and torch is None
        totals[str(kind)] = found
        _print_row(kind or "none (healthy)", found)
    whole = sum((found for kind, found in totals.items() if kind != "None"), Counter())
    _print_row("all faults", whole)
    lost = {what: whole[f"open {what}"] for what in ("right", "open", "silent", "wrong")}
    print(
        f"\n{whole['open']} cases not decided by their dumps (the decisive one is lost or too early): {lost}"
    )
    return totals


def _print_row(name: str, found: Counter[str]) -> None:
    total = found["decided"]
    opened = found["decided open"]
    wrong = found["decided wrong"] + found["decided silent"]
    torch = f"{wilson(found['torch right'], total)} | {found['torch near']} | {found['torch raised']}"
    print(f"| {name} | {wilson(found['decided right'], total)} | {opened} | {wrong} | {torch} |")


def speed(num_ranks: int, ring: int) -> None:
    """Time `dpro diagnose` on a folder of dumps, import included."""
    job = hanging_jobs.run_job(random.Random(1), "tp_pp", num_ranks, "host", steps=3)
    for works in job.works.values():
        del works[:-ring]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "dumps"
        folder.mkdir()
        dumping = hanging_dumps.Dumping(
            "2.9", as_json=False, active_only=False, ring=ring, timing=False, early={}, stamped=False
        )
        hanging_dumps.write_dumps(random.Random(2), job, dumping, folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"\n{num_ranks} dumps, {size / 1e6:.0f} MB, {size / num_ranks / 1e3:.0f} kB each:")
        begin = time.perf_counter()
        environment = {**os.environ, "DPRO_CACHE": f"{place}/cache"}
        command = [sys.executable, "-m", "dpro", "diagnose", str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        print(f"dpro diagnose: {time.perf_counter() - begin:.1f} s, `{done.stdout.splitlines()[0]}`")
        print(f"at fault: {job.fault.ranks if job.fault else ()}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=60, help="seeds of each kind of fault")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--ring", type=int, default=200, help="entries that are kept of each rank")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--json", action="store_true", help="one object; the tables then go to stderr")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        counts = accuracy(options.cases, options.seed) if options.cases else {}
        if options.ranks:
            speed(options.ranks, options.ring)
    if options.json:
        print(json.dumps({"hangs": check(counts)}))


def check(counts: Mapping[str, Mapping[str, int]]) -> dict[str, object]:
    """Check that no decided case is judged wrong, and no fault missed: {n, figures by fault, bar, holds}."""
    wrong = sum(found["decided wrong"] for found in counts.values())
    wrong += sum(found["decided silent"] for fault, found in counts.items() if fault != "None")
    n = sum(found["decided"] for found in counts.values())
    return {"n": n, "figures": {"wrong": wrong, "by_fault": counts}, "bar": 0, "holds": n > 0 and wrong == 0}


if __name__ == "__main__":
    main()
