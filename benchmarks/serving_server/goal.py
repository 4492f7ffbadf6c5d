"""Settings that the search under a goal finds for the small server, and how that server then performs.

    python -m benchmarks.serving_server.goal FOLDER --python PYTHON [--json]

In: a folder of `benchmarks.serving_server.pairs` with the run `base`, and a Python that has transformers. The
goal is twice the 99th percentiles of the first token and time per token of its requests. Out: the setting
that the search finds, the most requests per second that it allows, and the share of requests that keep the
goal when the server runs with that setting: at that rate, at 0.8 and at 1.25 of it. It has to be 99% at that
rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.serving_checks.pairs import served_in
from benchmarks.serving_server.pairs import BASE, record
from dpro.extensions.serving.fit import fit_run
from dpro.extensions.serving.predict import Goal, figures_of, most_requests
from dpro.store import is_run

TIMES = 2.0  # the goal, relative to the recorded server's figures
RATES = (0.8, 1.0, 1.25)  # of the allowed rate
BAR = 0.99  # share of requests that keep the goal at the allowed rate


def main() -> int:
    """Search, run the found setting, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="one that has transformers")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    requests, iterations = served_in(args.folder / "base")
    seen = figures_of(requests)
    goal = Goal(TIMES * seen["ttft_p99_ms"], TIMES * seen["tpot_p99_ms"])
    found = most_requests(requests, fit_run(requests, iterations), goal)
    best, unchanged = found[0], found[-1]
    recorded = requests.height / (np.ptp(requests["arrival_ns"].to_numpy()) / 1e9)
    kept = {}
    for name, each in {"unchanged": unchanged, "found" if best.changes else "unchanged": best}.items():
        for times in RATES:
            factor = times * each.requests_per_s / recorded
            run = args.folder / f"goal_{name}_{times}"
            if not is_run(run):
                record(run, _setting(each.changes) | {"rate": BASE["rate"] * factor}, args.python)
            kept[f"{name} x {times}"] = _share_that_keeps(served_in(run)[0], goal)
    figures = {
        "goal_ms": [goal.ttft_ms, goal.tpot_ms],
        "changes": list(best.changes),
        "requests_per_s": best.requests_per_s,
        "unchanged_requests_per_s": unchanged.requests_per_s,
        "kept": kept,
    }
    judged = "found x 1.0" if best.changes else "unchanged x 1.0"
    holds = kept[judged] >= BAR
    check = {"n": len(kept), "figures": figures, "bar": {judged: BAR}, "holds": holds}
    print(json.dumps({"search under a goal": check}, indent=None if args.json else 1))
    return int(not holds)


def _setting(changes: tuple[str, ...]) -> dict[str, float]:
    """Return the server's options for changes."""
    options = {"chunked-prefill:tokens": "chunk", "max-batch:requests": "max-batch"}
    given = (change.split("=") for change in changes)
    return BASE | {options[name]: int(value) for name, value in given}


def _share_that_keeps(requests: pl.DataFrame, goal: Goal) -> float:
    """Return the share of requests whose first token and time per token meet the goal."""
    first = (pl.col("first_token_ns") - pl.col("arrival_ns")) / 1e6
    token = (pl.col("end_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1) / 1e6
    return float(requests.select(((first <= goal.ttft_ms) & (token <= goal.tpot_ms)).mean()).item())


if __name__ == "__main__":
    sys.exit(main())
