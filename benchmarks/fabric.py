"""Effects of paths and faults on traffic, predicted and measured on a real fabric of network namespaces.

python benchmarks/fabric.py [--only rates|blame|edits|replan] [--seed N] [--cases N] [--json]

Needs root on Linux: hosts, leaves and spines are namespaces of this machine, with the kernel's own multipath
routing and TCP, and a gloo job over them. Cases are drawn from the seed: flows by the kernel's hash, by
planned ports, over a cable at half rate, around one that is down; all-reduces and steps of a job under these
conditions. `blame` injects faults into a fabric of three leaves: cables and ports that are slow or lose one
packet in a hundred, and slow switches, with healthy cases between them. It counts how often exactly the
component at fault is named, at the level that can be distinguished. `replan` slows cables of watched jobs
down, whose paths `dpro recipe nccl` then plans again.
`--json` prints one object: check → {n, median_pct, worst_pct, bar, holds}, of blame check → {n, right_pct,
by_kind, bar, holds}, of replan check → {n, figures, bar, holds}. After Ctrl-C, or a signal to end, the cases
measured so far are reported.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs as a script

from benchmarks.fabric_lab import blame, recorded, replan
from benchmarks.fabric_lab.cases import CONDITIONS, FAULTS, Compared, of_flows, of_job
from benchmarks.fabric_lab.job import StepWork
from benchmarks.fabric_lab.lab import lab
from benchmarks.fabric_lab.lifetime import ended_in_order
from benchmarks.fabric_lab.traffic import before_other_work

# Hosts, leaves, spines, Mbit/s of a host's cable and of one between switches.
SHAPE = (4, 2, 2, 100, 50)
BLAMED_SHAPE = (6, 3, 2, 100, 100)
REPLANNED_SHAPE = (6, 3, 2, 100, 200)
PAIRS = ("524288", "100")  # bytes of a reduction, ms before it
REDUCE, STEP = StepWork(0, 8 << 20, 1), StepWork(300, 2 << 20, 2)
STEPS = 3
BARS = {
    "flows": 3.0,
    "flows under a fault": 5.0,
    "all-reduce": 3.0,
    "all-reduce, both ways full": 6.0,
    "step": 5.0,
}


def check_of(row: Compared) -> str:
    """Return the check whose bar applies to a figure."""
    if row.what == "flows":
        return "flows under a fault" if row.condition in FAULTS else "flows"
    if row.what == "all-reduce":
        return "all-reduce, both ways full" if row.both_ways else "all-reduce"
    return "step"


def judged(rows: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """Compute the checks of predicted and measured figures; their largest error counts.

    Args:
        rows: what was predicted and measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for check, bar in BARS.items():
        errors = [row.error_pct for row in rows if check_of(row) == check]
        found[check] = {
            "n": len(errors),
            "median_pct": round(statistics.median(errors), 2) if errors else None,
            "worst_pct": round(max(errors), 2) if errors else None,
            "bar": f"worst <= {bar:g}%",
            "holds": max(errors) <= bar if errors else None,
        }
    return found


def measured(seed: int, cases: int, rows: list[Compared]) -> None:
    """Draw cases and measure them.

    Args:
        seed: of the cases.
        cases: how many; two of three are flows, and one is a job.
        rows: gets the results, case by case.
    """
    draw = random.Random(seed)
    with lab(*SHAPE) as made, before_other_work():
        of_flows(made, "hash", draw)  # the first flows after building are slower
        for number in range(cases):
            condition = CONDITIONS[number % len(CONDITIONS)]
            if number % 3 < 2:
                new = of_flows(made, condition, draw)
            else:
                work = (REDUCE, STEP)[number // 3 % 2]
                new = [of_job(made, condition if condition != "planned" else "hash", draw, work, STEPS)]
            rows += new
            worst = max(row.error_pct for row in new)
            print(f"{number + 1:>3} {new[0].what:<10} {new[0].condition:<9} {worst:6.1f}%", file=sys.stderr)


def blamed(seed: int, cases: int, rows: list[blame.NamedFault]) -> None:
    """Draw faults, inject them, and record what is named.

    Args:
        seed: of the faults.
        cases: how many.
        rows: gets what was named, case by case.
    """
    with lab(*BLAMED_SHAPE) as made, before_other_work():
        for row in blame.of_cases(made, random.Random(seed), cases):
            rows.append(row)
            said = "; ".join(" or ".join(sorted(each)) for each in row.named) or "nothing"
            word = "right" if row.right else "WRONG"
            print(
                f"{len(rows):>3} {word} {row.kind}: {row.fault or 'nothing'}, named {said}", file=sys.stderr
            )


def edited(runs: Path) -> dict[str, dict[str, Any]]:
    """Record missing jobs, and predict one from the other.

    Args:
        runs: the folder of recordings.
    """
    if not recorded.complete(runs):
        with lab(*SHAPE) as made, before_other_work():
            recorded.recordings(made, runs)
    rows = recorded.compared(runs)
    for row in rows:
        times = f"{row.before_ms:.1f} > {row.predicted_ms:.1f}, {row.after_ms:.1f} ms {row.error_pct:+.2f}%"
        print(f"{row.work:<13} {row.before:>9} to {row.after:<9} {times}  {row.edit}", file=sys.stderr)
    return recorded.judged(rows)


def replanned(runs: Path, seed: int, cases: int, rows: list[replan.Replanned]) -> None:
    """Draw cables, slow them down in watched jobs, and record what the new plan wins back.

    Args:
        runs: a new folder, for recordings.
        seed: of the cables.
        cases: how many draws have a slow cable.
        rows: gets the results, draw by draw.
    """
    if any(runs.glob("draw*")):
        sys.exit(f"{runs} has draws already: give a new folder (--runs)")
    with lab(*REPLANNED_SHAPE) as made:
        for row in replan.draws(made, runs, seed, cases, PAIRS):
            rows.append(row)
            print(f"{len(rows):>3} {'right' if row.right else 'WRONG'} {row}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("rates", "blame", "edits", "replan")
    parser.add_argument("--only", choices=parts, help="one; else the first two")
    parser.add_argument("--runs", type=Path, default=Path("fabric-runs"), help="for edits and replan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found, code = checked(arguments)
    if arguments.json:
        print(json.dumps(found, indent=1), flush=True)
    else:
        show(found)
    sys.exit(code)


def checked(arguments: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], int]:
    """Run what was asked for; return check → figures, of the cases until an interrupt, and the exit code.

    Args:
        arguments: of the command line.
    """
    found: dict[str, dict[str, Any]] = {}
    rates, named, code = list[Compared](), list[blame.NamedFault](), 0
    planned_again = list[replan.Replanned]()
    try:
        with ended_in_order():
            if arguments.only == "edits":
                found |= edited(arguments.runs)
            if arguments.only == "replan":
                replanned(arguments.runs, arguments.seed, arguments.cases, planned_again)
            if arguments.only in (None, "rates"):
                measured(arguments.seed, arguments.cases, rates)
            if arguments.only in (None, "blame"):
                blamed(arguments.seed, arguments.cases, named)
    except (KeyboardInterrupt, SystemExit) as error:
        code = int(error.code or 0) if isinstance(error, SystemExit) else 128 + signal.SIGINT
        print("cut off: these are the cases until then", file=sys.stderr)
    if arguments.only in (None, "rates"):
        found |= judged(rates)
    if arguments.only in (None, "blame"):
        found |= blame.judged(named)
    if arguments.only == "replan":
        found |= replan.judged(planned_again)
    return found, code


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print figures for people.

    Args:
        found: by check.
    """
    for check, row in found.items():
        word = {True: "holds", False: "MISSED", None: "not measured"}[row["holds"]]
        if "figures" in row:
            errors = "  ".join(f"{name} {value}" for name, value in row["figures"].items())
        elif "right_pct" in row:
            errors = f"right {row['right_pct']}%"
        else:
            errors = f"median {row['median_pct']}%  worst {row['worst_pct']}%"
        print(f"{check:<28} n {row['n']:>3}  {errors}  {row['bar']}  {word}")


if __name__ == "__main__":
    main()
