"""How often `dpro diagnose` is right about slow and healthy jobs; simulated, and really injected.

python -m benchmarks.diagnosis [matrix] [healthy] [smallest] [latency] [injected] [--cases N]

`matrix` draws cases: class of fault x layout (DP, FSDP, TP x PP, MoE) x ranks x severity x noise x missing
telemetry x clocks, recorded with deep windows or without, writes each as a run directory and runs the
command on it. The jobs are those of `tests/reference/training_jobs.py`, which is independent of detectors.
`healthy` looks at long healthy jobs again and again, as the watcher does. `smallest` finds the smallest
slowdown that is named within 20 steps, `latency` the number of steps until larger ones are named. `injected`
records real jobs on this machine. `benchmarks.diagnosis.hangs` measures hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.injected import injected, injected_table
from benchmarks.diagnosis.live import healthy, latencies, live_tables, smallest
from benchmarks.diagnosis.matrix import matrix
from benchmarks.diagnosis.report import markdown, table, wilson
from benchmarks.diagnosis.rules import named_by_hta
from tests.reference.training_jobs import FAULTS


def shown(rows: Iterator[dict[str, Any]], total: int, what: str) -> list[dict[str, Any]]:
    """Collect all rows, with a line of progress now and then; an interrupt ends it early."""
    got = []
    with suppress(KeyboardInterrupt):
        for row in rows:
            got.append(row)
            if len(got) % max(total // 20, 1) == 0:
                print(f"{what}: {len(got)} of {total}", file=sys.stderr, flush=True)
    return got


def main() -> None:
    """Measure, write the rows as JSON, and print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["matrix"])
    parser.add_argument("--cases", type=int, default=200, help="of each class of the matrix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="classes of the matrix, by commas")
    parser.add_argument("--steps", type=int, default=10_000, help="of each of 20 healthy jobs")
    parser.add_argument("--repeats", type=int, default=3, help="of injected, smallest and latency")
    parser.add_argument("--hta", default="", metavar="PYTHON", help="a Python that has HTA installed")
    parser.add_argument("--output", type=Path, default=Path("diagnosis.json"))
    options = parser.parse_args()
    only = (
        [name.replace("healthy", "") for name in options.only.split(",")] if options.only else ["", *FAULTS]
    )
    seeds = range(options.seed, options.seed + options.repeats)
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["DPRO_CACHE"] = f"{place}/cache"
        traces = Path(place) / "traces" if options.hta else None
        if "matrix" in options.parts:
            drawn = matrix(options.cases, options.seed, only, traces)
            rows["matrix"] = shown(drawn, options.cases * len(only), "matrix")
            _ask_hta(options.hta, rows["matrix"], traces)
    if "healthy" in options.parts:
        rows["healthy"] = shown(
            (healthy(seed, options.steps) for seed in range(options.seed, options.seed + 20)), 20, "healthy"
        )
    if "smallest" in options.parts:
        rows["smallest"] = shown(smallest(seeds), 30 * options.repeats, "smallest")
    if "latency" in options.parts:
        rows["latency"] = shown(latencies(seeds), 4 * options.repeats, "latency")
    if "injected" in options.parts:
        rows["injected"] = shown(injected(options.repeats), 18 * options.repeats, "injected")
    options.output.write_text(json.dumps(rows))
    if rows.get("matrix"):
        print(markdown(rows["matrix"]))
    print(live_tables(rows, wilson, table))
    if rows.get("injected"):
        print(injected_table(rows["injected"], wilson, table))


def _ask_hta(python: str, rows: list[dict[str, Any]], traces: Path | None) -> None:
    """Add the ranks that HTA names to rows that have traces."""
    traced = [row for row in rows if "traces" in row]
    if traces is not None and traced:
        for row, ranks in zip(traced, named_by_hta(python, [traces / row["traces"] for row in traced])):
            row["rules"]["hta"] = ranks


if __name__ == "__main__":
    main()
